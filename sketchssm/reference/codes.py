"""Sketches in few bits, as every backend stores them: the split form of a dense map, and the codes.

**Split form.** `ridge` reads ``S^T x`` as ``U C x`` with ``C = M^-1 U^T S^T / mu`` and ``M = U^T U / mu + ridge I``.
Terms of the product U C cancel in part, which amplifies the errors of few bits. With the Cholesky factor
``M = L L^T`` the same product has well-conditioned factors:

    U C = Q B,    Q = U L^-T (V, G),    B = L^-1 (S U)^T / mu (G, K).

The columns of Q are nearly orthogonal and of length ``sqrt(mu)``, unless the ridge shortens them.

**Codes.** A vector x is stored as integers times a scale, ``x ~ scale * codes``: the scale is ``max|x| / 127``, and
the codes are the nearest integers (ties to even), -127 to 127. Codes are computed with the unrounded scale. Scales are
stored in float32, the product of a column's and a row's scale as one number. A vector of zeros has scale 0. A vector
with NaN or an infinity has scale NaN, so its reads are NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.formats import SketchFormat
from sketchssm.reference import maps
from sketchssm.reference.recurrence import Array


class Codes(NamedTuple):
    """Coded vectors ``(..., n)``: codes as float64 numbers ``(..., n)``, and unrounded scales ``(...,)``."""

    codes: Array
    scale: Array


def encode(x: Array, top: float) -> Codes:
    """Code vectors ``(..., n)``, with codes of magnitude up to `top`."""
    largest = np.abs(x).max(axis=-1, initial=0.0)
    finite = np.isfinite(largest)  # NaN is not
    scale = np.where(finite, largest, 0.0) / top
    step = scale[..., None]
    with np.errstate(invalid="ignore"):
        codes = np.divide(x, step, out=np.zeros(x.shape), where=step > 0)
    return Codes(np.rint(np.clip(codes, -top, top)), np.where(finite, scale, np.nan))


def split_form(state: Array, omega: Array, ridge: float) -> tuple[Array, Array]:
    """Factors of the read through the regularised map of the exact state metric of states ``(..., K, V)``.

    Columns q ``(..., V, G)`` and rows b ``(..., G, K)``: ``q @ b`` is ``U C`` of `sketchssm.reference.maps.ridge_map`.
    NaN for a state that is not finite. The ridge is at least `RIDGE_FLOOR`.
    """
    sketch = state.swapaxes(-1, -2) @ omega
    mu = maps.state_scale(state)[..., None, None]
    metric = sketch.swapaxes(-1, -2) @ sketch / mu + ridge * np.eye(omega.shape[-1])
    finite = np.isfinite(metric).all(axis=(-1, -2), keepdims=True)
    lower = np.where(finite, np.linalg.cholesky(np.where(finite, metric, np.eye(omega.shape[-1]))), np.nan)
    q = np.linalg.solve(lower, sketch.swapaxes(-1, -2)).swapaxes(-1, -2)
    return q, np.linalg.solve(lower, sketch.swapaxes(-1, -2) @ state.swapaxes(-1, -2)) / mu


def sketched_read(form: SketchFormat, map: CoefficientMap, state: Array, omega: Array) -> Array:
    """The matrix ``(..., V, K)`` of a state read, ``U C`` or ``Q B``, with the rounding of a format.

    The read of an effective query x is the product of the matrix with x. `state (..., K, V)` are states of one head,
    `omega (K, G)` is its sketch basis. float32 and bfloat16 are not rounded: they stay float64.
    """
    if map.name == "subspace":
        basis = maps.coefficient_map(map, state, omega)
        image = basis @ state
        return image.swapaxes(-1, -2) @ basis if form.top is None else _product(image, basis, form.top)
    if form.top is not None and form.splits(map):
        columns, rows = split_form(state, omega, map.effective_ridge)
        return _product(columns.swapaxes(-1, -2), rows, form.top)
    sketch = stored(form, (state.swapaxes(-1, -2) @ omega).swapaxes(-1, -2)).swapaxes(-1, -2)
    if not form.scaled:
        return sketch @ maps.coefficient_map(map, state, omega)
    factors = maps.lowrank_factors(state, omega, map.pivots or 1, map.effective_ridge)
    shared = factors.w[..., :, None] * omega.T
    rows = factors.b.swapaxes(-1, -2) - factors.l.swapaxes(-1, -2) @ shared  # B - Pi Diag(w) L, by rows
    return sketch @ (shared + factors.f @ stored(form, rows))


def _product(columns: Array, rows: Array, top: float) -> Array:
    """Sum over g of coded column times coded row, with one float32 scale for the product."""
    left, right = encode(columns, top), encode(rows, top)
    scale = _float32(left.scale * right.scale)
    return (left.codes * scale[..., None]).swapaxes(-1, -2) @ right.codes


def stored(form: SketchFormat, x: Array) -> Array:
    """Vectors ``(..., n)`` as a format stores them, by codes and float32 scales; float32 and bfloat16 stay float64."""
    if form.top is None:
        return x
    codes, scale = encode(x, form.top)
    return codes * _float32(scale)[..., None]


def _float32(x: Array) -> Array:
    """Numbers as float32 holds them."""
    with np.errstate(over="ignore"):  # becomes infinite
        return x.astype(np.float32).astype(np.float64)
