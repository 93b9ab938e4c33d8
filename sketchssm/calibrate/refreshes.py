"""Errors of a plan with and without refreshes, measured on traces."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sketchssm.calibrate.windows import host_tokens
from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.recurrence import FULL_STATE, Tokens
from sketchssm.plans.plan import SketchPlan
from sketchssm.reference.recurrence import Array, per_head
from sketchssm.reference.refresh import HeadPlan, refresh, sketch_state
from sketchssm.reference.window import Ring, fold, read_window

__all__ = ["RefreshErrors", "refresh_errors"]


class RefreshErrors(NamedTuple):
    """Errors of a plan's outputs with and without refreshes, as relative norms over all sequences and tokens.

    Attributes
    ----------
    flushed : float
        Error of the plan with a flush at every window.
    refreshed : float
        Error of the plan as it is.
    head_flushed, head_refreshed : ndarray, (heads,)
        The same for each head.
    """

    flushed: float
    refreshed: float
    head_flushed: Array
    head_refreshed: Array


def refresh_errors(plan: SketchPlan, q: Any, k: Any, v: Any, g: Any, beta: Any = None) -> RefreshErrors:
    """Measure the errors of a plan in float64, with a flush at every window and with its refreshes.

    Sequences start from zero states. Whole windows count.

    Parameters
    ----------
    plan : SketchPlan
        The plan.
    q, k : array, (batch, tokens, key_heads, K)
        Queries and keys.
    v : array, (batch, tokens, heads, V)
        Values.
    g : array, (batch, tokens, heads) or, for kda, (batch, tokens, heads, K)
        Log-decays.
    beta : array, (batch, tokens, heads), optional
        Write gates; None for mamba2.

    Returns
    -------
    RefreshErrors
        Both errors.

    Raises
    ------
    ValueError
        If a shape does not fit the plan's layer, or there is no whole window.
    """
    tokens = per_head(plan.layer, host_tokens(plan.layer, q, k, v, g, beta))
    if tokens.v.shape[1] < plan.window:
        raise ValueError(f"v: expected at least one window of {plan.window} tokens, got {tokens.v.shape[1]}")
    sums = np.array([_head(plan, head, tokens) for head in range(plan.layer.heads)])
    size = sums[:, 0].sum()
    whole = np.sqrt(sums[:, 1:].sum(axis=0) / (size or 1.0))
    own = np.sqrt(sums[:, 1:] / np.where(sums[:, :1] > 0, sums[:, :1], 1.0))
    return RefreshErrors(float(whole[0]), float(whole[1]), own[:, 0], own[:, 1])


def _head(plan: SketchPlan, head: int, tokens: Tokens) -> tuple[float, float, float]:
    """Sums of squares of one head: of outputs, of errors with a flush at every window, of errors with refreshes."""
    window, rank = plan.window, int(plan.ranks[head])
    queries, k, v, g = (x[:, :, head] for x in (tokens.q, tokens.k, tokens.v, tokens.g))
    ring = Ring(k, v, g, None if tokens.beta is None else tokens.beta[:, :, head])
    state = np.zeros((k.shape[0], k.shape[-1], v.shape[-1]))
    omega, projection = (x[head, :, : max(rank, 0)].astype(np.float64) for x in (plan.omega, plan.projection))
    wide = 0 if plan.wide is None else int(plan.wide[head])
    own = HeadPlan(SketchFormat.of(plan.sketch_dtype), plan.map, omega, projection, wide)
    size = flushed = refreshed = 0.0
    for first in range(0, k.shape[1] - window + 1, window):
        part = ring.at(np.s_[:, first : first + window])
        reads = read_window(queries[:, first : first + window], part)
        outputs = reads.queries @ state + reads.weights @ part.v
        size += float(np.square(outputs).sum())
        start, state = state, fold(state, part)
        if rank == FULL_STATE:
            continue
        fresh = sketch_state(own, start)
        if first % plan.flush_every == 0:
            sketch = fresh
        missed = np.square(reads.queries @ (fresh.read.swapaxes(-1, -2) - start))
        flushed += float(missed[:, :-1].sum())
        missed = np.square(reads.queries @ (sketch.read.swapaxes(-1, -2) - start))
        flushes = (first + window) % plan.flush_every == 0
        refreshed += float(missed[:, : -1 if flushes else None].sum())
        sketch = refresh(own, sketch, part)
    return size, flushed, refreshed
