"""Buffered replay: the exact state is read at every token, and written once a window."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sketchssm.cpu.decode import FLUSH, STEP, window_kernel
from sketchssm.cpu.layout import Array, Memory
from sketchssm.cpu.packed import pack
from sketchssm.cpu.standard import StandardEngine
from sketchssm.cpu.workers import run, worker_count
from sketchssm.plan import SketchPlan
from sketchssm.recurrence import Layer, Tokens

__all__ = ["ReplayEngine"]


class ReplayEngine(StandardEngine):
    """A ring buffers raw inputs; the last token of a window folds them into the state.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    num_slots : int
        Number of state slots.
    window : int
        Tokens from one flush to the next (W).
    """

    def __init__(self, layer: Layer, num_slots: int, window: int) -> None:
        self._open(layer, num_slots, window, None, "float32")

    def _open(self, layer: Layer, num_slots: int, window: int, plan: SketchPlan | None, sketch_dtype: str) -> None:
        """Allocate the window's memory. Without a plan, every head reads its full state."""
        self._own(Memory(layer, num_slots, window))
        rank = pack(self._memory, plan, sketch_dtype)
        self._memory.scratch(worker_count(), rank)
        self.window = window

    def step(self, tokens: Tokens, slots: npt.NDArray[np.int64], out: Array) -> None:
        """See `sketchssm.backends.Engine`."""
        self._memory.set(task=STEP)
        run(window_kernel, self._memory, slots, tokens, out, rounds=out.shape[1])

    def flush(self, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.backends.Engine`."""
        self._memory.set(task=FLUSH)
        run(window_kernel, self._memory, slots)
