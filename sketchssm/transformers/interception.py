"""Interception of the calls of recurrences while a model runs: a handler answers the calls of each layer."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch

from sketchssm.transformers.modeling import Call, RecurrentLayer

CACHE_NAMES = ("cache", "cache_params", "past_key_values")
"""Argument of a mixer's forward that takes the cache. Version 5.24 renamed the last two, and still accepts them."""

NO_CACHE = "use_cache: expected False while layers are recorded, got a call with a cache"


class Handler(ABC):
    """Runs the recurrence of one layer instead of transformers."""

    @abstractmethod
    def prefill(self, run: Callable[..., Any], given: dict[str, Any], call: Call, cache: Any) -> Any:
        """Answer a call of any number of tokens; `run` takes `given` and is the function of transformers."""

    def decode(self, run: Callable[..., Any], given: dict[str, Any], call: Call, cache: Any) -> Any:
        """Answer a call of one token with a state before it. By default refused: whole rows run without a cache."""
        raise ValueError(NO_CACHE)


class _Active(threading.local):
    """The mixers whose forward runs, innermost last, with their handlers and caches."""

    def __init__(self) -> None:
        self.stack: list[tuple[RecurrentLayer, Handler, Any]] = []


_active = _Active()
_replaced: dict[tuple[str, str], list[Any]] = {}  # original functions of modeling files, and how many users they have
_forwards: weakref.WeakKeyDictionary[torch.nn.Module, _Forward] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def intercepted(handlers: Mapping[str, Handler], found: Mapping[str, RecurrentLayer]) -> Iterator[None]:
    """Let handlers run the recurrences of the layers of their names, among `found` by `layers`.

    Other models of the same class, and calls from other threads, run as before.
    """
    with ExitStack() as stack:
        for name, handler in handlers.items():
            layer = found[name]
            file = (layer.rule.forward or type(layer.module)).__module__
            for function in (layer.rule.prefill, layer.rule.decode):
                stack.enter_context(_dispatching(file, function))
            stack.enter_context(_announcing(layer, handler))
        yield


@contextmanager
def _announcing(layer: RecurrentLayer, handler: Handler) -> Iterator[None]:
    """Let a mixer's forward record, while it runs, that its layer is active.

    The forward is replaced, because hooks of a module are not called if Ctrl-C ends the forward.
    """
    module, user = layer.module, (layer, handler)
    with _lock:
        if module not in _forwards:
            _forwards[module] = _Forward(layer)
        forward = _forwards[module]
        forward.users.append(user)
    try:
        yield
    finally:
        with _lock:
            forward.users.remove(user)
            if not forward.users:
                _forwards.pop(module).remove(module)


class _Forward:
    """Replaces the forward of a mixer; the last of its `users`, layers and handlers, runs the layer."""

    def __init__(self, layer: RecurrentLayer) -> None:
        module, own = layer.module, layer.rule.forward
        self.users: list[tuple[RecurrentLayer, Handler]] = []
        users = self.users
        self._before = vars(module).get("forward")  # of a module that accelerate has wrapped
        forward = module.forward
        active = forward if own is None else functools.partial(own, module)
        names = list(inspect.signature(forward).parameters)
        cache_place = next(names.index(name) for name in CACHE_NAMES if name in names)

        @functools.wraps(type(module).forward)
        def announced(this: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if this is not module:  # a deep copy of the module, which nobody intercepts
                return type(this).forward(this, *args, **kwargs)
            if not users:
                return forward(*args, **kwargs)
            cache = (
                args[cache_place]
                if len(args) > cache_place
                else next((kwargs[name] for name in CACHE_NAMES if name in kwargs), None)
            )
            _active.stack.append((*users[-1], cache))
            try:
                return active(*args, **kwargs)
            finally:
                _active.stack.pop()

        # a bound method, so that a deep copy of the module gets a method of the copy
        self._forward = module.forward = MethodType(announced, module)

    def remove(self, module: torch.nn.Module) -> None:
        """Undo the replacement; if other code has wrapped the function since, it stays and has no effect."""
        if vars(module).get("forward") is not self._forward:
            return
        if self._before is None:
            del module.forward
        else:
            module.forward = self._before


@contextmanager
def _dispatching(module: str, name: str) -> Iterator[None]:
    """Replace a function of a modeling file by a function that calls the handler of the active mixer."""
    place, key = vars(sys.modules[module]), (module, name)
    with _lock:
        if key not in _replaced:
            _replaced[key] = [place[name], 0]
            place[name] = _dispatcher(place[name], name)
        _replaced[key][1] += 1
    try:
        yield
    finally:
        with _lock:
            _replaced[key][1] -= 1
            if not _replaced[key][1]:
                place[name] = _replaced.pop(key)[0]


def _dispatcher(original: Any, name: str) -> Callable[..., Any]:
    parameters = [x for x in inspect.signature(original).parameters.values() if x.kind is not x.VAR_KEYWORD]
    names = [x.name for x in parameters]
    defaults = {x.name: x.default for x in parameters if x.default is not x.empty}

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if not _active.stack:
            return original(*args, **kwargs)
        layer, handler, cache = _active.stack[-1]
        given = defaults | dict(zip(names, args, strict=False)) | kwargs

        decoding = name == layer.rule.decode
        call = layer.rule.call(given, decoding)
        repeats = call.tokens.q.shape[-2] // layer.layer.key_heads
        if repeats > 1:  # transformers before 5.23 repeats the key heads of gdn for their value heads
            q, k = (x[..., ::repeats, :] for x in call.tokens[:2])
            call = call._replace(tokens=call.tokens._replace(q=q, k=k))
        return (handler.decode if decoding else handler.prefill)(original, given, call, cache)

    return dispatch
