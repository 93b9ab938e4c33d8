"""The kernel that sketches states through bases adapted to them, with residuals, after a flush."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sketchssm.cuda.kernel_parameters import KERNELS
from sketchssm.cuda.launch import Launcher
from sketchssm.cuda.modules import size_of


class Encodes:
    """The kernel of ``encode.cu`` for one engine; `fixed` are the kernel's first arguments, `heads` counts sketches.

    A launch takes the rows of a call whose windows are at their beginning, as a workspace lists them.
    """

    def __init__(self, module: Any, fixed: Sequence[Any], heads: int) -> None:
        import cupy

        kernel = module.get_function("encode_states")
        shared = kernel.max_dynamic_shared_size_bytes = size_of(module, "encode_shared_bytes")
        self._threads, self._heads = size_of(module, "encode_threads"), heads
        resident = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(kernel.kernel.ptr, self._threads, shared)
        self._blocks = int(cupy.cuda.Device().attributes["MultiProcessorCount"]) * resident
        self.launch = Launcher(kernel, tuple(fixed), KERNELS["encode_states"].letters, shared=shared)

    def grid(self, batch: int) -> tuple[int, int]:
        """Blocks, and a block's threads."""
        return min(self._blocks, batch * self._heads), self._threads
