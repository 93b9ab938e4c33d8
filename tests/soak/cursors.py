"""Window positions by the rules that every backend follows."""

import numpy as np


class Cursors:
    """Positions, drafts and DUE bits of one head's slots and of its clock (`sketchssm.layer.slots`), as plain arrays.

    Parameters
    ----------
    window : int
        W; 1 for a head that writes its states at every token.
    every : int
        Tokens from one flush to the next; more than W with refreshes.
    phase : int or None
        Where the clock begins; None for no clock.
    slots : int
        Number of slots.
    deferred : bool, default False
        Whether a slot flushes behind its token number W - 1.
    """

    def __init__(self, window, every, phase, slots, deferred=False):
        self.window, self.every, self.clocked = window, every - deferred, phase is not None
        # the clock is one more row, behind the slots
        self.position, self.drafted = np.zeros(slots + 1, int), np.zeros(slots + 1, int)
        self.due = np.zeros(slots + 1, bool)
        self.strokes = set()
        """DUE bits that the clock has had since someone emptied the set."""
        if self.clocked:
            self.position[-1] = phase
            self.due[:] = phase == every - 1

    def plain(self, rows):
        """One token of some slots; returns which of them flush with it, and which refresh their sketches."""
        every = np.append(rows, -1) if self.clocked else rows
        flushes = self.due[every] | (self.position[every] == self.every - 1)
        self.position[every] = np.where(flushes, 0, self.position[every] + 1)
        self.due[every[flushes]] = False
        self.drafted[every] = 0
        if self.clocked and self.position[-1] == self.every - 1:
            self.due[every] = True
        self.strokes.add(bool(self.due[-1]))
        flushes = flushes[: len(rows)]
        return flushes, ~flushes & (self.position[rows] % self.window == 0)

    def draft(self, rows, lengths, most):
        """A draft of so many tokens each, and at most `most`.

        Returns which slots flush before the draft, and which begin it at their next window, with a refreshed sketch.
        """
        every, lengths = (np.append(rows, -1), np.append(lengths, most)) if self.clocked else (rows, lengths)
        folds = self.due[every] | (self.position[every] + lengths > self.every - 1)
        if self.clocked and folds[-1]:  # all slots of the call fold with the clock
            folds[:] = True
        if self.window == 1:
            folds[:] = False
        used = self.position[every] % self.window
        skips = ~folds & (used > 0) & (used + lengths >= self.window)
        self.position[every[folds]] = 0
        self.position[every[skips]] += self.window - used[skips]
        self.due[every[folds]] = False
        self.drafted[every] = lengths
        self.strokes.add(bool(self.due[-1]))
        return folds[: len(rows)], skips[: len(rows)]

    def commit(self, rows, accepted):
        """Keep the first tokens of some slots' drafts."""
        if self.window > 1:
            self.position[rows] += accepted
        self.drafted[rows] = 0
        if self.clocked:
            count, self.drafted[-1] = self.drafted[-1], 0
            self.position[-1] += count
            if self.position[-1] + count > self.every - 1:
                self.due[np.append(rows, -1)] = True
            self.strokes.add(bool(self.due[-1]))

    def begin(self, rows):
        """Begin windows on the states that stand in some slots."""
        self.position[rows], self.drafted[rows], self.due[rows] = 0, 0, self.due[-1]

    def copy(self, source, target):
        self.position[target], self.due[target], self.drafted[target] = self.position[source], self.due[source], 0

    def restore(self, rows, positions):
        """Begin at the positions of a snapshot."""
        self.begin(rows)
        self.position[rows] = positions
