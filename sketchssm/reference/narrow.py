"""Sketches in few bits, as every backend stores them: the split form of a dense map, and the codes.

**Split form.** `ridge` reads ``S^T x`` as ``U C x`` with ``C = M^-1 U^T S^T / mu`` and ``M = U^T U / mu + ridge I``.
Terms of the product U C cancel in part, which amplifies the errors of few bits. With the Cholesky factor
``M = L L^T`` the same product has well-conditioned factors:

    U C = Q B,    Q = U L^-T (V, G),    B = L^-1 (S U)^T / mu (G, K).

The columns of Q are nearly orthogonal and of length ``sqrt(mu)``, unless the ridge shortens them.

**Codes.** A vector x is stored as integers or e4m3 numbers times a scale, ``x ~ scale * codes``:

====  ===========================  =====================================================
code  scale                        codes
====  ===========================  =====================================================
int8  max|x| / 127                 nearest integers (ties to even), -127 to 127
fp8   max|x| / 448                 nearest e4m3 numbers (ties to even)
int4  c max|x| / 7                 nearest integers, -7 to 7; c in `SHRINKS` with the least squared error
====  ===========================  =====================================================

Codes are computed with the unrounded scale. Scales are stored in float32, the product of a column's and a row's scale
as one number. A vector of zeros has scale 0. A vector with NaN or an infinity has scale NaN, so its reads are NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.formats import Code, SketchFormat
from sketchssm.reference import maps
from sketchssm.reference.recurrence import Array

__all__ = ["SHRINKS", "Codes", "encode", "energy_order", "sketched_read", "split_form", "stored"]

SHRINKS = tuple(1 - i / 16 for i in range(8))
"""Scales that int4 tries, relative to ``max|x| / 7``, in this order: the first of the best is taken. All are exact in
binary, so that backends compute the same scales."""


class Codes(NamedTuple):
    """Coded vectors ``(..., n)``: codes as float64 numbers ``(..., n)``, and unrounded scales ``(...,)``."""

    codes: Array
    scale: Array


def encode(x: Array, code: Code) -> Codes:
    """Code vectors.

    Parameters
    ----------
    x : ndarray, (..., n)
        Vectors.
    code : Code
        `INT8`, `FP8` or `INT4`.

    Returns
    -------
    Codes
        Codes and scales.
    """
    assert code.top is not None
    largest = np.abs(x).max(axis=-1, initial=0.0)
    finite = np.isfinite(largest)  # NaN is not
    scale = np.where(finite, largest, 0.0) / code.top
    if code.name != "int4":
        codes = _codes(x, scale, code)
    else:
        best, codes, unit = np.full(scale.shape, np.inf), np.zeros(x.shape), scale
        for shrink in SHRINKS:
            tried = _codes(x, shrink * unit, code)
            with np.errstate(invalid="ignore"):
                error = np.square(x - tried * (shrink * unit)[..., None]).sum(axis=-1)
            better = error < best
            best, scale = np.where(better, error, best), np.where(better, shrink * unit, scale)
            codes = np.where(better[..., None], tried, codes)
    return Codes(codes, np.where(finite, scale, np.nan))


def _codes(x: Array, scale: Array, code: Code) -> Array:
    """Nearest codes of vectors at given scales; 0 where the scale is 0."""
    assert code.top is not None
    step = scale[..., None]
    with np.errstate(invalid="ignore"):
        codes = np.divide(x, step, out=np.zeros(x.shape), where=step > 0)
    codes = np.clip(codes, -code.top, code.top)
    if code.name != "fp8":
        return np.rint(codes)
    import ml_dtypes

    return codes.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def split_form(state: Array, omega: Array, ridge: float) -> tuple[Array, Array]:
    """Factors of the read through the regularised map of the exact state metric.

    Parameters
    ----------
    state : ndarray, (..., K, V)
        States.
    omega : ndarray, (K, G)
        Sketch basis.
    ridge : float
        Regularisation, at least `RIDGE_FLOOR`.

    Returns
    -------
    q : ndarray, (..., V, G)
        Columns.
    b : ndarray, (..., G, K)
        Rows: ``q @ b`` is ``U C`` of `sketchssm.reference.maps.ridge_map`. NaN for a state that is not finite.
    """
    sketch = state.swapaxes(-1, -2) @ omega
    mu = maps.state_scale(state)[..., None, None]
    metric = sketch.swapaxes(-1, -2) @ sketch / mu + ridge * np.eye(omega.shape[-1])
    finite = np.isfinite(metric).all(axis=(-1, -2), keepdims=True)
    lower = np.where(finite, np.linalg.cholesky(np.where(finite, metric, np.eye(omega.shape[-1]))), np.nan)
    q = np.linalg.solve(lower, sketch.swapaxes(-1, -2)).swapaxes(-1, -2)
    return q, np.linalg.solve(lower, sketch.swapaxes(-1, -2) @ state.swapaxes(-1, -2)) / mu


def energy_order(b: Array) -> npt.NDArray[np.intp]:
    """Order of a mixed sketch's columns.

    Parameters
    ----------
    b : ndarray, (..., G, K)
        Rows of the split form.

    Returns
    -------
    ndarray of int, (..., G)
        Indices of the rows by falling norm; equal norms stay in order.
    """
    return np.argsort(-np.square(b).sum(axis=-1), axis=-1, kind="stable")


def sketched_read(
    form: SketchFormat, map: CoefficientMap, state: Array, omega: Array, projection: Array, wide: int = 0
) -> Array:
    """The matrix of a state read, with the rounding of a format.

    Parameters
    ----------
    form : SketchFormat
        Format. float32 and bfloat16 are not rounded: they stay float64.
    map : CoefficientMap
        Map and parameters.
    state : ndarray, (..., K, V)
        States of one head.
    omega, projection : ndarray, (K, G)
        Sketch basis and shared projection Pi, in the form that the map reads through.
    wide : int, default 0
        Columns in 8 bits, of a mixed format.

    Returns
    -------
    ndarray, (..., V, K)
        ``U C`` or ``Q B``: the read of an effective query x is its product with x.
    """
    if form.splits(map):
        return _split_read(form, *split_form(state, omega, map.effective_ridge), wide)
    sketch = stored(form, (state.swapaxes(-1, -2) @ omega).swapaxes(-1, -2)).swapaxes(-1, -2)
    if not form.scaled:
        return sketch @ maps.coefficient_map(map, state, omega, projection)
    if map.storage == "shared":
        return sketch @ projection.T
    factors = maps.map_factors(map, state, omega, projection)
    shared = factors.w[..., :, None] * projection.T
    rows = factors.b.swapaxes(-1, -2) - factors.l.swapaxes(-1, -2) @ shared  # B - Pi Diag(w) L, by rows
    return sketch @ (shared + factors.f @ stored(form, rows))


def _split_read(form: SketchFormat, q: Array, b: Array, wide: int) -> Array:
    """Product of the coded columns of Q and rows of B."""
    columns = q.swapaxes(-1, -2)
    if form.tail is None:
        return _product(columns, b, form.code)
    order = energy_order(b)[..., None]
    columns, b = np.take_along_axis(columns, order, axis=-2), np.take_along_axis(b, order, axis=-2)
    lead = _product(columns[..., :wide, :], b[..., :wide, :], form.code)
    return lead + _product(columns[..., wide:, :], b[..., wide:, :], form.tail)


def _product(columns: Array, rows: Array, code: Code) -> Array:
    """Sum over g of coded column times coded row, with one float32 scale for the product."""
    left, right = encode(columns, code), encode(rows, code)
    scale = _float32(left.scale * right.scale)
    return (left.codes * scale[..., None]).swapaxes(-1, -2) @ right.codes


def stored(form: SketchFormat, x: Array) -> Array:
    """Vectors as a format stores them.

    Parameters
    ----------
    form : SketchFormat
        Format; float32 and bfloat16 stay float64.
    x : ndarray, (..., n)
        Vectors.

    Returns
    -------
    ndarray, (..., n)
        The vectors that codes and float32 scales stand for.
    """
    if not form.scaled:
        return x
    codes, scale = encode(x, form.code)
    return codes * _float32(scale)[..., None]


def _float32(x: Array) -> Array:
    """Numbers as float32 holds them."""
    with np.errstate(over="ignore"):  # becomes infinite
        return x.astype(np.float32).astype(np.float64)
