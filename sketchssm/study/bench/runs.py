"""Requests that arrive and leave at random while the batch stays full, and their runs on this machine's CPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.heads.head import DecodeHead
from sketchssm.layer.recurrence import Tokens
from sketchssm.study.bench.cases import Case
from sketchssm.study.bench.workloads import random_tokens, token_at

Array = npt.NDArray[Any]

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


@dataclass(frozen=True)
class Inputs:
    """Inputs of a window of steps, which repeat, and the state that every request begins with."""

    steps: Sequence[Tokens]  # (batch, ...) of each step of a window
    start: Array  # float32, (heads, V, K)
    first_row: Tokens  # (window, ...) float32 as the heads see them

    @classmethod
    def on_host(cls, case: Case, seed: int = 0) -> Inputs:
        """Draw the inputs of a case: float32 arrays on the host."""
        tokens = random_tokens(case.layer, case.batch, case.window, seed, case.gate is not None)
        start = np.random.default_rng(seed).standard_normal(case.layer.state_shape).astype(np.float32)
        return cls([token_at(tokens, t) for t in range(case.window)], start, tokens.at(0))


@dataclass(frozen=True)
class Run:
    """Results of a run; outputs and state are the last layer's, of the first row."""

    times: Array  # (steps,), microseconds of a step of all layers
    outputs: Array  # (steps, heads, V)
    state: Array  # (heads, V, K), after the last step


def run_on_host(heads: Sequence[DecodeHead], inputs: Inputs, requests: Requests) -> Run:
    """Run the steps on this machine's CPU; the heads are the layers of the model."""
    times, outputs = [], []
    for t, (slots, joins) in enumerate(zip(requests.slots, requests.joins, strict=True)):
        if joins.any():
            states = np.broadcast_to(inputs.start, (int(joins.sum()), *inputs.start.shape))
            for head in heads:
                head.load_state(states, slots=slots[joins])
        token = inputs.steps[t % len(inputs.steps)]
        begun = time.perf_counter()
        for head in heads:
            output = head.step(*token, slots=slots)
        times.append(1e6 * (time.perf_counter() - begun))
        outputs.append(np.array(output[0]))
    return Run(np.array(times), np.stack(outputs), heads[-1].state[requests.slots[-1, 0]].copy())
