"""Steps of arriving requests on a GPU: one captured graph for a step of all layers, replayed with other slots.

Before each replay the slots and inputs of the step are copied into the memory that the graph reads, and another graph
loads the states of the requests that begin. Only the step is timed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from sketchssm.arrays.interop import to_host
from sketchssm.heads.head import DecodeHead
from sketchssm.layer.recurrence import Tokens
from sketchssm.study.bench.cases import Case
from sketchssm.study.bench.device import ACTIVATION, Workload
from sketchssm.study.bench.graphs import Ahead, captured
from sketchssm.study.bench.runs import Inputs, Requests, Run

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
