"""Sets slots of an array from rows, or to zeros, as the device's slot numbers say: no host synchronisation."""

from __future__ import annotations

from typing import Any

import numpy as np

from sketchssm.cuda.modules import Variant, load

__all__ = ["SLOTS", "SlotWriter"]

SLOTS = Variant("slots", {})
UNIT = 16
"""Bytes that a thread moves at a time."""

THREADS, MAX_PARTS = 256, 64


class SlotWriter:
    """The kernel of ``slots.cu``, loaded when it is first needed."""

    def __init__(self) -> None:
        self._kernel: Any = None

    def __call__(self, array: Any, rows: Any, slots: Any, position: Any) -> None:
        """Overwrite ``array[slots]`` and start the slots' windows anew; -1 is skipped.

        Parameters
        ----------
        array : cupy.ndarray, (slots, ...)
            Contiguous within a slot; slots start and end at multiples of 16 bytes.
        rows : cupy.ndarray or None
            One row for each of `slots`, contiguous; None stands for zeros.
        slots : cupy.ndarray of int64, (batch,)
            Which slots, each at most once.
        position : cupy.ndarray of int32, (slots,)
            Cursors.
        """
        if not slots.shape[0]:
            return
        if self._kernel is None:
            self._kernel = load(SLOTS).get_function("set_slots")
        size = array[0].nbytes // UNIT
        parts = min(-(-size // THREADS), MAX_PARTS)
        source = np.uint64(0) if rows is None else rows
        where = (array, np.int64(array.strides[0] // UNIT))
        args = (*where, source, np.int64(size), position, slots, np.int32(parts))
        self._kernel((slots.shape[0] * parts,), (THREADS,), args)
