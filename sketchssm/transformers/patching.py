"""Decode with heads in a model of transformers: generation with any cache, beams, padding and several turns."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MethodType, TracebackType
from typing import Any

import torch

from sketchssm.heads.exact import ExactHead
from sketchssm.heads.head import check_capacity
from sketchssm.heads.sketch import SketchHead
from sketchssm.heads.standard import ReplayHead, StandardHead
from sketchssm.plans.model_plans import ModelPlans, load_plans
from sketchssm.plans.plan import SketchPlan
from sketchssm.torch import DecodeLayer
from sketchssm.transformers.calibration import fingerprint
from sketchssm.transformers.modeling import Call, RecurrentLayer, intercepted, layers

__all__ = ["Patch", "patch"]

_patched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
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
        `ModelPlans` from `calibrate`, or the path of their file: they must have been made for this model. Any other
        mapping has plans by the layers' names (`layers`), and transformers runs the layers without a plan. "standard"
        and "replay" name a system for all layers.
    slots : int, default 64
        Sequences that all caches may hold together; one for each beam.
    window : int, optional
        Tokens from one flush to the next, only for "replay"; default 16.
    backend : str, default "auto"
        See `SketchHead`.
    **settings
        Further keywords of the heads.

    Returns
    -------
    Patch
        A context manager; `Patch.start` patches until `Patch.stop`.

    Raises
    ------
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
        plans.check(fingerprint(model))
    if not isinstance(plans, str) and not (isinstance(plans, Mapping) and plans):
        came = "none" if isinstance(plans, Mapping) else type(plans).__name__
        raise ValueError(f"plans: expected plans by the names of layers, got {came}")
    heads: dict[str, ExactHead] = {}
    for name in found if isinstance(plans, str) else plans:
        if name not in found:
            raise ValueError(f"plans: expected names among {', '.join(found)}, got {name!r}")
        layer = found[name].layer
        if isinstance(plans, str):
            if plans == "standard":
                heads[name] = StandardHead(layer, slots, backend, **settings)
            else:
                heads[name] = ReplayHead(layer, slots, backend, window=16 if window is None else window, **settings)
        elif not isinstance(plans[name], SketchPlan):
            raise ValueError(f"plans: expected a SketchPlan for {name}, got {type(plans[name]).__name__}")
        elif plans[name].layer != layer:
            raise ValueError(f"plans: expected a plan of {layer} for {name}, got one of {plans[name].layer}")
        else:
            heads[name] = SketchHead(plans[name], slots, backend, **settings)
    return heads


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
            raise RuntimeError("start: the model is patched already; expected stop() of its patch before")
        self._stack = ExitStack()
        self._stack.enter_context(intercepted(dict(self._handlers), self._found))
        for module in modules:
            _patched.add(module)
            self._stack.callback(_patched.discard, module)
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
        place = cache.layers[self._layer.index]
        if call.state is not None and place in self._held:
            given = given | {self._layer.rule.state: self._states(place).to(call.state)}
        out, final = run(**given)
        self._load(place, final)
        return out, final

    def decode(self, run: Callable[..., Any], given: dict[str, Any], call: Call, cache: Any) -> Any:
        """See `sketchssm.transformers.modeling.Handler`."""
        place = cache.layers[self._layer.index]
        if not isinstance(place.reorder_cache, _Rows):  # a cache from before the patch
            self._load(place, call.state)
        tokens = [x if x is None else x.detach() for x in call.tokens]
        out = call.finished(self._step(*tokens, place.reorder_cache.slots))
        if self._layer.rule.kind == "mamba2":
            return out[:, 0]
        return out, call.state  # the cache's own tensor: its copy onto itself does nothing

    def hold(self, place: Any, rows: int, device: Any) -> _Rows:
        """Take slots for the rows of a layer of a cache."""
        if rows > len(self.free):
            raise ValueError(
                f"slots: expected room for {rows} sequences, got {len(self.free)} free slots of "
                f"{self.head.num_slots}; give patch() more slots, or drop caches that are not used any more"
            )
        taken = [self.free.pop() for _ in range(rows)]
        held = _Rows(self, place, torch.tensor(taken, device=device))
        weakref.finalize(held, self.free.extend, taken)
        self._held[place] = held
        return held

    def give_back(self) -> None:
        """Write the exact states of all caches into them, and free their slots."""
        for place, held in list(self._held.items()):
            state = place.recurrent_states[0]
            if state is None:  # the prompt ended in an error
                continue
            with torch.inference_mode(state.is_inference()):  # as the cache was made
                state.copy_(self._states(place).to(state))
            if vars(place).get("reorder_cache") is held:
                del place.reorder_cache
        self._held.clear()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _load(self, place: Any, states: torch.Tensor) -> None:
        """Begin from states of a cache, in slots of its rows."""
        held, rows = self._held.get(place), states.shape[0]
        if held is None or held.slots.shape[0] != rows:
            held = place.reorder_cache = self.hold(place, rows, states.device)
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
        return self._turned(torch.from_numpy(self.head.state[slots.numpy()]))


class _Rows:
    """Slots of the rows of one layer of a cache; replaces the method `reorder_cache` of the cache's layer.

    A deep copy of the cache makes a deep copy of this object, with its own slots.
    """

    def __init__(self, handler: _HeadHandler, place: Any, slots: torch.Tensor) -> None:
        self.slots = slots
        self._handler = weakref.ref(handler)
        self._place = weakref.ref(place)

    def __call__(self, rows: torch.Tensor) -> None:
        """Let rows of the cache continue others, as for beam search."""
        place, handler = self._place(), self._handler()
        type(place).reorder_cache(place, rows)  # type: ignore[union-attr]
        if handler is not None:
            handler.head.copy(self.slots[rows.to(self.slots.device)], self.slots)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the slots for the copy of the cache's layer, which `memo` holds."""
        place, handler = memo[id(self._place())], self._handler()
        if handler is None:
            return MethodType(type(place).reorder_cache, place)
        held = handler.hold(place, self.slots.shape[0], self.slots.device)
        handler.head.copy(self.slots, held.slots)
        return held
