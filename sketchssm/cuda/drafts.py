"""Drafts of the window engines: the kernels behind `ReplayEngine.draft` and `ReplayEngine.commit`."""

from __future__ import annotations

from typing import Any

import numpy as np

from sketchssm.cuda.launch import Launcher
from sketchssm.cuda.limits import check_shared, shared_limit
from sketchssm.cuda.modules import Variant, load
from sketchssm.cuda.pointer import Slots
from sketchssm.cuda.slots import part_of
from sketchssm.cuda.standard import SLOT_INPUTS, STEPS_INPUTS

__all__ = ["COMMIT", "Committer", "DraftReader", "draft_variant"]

COMMIT = Variant("commit", {})

THREADS = 512
"""Of a block of the commit kernel."""


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
    sketched : bool
        Whether any head has a sketch.
    """

    def __init__(
        self, variant: Variant, memory: tuple[Any, ...], slot_limits: tuple[Any, ...], sketched: bool
    ) -> None:
        check_shared(variant)
        kernel = load(variant, late=True).get_function("read_draft")
        shared = 0
        if sketched:
            shared = kernel.max_dynamic_shared_size_bytes = shared_limit()
        last = *slot_limits, np.int32(shared)
        self._launch = Launcher(kernel, memory, STEPS_INPUTS + SLOT_INPUTS + "i", last, shared=shared)

    def __call__(self, blocks: int, threads: int, *inputs: int) -> None:
        """Launch the kernel; see `Launcher`."""
        self._launch(blocks, threads, *inputs)


class Committer:
    """The kernel of ``commit.cu`` for one engine.

    Parameters
    ----------
    cursor : cupy.ndarray of int32, (slots,)
        Cursor words.
    clock : cupy.ndarray of int32, (1,), or None
        The head's clock.
    window : int
        Tokens from one flush to the next.
    slot_limits : tuple
        Slot number of padding, and number of slots.
    """

    def __init__(self, cursor: Any, clock: Any, window: int, slot_limits: tuple[Any, ...]) -> None:
        kernel = load(COMMIT).get_function("commit")
        fixed = *part_of(cursor), np.uint64(0) if clock is None else clock, np.int32(window)
        self._launch = Launcher(kernel, fixed, "QiQii", slot_limits)

    def __call__(self, accepted: Slots, slots: Slots) -> None:
        """Keep the first `accepted` drafts of each row."""
        batch = slots.shape[0]
        if batch:
            self._launch(1, THREADS, *slots.number, *accepted.number, batch)
