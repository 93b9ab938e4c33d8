"""Small dense algebra in float64, for solves that are too ill-conditioned for float32.

A matrix is a pointer to its rows, which lie without gaps.
"""

from __future__ import annotations

import math
from typing import Any

from sketchssm.cpu.jit import njit

Doubles = Any
"""A pointer to float64, in signatures of compiled functions."""


@njit
def cholesky(a: Doubles, n: int, least: float) -> None:
    """Replace the lower triangle of a matrix with its Cholesky factor, and the factor's diagonal with its inverse.

    `least` is a lower bound of the exact matrix's eigenvalues, and so of its pivots. A pivot that rounding took below
    the bound, or below zero, is raised to the bound.
    """
    for i in range(n):
        for j in range(i + 1):
            value = a[i * n + j]
            for k in range(j):
                value -= a[i * n + k] * a[j * n + k]
            a[i * n + j] = 1.0 / math.sqrt(max(value, least)) if i == j else value * a[j * n + j]


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
