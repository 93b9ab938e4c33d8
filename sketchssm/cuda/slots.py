"""Sets slots of an array from rows, or to zeros; the slot numbers are on the device, so the host does not wait."""

from __future__ import annotations

from typing import Any

import numpy as np

from sketchssm.cuda.kernel_parameters import KERNELS
from sketchssm.cuda.launch import Launcher
from sketchssm.cuda.modules import Variant, load
from sketchssm.cuda.pointer import Pointer, Slots

SLOTS = Variant("slots", {})
UNIT = 16
"""Bytes that a thread moves at a time."""

THREADS, MAX_PARTS = 256, 64


class SlotWriter:
    """The kernel of ``slots.cu`` for one array, loaded when it is first needed.

    The array is contiguous within a slot; slots start and end at multiples of 16 bytes.
    """

    def __init__(self, array: Any, cursor: Any, slot_limits: tuple[Any, ...], clock: Any) -> None:
        self._array, self._cursor, self._slot_limits, self._clock = array, cursor, slot_limits, clock
        self._size = array[0].nbytes // UNIT
        self._parts = min(-(-self._size // THREADS), MAX_PARTS)
        self._launch: Launcher | None = None

    def __call__(self, rows: Pointer | None, slots: Slots) -> None:
        """Overwrite ``array[slots]``, by zeros without rows, and start the slots' windows anew; padding is skipped."""
        source, stride = (0, 0) if rows is None else (rows.address, rows.row)
        self._write(source, stride, self._size, slots, self._parts)

    def begin(self, slots: Slots) -> None:
        """Start the slots' windows anew; the array stays."""
        self._write(0, 0, 0, slots, 1)

    def _write(self, source: int, stride: int, size: int, slots: Slots, parts: int) -> None:
        """Launch the kernel over `size` units of each slot, with so many blocks a slot."""
        count = slots.shape[0]
        if not count:
            return
        if self._launch is None:
            kernel = load(SLOTS).get_function("set_slots")
            fixed = *part_of(self._array), *part_of(self._cursor)
            last = *self._slot_limits, self._clock
            varying = KERNELS["set_slots"].letters
            self._launch = Launcher(kernel, fixed, varying, last, overlaps=False)  # the kernel does not wait
        self._launch(count * parts, THREADS, source, stride, size, *slots.arguments, parts)


def part_of(array: Any) -> tuple[Any, np.int32]:
    """A part of the slots' memory as the kernels take it: the array, and bytes from slot to slot."""
    return array, np.int32(array.strides[0])
