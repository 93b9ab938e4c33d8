"""The kernel that folds rings into states and sketches states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sketchssm.cuda.constants import DRAFT, FOLD, LOAD, STEP
from sketchssm.cuda.device_slots import DeviceSlots
from sketchssm.cuda.kernel_parameters import INPUTS, KERNELS
from sketchssm.cuda.launch import Launcher
from sketchssm.cuda.modules import size_of
from sketchssm.cuda.pointer import Slots

NO_TOKENS = (0,) * len(INPUTS.names)


class Flushes:
    """The kernel of ``flush.cu`` for one engine; `fixed` are the kernel's first arguments.

    `launches` has the launch of each mode, `blocks` the most blocks of one (those that are on the device at once), and
    `threads` the threads of a block.
    """

    def __init__(self, module: Any, fixed: Sequence[Any], slots: DeviceSlots, heads: int, ridge: float) -> None:
        import cupy

        kernel = module.get_function("flush_step")
        shared = kernel.max_dynamic_shared_size_bytes = size_of(module, "flush_shared_bytes")
        self.threads = size_of(module, "flush_threads")
        resident = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(kernel.kernel.ptr, self.threads, shared)
        self.blocks = int(cupy.cuda.Device().attributes["MultiProcessorCount"]) * resident
        self._heads = heads
        self.launches = [
            Launcher(
                kernel,
                tuple(fixed),
                KERNELS["flush_step"].letters,
                (*slots.limits, slots.clock, np.int32(mode), np.float32(ridge)),
                shared=shared,
            )
            for mode in (STEP, FOLD, LOAD, DRAFT)
        ]

    def grid(self, batch: int) -> tuple[int, int]:
        """Blocks, and a block's threads."""
        return min(self.blocks, batch * self._heads), self.threads

    def rebuild(self, mode: int, slots: Slots, rows: int, workspace: int) -> None:
        """Fold the rings of slots, or sketch their states, without tokens."""
        self.launches[mode](*self.grid(rows), *NO_TOKENS, *slots.arguments, rows, 0, 0, 0, 0, workspace)
