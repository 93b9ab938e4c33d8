"""Heads for the rows of caches: generation with any cache, beams, padding and several turns."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from sketchssm.heads.exact import ExactHead
from sketchssm.torch import DecodeLayer
from sketchssm.transformers.interception import Handler
from sketchssm.transformers.modeling import Call, RecurrentLayer

CROPPABLE = 64
"""Last tokens of a prompt that a head decodes if the cache is to be cropped."""


class HeadHandler(Handler):
    """Decodes one layer with a head."""

    def __init__(self, layer: RecurrentLayer, head: ExactHead) -> None:
        self.head = head
        self.free = list(range(head.num_slots))
        self._step = DecodeLayer(head)  # calls an operator, so that torch.compile does not trace the head
        self._layer = layer
        self._held: weakref.WeakKeyDictionary[Any, _Rows] = weakref.WeakKeyDictionary()

    def prefill(self, run: Callable[..., Any], given: dict[str, Any], call: Call, cache: Any) -> Any:
        """See `sketchssm.transformers.interception.Handler`."""
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
            shape = call.tokens.v.shape[0], *self._layer.layer.state_shape
            final = rule.turned(call.tokens.v.new_zeros(shape))
        if tail < length or not held:
            self._load(place, final)
        if not tail:
            return out, final
        decoded = self._decoded(place, call.last(tail))
        return decoded if tail == length else torch.cat([out, decoded.to(out)], 1), final

    def decode(self, run: Callable[..., Any], given: dict[str, Any], call: Call, cache: Any) -> Any:
        """See `sketchssm.transformers.interception.Handler`."""
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
        self.head.load_state(self._layer.rule.turned(states.detach()).float().contiguous(), held.slots)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _states(self, place: Any) -> torch.Tensor:
        """Exact states of a cache's rows, in the cache's layout."""
        slots = self._held[place].slots
        self.head.flush(slots)
        if self.head.backend == "cuda":
            return self._layer.rule.turned(torch.from_dlpack(self.head.state)[slots])
        return self._layer.rule.turned(torch.from_numpy(self.head.state[slots.cpu().numpy()]))


class _Rows:
    """Slots of the rows of one layer of a cache; replaces the methods `reorder_cache` and `crop` of the cache's layer.

    A deep copy of the cache makes a deep copy of this object, with its own slots. `recorded` holds the inputs of the
    calls since the last `crop`, while the cache records its past.
    """

    slots: torch.Tensor

    def __init__(self, handler: weakref.ref[HeadHandler], place: Any) -> None:
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
