"""Decode with heads in a model of transformers: generation with any cache, beams, padding and several turns."""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any, NoReturn

import torch

from sketchssm.heads.exact import ExactHead
from sketchssm.heads.head import check_capacity
from sketchssm.heads.sketch import ReadErrors, SketchHead
from sketchssm.heads.standard import ReplayHead, StandardHead
from sketchssm.layer.checks import UnsupportedError
from sketchssm.plans.model_plans import ModelPlans, load_plans
from sketchssm.plans.plan import SketchPlan
from sketchssm.torch import DecodeLayer
from sketchssm.transformers.identity import fingerprint
from sketchssm.transformers.modeling import Call, RecurrentLayer, intercepted, layers

CROPPABLE = 64
"""Last tokens of a prompt that a head decodes if the cache is to be cropped."""

_patched: weakref.WeakKeyDictionary[torch.nn.Module, Patch] = weakref.WeakKeyDictionary()
"""Mixers that a patch decodes."""


def patch(
    model: torch.nn.Module,
    plans: Mapping[str, SketchPlan] | str | os.PathLike[str],
    *,
    slots: int = 64,
    window: int | None = None,
    backend: str = "auto",
    **settings: Any,
) -> Patch:
    """Decode the recurrent layers of a model with heads.

    transformers runs the prefill. A call of one token with a cache is a step of the layer's head, which begins from
    the prefill's state. Caches are transformers' own: reordering for beam search copies slots, a second prompt on a
    cache begins from the exact state, a deep copy of a cache has its own slots, and a cache's slots are free again
    when the cache is deleted. Outputs of decode steps have no gradients. `torch.compile` compiles a step as one graph,
    and breaks the graph at each layer of a prompt.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers.
    plans : ModelPlans, mapping of str to SketchPlan, path, or {"standard", "replay"}
        `ModelPlans` from `calibrate`, or the path of their file: they must have been made for this model, or for one
        of another class with the same layers. Any other mapping, and a folder of files ``NAME.safetensors``, has plans
        by the layers' names (`layers`), and transformers runs the layers without a plan. "standard" and "replay" name
        a system for all layers.
    slots : int, default 64
        Sequences that all caches may hold together; one for each beam.
    window : int, optional
        Tokens from one flush to the next, only for "replay"; default 16.
    backend : str, default "auto"
        See `SketchHead`.
    **settings
        Further keywords of the heads. Heads on ``cuda`` take activations in float32, unless `activation_dtype` says
        otherwise: transformers computes in float32 between the normalisation of queries and keys and the output.

    Returns
    -------
    Patch
        A context manager; `Patch.start` patches until `Patch.stop`.

    Raises
    ------
    TypeError
        If the heads have no keyword of such a name.
    ValueError
        If plans were made for another model, a plan's layer does not exist or has another shape, a window is given
        without "replay", or the version of transformers is not supported.
    FileNotFoundError
        If there is no such file of plans.
    PlanFileError
        If the file can't be used.

    Examples
    --------
    >>> with sketchssm.transformers.patch(model, plans):  # doctest: +SKIP
    ...     model.generate(**tokenizer("The", return_tensors="pt"), max_new_tokens=100)
    """
    found = layers(model)
    heads = build_heads(model, found, plans, slots, window, backend, settings)
    return Patch({name: found[name] for name in heads}, heads)


def build_heads(
    model: torch.nn.Module,
    found: dict[str, RecurrentLayer],
    plans: Mapping[str, SketchPlan] | str | os.PathLike[str],
    slots: int,
    window: int | None,
    backend: str,
    settings: dict[str, Any],
) -> dict[str, ExactHead]:
    """Heads of the layers `found` in a model, for the arguments of `patch`."""
    check_capacity(slots, "slots")
    if window is not None and plans != "replay":
        raise ValueError(f"window: expected None, as only 'replay' takes a window, got {window!r}")
    if plans not in ("standard", "replay") and isinstance(plans, str | os.PathLike):
        if not os.path.exists(plans):
            raise FileNotFoundError(f"plans: expected plans, their file, 'standard' or 'replay', got {str(plans)!r}")
        plans = load_plans(plans)
    if isinstance(plans, ModelPlans):
        plans = plans.of(fingerprint(model))
    if not isinstance(plans, str) and not (isinstance(plans, Mapping) and plans):
        came = "none" if isinstance(plans, Mapping) else type(plans).__name__
        raise ValueError(f"plans: expected plans by the names of layers, got {came}")
    kind: Any = {"standard": StandardHead, "replay": ReplayHead}[plans] if isinstance(plans, str) else SketchHead
    if kind is ReplayHead:
        settings = settings | {"window": 16 if window is None else window}
    known = list(inspect.signature(kind).parameters)[3:]  # after layer or plan, num_slots and backend
    for name in settings:
        if name not in known:
            raise TypeError(f"{name}: expected slots, backend, or a keyword of {kind.__name__} ({', '.join(known)})")
    heads: dict[str, ExactHead] = {}
    for name in found if isinstance(plans, str) else plans:
        if name not in found:
            raise ValueError(f"plans: expected names among {', '.join(found)}, got {name!r}")
        source: Any = found[name].layer
        if not isinstance(plans, str):
            layer, source = source, plans[name]
            if not isinstance(source, SketchPlan):
                raise ValueError(f"plans: expected a SketchPlan for {name}, got {type(source).__name__}")
            if source.layer != layer:
                raise ValueError(f"plans: expected a plan of {layer} for {name}, got one of {source.layer}")
        with _device_of(found[name].module):
            try:
                heads[name] = kind(source, slots, backend, **settings)
            except UnsupportedError as error:
                raise UnsupportedError(f"{name}: {error}") from error
            if heads[name].backend == "cuda" and "activation_dtype" not in settings:
                heads[name].warmup("float32")
    return heads


def _device_of(module: torch.nn.Module) -> AbstractContextManager[Any]:
    """Make the device of a layer's weights the current one, on which a head works."""
    device = next(module.parameters()).device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def unpatch(model: torch.nn.Module) -> None:
    """Undo the patch of a model, whether or not its `Patch` is still known; see `Patch.stop`.

    Parameters
    ----------
    model : torch.nn.Module
        The model. Without a patch nothing happens.
    """
    for layer in layers(model).values():
        if patched := _patched.get(layer.module):
            patched.stop()


class Patch:
    """Heads in the layers of a model; made by `patch`.

    Parameters
    ----------
    found : dict of str to RecurrentLayer
        The layers by their names.
    heads : dict of str to ExactHead
        The heads by the layers' names.

    Attributes
    ----------
    heads
        As given.
    """

    def __init__(self, found: dict[str, RecurrentLayer], heads: dict[str, ExactHead]) -> None:
        self.heads = heads
        self._found = found
        self._handlers = {name: _HeadHandler(found[name], head) for name, head in heads.items()}
        self._stack: ExitStack | None = None

    def start(self) -> Patch:
        """Patch the model until `stop`.

        Returns
        -------
        Patch
            This object.

        Raises
        ------
        RuntimeError
            If the model is patched already.
        """
        modules = [layer.module for layer in self._found.values()]
        if any(module in _patched for module in modules):
            raise RuntimeError("start: the model is patched already; expected stop() of its patch or unpatch() before")
        self._stack = ExitStack()
        self._stack.enter_context(intercepted(dict(self._handlers), self._found))
        for module in modules:
            _patched[module] = self
            self._stack.callback(_patched.pop, module, None)
        return self

    def stop(self) -> None:
        """Undo `start`. Caches in use get their exact states back, and transformers continues from them."""
        if self._stack is not None:
            self._stack.close()
            self._stack = None
            for handler in self._handlers.values():
                handler.give_back()

    def __enter__(self) -> Patch:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def errors(self, *, reset: bool = False) -> dict[str, ReadErrors]:
        """Return what monitors have measured (``patch(..., monitor=2)``), of the last sequence of each slot.

        Parameters
        ----------
        reset : bool, default False
            Whether to clear the sums.

        Returns
        -------
        dict of str to ReadErrors
            See `SketchHead.errors`, by the layers' names.

        Raises
        ------
        ValueError
            If the heads have no monitor.
        """
        found = {}
        for name, head in self.heads.items():
            if not isinstance(head, SketchHead):
                raise ValueError("monitor: expected patch(..., monitor=1 or more) with plans, got exact heads")
            found[name] = head.errors(reset=reset)
        return found

    @property
    def free(self) -> int:
        """Number of free slots, in the layer with the fewest."""
        return min(len(handler.free) for handler in self._handlers.values())


class _HeadHandler:
    """Decodes one layer with a head."""

    def __init__(self, layer: RecurrentLayer, head: ExactHead) -> None:
        self.head = head
        self.free = list(range(head.num_slots))
        self._step = DecodeLayer(head)  # calls an operator, so that torch.compile does not trace the head
        self._layer = layer
        self._held: weakref.WeakKeyDictionary[Any, _Rows] = weakref.WeakKeyDictionary()

    def prefill(self, run: Callable[..., Any], given: dict[str, Any], call: Call, cache: Any) -> Any:
        """See `sketchssm.transformers.modeling.Handler`."""
        if cache is None:
            return run(**given)
        rule, length = self._layer.rule, call.tokens.v.shape[1]
        place = rule.place(cache, self._layer.index)
        tail = min(length, CROPPABLE) if getattr(place, "record_past", False) else 0
        held, final = call.state is not None and place in self._held, call.state
        if tail < length:
            first: dict[str, Any] = {name: given[name][:, : length - tail] for name in rule.tokens}
            if held:
                first[rule.state] = self._states(place).to(call.state)
            out, final = run(**given | first)
        elif final is None:
            final = self._turned(call.tokens.v.new_zeros(call.tokens.v.shape[0], *self._layer.layer.state_shape))
        if tail < length or not held:
            self._load(place, final)
        if not tail:
            return out, final
        decoded = self._decoded(place, call.last(tail))
        return decoded if tail == length else torch.cat([out, decoded.to(out)], 1), final

    def decode(self, run: Callable[..., Any], given: dict[str, Any], call: Call, cache: Any) -> Any:
        """See `sketchssm.transformers.modeling.Handler`."""
        place = self._layer.rule.place(cache, self._layer.index)
        if not isinstance(place.reorder_cache, _Rows):  # a cache from before the patch
            self._load(place, call.state)
        out = self._decoded(place, call)
        if self._layer.rule.updates:
            return out[:, 0]
        return out, call.state  # the cache's own tensor: its copy onto itself does nothing

    def _decoded(self, place: Any, call: Call) -> torch.Tensor:
        """Decode tokens with the head."""
        tokens = [x if x is None else x.detach() for x in call.tokens]
        if getattr(place, "record_past", False):
            place.reorder_cache.record(tokens)
        return call.finished(self._step(*tokens, place.reorder_cache.slots))

    def hold(self, place: Any, rows: int, device: Any) -> _Rows:
        """Take slots for the rows of a layer of a cache."""
        held = _Rows(weakref.ref(self), place)
        held.slots = self.take(held, rows, device)
        self._held[place] = held
        return held

    def take(self, owner: _Rows, rows: int, device: Any) -> torch.Tensor:
        """Take free slots, until their owner is deleted."""
        if rows > len(self.free):
            raise ValueError(
                f"slots: expected room for {rows} sequences, got {len(self.free)} free slots of "
                f"{self.head.num_slots}; give patch() more slots, or drop caches that are not used any more"
            )
        taken = [self.free.pop() for _ in range(rows)]
        weakref.finalize(owner, self.free.extend, taken)
        return torch.tensor(taken, device=device)

    def give_back(self) -> None:
        """Write the exact states of all caches into them, and free their slots."""
        for place, held in list(self._held.items()):
            state = place.recurrent_states[0]
            if state is None:  # the prompt ended in an error
                continue
            with torch.inference_mode(state.is_inference()):  # as the cache was made
                state.copy_(self._states(place).to(state))
            if vars(place).get("reorder_cache") is held:
                del place.reorder_cache, place.crop
        self._held.clear()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _load(self, place: Any, states: torch.Tensor) -> None:
        """Begin from states of a cache, in slots of its rows."""
        held, rows = self._held.get(place), states.shape[0]
        if held is None or held.slots.shape[0] != rows:
            held = place.reorder_cache = self.hold(place, rows, states.device)
            place.crop = held.crop
        held.recorded.clear()
        self.head.load_state(self._turned(states.detach()).float().contiguous(), held.slots)

    def _turned(self, state: torch.Tensor) -> torch.Tensor:
        """Convert a state between the head's layout and the cache's layout."""
        return state.transpose(-1, -2) if self._layer.rule.transposed else state

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _states(self, place: Any) -> torch.Tensor:
        """Exact states of a cache's rows, in the cache's layout."""
        slots = self._held[place].slots
        self.head.flush(slots)
        if self.head.backend == "cuda":
            return self._turned(torch.from_dlpack(self.head.state)[slots])
        return self._turned(torch.from_numpy(self.head.state[slots.cpu().numpy()]))


class _Rows:
    """Slots of the rows of one layer of a cache; replaces the methods `reorder_cache` and `crop` of the cache's layer.

    A deep copy of the cache makes a deep copy of this object, with its own slots. `recorded` holds the inputs of the
    calls since the last `crop`, while the cache records its past.
    """

    slots: torch.Tensor

    def __init__(self, handler: weakref.ref[_HeadHandler], place: Any) -> None:
        self.recorded: list[list[Any]] = []
        self._before: torch.Tensor | None = None  # slots with the states before the recorded calls
        self._handler = handler
        self._place = weakref.ref(place)

    def __call__(self, rows: torch.Tensor) -> None:
        """Let rows of the cache continue others, as for beam search."""
        place, handler = self._place(), self._handler()
        type(place).reorder_cache(place, rows)  # type: ignore[union-attr]
        self.recorded.clear()
        if handler is not None:
            handler.head.copy(self.slots[rows.to(self.slots.device)], self.slots)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def record(self, tokens: list[Any]) -> None:
        """Keep the inputs of a call before it is decoded, so that `crop` can decode a part of them again."""
        handler: Any = self._handler()
        if self._before is None:
            self._before = handler.take(self, *self.slots.shape, self.slots.device)
        if not self.recorded:
            handler.head.copy(self.slots, self._before)
        self.recorded.append(tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens of the cache."""
        place, handler = self._place(), self._handler()
        decoded = sum(tokens[0].shape[1] for tokens in self.recorded)
        kept = decoded + tokens_to_remove
        if kept < 0 and handler is not None and getattr(place, "record_past", False):
            raise ValueError(
                f"tokens_to_remove: expected at least {-decoded}, as heads have decoded {decoded} tokens since the "
                f"last crop, got {tokens_to_remove}"
            )
        type(place).crop(place, tokens_to_remove)  # type: ignore[union-attr]
        if handler is not None and kept < decoded:
            handler.head.copy(self._before, self.slots)
            if kept:
                parts = zip(*self.recorded, strict=True)
                tokens = [None if x[0] is None else torch.cat(x, 1)[:, :kept] for x in parts]
                handler.head.step(*tokens, slots=self.slots)
        self.recorded.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the slots for the copy of the cache's layer, which `memo` holds."""
        place, handler = memo[id(self._place())], self._handler()
        if handler is None:
            held = _Rows(self._handler, place)
            held.slots = self.slots
            return held
        held = handler.hold(place, self.slots.shape[0], self.slots.device)
        handler.head.copy(self.slots, held.slots)
        return held

    def __reduce__(self) -> NoReturn:
        raise TypeError("cache: expected stop() of the patch before a cache is saved, as its states are in heads")
