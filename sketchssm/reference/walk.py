"""Traces, window by window, in float64: states at the starts of windows and the effective queries that read them.

Calibration visits the same reads in blocks of matrix products (`sketchssm.calibrate.windows`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sketchssm.layer.recurrence import Layer, Tokens
from sketchssm.reference.recurrence import Array, per_head
from sketchssm.reference.window import Ring, fold, read_window


class SketchReads(NamedTuple):
    """Tokens of one window that are read through the sketch.

    ``state (batch, heads, K, V)`` is S0, and ``live (batch, heads)`` is True for a nonzero S0. ``queries
    (batch, heads, n, K)`` are effective queries. ``tokens`` are the tokens' places in the sequences.
    """

    state: Array
    live: npt.NDArray[np.bool_]
    queries: Array
    tokens: slice


def walk(layer: Layer, tokens: Tokens, window: int, visit: Callable[[SketchReads], None]) -> None:
    """Run sequences ``(batch, tokens, ...)`` from zero states, and visit each window that has a nonzero state."""
    batch, length = tokens.v.shape[:2]
    state: Array = np.zeros((batch, layer.heads, layer.key_dim, layer.value_dim))
    for start in range(0, length, window):
        stop = min(start + window, length)
        own = per_head(layer, tokens.at(np.s_[:, start:stop]))
        swapped: Any = (None if x is None else np.ascontiguousarray(x.swapaxes(1, 2)) for x in own)
        q, *inputs = swapped
        ring = Ring(*inputs)
        reads = min(stop - start, window - 1)
        live = np.any(state, axis=(-1, -2))
        if live.any():
            queries = read_window(q[..., :reads, :], ring.at(np.s_[:, :, :reads])).queries
            visit(SketchReads(state, live, queries, slice(start, start + reads)))
        state = fold(state, ring)
