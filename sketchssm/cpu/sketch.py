"""Sketched decode: exact states written once a window, and read through their sketches in between."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sketchssm.cpu import decode
from sketchssm.cpu.layout import Array
from sketchssm.cpu.replay import ReplayEngine
from sketchssm.cpu.standard import StandardEngine
from sketchssm.plan import SketchPlan
from sketchssm.recurrence import Tokens

__all__ = ["SketchEngine"]


class SketchEngine(ReplayEngine):
    """The paper's algorithm 1: replay whose state reads between flushes go through a sketch.

    Parameters
    ----------
    plan : SketchPlan
        Bases, ranks and settings of the layer.
    slots : int
        Number of state slots.
    sketch_dtype : {"bfloat16", "float32"}
        How sketches and coefficient maps are stored.
    exact_rows : int, default 0
        Most rows of a step that is decoded exactly.
    """

    def __init__(self, plan: SketchPlan, slots: int, sketch_dtype: str = "bfloat16", exact_rows: int = 0) -> None:
        self._open(plan.layer, slots, plan.window, plan, sketch_dtype)
        self.plan = plan
        self._exact_rows = exact_rows

    def warmup(self, activation: str | None = None) -> None:
        """See `sketchssm.backends.Engine`: both ways to decode."""
        super().warmup(activation)
        if self._exact_rows:
            exact_rows, self._exact_rows = self._exact_rows, 0
            try:
                super().warmup(activation)
            finally:
                self._exact_rows = exact_rows

    def step(self, tokens: Tokens, slots: npt.NDArray[np.int64], out: Array) -> None:
        """See `sketchssm.backends.Engine`."""
        if not out.size or slots.size > self._exact_rows:
            super().step(tokens, slots, out)
            return
        live = slots[slots >= 0]
        self.flush(live[self.position[live] < self.window])
        StandardEngine.step(self, tokens, slots, out)
        self.position[live] = self.window  # a state that has all tokens, and no sketch

    def load_state(self, state: Array, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.backends.Engine`."""
        super().load_state(state, slots)
        decode.rebuild(self._memory.context, self._areas, slots)

    def reset(self, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.backends.Engine`."""
        super().reset(slots)
        # With U = 0 any finite map reads a zero state right.
        self._memory.clear(slots[slots >= 0], "packed", "master", "factors")
