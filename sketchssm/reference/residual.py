"""Residuals in few bits, as every backend stores them, in float64.

A head with residual bits reads ``S^T x ~ (U C + R) x``, with the codes R of ``S^T - U C``.

**Codes.** A row's scale r is the root mean square of the row. A column's scale c is the root mean square of the column
after all rows were divided by their scales. With the distance D and the gain a of `sketchssm.layer.residual`, an
element x has the code ``floor(x / (D r c))``, clipped to b bits, and the value ``(code + 1/2) a D r c``. Both scales
are bfloat16 numbers, and a D is part of the stored r. Codes are computed with the rounded scales. A row or column of
zeros has scale 0; a state that is not finite has scales of NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.residual import GAINS, STEPS
from sketchssm.reference.codes import sketched_read
from sketchssm.reference.recurrence import Array


class Residual(NamedTuple):
    """Codes ``(..., V, K)`` from ``-2^(b-1)`` to ``2^(b-1) - 1``, and scales of rows and columns.

    Row scales are ``(..., V)``, column scales ``(..., K)``.
    """

    codes: Array
    rows: Array
    columns: Array

    @property
    def matrix(self) -> Array:
        """The values of the codes, ``(..., V, K)``."""
        return (self.codes + 0.5) * self.rows[..., :, None] * self.columns[..., None, :]


def encode_residual(residual: Array, bits: int) -> Residual:
    """Code residuals ``(..., V, K)``, what the sketch leaves of each state, in 1 to 3 bits."""
    rows = _bfloat16(STEPS[bits] * GAINS[bits] * np.sqrt(np.square(residual).mean(-1)))
    steps = (rows / GAINS[bits])[..., :, None]
    columns = _bfloat16(np.sqrt(np.square(_quotient(STEPS[bits] * residual, steps)).mean(-2)))
    half = 2 ** (bits - 1)
    codes = np.floor(_quotient(residual, steps * columns[..., None, :]))
    return Residual(np.clip(codes, -half, half - 1), rows, columns)


def residual_read(form: SketchFormat, map: CoefficientMap, state: Array, omega: Array, *, bits: int) -> Array:
    """The matrix ``(..., V, K)`` of a state read through a sketch and a residual of some bits, 0 for the sketch alone.

    The read of an effective query x is its product with x; arguments as of `sketchssm.reference.codes.sketched_read`.
    """
    low = sketched_read(form, map, state, omega)
    if not bits:
        return low
    return low + encode_residual(state.swapaxes(-1, -2) - low, bits).matrix


def _quotient(x: Array, scale: Array) -> Array:
    """Quotients, and zero where the scale is zero."""
    return np.divide(x, scale, out=np.zeros(np.broadcast(x, scale).shape), where=scale != 0)


def _bfloat16(x: Array) -> Array:
    """Numbers of at least 0, or NaN, rounded to bfloat16's eight digits; exponents are not limited."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa * 256), exponent - 8)
