"""Small dense algebra in float64: the few solves whose conditioning float32 can't carry.

Matrices are pointers to their rows, without gaps.
"""

from __future__ import annotations

import math
from typing import Any

from sketchssm.cpu.jit import njit

__all__ = ["cholesky", "cholesky_solve", "pseudo_inverse"]

Doubles = Any
"""In signatures of compiled functions: a pointer to float64."""

SINGULAR_TOLERANCE = 1e-7
"""Share of the largest singular value below which one counts as zero, as in `sketchssm.reference.maps.exact_map`."""

SWEEPS = 30
"""Bound on Jacobi sweeps; they converge quadratically, within ten for any sketch."""

CONVERGED = 1e-15
"""Cosine between two rows that counts as orthogonal."""


@njit
def cholesky(a: Doubles, n: int) -> None:
    """Replace the lower triangle of a positive definite matrix with its Cholesky factor, its diagonal inverted."""
    for i in range(n):
        for j in range(i + 1):
            value = a[i * n + j]
            for k in range(j):
                value -= a[i * n + k] * a[j * n + k]
            a[i * n + j] = 1.0 / math.sqrt(value) if i == j else value * a[j * n + j]


@njit
def cholesky_solve(factor: Doubles, n: int, x: Doubles) -> None:
    """Solve in place, given the factor from `cholesky`."""
    for i in range(n):
        value = x[i]
        for k in range(i):
            value -= factor[i * n + k] * x[k]
        x[i] = value * factor[i * n + i]
    for i in range(n - 1, -1, -1):
        value = x[i]
        for k in range(i + 1, n):
            value -= factor[k * n + i] * x[k]
        x[i] = value * factor[i * n + i]


@njit
def pseudo_inverse(u: Doubles, n: int, width: int, rotation: Doubles) -> None:
    """Turn n rows, the columns of U, into those of ``pinv(U)``; `rotation` is scratch of ``(n + 1) n``.

    One-sided Jacobi rotations make the rows orthogonal, ``R U^T``; then ``pinv(U) = R^T Diag(1 / sigma^2) (R U^T)``.
    """
    for i in range(n):
        for j in range(n):
            rotation[i * n + j] = 1.0 if i == j else 0.0
    for _ in range(SWEEPS):
        worst = 0.0
        for i in range(n):
            for j in range(i):
                a, b, c = _inner(u, i, i, width), _inner(u, j, j, width), _inner(u, i, j, width)
                if c != 0.0:
                    worst = max(worst, abs(c) / math.sqrt(a * b))
                    zeta = (b - a) / (2.0 * c)
                    tangent = math.copysign(1.0, zeta) / (abs(zeta) + math.sqrt(1.0 + zeta * zeta))
                    cosine = 1.0 / math.sqrt(1.0 + tangent * tangent)
                    _rotate(u, i, j, width, cosine, cosine * tangent)
                    _rotate(rotation, i, j, n, cosine, cosine * tangent)
        if worst < CONVERGED:
            break
    largest = 0.0
    for i in range(n):
        largest = max(largest, _inner(u, i, i, width))
    for i in range(n):
        square = _inner(u, i, i, width)
        kept = 1.0 / math.sqrt(square) if square > largest * SINGULAR_TOLERANCE**2 else 0.0
        for c in range(width):
            u[i * width + c] *= kept
        for g in range(n):
            rotation[i * n + g] *= kept
    for c in range(width):
        for g in range(n):
            value = 0.0
            for i in range(n):
                value += rotation[i * n + g] * u[i * width + c]
            # the new column waits behind the rotation, since all of it needs all of the old one
            rotation[n * n + g] = value
        for g in range(n):
            u[g * width + c] = rotation[n * n + g]


@njit
def _inner(rows: Doubles, i: int, j: int, width: int) -> float:
    """Product of two rows."""
    value = 0.0
    for c in range(width):
        value += rows[i * width + c] * rows[j * width + c]
    return value


@njit
def _rotate(rows: Doubles, i: int, j: int, width: int, cosine: float, sine: float) -> None:
    """Turn rows i and j into one another's mixture."""
    for c in range(width):
        a, b = rows[i * width + c], rows[j * width + c]
        rows[i * width + c] = cosine * a - sine * b
        rows[j * width + c] = sine * a + cosine * b
