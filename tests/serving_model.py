"""A model of a server's slots that runs the plain recurrence and decides on flushes by the rules of docs/serving.md.

Each slot keeps its state and the tokens since its last flush; rows are processed one at a time.
"""

import numpy as np

from sketchssm.layer.recurrence import FULL_STATE, Tokens
from sketchssm.reference.maps import coefficient_map
from sketchssm.reference.recurrence import per_head, run
from sketchssm.reference.window import Ring, effective_query

SLOTS = 3
WINDOW = 5
DRAFTS = 3
RANKS = np.array([2, FULL_STATE, 3, 1])


class Row:
    """The rules of a row's flushes: windows, drafts and clocks. The clock is a row, too."""

    def __init__(self, window, position=0):
        self.window, self.position, self.drafted = window, position, 0
        self.due = position == window - 1

    def step(self):
        """Take a token; return whether it flushes."""
        flushes = self.due or self.position == self.window - 1
        self.position = 0 if flushes else self.position + 1
        self.due, self.drafted = False, 0
        return flushes

    def folds_before(self, count):
        """Whether there is no room for drafts."""
        return self.due or self.position + count > self.window - 1

    def draft(self, count, stroke=False):
        """Take drafts; return whether the tokens before them are folded first, as at a stroke."""
        folds = stroke or self.folds_before(count)
        if folds:
            self.position, self.due = 0, False
        self.drafted = count
        return folds

    def commit(self, accepted):
        self.position += min(accepted, self.drafted)
        self.drafted = 0

    def begin(self, clock):
        """Begin a window."""
        self.position, self.drafted, self.due = 0, 0, clock is not None and clock.due


class Slot:
    """A slot of a head with windows: the state of its last flush, and the tokens since then."""

    def __init__(self, model):
        self.model = model
        self.row = Row(model.window)
        self.row.begin(model.clock)
        self.load(np.zeros((1, *model.layer.state_shape)))

    def load(self, state):
        self.written = self.model.rounded(state)
        self.pending, self.trial = [], []

    def current(self):
        return self.run(self.pending)[1] if self.pending else self.written

    def run(self, tokens):
        return run(self.model.layer, *joined(tokens), state=self.written)

    def step(self, token):
        """Decode a token ``(1, 1, ...)``; return its output, what a sketch makes of that, and whether it flushed."""
        self.trial = []
        self.pending.append(token)
        flushed = self.row.step()
        output = self.read(self.pending)
        if flushed:
            self.load(self.current())
            return output[0], output[0], True
        return *output, False

    def draft(self, tokens, most):
        """Return outputs of drafts, as `step` does; `most` is the length of the call's tokens axis."""
        clock = self.model.clock
        if self.row.draft(len(tokens), clock is not None and clock.folds_before(most)):
            self.load(self.current())
        self.trial = tokens
        return [(*self.read(self.pending + tokens[: t + 1]), False) for t in range(len(tokens))]

    def commit(self, accepted):
        self.pending = self.pending + self.trial[:accepted]
        self.row.commit(accepted)
        self.trial = []

    def read(self, tokens):
        """Output of the last token, exactly and with its state read through the sketch."""
        exact = self.run(tokens)[0][0, -1]
        q, k, v, g, beta = per_head(self.model.layer, joined(tokens))
        sketched = exact.copy()
        for head in np.flatnonzero(RANKS != FULL_STATE):
            state = self.written[0, head].T
            ring = Ring(k[0, :, head], v[0, :, head], g[0, :, head], None if beta is None else beta[0, :, head])
            x = effective_query(q[0, -1, head], ring)
            omega = self.model.plan.omega[head, :, : RANKS[head]].astype(np.float64)
            read = state.T @ omega @ coefficient_map(self.model.plan.map, state, omega, omega)
            sketched[head] += read @ x - state.T @ x
        return exact, sketched

    def contents(self):
        """What a copy of the slot keeps."""
        return self.written, list(self.pending), self.row.position

    def put(self, contents):
        self.written, self.pending, self.row.position = contents[0], list(contents[1]), contents[2]
        self.trial, self.row.drafted = [], 0


class StandardSlot(Slot):
    """A slot of standard decode: every token is written."""

    def step(self, token):
        self.trial, self.row.drafted = [], 0
        output, state = run(self.model.layer, *token, state=self.written)
        self.load(state)
        return output[0, -1], output[0, -1], True

    def draft(self, tokens, most):
        kept, results = self.written, [self.step(token) for token in tokens]
        self.load(kept)
        self.trial, self.row.drafted = tokens, len(tokens)
        return results

    def commit(self, accepted):
        for token in self.trial[:accepted]:
            self.step(token)
        self.row.drafted = 0


class Model:
    """Slots of a head and its clock."""

    def __init__(self, plan, kind, window, phase, state_dtype):
        self.plan, self.layer, self.window, self.state_dtype = plan, plan.layer, window, state_dtype
        self.clock = None if phase is None else Row(window, phase)
        self.slots = [kind(self) for _ in range(SLOTS)]

    def rounded(self, state):
        if self.state_dtype == "float32":
            return state
        if self.state_dtype == "float16":
            return state.astype(np.float16).astype(np.float64)
        import ml_dtypes

        return state.astype(ml_dtypes.bfloat16).astype(np.float64)

    def tick(self, slots):
        """Advance the clock after a token of these slots."""
        if self.clock is not None:
            self.clock.step()
            if self.clock.position == self.window - 1:
                for each in (self.clock, *(self.slots[s].row for s in slots)):
                    each.due = True

    def committed(self, slots):
        """Advance the clock after a commit."""
        if self.clock is not None:
            count = self.clock.drafted
            self.clock.commit(count)
            if self.clock.position + count > self.window - 1:
                for each in (self.clock, *(self.slots[s].row for s in slots)):
                    each.due = True

    def begin(self, slot, state=None):
        if state is not None:
            self.slots[slot].load(state)
        self.slots[slot].row.begin(self.clock)


def joined(tokens):
    parts = zip(*tokens, strict=True)
    return Tokens(*(None if part[0] is None else np.concatenate(part, axis=1) for part in parts))
