"""Errors of reads at flush tokens, which are exact: the sums of a monitor, and the bound of a tolerance."""

from __future__ import annotations

import numpy as np

from sketchssm.cpu.cursors import is_exact
from sketchssm.cpu.jit import njit
from sketchssm.cpu.layout import Record
from sketchssm.cpu.packed import RANK, field
from sketchssm.cpu.simd import Pointer, floats
from sketchssm.layer.recurrence import FULL_STATE
from sketchssm.layer.slots import LEAST_SAMPLES


@njit
def measures(m: Record, slot: int, head: int) -> bool:
    """Whether the head's next flush is measured."""
    if m.monitor == 0 or is_exact(m, slot):
        return False
    return int(floats(m.errors)[slot * m.errors_stride + 3 * head + 2]) % m.monitor == 0


@njit
def add_error(m: Record, at: Record, buf: Pointer, slot: int, head: int, target: int) -> None:
    """Count a head's flush and, if it is measured, add its error and its energy. Errors of full reads do not count.

    The exact output is compared with the sketch's answer, which waits in the output's place.
    """
    if is_exact(m, slot):
        return
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


@njit
def exceeds(m: Record, slot: int) -> bool:
    """Whether a slot's error is above the tolerance, after a flush; only after measured ones, and enough of them."""
    sums, own = floats(m.errors), slot * m.errors_stride
    before = int(sums[own + 2]) - 1
    if is_exact(m, slot) or before % m.monitor != 0 or before < (LEAST_SAMPLES - 1) * m.monitor:
        return False
    error = energy = 0.0
    for head in range(m.heads):
        error += sums[own + 3 * head]
        energy += sums[own + 3 * head + 1]
    return not error <= m.tolerance * energy  # NaN is above
