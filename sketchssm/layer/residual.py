"""Residuals in few bits: what a sketch leaves of its state, as codes with scales.

A sketched read is a low-rank matrix ``U C``. It is right where queries usually go and blind elsewhere, so it forgets
what a state holds in other directions. A head with *residual bits* b also stores ``R = S^T - U C`` ``(V, K)`` as codes
of b bits, with one scale for each row and one for each column. `sketchssm.reference.residual` defines the codes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.layer.checks import check_integer

STEPS = {1: 1.596, 2: 0.996, 3: 0.586}
"""Distance of neighbouring levels for each number of bits, in standard deviations.

The levels lie at ``(i + 1/2)`` distances; none is zero. The distances have the least squared error for a normal
distribution (J. Max, *Quantizing for minimum distortion*, IRE Transactions on Information Theory 6, 1960, table II).
"""

GAINS = {1: 1.571, 2: 1.135, 3: 1.039}
"""Factor of the levels for each number of bits.

Levels of least squared error shrink a residual: the mean of their product with it is 1 - D of its energy, with the
error D (.3634, .1188 and .03744; table I of the same paper). Shrunken residuals cost more loss than their error says,
because the shrinkage of all reads adds up. The factor is 1 / (1 - D), so that reads are right on average.
"""

RESIDUAL_BITS = (0, *STEPS)
"""Possible numbers of bits; 0 stands for no residual."""

SCALE_BYTES = 2
"""Bytes of a scale, a bfloat16 number."""


def check_residual_bits(bits: Any) -> int:
    """Return a number of bits for all heads; ValueError if it is none of `RESIDUAL_BITS`."""
    return check_integer("residual_bits", bits, RESIDUAL_BITS[0], RESIDUAL_BITS[-1])


def residual_bytes(bits: npt.ArrayLike, key_dim: int, value_dim: int) -> npt.NDArray[np.float64]:
    """Bytes of the codes and scales that a state stores as its residual, in the shape of `bits`.

    `bits` are those of a code, 0 for no residual; fractions stand for the mean of a budget.
    """
    b = np.asarray(bits, dtype=np.float64)
    return b * (key_dim * value_dim / 8) + SCALE_BYTES * (key_dim + value_dim) * (b > 0)
