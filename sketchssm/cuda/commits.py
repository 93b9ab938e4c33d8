"""Commits of drafts, for all engines of the CUDA backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from sketchssm.cuda.kernel_parameters import KERNELS
from sketchssm.cuda.launch import Launcher
from sketchssm.cuda.modules import Variant, load
from sketchssm.cuda.pointer import Slots
from sketchssm.cuda.slots import part_of

COMMIT = Variant("commit", {})

THREADS = 512
"""Threads of a block of the commit kernel."""


class Committer:
    """The kernel of ``commit.cu`` for one engine; with a window of 1 it clears cursor words."""

    def __init__(self, cursor: Any, clock: Any, window: int, slot_limits: tuple[Any, ...]) -> None:
        kernel = load(COMMIT).get_function("commit")
        fixed = *part_of(cursor), clock, np.int32(window)
        self._launch = Launcher(kernel, fixed, KERNELS["commit"].letters, slot_limits)

    def __call__(self, accepted: Slots | None, slots: Slots) -> None:
        """Keep the first `accepted` drafts of each row; None is for windows of 1."""
        batch = slots.shape[0]
        if batch:
            counts = (0, 0) if accepted is None else accepted.number
            self._launch(1, THREADS, *slots.arguments, *counts, batch)
