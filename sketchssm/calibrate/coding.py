"""Codes of sketches and residuals, for many states at once: `sketchssm.reference.codes` and `reference.residual`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sketchssm.arrays.space import Space
from sketchssm.layer.checks import UnsupportedError
from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.residual import GAINS, STEPS


class ResidualError(NamedTuple):
    """Errors ``Diag(rows) matrix Diag(columns)`` of coded residuals ``(..., V, K)``, and their energies ``(...)``."""

    matrix: Any
    rows: Any
    columns: Any
    energy: Any


def residual_error(space: Space, left: Any, squares: Any, spread: Any, bits: int) -> ResidualError:
    """What `sketchssm.reference.residual.encode_residual` adds to residuals ``(..., V, K)``.

    `squares` are those of the residuals, and `spread (..., V)` the root mean squares of their rows.
    """
    xp = space.xp
    rows = _bfloat16(STEPS[bits] * GAINS[bits] * spread)
    down = xp.where(rows > 0, GAINS[bits] / xp.where(rows > 0, rows, 1.0), 0.0)
    weights = xp.square(STEPS[bits] * down)[..., None, :]
    columns = _bfloat16(xp.sqrt((weights @ squares)[..., 0, :] / rows.shape[-1]))
    across = xp.where(columns > 0, 1 / xp.where(columns > 0, columns, 1.0), 0.0)
    matrix, sums = _errors(space, left, down, across, bits)
    energy = GAINS[bits] ** 2 * (sums * xp.square(columns)).sum(-1)
    return ResidualError(matrix, rows, columns, space.cast(energy, "float64"))


def _errors(space: Space, left: Any, down: Any, across: Any, bits: int) -> tuple[Any, Any]:
    """Errors ``(..., V, K)`` of codes of scaled residuals; sums ``(..., K)`` of their squares over those of `down`."""
    xp, half = space.xp, 2 ** (bits - 1)
    kernel = None if space.on_device else _kernel()
    if kernel is not None:
        flat = [
            np.ascontiguousarray(x).reshape(-1, *x.shape[lead:]) for x, lead in ((left, -2), (down, -1), (across, -1))
        ]
        matrix, sums = np.empty_like(flat[0]), np.empty_like(flat[2])
        levels = np.array([-half, half - 1, 0.5, 1 / GAINS[bits]], matrix.dtype)
        kernel(*flat, *levels, matrix, sums)
        return matrix.reshape(left.shape), sums.reshape(across.shape)
    scaled = left * down[..., :, None]
    scaled *= across[..., None, :]
    matrix = xp.floor(scaled)
    xp.clip(matrix, -half, half - 1, out=matrix)
    matrix += 0.5
    scaled *= 1 / GAINS[bits]
    matrix -= scaled
    weights = xp.where(down > 0, 1 / xp.square(xp.where(down > 0, down, 1.0)), 0.0)
    return matrix, (weights[..., None, :] @ xp.square(matrix))[..., 0, :]


def _kernel() -> Any:
    """The compiled form of `_errors`, or None where the host compiles nothing."""
    try:
        from sketchssm.cpu.coding import coding_errors
    except UnsupportedError:
        return None
    return coding_errors


def _bfloat16(x: Any) -> Any:
    """Numbers rounded to bfloat16's eight digits, by a product that has room for only as many."""
    digits = 2.0 ** ((24 if str(x.dtype).endswith("float32") else 53) - 8) + 1
    return x * digits - (x * digits - x)


def stored(space: Space, form: SketchFormat, x: Any) -> Any:
    """Vectors ``(..., n)`` as a format stores them; see `sketchssm.reference.codes.stored`."""
    if form.top is None:
        return x
    xp = space.xp
    step = xp.amax(xp.abs(x), -1)[..., None] / form.top
    return xp.round(x / xp.where(step > 0, step, 1.0)) * space.cast(step, "float32")
