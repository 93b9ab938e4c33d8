"""Decoupled-scale quantisation (DSQ) of states, in float64.

A state's outliers lie along whole rows and whole columns, since it is a sum of outer products of keys and values: one
scale per row and one per column fit what neither alone does. From Q-Mamba (Chen et al., Findings of ACL 2025, 551)
come the two sets of scales and that they follow the state (dynamic, symmetric, integer codes). The public summary
leaves open how the scales are found. Here a row's scale is its largest magnitude, and a column's the largest
magnitude that remains once rows are divided by theirs: so every element is within the product of its two scales, and
nothing is clipped. Rows (value channels) come first because that lost less than columns first, or than a geometric
mean of the two, on most of the real traces tried. Scales are bfloat16 numbers, as the byte model counts them, rounded
up so that the bound survives.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sketchssm.reference.recurrence import Array

__all__ = ["Grid", "round_trip", "scales"]


def scales(state: Array) -> tuple[Array, Array]:
    """Row and column scales of states.

    Parameters
    ----------
    state : ndarray, (..., V, K)
        States, K last.

    Returns
    -------
    rows : ndarray, (..., V, 1)
        Scales of the value channels.
    columns : ndarray, (..., 1, K)
        Scales of the key channels: ``|state| <= rows * columns`` everywhere.
    """
    size = np.abs(state)
    rows = _bfloat16_above(size.max(axis=-1, keepdims=True))
    share = np.divide(size, rows, out=np.zeros_like(size), where=rows > 0)
    return rows, _bfloat16_above(share.max(axis=-2, keepdims=True))


class Grid(NamedTuple):
    """The codes of a quantiser: every whole number from ``-top`` to ``top``, or those shifted by a half.

    A recurrent state's grid holds zero, so that what is exactly zero stays so (``top = 2^(bits - 1) - 1``). A grid
    without zero has one level more, at the centres of ``2^bits`` equal cells (``top = 2^(bits - 1) - 1/2``).
    """

    top: float
    shift: float

    @classmethod
    def of(cls, bits: int, zero: bool = True) -> Grid:
        """Grid of some bits, with or without zero; no bits, no codes."""
        if not bits:
            return cls(0.0, 0.0)
        return cls(2.0 ** (bits - 1) - 1.0, 0.0) if zero else cls(2.0 ** (bits - 1) - 0.5, 0.5)

    def step(self, scale: Array) -> Array:
        """Distance of two codes for elements of at most `scale`: half of it is the largest error."""
        return scale / (self.top + self.shift)

    def encode(self, x: Array, step: Array) -> Array:
        """Nearest codes; where the step is zero what they stand for is, too."""
        with np.errstate(over="ignore", invalid="ignore"):
            codes = np.divide(x, step, out=np.zeros(np.broadcast(x, step).shape), where=step > 0)
        return np.clip(np.rint(codes - self.shift) + self.shift, -self.top, self.top)


def round_trip(state: Array, bits: int, residual_bits: int = 0, zero: bool = True) -> Array:
    """Quantise states with scales of their own and return what is stored.

    Parameters
    ----------
    state : ndarray, (..., V, K)
        States, K last.
    bits : int
        Bits per element.
    residual_bits : int, default 0
        Bits per element of a second set of codes that keeps what the first loses; 0 for none. It lies within half a
        step of the first, so that it needs no scales.
    zero : bool, default True
        Whether the grid holds zero, see `Grid`.

    Returns
    -------
    ndarray
        States within half a step of the given ones: a step is ``rows * columns / top``, or ``rows * columns`` over
        ``2^(bits - 1)`` without a zero. Residuals divide the bound by ``2 top`` of their own grid.
    """
    rows, columns = scales(state)
    grid = Grid.of(bits, zero)
    step = grid.step(rows * columns)
    stored = grid.encode(state, step) * step
    if residual_bits:
        fine_grid = Grid.of(residual_bits)
        fine = fine_grid.step(step / 2)
        stored = stored + fine_grid.encode(state - stored, fine) * fine
    return stored


def _bfloat16_above(x: Array) -> Array:
    """The least bfloat16 number that is not below each element, whatever its exponent."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.ceil(mantissa * 256), exponent - 8)
