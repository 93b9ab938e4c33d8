"""Replay: the exact state is read at every token, and written once a window."""

from __future__ import annotations

from typing import ClassVar

from sketchssm.arrays.options import DEFAULTS, HOST_OPTIONS, EngineOptions
from sketchssm.cpu.decode import window_kernel
from sketchssm.cpu.layout import COMMIT, DRAFT, FLUSH, STEP, Memory
from sketchssm.cpu.packed import Packing, full_states
from sketchssm.cpu.parts import Array, slot_parts, window_parts
from sketchssm.cpu.standard import Slots, StandardEngine
from sketchssm.cpu.workers import run, worker_count
from sketchssm.layer.recurrence import Layer, Tokens
from sketchssm.layer.slots import MAX_DRAFTS, PartsOf


class ReplayEngine(StandardEngine):
    """A ring buffers raw inputs; the last token of a window folds them into the state.

    A 16-bit state is rounded at its flush, after the flush's outputs are read.
    """

    supports = HOST_OPTIONS | {"phase"}
    parts_of: ClassVar[PartsOf] = staticmethod(
        lambda layer, window, options: slot_parts(window_parts(layer, window, options.state_dtype))
    )

    def __init__(self, layer: Layer, num_slots: int, window: int, options: EngineOptions = DEFAULTS) -> None:
        parts = window_parts(layer, window, options.state_dtype)
        self._open(Memory(layer, num_slots, window, parts, options), full_states(layer), options)

    def _open(self, memory: Memory, packing: Packing, options: EngineOptions) -> None:
        """Take the memory, and allocate the arrays that all slots share."""
        self.window = int(memory.context["window"][0])
        self._own(memory, min(MAX_DRAFTS, self.window - 1), options)
        packing.attach(memory)
        memory.scratch(worker_count(), packing.rank, residual=packing.residual)

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
