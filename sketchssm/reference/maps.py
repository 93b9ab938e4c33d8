"""Coefficient maps: from an effective query x to the coefficients c of the sketch columns.

One head's state ``S`` is ``(..., K, V)``. Its sketch is ``U = S^T Omega`` ``(..., V, G)`` with a sketch basis
``Omega`` ``(K, G)``. Every map is linear, ``c = C x``, and the state read ``S^T x`` is approximated by ``U c``. The
state metric is normalised to a mean diagonal of one, ``H = S S^T / mu`` with ``mu = |S|_F^2 / K``:

=========  ==========================================================================  ==================
map        C                                                                           paper
=========  ==========================================================================  ==================
ridge      ``(Omega^T H Omega + ridge I)^-1 Omega^T H``                                *pivot-ridge*
lowrank    the same with ``H ~ B B^T + Diag(d)``: projection on p pivots, diagonal     *pivot-metric*
subspace   ``B^T``, of a basis B adapted to the state, with the sketch ``S^T B``       (ours)
=========  ==========================================================================  ==================

As the ridge goes to zero, `ridge` goes to the least-squares map ``pinv(U) S^T`` (equation *m-coeff*).

`lowrank` is kept as factors. With the diagonal residual ``delta`` of ``Omega^T H Omega``,

    C = (L L^T + Diag(delta + ridge))^-1 (L B^T + Diag(delta) Omega^T),    B = S Q / sqrt(mu),  L = Omega^T B,

and by the Woodbury identity, with ``z = Omega^T x`` and ``w = delta / (delta + ridge)``,

    C x = w z + F (B^T x - L^T (w z)),    F = D^-1 L (I + L^T D^-1 L)^-1,  D = Diag(delta + ridge).

A state then stores ``B (K, p)``, ``F`` and ``L (G, p)`` and ``w (G)`` beside its sketch.

`subspace` is a step of subspace iteration (Halko, Martinsson and Tropp, *Finding structure with randomness*, SIAM
Review 53, 2011, algorithm 4.4) from Omega: B is an orthonormal basis of ``S S^T Omega``. The read ``S^T B B^T x`` is
near that of the best rank-G approximation of the state, whatever the calibration saw.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sketchssm.layer.coefficients import RIDGE_FLOOR, CoefficientMap
from sketchssm.reference.recurrence import Array

PIVOT_TOLERANCE = 3e-3
"""A pivot column is dropped if its part outside the span of the columns before it has at most this share of its
norm. A sketch in bf16 resolves no smaller share. On our traces, dropping all below 1e-2 changes no error in its fifth
digit."""


class MapFactors(NamedTuple):
    """A coefficient map in Woodbury form; the module docstring has the equations.

    ``b (..., K, p)``, ``f (..., G, p)``, ``l (..., G, p)``, ``w (..., G)`` per state, ``omega (K, G)`` per head.
    """

    b: Array
    f: Array
    l: Array  # noqa: E741  the paper's letter
    w: Array
    omega: Array

    def dense(self) -> Array:
        """The map as a matrix ``(..., G, K)``."""
        shared = self.w[..., :, None] * self.omega.T
        return shared + self.f @ (self.b.swapaxes(-1, -2) - self.l.swapaxes(-1, -2) @ shared)


def coefficient_map(map: CoefficientMap, state: Array, omega: Array) -> Array:
    """Coefficient maps ``(..., G, K)`` of many states ``(..., K, V)`` of one head, as matrices.

    `omega (K, G)` is the sketch basis. For `subspace` the matrix belongs to a sketch through its own rows instead.
    """
    if map.name == "subspace":
        return subspace(state, omega).swapaxes(-1, -2)
    if map.storage == "dense":
        return ridge_map(state, omega, map.effective_ridge)
    return lowrank_factors(state, omega, map.pivots or 1, map.effective_ridge).dense()


def state_scale(state: Array) -> Array:
    """``mu = |S|_F^2 / K``, and 1 for a zero state (equation *pivot-state-metric*)."""
    mu = np.square(state).sum(axis=(-1, -2)) / state.shape[-2]
    return np.where(mu > 0, mu, 1.0)


def subspace(state: Array, omega: Array) -> Array:
    """Orthonormal basis ``(..., K, G)`` of ``S S^T Omega``, for states ``(..., K, V)`` and `omega` ``(K, G)``.

    A column that depends on the columns before it becomes zero.
    """
    return pivot_basis(state @ (state.swapaxes(-1, -2) @ omega), omega.shape[-1])


def ridge_map(state: Array, omega: Array, ridge: float) -> Array:
    """Regularised map of the exact state metric, ``(..., G, K)`` (equation *pivot-ridge*)."""
    sketch = state.swapaxes(-1, -2) @ omega
    mu = state_scale(state)[..., None, None]
    gram = sketch.swapaxes(-1, -2) @ sketch / mu
    cross = sketch.swapaxes(-1, -2) @ state.swapaxes(-1, -2) / mu
    return np.linalg.solve(gram + max(ridge, RIDGE_FLOOR) * np.eye(omega.shape[-1]), cross)


def pivot_basis(sketch: Array, pivots: int) -> Array:
    """Orthonormal basis ``(..., V, p)`` of the first ``p = min(G, P)`` sketch columns, by Gram-Schmidt done twice.

    A sketch column that depends on the columns before it gives a zero column.
    """
    p = min(pivots, sketch.shape[-1])
    q = np.zeros((*sketch.shape[:-1], p))
    for i in range(p):
        column = sketch[..., i]
        residual = column
        for _ in range(2):
            residual = residual - (q @ (q.swapaxes(-1, -2) @ residual[..., None]))[..., 0]
        norm = np.linalg.norm(residual, axis=-1, keepdims=True)
        independent = norm > PIVOT_TOLERANCE * np.linalg.norm(column, axis=-1, keepdims=True)
        q[..., i] = np.where(independent, residual / np.where(independent, norm, 1.0), 0.0)
    return q


def lowrank_factors(state: Array, omega: Array, pivots: int, ridge: float) -> MapFactors:
    """The paper's low-rank-plus-diagonal map (appendix *pivot-coeff*).

    `state (..., K, V)` is the state at the window's start, `omega (K, G)` an orthonormal basis. The ridge is relative
    to the metric's mean diagonal.
    """
    sketch = state.swapaxes(-1, -2) @ omega
    mu = state_scale(state)
    scale, q = np.sqrt(mu)[..., None, None], pivot_basis(sketch, pivots)
    b, low = state @ q / scale, sketch.swapaxes(-1, -2) @ q / scale  # equation pivot-low-rank-factor
    energy = np.square(sketch).sum(axis=-2) / mu[..., None]
    residual = np.maximum(energy - np.square(low).sum(axis=-1), 0.0)
    diagonal = residual + max(ridge, RIDGE_FLOOR)
    scaled = low / diagonal[..., None]
    small = np.eye(low.shape[-1]) + low.swapaxes(-1, -2) @ scaled  # equation pivot-woodbury
    f = np.linalg.solve(small, scaled.swapaxes(-1, -2)).swapaxes(-1, -2)
    return MapFactors(b, f, low, residual / diagonal, omega)
