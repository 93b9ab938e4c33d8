"""What a head owes to each request, in float64: outputs and states from the request's own accepted tokens. The oracle
keeps the state ``S`` after every accepted token, by the plain recurrence. Between flushes a sketched read differs from
the exact output by ``E x``: the error ``E = U C - S0^T`` of the sketch of the state S0 at the window's start, times
the effective query ``x = M_{1:t}^T q``. The product ``M_{1:t}`` of the window's transitions is kept beside S. So no
ring, no slot and no fold takes part.
"""

from collections import deque
from typing import NamedTuple

import ml_dtypes
import numpy as np

from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.recurrence import FULL_STATE
from sketchssm.reference.recurrence import per_head, step
from sketchssm.reference.residual import residual_read

HISTORY = 64
"""Last events of a request that a failure prints."""


class Past(NamedTuple):
    """All that a request's tokens have come to; arrays are never written again. ``state (heads, K, V)``, ``transitions
    (heads, K, K)`` of the window, ``missed (heads, V, K)`` by the sketch, and ``size (heads,)``, the norm of the state
    at the window's start.
    """

    state: np.ndarray
    transitions: np.ndarray
    missed: np.ndarray
    size: np.ndarray


class Request:
    """One sequence: its past, the tokens left to decode, its slot, and its last events."""

    def __init__(self, name, past, left):
        self.name, self.past, self.left, self.slot = name, past, left, None
        self.history = deque(maxlen=HISTORY)

    def note(self, *event):
        self.history.append(" ".join(map(str, event)))


class Oracle:
    """Outputs and states of the requests of one layer; with a plan, as sketches show them between flushes. A state of
    a 16-bit type is rounded where a window begins, behind the outputs that are read from it.
    """

    def __init__(self, layer, plan=None, state_dtype="float32"):
        self.layer, self.plan = layer, plan
        self.rounded = None if state_dtype == "float32" else np.dtype(getattr(ml_dtypes, state_dtype, state_dtype))
        self.sketched = [] if plan is None else np.flatnonzero(plan.ranks != FULL_STATE)
        self._eye = np.broadcast_to(np.eye(layer.key_dim), (layer.heads, layer.key_dim, layer.key_dim))
        self._nothing = np.zeros((layer.heads, layer.value_dim, layer.key_dim))

    def begin(self, states):
        """Pasts of requests that begin a window on states ``(rows, heads, K, V)``."""
        if self.rounded is not None:
            states = states.astype(self.rounded).astype(np.float64)
        sizes = np.linalg.norm(states, axis=(-2, -1))
        missed = self._missed(states)
        return [Past(state, self._eye, *rest) for state, *rest in zip(states, missed, sizes, strict=True)]

    def _missed(self, states):
        """Errors of the sketches of states ``(rows, heads, K, V)``."""
        missed = [self._nothing.copy() if len(self.sketched) else self._nothing for _ in states]
        for head in self.sketched:
            plan, rank = self.plan, int(self.plan.ranks[head])
            omega, form = plan.omega[head, :, :rank].astype(np.float64), SketchFormat.of(plan.sketch_dtype)
            bits = int(plan.residual_bits[head])
            read = residual_read(form, plan.map, states[:, head], omega, bits=bits)
            for one, error in zip(missed, read - states[:, head].swapaxes(-1, -2), strict=True):
                one[head] = error
        return missed

    def fold(self, pasts):
        """The same pasts, with their windows at their states."""
        return self.begin(np.stack([past.state for past in pasts])) if pasts else []

    def decode(self, pasts, token, flushes):
        """Decode one token ``(rows, ...)`` of each past. Returns the outputs ``(rows, heads, V)``, norms ``(rows,
        heads)`` that rounding errors are relative to, and the pasts with the token. A row that flushes reads its
        output from the state, on which its next window begins.
        """
        q, k, v, g, beta = per_head(self.layer, token)
        state, transitions, missed, size = (np.stack(x) for x in zip(*pasts, strict=True))
        state, output = step(state, q, k, v, g, beta)
        transitions = np.exp(g)[..., None] * transitions
        if beta is not None:
            seen = beta[..., None] * np.einsum("...kj,...k->...j", transitions, k)
            transitions = transitions - k[..., :, None] * seen[..., None, :]
        if len(self.sketched):
            queries = np.einsum("...kj,...k->...j", transitions, q)
            output[~flushes] += np.einsum("...vj,...j->...v", missed, queries)[~flushes]
        norms = size + np.linalg.norm(state, axis=(-2, -1)) + np.linalg.norm(v, axis=-1)
        after = [Past(*x) for x in zip(state, transitions, missed, size, strict=True)]
        ends = np.flatnonzero(flushes)
        for row, past in zip(ends, self.fold([after[row] for row in ends]), strict=True):
            after[row] = past
        return output, norms * np.linalg.norm(q, axis=-1), after
