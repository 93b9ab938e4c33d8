"""The recurrent layers of a transformers model, and the interception of calls of their recurrences."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from sketchssm.layer.recurrence import Layer, Tokens
from sketchssm.transformers import lightning

LEAST_VERSION, NEXT_VERSION = (5, 19), (6,)
"""Supported versions of transformers: every modeling file calls its recurrence through the functions of `RULES`."""

NORM_EPSILON = 1e-6
"""Added to the squared norm of queries and keys, as in transformers."""

COMPILED = "_orig_mod"
"""Name of a module within its result of `torch.compile`."""

CACHE_NAMES = ("cache", "cache_params", "past_key_values")
"""Argument of a mixer's forward that takes the cache. Version 5.24 renamed the last two, and still accepts them."""


class Call(NamedTuple):
    """One call of a recurrence: inputs ``(batch, tokens, heads, ...)`` of any length, state, skip and output gate."""

    tokens: Tokens  # in float32: functions of transformers compute in float32 after the convolution
    skip: torch.Tensor | None  # added to outputs: the term D x of mamba2, in float32
    state: torch.Tensor | None  # before the call, in the cache's layout
    dtype: torch.dtype  # of the activations
    z: torch.Tensor | None = None  # output gate of mamba2: outputs are multiplied by silu(z)

    def last(self, count: int) -> Call:
        """Return the call of the last tokens alone, after a state that is not known."""
        tail = slice(None), slice(-count, None)
        skip = None if self.skip is None else self.skip[tail]
        return self._replace(tokens=self.tokens.at(tail), skip=skip, state=None)

    def finished(self, out: torch.Tensor) -> torch.Tensor:
        """Output of the function for the recurrence's output."""
        out = (out if self.skip is None else out + self.skip).to(self.dtype)
        return out if self.z is None else out * F.silu(self.z)


@dataclass(frozen=True)
class Rule:
    """Interface of one kind of recurrence in modeling files of transformers."""

    kind: str
    prefill: str  # function of the modeling file, for any number of tokens
    decode: str  # the same for one token
    shape: Callable[[Any], Layer]  # returns the `Layer` of a mixer
    call: Callable[[dict[str, Any], bool], Call]  # of bound arguments; the flag tells decoding
    state: str  # argument that holds the state before the call
    tokens: tuple[str, ...]  # arguments of `prefill` whose second axis is tokens
    transposed: bool  # whether states are (heads, K, V)
    updates: bool = False  # whether `decode` updates the state itself, and returns the output of a token alone
    fuses: bool = False  # whether a fused kernel may replace the functions in training mode
    marks: tuple[str, ...] = ()  # names in a mixer's forward that tell the rule, if not those of the functions
    forward: Callable[..., Any] | None = None  # replaces a forward without the functions; its file has them
    place: Callable[[Any, int], Any] = lambda cache, index: cache.layers[index]  # of a layer in a cache


def _lightning_call(given: dict[str, Any], decoding: bool) -> Call:
    q, k, v = (given[name].float() for name in LIGHTNING_TOKENS)
    g = -given["slope_rate"].float().reshape(-1).expand(v.shape[:3]).contiguous()
    return Call(Tokens(q, k, v, g, None), None, given["initial_state"], given["value"].dtype)


LIGHTNING_TOKENS = ("query", "key", "value")
DELTA_TOKENS = ("query", "key", "value", "g", "beta")


def _delta_call(given: dict[str, Any], decoding: bool) -> Call:
    q, k, v, g, beta = (given[name].float() for name in DELTA_TOKENS)
    if given.get("use_qk_l2norm_in_kernel"):
        q, k = _normalised(q), _normalised(k)
    return Call(Tokens(q * q.shape[-1] ** -0.5, k, v, g, beta), None, given["initial_state"], given["value"].dtype)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPSILON)


def _mamba_call(given: dict[str, Any], decoding: bool) -> Call:
    x, dt, rate, skip = (given[name] for name in ("hidden_states", "dt", "A", "D"))
    bias = given.get("dt_bias")
    if decoding:  # one token; dt, A, D and the bias are repeated over the head's channels
        dt, rate, skip = dt[..., 0], rate[:, 0, 0], None if skip is None else skip[:, 0]
        bias = None if bias is None else bias[:, 0]
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    if given.get("dt_softplus"):
        dt = F.softplus(dt)
    if not decoding:
        dt = dt.clamp(*given["dt_limit"])
    x, dt, kind, z = x.float(), dt.float(), x.dtype if decoding else torch.float32, None
    tokens = Tokens(given["C"].float(), given["B"].float(), x * dt[..., None], rate.float() * dt, None)
    if decoding:
        tokens = Tokens(*(y if y is None else y[:, None] for y in tokens))
        x = x[:, None]
        z = given["z"] if given["z"] is None else given["z"][:, None]
    term = None if skip is None else skip.float()[:, None] * x
    return Call(tokens, term, given["state"] if decoding else given["initial_states"], kind, z)


RULES = (
    Rule(
        "gdn",
        "torch_chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule",
        lambda m: Layer("gdn", m.num_v_heads, m.head_k_dim, m.head_v_dim, m.num_k_heads),
        _delta_call,
        "initial_state",
        DELTA_TOKENS,
        True,
    ),
    Rule(
        "kda",
        "chunk_kimi_delta_attention",
        "recurrent_kimi_delta_attention",
        lambda m: Layer("kda", m.num_heads, m.head_dim, m.head_dim, m.num_heads),
        _delta_call,
        "initial_state",
        DELTA_TOKENS,
        True,
    ),
    Rule(
        "mamba2",
        "mamba2_chunk_scan",
        "mamba2_selective_state_update",
        lambda m: Layer("mamba2", m.num_heads, m.ssm_state_size, m.head_dim, m.n_groups),
        _mamba_call,
        "initial_states",
        ("hidden_states", "dt", "B", "C"),
        False,
        updates=True,
        fuses=True,
    ),
    Rule(
        "mamba2",
        "lightning_prefill",
        "lightning_decode",
        lambda m: Layer("mamba2", m.num_attention_heads, m.head_dim, m.head_dim, m.num_attention_heads),
        _lightning_call,
        "initial_state",
        LIGHTNING_TOKENS,
        True,
        marks=("slope_rate", "get_linear_cache"),
        forward=lightning.forward,
        place=lightning.place_of,
    ),
)


@dataclass(frozen=True)
class RecurrentLayer:
    """One recurrent layer of a model.

    Parameters
    ----------
    name : str
        Name of the module within the model.
    layer : Layer
        Kind and shape.
    index : int
        The layer's index in a cache.
    module : torch.nn.Module
        The mixer.
    rule : Rule
        Interface of the mixer's recurrence.
    """

    name: str
    layer: Layer
    index: int
    module: torch.nn.Module
    rule: Rule


def layers(model: torch.nn.Module) -> dict[str, RecurrentLayer]:
    """Recurrent layers of a model that heads can decode.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers; it, or a part, may be a result of `torch.compile`.

    Returns
    -------
    dict of str to RecurrentLayer
        Layers by the names of their modules before `torch.compile`, in the order of the model.

    Raises
    ------
    TypeError
        If `model` is no module, such as the name of a folder.
    ValueError
        If the version of transformers is not supported, or no layer has a known recurrence.
    """
    check_version()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a model, as from_pretrained returns it, got {type(model).__name__}")
    found = {}
    for full, module in model.named_modules():
        name = ".".join(part for part in full.split(".") if part != COMPILED)
        names = inspect.unwrap(type(module).forward).__code__.co_names
        for rule in RULES:
            if all(name in names for name in rule.marks or (rule.prefill, rule.decode)):
                found[name] = RecurrentLayer(name, rule.shape(module), int(module.layer_idx), module, rule)
    if not found:
        raise ValueError(
            "model: expected layers of gated delta rule, Kimi Delta Attention, Mamba-2 or lightning attention, found "
            f"none in {type(getattr(model, COMPILED, model)).__name__}"
        )
    return found


def block_of(model: torch.nn.Module, layer: RecurrentLayer) -> torch.nn.Module:
    """The block of a model that a layer is in, with its norms and often an MLP: the module around the mixer."""
    full = next(name for name, module in model.named_modules() if module is layer.module)
    return model.get_submodule(full.removesuffix(f".{COMPILED}").rpartition(".")[0])


def check_version() -> None:
    """Refuse a version of transformers with other modeling files."""
    import transformers

    version = transformers.__version__
    if not LEAST_VERSION <= tuple(int(x) for x in version.split(".")[:2]) < NEXT_VERSION:
        least, after = (".".join(map(str, x)) for x in (LEAST_VERSION, NEXT_VERSION))
        raise ValueError(f"transformers: expected a version >={least},<{after}, got {version}")


class Handler(Protocol):
    """Runs the recurrence of one layer instead of transformers."""

    def prefill(self, run: Callable[..., Any], given: dict[str, Any], call: Call, cache: Any) -> Any:
        """Answer a call of any number of tokens; `run` takes `given` and is the function of transformers."""

    def decode(self, run: Callable[..., Any], given: dict[str, Any], call: Call, cache: Any) -> Any:
        """Answer a call of one token with a state before it."""


class _Active(threading.local):
    """The mixers whose forward runs, innermost last, with their handlers and caches."""

    def __init__(self) -> None:
        self.stack: list[tuple[RecurrentLayer, Handler, Any]] = []


_active = _Active()
_replaced: dict[tuple[str, str], list[Any]] = {}  # original functions of modeling files, and how many users they have
_forwards: weakref.WeakKeyDictionary[torch.nn.Module, _Forward] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def intercepted(handlers: dict[str, Handler], found: dict[str, RecurrentLayer]) -> Iterator[None]:
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
