"""Buffered replay: the exact state is read at every token, and written once a window."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from sketchssm.cpu import decode
from sketchssm.cpu.layout import Array, Memory, pass_call
from sketchssm.cpu.packed import pack
from sketchssm.cpu.standard import StandardEngine
from sketchssm.plan import SketchPlan
from sketchssm.recurrence import Layer, Tokens

__all__ = ["ReplayEngine"]


class ReplayEngine(StandardEngine):
    """Raw inputs wait in a ring and are folded into the state at the window's last token.

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
        """Set up the window's memory; without a plan, every head reads its full state."""
        self._own(Memory(layer, num_slots, window))
        rank = pack(self._memory, plan, sketch_dtype)
        self._areas = self._memory.scratch(numba.get_num_threads(), rank)
        self.window = window

    def step(self, tokens: Tokens, slots: npt.NDArray[np.int64], out: Array) -> None:
        """See `sketchssm.backends.Engine`."""
        decode.step(self._memory.context, self._areas, *pass_call(tokens, slots, out))

    def flush(self, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.backends.Engine`."""
        decode.flush(self._memory.context, self._areas, slots)
        self.position[slots[slots >= 0]] = 0
