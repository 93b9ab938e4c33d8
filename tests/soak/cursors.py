"""Window positions by the rules that every backend follows."""

import numpy as np


class Cursors:
    """Positions, drafts and DUE bits of one head's slots and of its clock (`sketchssm.layer.slots`), as plain arrays.
    The window is 1 for a head that writes its states at every token; without a phase there is no clock.
    """

    def __init__(self, window, phase, slots):
        self.window, self.clocked = window, phase is not None
        # the clock is one more row, behind the slots
        self.position, self.drafted = np.zeros(slots + 1, int), np.zeros(slots + 1, int)
        self.due = np.zeros(slots + 1, bool)
        self.strokes = set()
        """DUE bits that the clock has had since someone emptied the set."""
        if self.clocked:
            self.position[-1] = phase
            self.due[:] = phase == window - 1

    def plain(self, rows):
        """One token of some slots; returns which of them flush with it."""
        every = np.append(rows, -1) if self.clocked else rows
        flushes = self.due[every] | (self.position[every] == self.window - 1)
        self.position[every] = np.where(flushes, 0, self.position[every] + 1)
        self.due[every[flushes]] = False
        self.drafted[every] = 0
        if self.clocked and self.position[-1] == self.window - 1:
            self.due[every] = True
        self.strokes.add(bool(self.due[-1]))
        return flushes[: len(rows)]

    def draft(self, rows, lengths, most):
        """A draft of so many tokens each, and at most `most`; returns which slots flush before it."""
        every, lengths = (np.append(rows, -1), np.append(lengths, most)) if self.clocked else (rows, lengths)
        folds = self.due[every] | (self.position[every] + lengths > self.window - 1)
        if self.clocked and folds[-1]:  # all slots of the call fold with the clock
            folds[:] = True
        if self.window == 1:
            folds[:] = False
        self.position[every[folds]] = 0
        self.due[every[folds]] = False
        self.drafted[every] = lengths
        self.strokes.add(bool(self.due[-1]))
        return folds[: len(rows)]

    def commit(self, rows, accepted):
        """Keep the first tokens of some slots' drafts."""
        if self.window > 1:
            self.position[rows] += accepted
        self.drafted[rows] = 0
        if self.clocked:
            count, self.drafted[-1] = self.drafted[-1], 0
            self.position[-1] += count
            if self.position[-1] + count > self.window - 1:
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
