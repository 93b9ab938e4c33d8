"""Arguments and results of a run of arriving requests, and runs on this machine's CPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.heads.head import DecodeHead
from sketchssm.layer.recurrence import Tokens
from sketchssm.study.bench.cases import Case
from sketchssm.study.bench.requests import Requests
from sketchssm.study.bench.workloads import random_tokens, token_at

Array = npt.NDArray[Any]


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
