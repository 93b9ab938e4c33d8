"""Requests that arrive and leave at random while the batch stays full, as on a busy server."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SPARE = 8
"""Slots beyond those of the batch, so that a request seldom gets the slot that has just been released."""


@dataclass(frozen=True)
class Requests:
    """Slot of each row of a batch at each step."""

    slots: npt.NDArray[np.int64]  # (steps, batch); -1 until the row's first request arrives
    joins: npt.NDArray[np.bool_]  # (steps, batch): whether a request begins, whose state must be loaded before
    num_slots: int  # slots in use

    @classmethod
    def together(cls, batch: int, steps: int) -> Requests:
        """Requests that all begin at the first step and never end: all rows stay at one window position."""
        joins = np.zeros((steps, batch), dtype=np.bool_)
        joins[:1] = True
        return cls(np.tile(np.arange(batch), (steps, 1)), joins, batch)

    @classmethod
    def arriving(cls, batch: int, steps: int, window: int, mean_tokens: float, seed: int = 0) -> Requests:
        """Requests of random lengths; when one ends, another begins in its row at the next step.

        The first requests begin at random within `window` steps, so that rows stand at all window positions. Lengths
        are geometric with a mean of `mean_tokens`, as if each token could be the last one. A new request takes the
        slot that has been free for the longest time.
        """
        rng = np.random.default_rng(seed)
        free = deque(range(batch + SPARE))
        slots = np.full((steps, batch), -1, dtype=np.int64)
        joins = np.zeros((steps, batch), dtype=np.bool_)
        row_slots = np.full(batch, -1, dtype=np.int64)
        ends = rng.integers(0, window, batch)  # the first step that needs a new request
        for t in range(steps):
            for row in np.flatnonzero(ends == t):
                if row_slots[row] >= 0:
                    free.append(int(row_slots[row]))
                row_slots[row] = free.popleft()
                ends[row] = t + rng.geometric(1 / mean_tokens)
                joins[t, row] = True
            slots[t] = row_slots
        return cls(slots, joins, batch + SPARE)
