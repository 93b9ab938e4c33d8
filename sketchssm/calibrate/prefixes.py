"""Nested orthonormal bases of the first columns of sketches, for many sketches at once."""

from __future__ import annotations

from typing import Any

from sketchssm import cuda
from sketchssm.arrays.space import Space

DEPENDENT = {"float64": 1e-7, "float32": 1e-6}
"""Relative distance of a sketch column from the span of the columns before it, by the type of the products that made
the sketch. A closer column adds only rounding noise."""

REPEATS = {"float64": 3, "float32": 1}
"""Corrections of the first orthogonalisation: to the last digits of each type."""


def prefix_basis(space: Space, sketch: Any, dtype: str) -> Any:
    """Nested orthonormal bases of sketches ``(..., V, G)``: the first G columns of both have the same span.

    A sketch column that depends on the columns before it gives a zero column. Computed in float64, returned in the
    sketch's type `dtype`. Gram-Schmidt acts on Gram matrices, which leaves columns orthogonal up to
    1e-16 / `DEPENDENT`^2; each repetition squares this error.
    """
    xp = space.xp
    basis = space.cast(sketch, "float64")
    largest = xp.amax(xp.abs(basis), -2)  # first, since squares may overflow
    basis = basis / xp.where(largest > 0, largest, 1.0)[..., None, :]
    norms = xp.sqrt(xp.square(basis).sum(-2))
    basis = basis / xp.where(norms > 0, norms, 1.0)[..., None, :]
    basis = basis @ orthogonaliser(space, basis.swapaxes(-1, -2) @ basis, DEPENDENT[dtype] ** 2).swapaxes(-1, -2)
    halves = xp.tril(space.zeros((basis.shape[-1],) * 2, "float64") + 1)
    halves = (halves + xp.tril(halves, -1)) / 2
    for _ in range(REPEATS[dtype]):  # I - strict_lower(E) - diag(E) / 2 orthogonalises a Gram matrix I + E up to E^2
        gram = basis.swapaxes(-1, -2) @ basis
        basis = 1.5 * basis - basis @ (halves * gram).swapaxes(-1, -2)
    return space.cast(basis, dtype)


def orthogonaliser(space: Space, gram: Any, least: float) -> Any:
    """Lower triangular C with orthonormal columns of ``B C^T``, for B of Gram matrix `gram`; zero rows if dependent.

    Gaussian elimination of the Gram matrix beside a unit matrix, with the batch on the last axis. It gives the inverse
    of a unit lower triangular matrix.
    """
    xp, size, kernels = space.xp, gram.shape[-1], cuda.calibration(gram)
    if kernels and (factors := kernels.orthogonaliser(space, gram, least)) is not None:
        return factors
    table = space.zeros((size, 2 * size, *gram.shape[:-2]), "float64")
    table[:, :size] = xp.moveaxis(gram, (-2, -1), (0, 1))
    for i in range(size):
        table[i, size + i] = 1.0
    found = []
    for i in range(size):
        pivot = table[i, i]
        keep = pivot > least
        inverse = xp.where(keep, 1.0 / xp.where(keep, pivot, 1.0), 0.0)
        own = table[i, i + 1 : size + i + 1]
        found.append(table[i, size:] * xp.sqrt(inverse))
        table[i + 1 :, i + 1 : size + i + 1] -= (table[i + 1 :, i] * inverse)[:, None] * own
    return xp.moveaxis(xp.stack(found), (0, 1), (-2, -1))
