"""Measure one decode system on one layer's test sequences: errors per head, and how they go on over tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.evaluate.energy import retained_energy
from sketchssm.evaluate.registry import Entry, random_basis
from sketchssm.evaluate.study import Study
from sketchssm.interop import to_host
from sketchssm.recurrence import Tokens
from sketchssm.reference.recurrence import Array

__all__ = ["Measurement", "RankCurve", "measure", "rank_curves", "rounded"]

DIGITS = 6
"""Significant digits that results keep: beyond what rounding in another order of summation changes."""


@dataclass(frozen=True)
class Measurement:
    """What a system did on a layer's test sequences; errors are relative norms against float64.

    Attributes
    ----------
    family, setting : str
        The system's name in the registry.
    reduction : float
        Traffic reduction relative to standard decoding.
    backend : str
        Where it ran.
    output_error, state_error : float
        Of all outputs, and of the states after the last token (of windowed systems: after the last flush).
    retained : float
        Retained energy of the state reads, mean over heads: 1 less the error's energy over the energy of the state
        reads between flushes. Exactly what a sketch retains; negative where an error exceeds what is read.
    head_output_error, head_state_error, head_retained : list of float
        The same per head.
    drift : dict of str to list
        ``tokens``: points of the curves. ``output_error``: of the outputs since the point before.
        ``state_error``: of the states at the point.
    ranks : list of int or None
        Ranks of a sketch, -1 for a full read.
    objective : float or None
        Gradient-weighted score of the ranks, on the sequences that ranks were scored on; None without gradients.
    """

    family: str
    setting: str
    reduction: float
    backend: str
    output_error: float
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
        """Return what JSON holds of it, numbers rounded to what repeats."""
        return rounded(asdict(self))


@dataclass(frozen=True)
class RankCurve:
    """What a coefficient map retains at each rank, all heads at that rank.

    Attributes
    ----------
    basis, map : str
        "calibrated" or "random", and the map.
    ranks : list of int
        Ranks.
    retained : list of list of float, (heads, ranks)
        Retained energy of the state reads, in float64.
    reduction : list of float, (ranks,)
        Traffic reduction.
    """

    basis: str
    map: str
    ranks: list[int]
    retained: list[list[float]]
    reduction: list[float]

    def plain(self) -> dict[str, Any]:
        """Return what JSON holds of it, numbers rounded to what repeats."""
        return rounded(asdict(self))


def measure(entry: Entry, study: Study, backend: str = "auto") -> Measurement:
    """Decode the test sequences with one system and judge it by the float64 recurrence.

    Parameters
    ----------
    entry : Entry
        The system, from `registry.entries`.
    study : Study
        The layer.
    backend : str, default "auto"
        Where to run.

    Returns
    -------
    Measurement
        Errors and traffic.
    """
    system = entry.build()
    head = system.build(study.traces.test.v.shape[0], backend)
    if head.backend == "cuda":
        head.warmup("float32")
    lost, energy, states = [], [], []
    start = 0
    for stop in study.checkpoints:
        tokens = Tokens(*(None if x is None else x[:, start:stop] for x in study.traces.test))
        right = study.output[:, start:stop]
        lost.append(np.square(head.step(*tokens) - right).sum(axis=(0, 3)))
        energy.append(np.square(right).sum(axis=(0, 3)))
        exact = study.state(stop - int(head.position[0]))
        away = to_host(head.state, "state") - exact
        states.append([np.square(x).sum(axis=(0, 2, 3)) for x in (away, exact)])
        start = stop
    sums = np.array([[part.sum(axis=0) for part in parts] for parts in (lost, energy)])  # (2, points, heads)
    error, size = sums.sum(axis=1)
    away, whole = np.array(states).swapaxes(0, 1)
    cut = study.length // entry.window * entry.window  # reads are counted over whole windows
    reads = study.read_energy(entry.window).sum(axis=0)
    missed = np.concatenate(lost)[:cut].sum(axis=0)
    retained = 1.0 - np.divide(missed, reads, out=np.zeros_like(missed), where=reads > 0)
    plan = system.plan
    return Measurement(
        entry.family,
        entry.setting,
        float(system.reduction),
        head.backend,
        float(_ratio(error.sum(), size.sum())),
        float(_ratio(away[-1].sum(), whole[-1].sum())),
        float(retained.mean()),
        _ratio(error, size).tolist(),
        _ratio(away[-1], whole[-1]).tolist(),
        retained.tolist(),
        {
            "tokens": study.checkpoints,
            "output_error": _ratio(*sums.sum(axis=2)).tolist(),
            "state_error": _ratio(away.sum(axis=1), whole.sum(axis=1)).tolist(),
        },
        None if plan is None else plan.ranks.tolist(),
        None if plan is None else entry.objective(plan.ranks),
    )


def rank_curves(study: Study) -> list[RankCurve]:
    """Measure in float64 what each map retains of the test sequences' state reads at each rank.

    Parameters
    ----------
    study : Study
        The layer.

    Returns
    -------
    list of RankCurve
        One per map with the calibrated basis, and the exact map with a random one.
    """
    basis = study.calibrated().basis
    ranks = [rank for rank in study.ranks if rank <= basis.rank_max]
    found = retained_energy(basis, study.windows, ranks, study.settings.maps())
    found += retained_energy(random_basis(study), study.windows, ranks, ["exact"], "random")
    return [RankCurve(e.basis, e.map.name, ranks, e.retained.tolist(), e.reduction.tolist()) for e in found]


def rounded(value: Any) -> Any:
    """Round all floating-point numbers in nested lists and dictionaries; None for those that are not finite.

    Parameters
    ----------
    value : object
        What JSON knows.

    Returns
    -------
    object
        The same with rounded numbers.
    """
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None
    return value


def _ratio(error: npt.ArrayLike, size: npt.ArrayLike) -> Array:
    """Relative norms from sums of squares; infinity for an error where right is zero."""
    lost, whole = np.asarray(error), np.asarray(size)
    return np.sqrt(np.divide(lost, whole, out=np.where(lost > 0, np.inf, 0.0), where=whole > 0))
