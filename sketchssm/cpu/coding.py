"""Errors of residuals in few bits, for calibration: one pass over the residuals, where NumPy needs ten."""

from __future__ import annotations

from typing import Any

import numpy as np

from sketchssm.cpu.jit import entry


@entry
def coding_errors(
    left: Any, down: Any, across: Any, least: Any, most: Any, middle: Any, shrink: Any, out: Any, sums: Any
) -> None:
    """Errors ``level - shrink x`` of numbers ``x = down left across`` between levels, into `out (n, V, K)`.

    `left (n, V, K)`, `down (n, V)` and `across (n, K)`. A level is the floor of x within `least` to `most`, plus
    `middle`. `sums (n, K)` become the sums over V of squared errors, divided by the squares of `down`. All arrays and
    numbers have one type.
    """
    for n in range(left.shape[0]):
        sums[n] = 0
        for v in range(left.shape[1]):
            scale = down[n, v]
            weight = 1 / (scale * scale) if scale > 0 else scale
            for k in range(left.shape[2]):
                x = left[n, v, k] * scale * across[n, k]
                level = np.floor(x)
                level = level if level > least else least
                level = level if level < most else most
                error = level + middle - shrink * x
                out[n, v, k] = error
                sums[n, k] += error * error * weight
