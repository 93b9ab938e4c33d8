"""Measure one decode system on the test sequences of one layer: errors per head, and errors over tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.arrays.interop import to_host
from sketchssm.reference.recurrence import Array
from sketchssm.study.evaluate.registry import Entry
from sketchssm.study.evaluate.study import Study

ALLOCATED = ("sketch", "ablation")
"""Families whose ranks are allocated."""

DIGITS = 6
"""Significant digits of results; the order of summation does not change them."""


@dataclass(frozen=True)
class Measurement:
    """Errors and traffic of a system on the test sequences of a layer; errors are relative norms against float64.

    `family` and `setting` name the system. `flush_error` is the largest error of the token of a flush, over sequences
    and flushes: systems with windows read the exact state there. `state_error` is that of the states after the last
    token (of systems with windows: after the last flush).

    `retained` is the retained energy of all heads' state reads: 1 minus the error's energy over the energy of the
    state reads between flushes. For a sketch, the share of the energy that it retains. Negative if the error has more
    energy than the reads. ``head_...`` are the same per head.

    `drift` has points of curves: ``tokens``, ``output_error`` since the last point and ``state_error`` at the point.
    `ranks` are those of a sketch, -1 for a full read. `objective` is the gradient-weighted score of the ranks on the
    sequences for rank scores; None without gradients, and for systems without allocated ranks.
    """

    family: str
    setting: str
    reduction: float
    backend: str
    output_error: float
    flush_error: float
    state_error: float
    retained: float
    head_output_error: list[float]
    head_state_error: list[float]
    head_retained: list[float]
    drift: dict[str, list[Any]]
    ranks: list[int] | None = None
    objective: float | None = None

    @property
    def name(self) -> str:
        """``family/setting``."""
        return f"{self.family}/{self.setting}"

    def plain(self) -> dict[str, Any]:
        """Return the measurement as JSON holds it, numbers rounded to the digits that repeat."""
        return rounded(asdict(self))


def measure(entry: Entry, study: Study, backend: str = "auto") -> Measurement:
    """Decode the test sequences with one system and compare the outputs with the float64 recurrence."""
    system, window = entry.build(), entry.window
    test = study.traces.test
    head = system.build(test.v.shape[0], backend)
    if head.backend == "cuda":
        head.warmup("float32")
    outputs, states = [], []
    for start, stop in pairwise([0, *study.checkpoints]):
        outputs.append(head.step(*test.at(np.s_[:, start:stop])))
        exact = study.state(stop - int(head.position[0]))
        away = to_host(head.state, "state") - exact
        states.append([np.square(x).sum(axis=(0, 2, 3)) for x in (away, exact)])
    # sums of squares: (sequences, tokens, heads) of the outputs, (points, heads) of the states
    lost = np.square(np.concatenate(outputs, axis=1) - study.output).sum(axis=-1)
    size = np.square(study.output).sum(axis=-1)
    state_lost, state_size = np.moveaxis(np.array(states), 1, 0)
    points = [0, *study.checkpoints[:-1]]
    every = window if system.plan is None else system.plan.window
    flushes = slice(every - 1, None, every)
    whole = study.length // window * window  # reads are counted over whole windows
    reads = study.read_energy(window).sum(axis=0)
    missed = lost[:, :whole].sum(axis=(0, 1))
    retained = 1.0 - np.divide(missed, reads, out=np.zeros_like(missed), where=reads > 0)
    ranks = None if system.plan is None else system.plan.ranks
    return Measurement(
        entry.family,
        entry.setting,
        float(system.reduction),
        head.backend,
        output_error=float(_ratio(lost.sum(), size.sum())),
        flush_error=float(_ratio(*(x[:, flushes].sum(axis=-1) for x in (lost, size))).max()),
        state_error=float(_ratio(state_lost[-1].sum(), state_size[-1].sum())),
        retained=float(1.0 - missed.sum() / (reads.sum() or 1.0)),
        head_output_error=_ratio(*(x.sum(axis=(0, 1)) for x in (lost, size))).tolist(),
        head_state_error=_ratio(state_lost[-1], state_size[-1]).tolist(),
        head_retained=retained.tolist(),
        drift={
            "tokens": study.checkpoints,
            "output_error": _ratio(*(np.add.reduceat(x.sum(axis=(0, 2)), points) for x in (lost, size))).tolist(),
            "state_error": _ratio(state_lost.sum(axis=1), state_size.sum(axis=1)).tolist(),
        },
        ranks=None if ranks is None else ranks.tolist(),
        objective=None if ranks is None or entry.family not in ALLOCATED else study.objective(ranks, window),
    )


def relative_error(have: npt.ArrayLike, want: npt.ArrayLike) -> float:
    """Norm of the error over the norm of the reference; infinity for an error if the reference is zero."""
    away = np.asarray(have, dtype=np.float64) - np.asarray(want, dtype=np.float64)
    return float(_ratio(np.square(away).sum(), np.square(np.asarray(want, dtype=np.float64)).sum()))


def rounded(value: Any) -> Any:
    """Round all floating-point numbers in nested lists and dictionaries; None for those that are not finite."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None
    return value


def _ratio(error: npt.ArrayLike, size: npt.ArrayLike) -> Array:
    """Relative norms from sums of squares; infinity for an error if the reference is zero."""
    lost, whole = np.asarray(error), np.asarray(size)
    return np.sqrt(np.divide(lost, whole, out=np.where(lost > 0, np.inf, 0.0), where=whole > 0))
