"""Decoupled-scale quantisation (DSQ) of states, in float64.

A state is a sum of outer products of keys and values, so its outliers fill whole rows and whole columns. Each row and
each column therefore has its own scale. Q-Mamba (Chen et al., Findings of ACL 2025, 551) proposed these two sets of
scales, recomputed from every state, with symmetric integer codes. Its public summary does not give the computation of
the scales. Here the scale of a row is its largest magnitude, and the scale of a column is the largest magnitude after
all rows were divided by their scales. Every element is then at most the product of its two scales, and no element is
clipped. Rows (value channels) come first: on most real traces the error was smaller than with columns first or with a
geometric mean of both. Scales are bfloat16 numbers, as the byte model counts them, rounded up so that the bound holds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sketchssm.reference.recurrence import Array


def scales(state: Array) -> tuple[Array, Array]:
    """Scales of rows ``(..., V, 1)`` and columns ``(..., 1, K)``: ``|state| <= rows * columns`` everywhere."""
    size = np.abs(state)
    rows = _bfloat16_above(size.max(axis=-1, keepdims=True))
    share = np.divide(size, rows, out=np.zeros_like(size), where=rows > 0)
    return rows, _bfloat16_above(share.max(axis=-2, keepdims=True))


class Grid(NamedTuple):
    """The codes of a quantiser: every integer from ``-top`` to ``top``, or integers plus one half.

    A grid with zero (``top = 2^(bits - 1) - 1``) stores an element of zero exactly. A grid without zero has its levels
    at the centres of ``2^bits`` equal cells (``top = 2^(bits - 1) - 1/2``): one more level.
    """

    top: float
    shift: float

    @classmethod
    def of(cls, bits: int, zero: bool = True) -> Grid:
        """Grid of some bits, with or without zero."""
        return cls(2.0 ** (bits - 1) - 1.0, 0.0) if zero else cls(2.0 ** (bits - 1) - 0.5, 0.5)

    def step(self, scale: Array) -> Array:
        """Distance between two codes for elements of at most `scale`; the largest error is half of this distance."""
        return scale / (self.top + self.shift)

    def encode(self, x: Array, step: Array) -> Array:
        """Nearest codes; if the step is zero, every code decodes to zero."""
        with np.errstate(over="ignore", invalid="ignore"):
            codes = np.divide(x, step, out=np.zeros(np.broadcast(x, step).shape), where=step > 0)
        return np.clip(np.rint(codes - self.shift) + self.shift, -self.top, self.top)


def round_trip(state: Array, bits: int, zero: bool = True) -> Array:
    """Quantise states ``(..., V, K)`` with scales from the states, and return the stored values.

    They are within half a step of the given ones: a step is ``rows * columns / top``, or ``rows * columns`` over
    ``2^(bits - 1)`` without a zero on the grid (see `Grid`).
    """
    rows, columns = scales(state)
    grid = Grid.of(bits, zero)
    step = grid.step(rows * columns)
    return grid.encode(state, step) * step


def _bfloat16_above(x: Array) -> Array:
    """The least bfloat16 number that is not below each element; exponents are not limited."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.ceil(mantissa * 256), exponent - 8)
