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

import numpy as np

from sketchssm.reference.recurrence import Array

__all__ = ["decode", "encode", "round_trip", "scales"]


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


def encode(state: Array, step: Array, bits: int) -> Array:
    """Nearest codes of a symmetric quantiser.

    Parameters
    ----------
    state : ndarray
        What to quantise.
    step : ndarray
        Distance of two codes, broadcast against it; where it is zero so are the codes.
    bits : int
        Bits per code.

    Returns
    -------
    ndarray
        Integers from ``-top`` to ``top = 2^(bits - 1) - 1``, in float64.
    """
    top = 2 ** (bits - 1) - 1
    with np.errstate(over="ignore", invalid="ignore"):
        codes = np.divide(state, step, out=np.zeros(np.broadcast(state, step).shape), where=step > 0)
    return np.clip(np.rint(codes), -top, top)


def decode(codes: Array, step: Array) -> Array:
    """What codes stand for.

    Parameters
    ----------
    codes : ndarray
        From `encode`.
    step : ndarray
        Distance of two codes.

    Returns
    -------
    ndarray
        ``codes * step``.
    """
    return codes * step


def round_trip(state: Array, bits: int, residual_bits: int = 0) -> Array:
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

    Returns
    -------
    ndarray
        States within ``rows * columns / (2 top)`` of the given ones, and within that over ``2 top_residual`` where
        residuals are kept.
    """
    rows, columns = scales(state)
    step = rows * columns / (2 ** (bits - 1) - 1)
    stored = decode(encode(state, step, bits), step)
    if residual_bits:
        fine = step / (2 * (2 ** (residual_bits - 1) - 1))
        stored = stored + decode(encode(state - stored, fine, residual_bits), fine)
    return stored


def _bfloat16_above(x: Array) -> Array:
    """The least bfloat16 number that is not below each element, whatever its exponent."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.ceil(mantissa * 256), exponent - 8)
