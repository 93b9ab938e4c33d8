"""Sets slots of an array from rows, or to zeros; the slot numbers are on the device, so the host does not wait."""

from __future__ import annotations

from typing import Any

import numpy as np

from sketchssm.cuda.launch import Launcher
from sketchssm.cuda.modules import Variant, load
from sketchssm.cuda.pointer import Pointer

__all__ = ["SLOTS", "SlotWriter"]

SLOTS = Variant("slots", {})
UNIT = 16
"""Bytes that a thread moves at a time."""

THREADS, MAX_PARTS = 256, 64


class SlotWriter:
    """The kernel of ``slots.cu`` for one array, loaded when it is first needed.

    Parameters
    ----------
    array : cupy.ndarray, (slots, ...)
        Contiguous within a slot; slots start and end at multiples of 16 bytes.
    cursor : cupy.ndarray of int32, (slots,)
        Cursor words.
    clock : cupy.ndarray of int32, (1,), optional
        The head's clock.
    """

    def __init__(self, array: Any, cursor: Any, clock: Any = None) -> None:
        self._array, self._cursor, self._clock = array, cursor, np.uint64(0) if clock is None else clock
        self._size = array[0].nbytes // UNIT
        self._parts = min(-(-self._size // THREADS), MAX_PARTS)
        self._launch: Launcher | None = None

    def __call__(self, rows: Pointer | None, slots: Pointer) -> None:
        """Overwrite ``array[slots]`` and start the slots' windows anew; -1 is skipped.

        Parameters
        ----------
        rows : Pointer or None
            One row for each of `slots`; None stands for zeros.
        slots : Pointer, (batch,)
            Which slots, each at most once.
        """
        count = slots.shape[0]
        if not count:
            return
        if self._launch is None:
            kernel = load(SLOTS).get_function("set_slots")
            fixed = self._array, np.int64(self._array.strides[0] // UNIT)
            self._launch = Launcher(kernel, fixed, "QqQQi", (self._clock,), overlaps=False)  # the kernel does not wait
        source = 0 if rows is None else rows.address
        cursor = self._cursor.data.ptr
        self._launch(count * self._parts, THREADS, source, self._size, cursor, slots.address, self._parts)
