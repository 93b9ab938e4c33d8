"""Refreshes of the window engines: the kernel behind a step of `SketchEngine` with `flush_every`."""

from __future__ import annotations

from typing import Any

import numpy as np

from sketchssm.cuda.launch import Launcher
from sketchssm.cuda.modules import size_of
from sketchssm.cuda.standard import TOKEN_INPUTS, TOKEN_VALUES

__all__ = ["Refresher"]

THREADS = 160
"""Threads of a block; as in ``cuda_src/refresh.cuh``."""


class Refresher:
    """The kernel of ``refresh.cu`` for one engine.

    Parameters
    ----------
    module : cupy.RawModule
        The compiled kernel.
    memory : tuple
        The kernel's fixed arguments up to the heads.
    ridge : float
        Ridge of the map.
    heads : int
        Heads of the layer.
    """

    values = (*TOKEN_VALUES, "workspace")
    """Names of the arguments that vary."""

    def __init__(self, module: Any, memory: tuple[Any, ...], ridge: float, heads: int) -> None:
        import cupy

        kernel = module.get_function("refresh_step")
        shared = kernel.max_dynamic_shared_size_bytes = size_of(module, "refresh_shared_bytes")
        resident = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(kernel.kernel.ptr, THREADS, shared)
        self._most = resident * int(cupy.cuda.Device().attributes["MultiProcessorCount"])
        self._heads = heads
        self.launcher = Launcher(kernel, memory, TOKEN_INPUTS + "Q", (np.float32(ridge),), shared=shared)

    def grid(self, batch: int) -> tuple[int, int]:
        """Blocks of a step of so many rows, and a block's threads."""
        return min(self._most, batch * self._heads), THREADS

    def __call__(self, batch: int, inputs: tuple[int, ...], workspace: int) -> None:
        """Refresh the rows that the step's read has listed in the workspace; `inputs` are the step's."""
        self.launcher(*self.grid(batch), *inputs[: len(TOKEN_INPUTS)], workspace)
