"""Times of calibration: moments, rank scores and joint scores of one layer, on the host or on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sketchssm.calibrate.joint_scores import JointScores
from sketchssm.calibrate.moments import Moments
from sketchssm.calibrate.scores import RankScores
from sketchssm.layer.recurrence import Layer, Tokens
from sketchssm.plans.basis import SketchBasis
from sketchssm.study.bench.device import device_name
from sketchssm.study.bench.host import available_cores
from sketchssm.study.bench.shapes import SHAPES
from sketchssm.study.bench.workloads import random_tokens
from sketchssm.study.tables import Table, ruled, scientific

RANK_MAX = 16
"""Columns of the scored bases: the most that the kernels of most shapes have room for."""

SIZES = {"cpu": (2, 256), "cuda": (16, 1024)}
"""Sequences and tokens of a call."""

CHECKED = 64
"""Tokens of the comparison with float64."""


@dataclass(frozen=True)
class CalibrationResult:
    """Time of one kind of sums; `error` is that of its first sum, relative to float64 tokens."""

    shape: str
    sums: str
    backend: str
    batch: int
    tokens: int
    milliseconds: float  # of a token of one layer
    processor_milliseconds: float  # of all cores, which other processes change less
    tokens_per_second: float
    error: float


@dataclass(frozen=True)
class CalibrationReport:
    """Results of `time_calibration`, and where it ran."""

    device: str
    cores: int
    results: list[CalibrationResult]


def time_calibration(
    shapes: Sequence[str],
    backend: str,
    seconds: float | None = None,
    seed: int = 0,
    progress: Callable[[str], object] = lambda label: None,
) -> CalibrationReport:
    """Time moments, rank scores and joint scores of random tokens of some shapes, with gradients.

    `backend` "cpu" computes in NumPy, "cuda" on arrays of CuPy. The time is the least of calls of `seconds` in all
    (default 1), after a first call that is not counted.
    """
    results = []
    for name in shapes:
        progress(f"timing {name}")
        results += _time_shape(name, SHAPES[name], backend, 1.0 if seconds is None else seconds, seed)
    device = device_name() if backend == "cuda" else "cpu"
    return CalibrationReport(device, available_cores(), results)


def _time_shape(name: str, layer: Layer, backend: str, seconds: float, seed: int) -> list[CalibrationResult]:
    batch, length = SIZES[backend]
    tokens = random_tokens(layer, batch, length, seed)
    grad = np.random.default_rng(seed).standard_normal(tokens.v.shape, np.float32)
    basis = SketchBasis.random(layer, min(RANK_MAX, layer.key_dim, layer.value_dim), seed)
    there, wait = _moved(backend)
    given, slope = Tokens(*map(there, tokens)), there(grad)
    made: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
        "moments": (lambda: Moments(layer), "state_gram", {}),
        "scores": (lambda: RankScores(basis), "error", {"grad": slope}),
        "joint scores": (lambda: JointScores(basis), "error", {"grad": slope}),
    }
    results = []
    for sums, (make, first, more) in made.items():
        own = make()
        own.update(*given, **more)
        wait()
        times: list[tuple[float, float]] = []
        while not times or sum(wall for wall, _ in times) < seconds:
            begun = time.perf_counter(), time.process_time()
            own.update(*given, **more)
            wait()
            times.append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
        few, exact, close = np.s_[:1, :CHECKED], make(), make()
        close.update(*given.at(few), **{key: x[few] for key, x in more.items()})
        wide: Any = (None if x is None else x[few].astype(np.float64) for x in tokens)
        exact.update(*wide, **{key: grad[few].astype(np.float64) for key in more})
        want = getattr(exact, first)
        error = float(np.linalg.norm(getattr(close, first) - want) / np.linalg.norm(want))
        wall, used = (1e3 * min(column) / (batch * length) for column in zip(*times, strict=True))
        results.append(CalibrationResult(name, sums, backend, batch, length, wall, used, 1e3 / wall, error))
    return results


def _moved(backend: str) -> tuple[Callable[[Any], Any], Callable[[], None]]:
    """Functions that bring an array to a backend's device, and wait for the device."""
    if backend == "cpu":
        return lambda x: x, lambda: None
    import cupy

    return (lambda x: None if x is None else cupy.asarray(x)), cupy.cuda.Device().synchronize


def calibration_table(report: CalibrationReport) -> Table:
    """Table of the results of `time_calibration`."""

    def row(r: CalibrationResult) -> list[str]:
        times = [f"{x:.4g}" for x in (r.milliseconds, r.processor_milliseconds)]
        return [r.shape, r.sums, *times, f"{r.tokens_per_second:,.0f}", scientific(r.error)]

    rows = ruled(report.results, lambda r: r.shape, row)
    where = report.device if report.device != "cpu" else f"{report.cores} cores"
    columns = ["shape", "sums", "ms", "ms of cores", "tokens/s", "error"]
    note = (
        "Of a token of one layer. Errors are relative to float64 tokens, of the states' moments or the reads' errors."
    )
    return Table(f"Calibration on {where}", columns, rows, note, words=2)
