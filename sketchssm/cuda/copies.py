"""Copies of slots on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sketchssm.cuda.constants import MAX_ROWS
from sketchssm.cuda.kernel_parameters import KERNELS
from sketchssm.cuda.launch import Launcher
from sketchssm.cuda.modules import Variant, load
from sketchssm.cuda.pointer import Slots
from sketchssm.cuda.slots import UNIT, part_of
from sketchssm.cuda.workspaces import PAIRS

COPY = Variant("copy", {})
THREADS, HELD = 512, 8


class Copier:
    """The kernels of ``copy.cu`` for one engine; `memory` has all parts of its slots, and the cursor."""

    def __init__(self, memory: Mapping[str, Any], clock: Any, slot_limits: tuple[Any, ...]) -> None:
        import cupy

        module = load(COPY)
        arrays = [array for name, array in memory.items() if name != "cursor"]
        table = [(x.data.ptr, x.strides[0], x[0].nbytes // UNIT) for x in arrays]
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
