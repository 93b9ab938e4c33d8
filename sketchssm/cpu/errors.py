"""Errors of flush tokens: the exact output against the sketch's answer, which waits in the output's place.

The sums of a head are the squared norms of the differences, the squared norms of the exact outputs, and the number of
flushes. The sums of a measured flush are float32, like all that is stored.
"""

from __future__ import annotations

import numpy as np

from sketchssm.cpu.jit import njit
from sketchssm.cpu.layout import Record
from sketchssm.cpu.packed import RANK, field
from sketchssm.cpu.simd import Pointer, floats
from sketchssm.layer.recurrence import FULL_STATE


@njit
def measures(m: Record, slot: int, head: int) -> bool:
    """Whether the head's next flush is measured."""
    if m.monitor == 0:
        return False
    return int(floats(m.errors)[slot * m.errors_stride + 3 * head + 2]) % m.monitor == 0


@njit
def add_error(m: Record, at: Record, buf: Pointer, slot: int, head: int, target: int) -> None:
    """Count a head's flush and, if it is measured, add its error and its energy. A full state has no error."""
    sums, own = floats(m.errors), slot * m.errors_stride + 3 * head
    if measures(m, slot, head):
        error = energy = np.float32(0.0)
        for c in range(m.value_dim):
            exact = buf[at.output + head * m.values + c]
            difference = exact - floats(m.out)[target + c]
            error += difference * difference
            energy += exact * exact
        if field(m, head, RANK) != FULL_STATE:
            sums[own] += error
        sums[own + 1] += energy
    sums[own + 2] += np.float32(1.0)
