"""Sketched decode: exact states written once a window, and read through their sketches in between."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sketchssm.cpu.decode import REBUILD, window_kernel
from sketchssm.cpu.layout import Array
from sketchssm.cpu.replay import ReplayEngine
from sketchssm.cpu.workers import run
from sketchssm.plan import SketchPlan

__all__ = ["SketchEngine"]


class SketchEngine(ReplayEngine):
    """The paper's algorithm 1: replay, with a sketch for the state reads between flushes.

    Parameters
    ----------
    plan : SketchPlan
        Bases, ranks and settings of the layer.
    num_slots : int
        Number of state slots.
    sketch_dtype : {"bfloat16", "float32"}
        How sketches and coefficient maps are stored.
    """

    def __init__(self, plan: SketchPlan, num_slots: int, sketch_dtype: str = "bfloat16") -> None:
        self._open(plan.layer, num_slots, plan.window, plan, sketch_dtype)
        self.plan = plan

    def load_state(self, state: Array, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.backends.Engine`."""
        super().load_state(state, slots)
        self._memory.set(task=REBUILD)
        run(window_kernel, self._memory, slots)

    def reset(self, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.backends.Engine`."""
        super().reset(slots)
        # a zero sketch reads a zero state correctly through any finite map
        self._memory.clear(slots[slots >= 0], "packed", "master", "factors")
