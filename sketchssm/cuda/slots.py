"""Kernels on the memory of slots: set, copy, commit. Slot numbers are on the device, so the host does not wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sketchssm.cuda.constants import ACCESS, MAX_ROWS
from sketchssm.cuda.kernel_parameters import KERNELS
from sketchssm.cuda.launch import Launcher
from sketchssm.cuda.modules import Variant, load
from sketchssm.cuda.pointer import Pointer, Slots
from sketchssm.cuda.workspaces import PAIRS

SLOTS, COPY, COMMIT = (Variant(operation, {}) for operation in ("slots", "copy", "commit"))

SET_THREADS, MAX_PARTS = 256, 64
THREADS, HELD = 512, 8


class SlotWriter:
    """The kernel of ``slots.cu`` for one array, loaded when it is first needed.

    The array is contiguous within a slot; slots start and end at multiples of 16 bytes.
    """

    def __init__(self, array: Any, cursor: Any, slot_limits: tuple[Any, ...], clock: Any) -> None:
        self._array, self._cursor, self._slot_limits, self._clock = array, cursor, slot_limits, clock
        self._size = array[0].nbytes // ACCESS
        self._parts = min(-(-self._size // SET_THREADS), MAX_PARTS)
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
        self._launch(count * parts, SET_THREADS, source, stride, size, *slots.arguments, parts)


class Copier:
    """The kernels of ``copy.cu`` for one engine; `memory` has all parts of its slots, and the cursor."""

    def __init__(self, memory: Mapping[str, Any], clock: Any, slot_limits: tuple[Any, ...]) -> None:
        import cupy

        module = load(COPY)
        arrays = [array for name, array in memory.items() if name != "cursor"]
        table = [(x.data.ptr, x.strides[0], x[0].nbytes // ACCESS) for x in arrays]
        self._units = sum(row[2] for row in table)
        self._parts = cupy.asarray(np.array(table, dtype=np.int64))
        cupy.cuda.get_current_stream().synchronize()  # calls may come on other streams
        cursor = part_of(memory["cursor"])

        def launcher(name: str, before: tuple[Any, ...], after: tuple[Any, ...]) -> Launcher:
            return Launcher(module.get_function(name), before, KERNELS[name].letters, after, overlaps=False)

        self._check = launcher("check_pairs", (), slot_limits)
        self._copy = launcher("copy_slots", (self._parts, np.int32(len(arrays)), *cursor), ())
        self._rejoin = launcher("rejoin", (*cursor, clock), slot_limits)

    def copy(self, src: Slots, dst: Slots, workspace: int) -> None:
        """Copy slots as if all were read before any is written; the workspace is the stream's `Schedule`."""
        count = dst.shape[0]
        if count > MAX_ROWS:
            raise ValueError(f"dst: expected at most {MAX_ROWS} slots in a call, got {count}")
        if count:
            self._check(1, THREADS, *src.number, *dst.arguments, count, workspace + PAIRS)
            units = THREADS * HELD // count
            self._copy(-(-self._units // units), THREADS, workspace + PAIRS, count, units)

    def rejoin(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.ExactEngine`."""
        if slots.shape[0]:
            self._rejoin(1, THREADS, *slots.arguments, slots.shape[0])


class Committer:
    """The kernel of ``commit.cu`` for one engine; with a window of 1 it clears cursor words."""

    def __init__(self, cursor: Any, clock: Any, window: int, slot_limits: tuple[Any, ...]) -> None:
        kernel = load(COMMIT).get_function("commit")
        fixed = *part_of(cursor), clock, np.int32(window)
        self._launch = Launcher(kernel, fixed, KERNELS["commit"].letters, slot_limits)

    def __call__(self, accepted: Slots | None, slots: Slots) -> None:
        """Keep the first `accepted` drafts of each row; None is for windows of 1."""
        batch = slots.shape[0]
        if batch:
            counts = (0, 0) if accepted is None else accepted.number
            self._launch(1, THREADS, *slots.arguments, *counts, batch)


def part_of(array: Any) -> tuple[Any, np.int32]:
    """A part of the slots' memory as the kernels take it: the array, and bytes from slot to slot."""
    return array, np.int32(array.strides[0])
