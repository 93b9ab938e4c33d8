"""Times of decode systems on a GPU, by replaying captured graphs.

A window is W graphs, one per position, which read and advance the cursors on the device like any other step. They are
launched without waiting, with an event between consecutive graphs; between windows the device may rest. Each graph
goes through so many sets of slots that the L2 cache does not hold the sketches and ring of a set at the set's next
turn.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from sketchssm.arrays.interop import to_host
from sketchssm.heads.head import DecodeHead
from sketchssm.layer.recurrence import Layer, Tokens
from sketchssm.plans import traffic
from sketchssm.reference.recurrence import Array
from sketchssm.study.bench.graphs import Ahead, captured, upload
from sketchssm.study.bench.results import BenchResult, step_bytes
from sketchssm.study.bench.workloads import random_tokens, token_at
from sketchssm.study.evaluate.measure import relative_error
from sketchssm.study.systems import System

ACTIVATION = "bfloat16"

PASSING = 1 << 30
"""Bytes read between two turns of a set of slots: more than any L2 cache, and gaps between graphs hardly count."""

MAX_SETS = 512

CAPTURES = 32
"""Graphs of a head between two calls outside of graphs, which make room for the next graphs."""

LEAST, MOST = 5, 200
"""Smallest and largest number of timed rounds."""


class Workload:
    """Inputs of one window on the device, and an initial state; `raw_gate` tells whether g holds raw gate inputs."""

    def __init__(self, layer: Layer, batch: int, window: int, seed: int = 0, raw_gate: bool = False) -> None:
        self.layer, self.batch, self.window = layer, batch, window
        # further rows repeat the first 32: drawing all rows on the host would take longer than timing them
        drawn = random_tokens(layer, min(batch, 32), window, seed, raw_gate)
        rows = np.arange(batch) % 32
        self.steps = [upload(token_at(drawn, t).at(rows), ACTIVATION, raw_gate) for t in range(window)]
        self.start = np.random.default_rng(seed).standard_normal(layer.state_shape).astype(np.float32)

    def one_row(self) -> Tokens:
        """Return the first row's inputs with the rounding of the device, ``(1, window, ...)`` float32 on the host."""
        inputs = zip(*self.steps, strict=True)  # by argument
        rows = (None if x[0] is None else [to_host(y[:1], "input") for y in x] for x in inputs)
        return Tokens(*(None if x is None else np.stack(x, axis=1).astype(np.float32) for x in rows))

    def errors(self, system: System, outputs: Array, state: Array, row: Tokens | None = None) -> tuple[float, float]:
        """Relative errors of the first row's outputs ``(window, heads, V)`` and state against the system in float64.

        `row` has the inputs of the results; by default `one_row`.
        """
        twin = system.build(1, "reference")
        twin.load_state(self.start[None])
        want = np.asarray(twin.step(*(row or self.one_row())), dtype=np.float64)[0]
        return relative_error(outputs, want), relative_error(state, twin.state[0])


def device_name() -> str:
    """Name of the current device, from the driver."""
    import cupy

    name: bytes = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"]
    return name.decode()


def compile_all(systems: Sequence[System]) -> float:
    """Compile all kernels of several systems in parallel, and return the seconds."""
    import cupy

    begun, device = time.perf_counter(), cupy.cuda.Device()

    def compile_one(system: System) -> None:
        with device:
            system.build(1, "cuda").warmup(ACTIVATION)

    with ThreadPoolExecutor(max(len(systems), 1)) as pool:
        list(pool.map(compile_one, systems))
    return time.perf_counter() - begun


def device_bandwidth(megabytes: int = 2048, repeats: int = 7) -> float:
    """Median copy bandwidth of the current device in bytes per second; read and written bytes both count."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    source, target = (cupy.zeros(megabytes * 2**18, dtype=np.float32) for _ in range(2))
    cupy.cuda.Device().synchronize()

    def copy() -> None:  # no graph: copy nodes of a graph use the slower copy engines
        cupy.cuda.runtime.memcpyAsync(target.data.ptr, source.data.ptr, source.nbytes, 3, stream.ptr)

    times = launch_times([copy], stream, repeats)
    return float(2e6 * source.nbytes / np.median(times))


def launch_times(launches: Sequence[Callable[[], None]], stream: Any, rounds: int, rest: float = 0.0) -> Array:
    """Launch work in turns, without waiting except to rest, and time the work on the device.

    Each launch queues work on the stream. One round goes before the timed rounds, and the device idles for `rest`
    seconds before each. The result ``(rounds, launches)`` has the microseconds from the end of the launch before to
    the end of each launch.
    """
    import cupy

    ahead = Ahead() if rest > 0 else None
    marks = [[cupy.cuda.Event() for _ in range(len(launches) + 1)] for _ in range(rounds)]
    for launch in launches:
        launch()
    for first, *others in marks:
        if ahead is not None:
            stream.synchronize()
            time.sleep(rest)
            ahead.launch(stream)
        first.record(stream)
        for launch, event in zip(launches, others, strict=True):
            launch()
            event.record(stream)
    stream.synchronize()
    return np.array([[1e3 * cupy.cuda.get_elapsed_time(*pair) for pair in pairwise(events)] for events in marks])


def typical_times(launches: Sequence[Callable[[], None]], stream: Any, seconds: float, duty: float = 1.0) -> Array:
    """Compute median times of launches in turns, in microseconds, from whole rounds, at least five.

    `duty` is the share of the time that the device works, in (0, 1]. A device that rests keeps its clock rate; a
    device that never rests may reach its power limit, which lowers the clock rate.
    """
    if not 0 < duty <= 1:
        raise ValueError(f"duty: expected a share in (0, 1], got {duty}")
    taken = 1e-6 * float(launch_times(launches, stream, 1).sum())
    rounds = int(min(max(seconds / taken, LEAST), MOST))
    return np.median(launch_times(launches, stream, rounds, taken * (1 / duty - 1)), axis=0)


def slot_sets(batch: int, read_bytes: float, state_bytes: int) -> int:
    """Choose the number of sets of slots that take turns: as many as `PASSING` needs and memory allows.

    `read_bytes` is what a step between flushes reads of one set, `state_bytes` the memory of one slot.
    """
    import cupy

    gc.collect()  # frees the memory of systems timed before
    cupy.get_default_memory_pool().free_all_blocks()
    free, _ = cupy.cuda.runtime.memGetInfo()
    room = int(free / 2 / (batch * state_bytes))
    return max(1, min(-(-PASSING // int(read_bytes)), room, MAX_SETS))


def measure_device(
    shape: str,
    system: System,
    work: Workload,
    bandwidth: float,
    *,
    seconds: float = 0.05,
    duty: float = 1.0,
) -> BenchResult:
    """Time a system of `systems` at every position of the window, with the errors of one row of the same run.

    `bandwidth` comes from `device_bandwidth`, `duty` is that of `typical_times`. Compiling counts separately.
    ValueError if there are no kernels for the layer or the plan, MemoryError if the device is too small for the batch.
    """
    import cupy

    layer, batch, window = work.layer, work.batch, work.window
    needed = step_bytes(system, layer, batch, window, on_device=True)
    state_bytes = layer.heads * traffic.state_bytes(layer.key_dim, layer.value_dim, system.state_dtype)
    sets = slot_sets(batch, needed.read, int(state_bytes))
    begun = time.perf_counter()
    head = system.build(sets * batch, "cuda")
    head.warmup(ACTIVATION)
    compiled = time.perf_counter() - begun
    slots = [cupy.arange(i * batch, (i + 1) * batch, dtype=np.int64) for i in range(sets)]
    start = cupy.asarray(work.start[None]).repeat(batch, axis=0)
    # one output per position: the last set's outputs stay there and are compared with float64
    outputs = [cupy.empty(x.v.shape, x.v.dtype) for x in work.steps]
    stream = cupy.cuda.Stream(non_blocking=True)
    launches = []
    for i, pair in enumerate(zip(work.steps, outputs, strict=True)):
        if i % CAPTURES == 0:
            for some in slots:
                head.load_state(start, some)
        launches.append(partial(captured(_steps(head, *pair, slots), stream).launch, stream))
    del start
    cupy.cuda.Device().synchronize()

    for launch in launches:
        launch()
    stream.synchronize()
    got = np.stack([to_host(x[0], "output").astype(np.float64) for x in outputs])
    errors = work.errors(system, got, to_host(head.state[int(slots[-1][0])], "state"))

    times = typical_times(launches, stream, seconds, duty) / sets
    if system.name == "standard":  # all positions are alike
        times[:] = np.median(times)
    names = (shape, system.name, head.backend)
    return BenchResult.of(names, batch, times.tolist(), needed, bandwidth, errors, compiled)


def _steps(head: DecodeHead, step: Tokens, output: Any, slots: Sequence[Any]) -> Callable[[], None]:
    """One token for every set of slots."""

    def work() -> None:
        for some in slots:
            head.step(*step, slots=some, out=output)

    return work
