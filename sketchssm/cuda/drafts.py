"""Drafts of the window engines: the kernel behind `ReplayEngine.draft`."""

from __future__ import annotations

from typing import Any

import numpy as np

from sketchssm.cuda.launch import Launcher
from sketchssm.cuda.limits import check_shared, shared_limit
from sketchssm.cuda.modules import Variant, load, size_of
from sketchssm.cuda.standard import SLOT_INPUTS, STEPS_INPUTS

__all__ = ["DraftReader", "draft_variant"]


def draft_variant(read: Variant) -> Variant:
    """The draft read of a read step."""
    return Variant("read_draft", dict(read.constants))


class DraftReader:
    """The kernel of ``read_draft.cu`` for one engine.

    Parameters
    ----------
    variant : Variant
        See `draft_variant`.
    memory : tuple
        The kernel's fixed arguments up to the order of heads.
    slot_limits : tuple
        Slot number of padding, and number of slots.
    clock : cupy.ndarray of int32, (1,), or None
        The head's clock.
    sketched : bool
        Whether any head has a sketch.
    """

    def __init__(
        self, variant: Variant, memory: tuple[Any, ...], slot_limits: tuple[Any, ...], clock: Any, sketched: bool
    ) -> None:
        check_shared(variant)
        module = load(variant, late=True)
        kernel = module.get_function("read_draft")
        self._most_threads = 32 * size_of(module, "read_draft_max_warps")
        shared = 0
        if sketched:
            shared = kernel.max_dynamic_shared_size_bytes = shared_limit()
        last = *slot_limits, np.uint64(0) if clock is None else clock, np.int32(shared)
        self._launch = Launcher(kernel, memory, STEPS_INPUTS + SLOT_INPUTS + "iiQi", last, shared=shared)

    def __call__(self, blocks: int, threads: int, *inputs: int) -> None:
        """Launch the kernel; see `Launcher`."""
        self._launch(blocks, min(threads, self._most_threads), *inputs)
