"""The kernels that read: one token of every row, or the drafts of every row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sketchssm.cuda.device_slots import DeviceSlots
from sketchssm.cuda.kernel_parameters import KERNELS
from sketchssm.cuda.launch import Launcher
from sketchssm.cuda.limits import check_shared, shared_limit
from sketchssm.cuda.modules import Variant, load, size_of

LEAST_WARPS = 4
"""Smallest number of warps of a block. At least two are needed: a warp without tiles computes the products of keys for
the other warps and writes tokens into the ring."""

FULL_STATE_THREADS = 128
"""Threads of a block if all heads read full states."""


def draft_variant(read: Variant) -> Variant:
    """The draft read of a read step; no draft is measured."""
    return Variant("read_draft", {name: value for name, value in read.constants if name != "MONITOR"})


class Reads:
    """The kernel of ``read.cu`` for one engine: reads every row, and lists the rows that are due in a workspace.

    `fixed` are the kernel's first arguments; `full_state` heads read full states, and others, if `sketched`, sketches.
    """

    def __init__(self, module: Any, fixed: Sequence[Any], slots: DeviceSlots, full_state: int, sketched: bool) -> None:
        import cupy

        kernel = module.get_function("read_step")
        self._full_state, shared = full_state, 0
        self._limits: tuple[int, ...] = ()
        if sketched:  # a block divides all shared memory among its warps
            shared = kernel.max_dynamic_shared_size_bytes = shared_limit()
            names = ("read_row_tiles", "read_max_tiles", "read_max_warps")
            processors = int(cupy.cuda.Device().attributes["MultiProcessorCount"])
            self._limits = (processors, *(size_of(module, name) for name in names))
        last = *slots.limits, np.int32(shared)
        self.launch = Launcher(kernel, tuple(fixed), KERNELS["read_step"].letters, last, shared=shared)

    def grid(self, batch: int) -> tuple[int, int]:
        """Blocks, and a block's threads."""
        if not self._limits:
            return batch * self._full_state, FULL_STATE_THREADS
        processors, row_tiles, max_tiles, max_warps = self._limits
        tiles = batch * row_tiles
        blocks = max(min(tiles, processors), -(-tiles // max_tiles))
        return blocks, 32 * min(max(-(-tiles // blocks), LEAST_WARPS), max_warps)


class DraftReads:
    """The kernel of ``read_draft.cu`` for one engine; arguments as of `Reads`."""

    def __init__(self, variant: Variant, fixed: Sequence[Any], slots: DeviceSlots, sketched: bool) -> None:
        check_shared(variant)
        module = load(variant, late=True)
        kernel = module.get_function("read_draft")
        self._most_threads = 32 * size_of(module, "read_draft_max_warps")
        shared = 0
        if sketched:
            shared = kernel.max_dynamic_shared_size_bytes = shared_limit()
        last = *slots.limits, slots.clock, np.int32(shared)
        self._launch = Launcher(kernel, tuple(fixed), KERNELS["read_draft"].letters, last, shared=shared)

    def __call__(self, blocks: int, threads: int, *inputs: int) -> None:
        """Launch the kernel; see `Launcher`."""
        self._launch(blocks, min(threads, self._most_threads), *inputs)
