"""The sketches of one slot: computed from the state, and refreshed window by window."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from sketchssm.formats import SketchFormat
from sketchssm.plan import SketchPlan
from sketchssm.recurrence import FULL_STATE
from sketchssm.reference.recurrence import Array
from sketchssm.reference.refresh import HeadPlan, Sketch, refresh, sketch_state
from sketchssm.reference.window import Ring

__all__ = ["SlotSketches"]


class SlotSketches:
    """Sketches of all heads of a slot, computed from the state and from the ring's tokens of whole windows.

    Parameters
    ----------
    plan : SketchPlan
        Bases, ranks and settings of the layer.
    form : SketchFormat
        Format of storage.
    """

    def __init__(self, plan: SketchPlan, form: SketchFormat) -> None:
        self._plan, self._form = plan, form
        # copies of the state and the tokens from which the sketches were computed
        self._state: Array | None = None
        self._ring: Ring | None = None
        self._sketches: list[Sketch | None] = []

    def read(self, state: Array, ring: Ring, queries: Array) -> Array:
        """Read a slot's state through its sketches.

        Parameters
        ----------
        state : ndarray, (heads, V, K)
            State as of the last flush.
        ring : Ring
            Tokens since then, up to the window's start, ``(heads, tokens, ...)``.
        queries : ndarray, (heads, K)
            Effective queries from the window's start.

        Returns
        -------
        ndarray, (heads, V)
            State-read outputs.
        """
        self._follow(state, ring)
        each = zip(state, self._sketches, queries, strict=True)
        return np.stack([own @ x if sketch is None else sketch.read @ x for own, sketch, x in each])

    def _follow(self, state: Array, ring: Ring) -> None:
        """Bring the sketches up to date: sketch the state if it has changed, then refresh through the ring."""
        window, count, done = self._plan.window, ring.k.shape[1], self._made_from(state, ring)
        if done is None:
            done, self._state = 0, state.copy()
            self._sketches = [self._sketch(head, own.T) for head, own in enumerate(self._state)]
        for first in range(done, count, window):
            tokens = ring.at(np.s_[:, first : first + window])
            self._sketches = [self._refresh(head, own, tokens) for head, own in enumerate(self._sketches)]
        self._ring = copy.deepcopy(ring)

    def _made_from(self, state: Array, ring: Ring) -> int | None:
        """Number of the ring's tokens in the sketches; None if the sketches are of other tokens or another state."""
        if self._state is None or self._ring is None or not np.array_equal(self._state, state):
            return None
        count = self._ring.k.shape[1]
        pairs: Any = zip(self._ring, ring.at(np.s_[:, :count]), strict=True)
        return count if all(have is None or np.array_equal(have, want) for have, want in pairs) else None

    def _sketch(self, head: int, state: Array) -> Sketch | None:
        """Sketch one head's state; None for a head that reads its full state."""
        if self._plan.ranks[head] == FULL_STATE:
            return None
        return sketch_state(self._head(head), state)

    def _refresh(self, head: int, sketch: Sketch | None, tokens: Ring) -> Sketch:
        """Advance one head's sketch through the tokens of a window."""
        assert sketch is not None  # no plan with refreshes has heads that read their full states
        return refresh(self._head(head), sketch, tokens.at(head))

    def _head(self, head: int) -> HeadPlan:
        """Settings of a head's sketches."""
        plan, rank = self._plan, int(self._plan.ranks[head])
        omega, projection = (x[head, :, :rank].astype(np.float64) for x in (plan.omega, plan.projection))
        return HeadPlan(self._form, plan.map, omega, projection, 0 if plan.wide is None else int(plan.wide[head]))
