"""The kernels of flushes: fold rings into states, and sketch states."""

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


class _Resident:
    """A kernel of which no more blocks are launched than are on the device at once, for so many heads of each row."""

    def __init__(self, module: Any, name: str, operation: str, heads: int) -> None:
        import cupy

        self._kernel, self._name, self._heads = module.get_function(name), name, heads
        self._shared = self._kernel.max_dynamic_shared_size_bytes = size_of(module, f"{operation}_shared_bytes")
        self.threads = threads = size_of(module, f"{operation}_threads")
        occupancy = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
        resident = occupancy(self._kernel.kernel.ptr, threads, self._shared)
        self.blocks = int(cupy.cuda.Device().attributes["MultiProcessorCount"]) * resident

    def _launcher(self, before: Sequence[Any], after: tuple[Any, ...] = ()) -> Launcher:
        return Launcher(self._kernel, tuple(before), KERNELS[self._name].letters, after, shared=self._shared)

    def grid(self, batch: int) -> tuple[int, int]:
        """Blocks, and a block's threads."""
        return min(self.blocks, batch * self._heads), self.threads


class Flushes(_Resident):
    """The kernel of ``flush.cu`` for one engine; `fixed` are the kernel's first arguments.

    `launches` has the launch of each mode.
    """

    def __init__(self, module: Any, fixed: Sequence[Any], slots: DeviceSlots, heads: int, ridge: float) -> None:
        super().__init__(module, "flush_step", "flush", heads)
        self.launches = [
            self._launcher(fixed, (*slots.limits, slots.clock, np.int32(mode), np.float32(ridge)))
            for mode in (STEP, FOLD, LOAD, DRAFT)
        ]

    def rebuild(self, mode: int, slots: Slots, rows: int, workspace: int) -> None:
        """Fold the rings of slots, or sketch their states, without tokens."""
        self.launches[mode](*self.grid(rows), *NO_TOKENS, *slots.arguments, rows, 0, 0, 0, 0, workspace)


class Encodes(_Resident):
    """The kernel of ``encode.cu`` for one engine, which sketches states through bases adapted to them after a flush.

    `fixed` are the kernel's first arguments, `heads` counts sketches. A launch takes the rows of a call whose windows
    are at their beginning, as a workspace lists them.
    """

    def __init__(self, module: Any, fixed: Sequence[Any], heads: int) -> None:
        super().__init__(module, "encode_states", "encode", heads)
        self.launch = self._launcher(fixed)
