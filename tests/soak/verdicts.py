"""Whether what a request sees is its own."""

import numpy as np


class SoakError(AssertionError):
    """An output, a state or a position that is not the request's."""


class Verdicts:
    """Compares a head's results with the oracle's, and keeps the largest errors. Allowed are errors `exact` of states
    and of flushed outputs, `allowed` of each head's other outputs, and `usual` of 99% of all outputs.
    """

    def __init__(self, exact, allowed, usual, where, counts):
        self.exact, self.allowed, self.usual, self.where, self.counts = exact, allowed, usual, where, counts
        self.worst = np.zeros(allowed.shape)
        self.compared = self.unusual = 0

    def outputs(self, rows, got, want, scale, flushed=False):
        """Outputs ``(rows, tokens, heads, V)`` of requests, or of padding where a row is None. `flushed` says which of
        them ``(rows, tokens)`` came from flushes.
        """
        off = np.linalg.norm(np.asarray(got, np.float64) - want, axis=-1)
        self.worst = np.maximum(self.worst, np.divide(off, scale, out=np.zeros_like(off), where=scale > 0).max((0, 1)))
        allowed = np.where(np.asarray(flushed)[..., None], self.exact, self.allowed)
        wrong = ~(off <= allowed * scale)  # also where an output is NaN
        if wrong.any():
            row, t, head = np.argwhere(wrong)[0]
            what = f"token {t}, head {head}: off by {off[row, t, head]:.3g} of {scale[row, t, head]:.3g}"
            raise self.error(rows[row], what)
        self.compared += np.count_nonzero(scale)
        self.unusual += np.count_nonzero(off > self.usual * scale)

    def usual_errors(self):
        """Check that few outputs have more than the usual error."""
        if self.unusual > 0.01 * self.compared:
            what = f"{self.unusual} of {self.compared} outputs are off by more than {self.usual}"
            raise SoakError(f"{self.where}, {dict(self.counts)}: {what}")

    def state(self, request, got):
        """The state ``(heads, V, K)`` of a request whose window has just ended."""
        want = request.past.state.swapaxes(-1, -2)
        off = np.linalg.norm(np.asarray(got, np.float64) - want, axis=(-2, -1))
        # by the fold, from the state at the window's start and values of about sqrt(V)
        size = np.linalg.norm(want, axis=(-2, -1)) + request.past.size + np.sqrt(want.shape[-2])
        for head in np.flatnonzero(~(off <= self.exact * size))[:1]:
            raise self.error(request, f"state of head {head}: off by {off[head]:.3g} of {size[head]:.3g}")
        self.counts["states"] += 1

    def positions(self, requests, got, want):
        """Window positions of requests."""
        for i in np.flatnonzero(got != want)[:1]:
            raise self.error(requests[i], f"position {got[i]}, expected {want[i]}")

    def error(self, request, what):
        """The error, with the request's last events."""
        who = "padding" if request is None else f"request {request.name} in slot {request.slot}"
        events = "" if request is None else "\n  ".join(["; its last events:", *request.history])
        return SoakError(f"{self.where}, {dict(self.counts)}: {who}: {what}{events}")
