"""Requests that arrive and leave at random while the batch stays full, and their runs on a CPU or a GPU.

On a GPU a step of all layers is one captured graph, replayed with other slots. Before each replay the slots and inputs
of the step are copied into the memory that the graph reads, and another graph loads the states of the requests that
begin. Only the step is timed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.arrays.interop import to_host
from sketchssm.heads.head import DecodeHead
from sketchssm.layer.recurrence import Tokens
from sketchssm.study.bench import Case, Workload, random_tokens
from sketchssm.study.bench.device import ACTIVATION
from sketchssm.study.bench.graphs import Ahead, captured
from sketchssm.study.bench.workloads import token_at

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


ON_DEVICE = 3
"""The driver's number for a copy from the device to the device."""


def inputs_on_device(case: Case, seed: int = 0) -> Inputs:
    """Upload the inputs of a case to the current device: q, k, v and raw gate inputs in bf16."""
    work = Workload(case.layer, case.batch, case.window, seed, case.gate is not None)
    return Inputs(work.steps, work.start, work.one_row().at(0))


def run_on_device(heads: Sequence[DecodeHead], inputs: Inputs, requests: Requests, duty: float = 1.0) -> Run:
    """Run the steps on the current device, without waiting except to rest; times are those of the device."""
    import cupy

    steps, period = len(requests.slots), len(inputs.steps)
    joining = requests.joins.sum(axis=1)
    begun = np.full((steps, int(joining.max())), -1, dtype=np.int64)  # slots of the requests that begin, then padding
    for own, slots, joins in zip(begun, requests.slots, requests.joins, strict=True):
        own[: joins.sum()] = slots[joins]
    tables = cupy.asarray(requests.slots), cupy.asarray(begun)
    slots, joined = (cupy.full(table.shape[1], -1, np.int64) for table in tables)
    token = Tokens(*(None if x is None else cupy.empty(x.shape, x.dtype) for x in inputs.steps[0]))
    output = cupy.empty(token.v.shape, token.v.dtype)
    log = cupy.empty((steps, *output.shape[1:]), output.dtype)
    start = inputs.start[None].astype(heads[0].state.dtype)  # a graph can't convert
    states = cupy.asarray(start).repeat(begun.shape[1], axis=0)
    for head in heads:
        head.warmup(ACTIVATION)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()

    def load() -> None:
        for head in heads:
            head.load_state(states, slots=joined)

    def step() -> None:
        for head in heads:
            head.step(*token, slots=slots, out=output)

    load_graph, step_graph = captured(load, stream), captured(step, stream)
    pace = _Pace(period, duty, stream)
    marks = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(steps)]
    for t, (start, stop) in enumerate(marks):
        pace(t)
        _copy(slots, tables[0][t], stream)
        for target, source in zip(token, inputs.steps[t % period], strict=True):
            if target is not None:
                _copy(target, source, stream)
        if joining[t]:
            _copy(joined, tables[1][t], stream)
            load_graph.launch(stream)
        start.record(stream)
        step_graph.launch(stream)
        stop.record(stream)
        _copy(log[t], output[0], stream)
    stream.synchronize()
    times = np.array([1e3 * cupy.cuda.get_elapsed_time(*pair) for pair in marks])
    outputs = to_host(log, "output").astype(np.float64)
    return Run(times, outputs, to_host(heads[-1].state[int(requests.slots[-1, 0])], "state"))


def _copy(target: Any, source: Any, stream: Any) -> None:
    import cupy

    cupy.cuda.runtime.memcpyAsync(target.data.ptr, source.data.ptr, target.nbytes, ON_DEVICE, stream.ptr)


class _Pace:
    """Lets the device rest between windows, for as long as `duty` asks."""

    def __init__(self, window: int, duty: float, stream: Any) -> None:
        self._window, self._duty, self._stream = window, duty, stream
        self._ahead = Ahead() if duty < 1 else None
        self._begun = time.perf_counter()

    def __call__(self, t: int) -> None:
        """Rest if step t begins a window."""
        if self._ahead is None or t % self._window:
            return
        self._stream.synchronize()
        time.sleep((time.perf_counter() - self._begun) * (1 / self._duty - 1))
        self._begun = time.perf_counter()
        self._ahead.launch(self._stream)
