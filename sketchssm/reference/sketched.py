"""Reads of one slot through its sketches: computed from the state, and refreshed window by window."""

from __future__ import annotations

import numpy as np

from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.recurrence import FULL_STATE
from sketchssm.plans.plan import SketchPlan
from sketchssm.reference.recurrence import Array
from sketchssm.reference.refresh import HeadPlan, refresh, sketch_state
from sketchssm.reference.window import Ring

__all__ = ["read_state"]


def read_state(plan: SketchPlan, form: SketchFormat, state: Array, ring: Ring, queries: Array) -> Array:
    """Read a slot's state through its sketches.

    Parameters
    ----------
    plan : SketchPlan
        Bases, ranks and settings of the layer.
    form : SketchFormat
        Format of storage.
    state : ndarray, (heads, V, K)
        State as of the last flush.
    ring : Ring
        Tokens since then, up to the window's start, ``(heads, tokens, ...)``.
    queries : ndarray, (heads, K)
        Effective queries from the window's start.

    Returns
    -------
    ndarray, (heads, V)
        State-read outputs; a head of rank `FULL_STATE` reads its full state.
    """
    outputs = np.empty(state.shape[:2])
    for head, (matrix, query) in enumerate(zip(state, queries, strict=True)):
        if plan.ranks[head] != FULL_STATE:
            matrix = _read(plan, form, head, matrix, ring.at(head))
        outputs[head] = matrix @ query
    return outputs


def _read(plan: SketchPlan, form: SketchFormat, head: int, state: Array, ring: Ring) -> Array:
    """Product of one head's sketch and map ``(V, K)``, after a refresh for every window of the ring."""
    rank = int(plan.ranks[head])
    omega, projection = (x[head, :, :rank].astype(np.float64) for x in (plan.omega, plan.projection))
    settings = HeadPlan(form, plan.map, omega, projection, 0 if plan.wide is None else int(plan.wide[head]))
    sketch = sketch_state(settings, state.T)
    for first in range(0, ring.k.shape[0], plan.window):
        sketch = refresh(settings, sketch, ring.at(np.s_[first : first + plan.window]))
    return sketch.read
