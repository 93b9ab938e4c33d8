"""CPU benchmark: window-amortised step times of decode systems, held against the memory's measured bandwidth.

One step's cost depends on where in its window it falls: the ring grows, and the last token flushes. So every position
is timed, and what counts is their mean. The floor is the bytes that the operation must move over the copy bandwidth
measured in the same run, and each time stands beside the error of the same run's outputs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm import traffic
from sketchssm.calibrate.basis import SketchBasis
from sketchssm.evaluate.systems import System, exact_systems, relative_error, sketch_system
from sketchssm.head import DecodeHead
from sketchssm.plan import SketchPlan
from sketchssm.recurrence import Layer, Tokens

__all__ = [
    "SHAPES",
    "BenchResult",
    "available_cores",
    "copy_bandwidth",
    "measure",
    "random_plan",
    "random_tokens",
    "step_bytes",
    "systems",
]

SHAPES = {
    "nemotron-3-super": Layer("mamba2", 128, 128, 64, 8),
    "nemotron-nano-9b-v2": Layer("mamba2", 128, 128, 80, 8),
    "qwen3-next": Layer("gdn", 32, 128, 128, 16),
    "qwen3.5-large": Layer("gdn", 64, 128, 128, 16),
    "kimi-linear": Layer("kda", 32, 128, 128, 32),
}
"""Recurrent layers of models in use, whole (one layer, no tensor parallelism)."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class BenchResult:
    """Times of one system at one shape, batch and window.

    Attributes
    ----------
    shape, system, backend : str
        What ran where.
    batch, window : int
        Rows of a step; tokens from one flush to the next.
    read_microseconds : float
        A step between flushes, averaged over the window's positions.
    flush_microseconds : float
        The step that flushes; for standard decoding, any step.
    microseconds : float
        A step, amortised over the window with its flush.
    bytes : float
        What a step must move, amortised likewise.
    fraction : float
        Share of the measured copy bandwidth that those bytes reach: 1 is the floor.
    error : float
        Relative error of the outputs of one row against the same system in float64.
    state_error : float
        Relative error of that row's state after the window, likewise.
    first_call_seconds : float
        What the first window took beyond a typical one: compiling, or loading what was compiled earlier.
    """

    shape: str
    system: str
    backend: str
    batch: int
    window: int
    read_microseconds: float
    flush_microseconds: float
    microseconds: float
    bytes: float
    fraction: float
    error: float
    state_error: float
    first_call_seconds: float

    @property
    def gigabytes_per_second(self) -> float:
        """Rate of moving `bytes`."""
        return self.bytes / self.microseconds / 1e3


def available_cores() -> int:
    """Count the cores that this process may use.

    Returns
    -------
    int
        Its affinity's where the system has one, else all.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def copy_bandwidth(threads: int | None = None, megabytes: int = 256, repeats: int = 5) -> float:
    """Measure how fast memory can be copied by all cores at once.

    Parameters
    ----------
    threads : int, optional
        Default: the cores that this process may use.
    megabytes : int, default 256
        Size of the source, well beyond the caches.
    repeats : int, default 5
        The best of so many counts.

    Returns
    -------
    float
        Bytes per second, read and written bytes both counted.
    """
    threads = threads or available_cores()
    source = np.ones(megabytes * 2**20 // 8)
    target = np.zeros_like(source)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    best = np.inf
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats + 1):  # the first one also wakes the threads
            start = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(*pair), parts))
            best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best


def random_tokens(layer: Layer, batch: int, tokens: int, seed: int = 0) -> Tokens:
    """Draw inputs of a layer: unit keys and queries, mild decay.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    batch, tokens : int
        Leading axes.
    seed : int, default 0
        Seed of the draw.

    Returns
    -------
    Tokens
        Float32 arrays ``(batch, tokens, ...)``.
    """
    rng = np.random.default_rng(seed)
    drawn: dict[str, Array] = {}
    for name, tail in layer.token_shapes().items():
        shape = (batch, tokens, *tail)
        if name == "g":
            drawn[name] = -rng.random(shape, dtype=np.float32) / 10
        elif name == "beta":
            drawn[name] = rng.random(shape, dtype=np.float32)
        else:
            x = rng.standard_normal(shape, dtype=np.float32)
            drawn[name] = x if name == "v" else x / np.linalg.norm(x, axis=-1, keepdims=True)
    return Tokens(*(drawn.get(name) for name in Tokens._fields))


def random_plan(layer: Layer, rank: int, window: int, map: str, pivots: int = 4, seed: int = 0) -> SketchPlan:
    """Make a plan with random bases and one rank: times do not depend on the values.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    rank : int
        Rank of every head.
    window : int
        Tokens from one flush to the next.
    map : str
        Coefficient map.
    pivots : int, default 4
        Pivot count.
    seed : int, default 0
        Seed of the bases.

    Returns
    -------
    SketchPlan
        The plan.
    """
    basis = SketchBasis.random(layer, rank, seed, window=window)
    return SketchPlan(basis, np.full(layer.heads, rank), window, map, pivots)


def systems(layer: Layer, window: int, plans: Sequence[SketchPlan]) -> list[System]:
    """List what a benchmark compares: standard, replay, and one sketch for each plan.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    window : int
        Tokens from one flush to the next.
    plans : sequence of SketchPlan
        Plans of the sketches.

    Returns
    -------
    list of System
        Entries for `measure`.
    """
    return exact_systems(layer, window) + [
        sketch_system(plan, f"sketch G={plan.mean_rank:g} {plan.map}") for plan in plans
    ]


def step_bytes(system: System, layer: Layer, batch: int, window: int) -> float:
    """Bytes that a float32 step must move, amortised over a window.

    Parameters
    ----------
    system : System
        One of `systems`.
    layer : Layer
        Kind and shape.
    batch : int
        Rows of a step.
    window : int
        Tokens from one flush to the next.

    Returns
    -------
    float
        States, sketches and maps as in `sketchssm.traffic`, and what that model leaves out: inputs and outputs, the
        ring (written once, read from the window's start at each token), and the sketch that a flush writes.
    """
    shapes = layer.token_shapes()
    taken = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    moved = taken + 4 * layer.heads * layer.value_dim
    standard = layer.heads * traffic.standard(layer.key_dim, layer.value_dim)
    if system.name == "standard":
        return batch * (standard + moved)
    buffered = taken - 4 * int(np.prod(shapes["q"]))  # queries are not kept
    ring = buffered * (1 + (window + 1) / 2)
    written = 0.0
    if system.plan is not None:
        plan = system.plan
        sizes = (layer.kind, layer.key_dim, layer.value_dim, plan.ranks, window, plan.storage, plan.pivots)
        read = traffic.sketch_read(*sizes)
        written = float(np.where(plan.ranks < 0, 0.0, read).sum()) / window
    return batch * (standard / system.reduction + moved + ring + written)


def measure(
    shape: str,
    layer: Layer,
    systems: Sequence[System],
    batch: int,
    window: int,
    bandwidth: float,
    *,
    backend: str = "auto",
    seconds: float = 1.0,
    seed: int = 0,
) -> list[BenchResult]:
    """Time systems in turns, window by window, so that a busy machine slows all of them alike.

    Parameters
    ----------
    shape : str
        What to call the layer's shape.
    layer : Layer
        Kind and shape.
    systems : sequence of System
        What to time, from `systems`.
    batch : int
        Rows of a step.
    window : int
        Tokens from one flush to the next.
    bandwidth : float
        Copy bandwidth in bytes per second, from `copy_bandwidth`.
    backend : str, default "auto"
        Where to run.
    seconds : float, default 1
        Time to spend on each system, in whole windows, at least three.
    seed : int, default 0
        Seed of the inputs.

    Returns
    -------
    list of BenchResult
        Times, bytes and error of each system.
    """
    tokens = random_tokens(layer, batch, window, seed)
    steps = [Tokens(*(None if x is None else np.ascontiguousarray(x[:, t]) for x in tokens)) for t in range(window)]
    one_row = Tokens(*(None if x is None else x[:1] for x in tokens))
    start = np.random.default_rng(seed).standard_normal((1, *layer.state_shape)).astype(np.float32)

    heads, errors, state_errors, first = [], [], [], []
    for system in systems:
        head = system.build(batch, backend)
        head.load_state(np.broadcast_to(start, (batch, *layer.state_shape)))
        clock = time.perf_counter()
        outputs = np.stack([np.array(head.step(*token)[:1]) for token in steps], axis=1)
        first.append(time.perf_counter() - clock)
        heads.append(head)
        twin = system.build(1, "reference")
        twin.load_state(start)
        errors.append(relative_error(outputs, np.asarray(twin.step(*one_row), dtype=np.float64)))
        state_errors.append(relative_error(head.state[:1], twin.state))

    times: list[list[list[float]]] = [[] for _ in systems]
    stop = time.perf_counter() + seconds * len(heads)
    while len(times[-1]) < 3 or time.perf_counter() < stop:
        for head, own in zip(heads, times, strict=True):
            own.append(_window(head, steps))

    results = []
    for i, system in enumerate(systems):
        typical = np.median(times[i], axis=0)
        amortised = float(typical.mean())
        needed = step_bytes(system, layer, batch, window)
        result = BenchResult(
            shape,
            system.name,
            heads[i].backend,
            batch,
            window,
            1e6 * float(typical[:-1].mean()),
            1e6 * float(typical[-1]),
            1e6 * amortised,
            needed,
            needed / amortised / bandwidth,
            errors[i],
            state_errors[i],
            max(first[i] - window * amortised, 0.0),
        )
        results.append(result)
    return results


def _window(head: DecodeHead, steps: Sequence[Tokens]) -> list[float]:
    """Seconds of each step of one window."""
    times = []
    for token in steps:
        start = time.perf_counter()
        head.step(*token)
        times.append(time.perf_counter() - start)
    return times
