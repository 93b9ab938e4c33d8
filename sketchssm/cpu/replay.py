"""Replay: the exact state is read at every token, and written once a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sketchssm.cpu.decode import window_kernel
from sketchssm.cpu.layout import COMMIT, DRAFT, FLUSH, STEP, Memory
from sketchssm.cpu.packed import Packing, full_states
from sketchssm.cpu.parts import Array, slot_parts, window_parts
from sketchssm.cpu.standard import Slots, StandardEngine
from sketchssm.cpu.workers import run, worker_count
from sketchssm.layer.recurrence import Layer, Tokens
from sketchssm.layer.slots import MAX_DRAFTS, SlotPart

__all__ = ["ReplayEngine"]


class ReplayEngine(StandardEngine):
    """A ring buffers raw inputs; the last token of a window folds them into the state.

    A 16-bit state is rounded at its flush, after the flush's outputs are read. `phase` is where the clock begins; None
    for no clock.
    """

    def __init__(
        self,
        layer: Layer,
        num_slots: int,
        window: int,
        *,
        state_dtype: str = "float32",
        memory: Mapping[str, Any] | None = None,
        phase: int | None = None,
    ) -> None:
        parts = window_parts(layer, window, state_dtype)
        self._open(Memory(layer, num_slots, window, parts, memory, phase), full_states(layer))

    def _open(self, memory: Memory, packing: Packing) -> None:
        """Take the memory, and allocate the arrays that all slots share."""
        self.window = int(memory.context["window"][0])
        self._own(memory, min(MAX_DRAFTS, self.window - 1))
        packing.attach(memory)
        memory.scratch(worker_count(), packing.rank)

    @staticmethod
    def parts_of(  # type: ignore[override]
        layer: Layer, window: int, *, state_dtype: str = "float32"
    ) -> tuple[SlotPart, ...]:
        """Parts of a slot; see `sketchssm.heads.engine.Engine`."""
        return slot_parts(window_parts(layer, window, state_dtype))

    def step(self, tokens: Tokens, slots: Slots, out: Array) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        self._memory.set(task=STEP)
        run(window_kernel, self._memory, slots, tokens, out, rounds=out.shape[1])

    def flush(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        self._memory.set(task=FLUSH)
        run(window_kernel, self._memory, slots)

    def draft(self, tokens: Tokens, lengths: Slots, slots: Slots, out: Array) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        self._memory.set(task=DRAFT, counts=lengths.ctypes.data)
        run(window_kernel, self._memory, slots, tokens, out)

    def commit(self, accepted: Slots, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        self._memory.set(task=COMMIT, counts=accepted.ctypes.data)
        run(window_kernel, self._memory, slots)
