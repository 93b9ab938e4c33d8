"""Times of decode systems on this machine's CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from sketchssm.heads.head import DecodeHead
from sketchssm.layer.recurrence import Layer, Tokens
from sketchssm.study.bench.results import BenchResult, step_bytes
from sketchssm.study.bench.workloads import random_tokens, token_at
from sketchssm.study.evaluate.measure import relative_error
from sketchssm.study.systems import System


def available_cores() -> int:
    """Count the cores in the process's affinity mask, where the system has one, else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def copy_bandwidth(threads: int | None = None, megabytes: int = 256, repeats: int = 5) -> float:
    """Best copy bandwidth of all cores together in bytes per second; read and written bytes both count."""
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


def measure_host(
    shape: str,
    layer: Layer,
    systems: Sequence[System],
    batch: int,
    window: int,
    bandwidth: float,
    *,
    backend: str = "cpu",
    seconds: float = 1.0,
    seed: int = 0,
) -> list[BenchResult]:
    """Time systems in turns, window by window, so that other load on the machine slows all of them alike.

    Systems come from `systems`; either all have a gate or none. `bandwidth` comes from `copy_bandwidth`. `seconds` are
    spent on each system, in whole windows, at least three.
    """
    tokens = random_tokens(layer, batch, window, seed, any(system.gate is not None for system in systems))
    steps = [token_at(tokens, t) for t in range(window)]
    one_row = tokens.at(slice(1))
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
        result = BenchResult.of(
            (shape, system.name, heads[i].backend),
            batch,
            (1e6 * typical).tolist(),
            step_bytes(system, layer, batch, window),
            bandwidth,
            (errors[i], state_errors[i]),
            max(first[i] - float(typical.sum()), 0.0),
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
