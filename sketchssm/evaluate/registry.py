"""Every system that an evaluation knows, by family and setting, and the ablations of the sketch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial

import numpy as np
import numpy.typing as npt

from sketchssm.calibrate.allocation import METHODS
from sketchssm.calibrate.basis import SketchBasis
from sketchssm.coefficients import CoefficientMap
from sketchssm.evaluate.baselines import (
    key_reduced_systems,
    pruned_systems,
    quantised_systems,
    read_only_systems,
)
from sketchssm.evaluate.study import Study
from sketchssm.evaluate.systems import System, exact_systems, sketch_system
from sketchssm.plan import SketchPlan
from sketchssm.recurrence import DENSE, Layer, Tokens

__all__ = ["FAMILIES", "FULL", "Entry", "entries", "random_basis", "select", "series"]

PIVOTS = (1, 2, 4, 8)
RIDGES = (0, 0.01, 0.1, 1)
WINDOWS = (4, 8, 16, 32)

FULL = "full-method"
"""The ablation that replaces nothing: what the others are compared with."""


@dataclass(frozen=True)
class Entry:
    """A system at one setting, built when it is needed.

    Attributes
    ----------
    family, setting : str
        Its name.
    window : int
        Tokens from one flush to the next.
    build : callable
        Makes the `System`; may have to calibrate first.
    objective : callable
        Gradient-weighted score of a table of ranks, None without gradients.
    """

    family: str
    setting: str
    window: int
    build: Callable[[], System]
    objective: Callable[[npt.NDArray[np.int64]], float | None] = lambda ranks: None

    @property
    def name(self) -> str:
        """``family/setting``."""
        return f"{self.family}/{self.setting}"


@dataclass(frozen=True)
class Family:
    """A family of systems: what it is, and its settings on one layer."""

    what: str
    list: Callable[[Study], Iterable[Entry]]


def _exact(study: Study) -> list[Entry]:
    window = study.settings.window
    return _ready("exact", exact_systems(study.traces.layer, window), window)


def _baseline(family: str, make: Callable[[Layer, Tokens, int], list[System]]) -> Callable[[Study], list[Entry]]:
    """Settings of a baseline, which may look at the calibration sequences."""

    def listed(study: Study) -> list[Entry]:
        window = study.settings.window
        return _ready(family, make(study.traces.layer, study.traces.calib, window), window)

    return listed


def _quantised(layer: Layer, tokens: Tokens, window: int) -> list[System]:
    return quantised_systems(layer, tokens, window, error_feedback=(False, True))


def _sketches(study: Study) -> list[Entry]:
    """Every map at every mean rank."""
    maps = study.settings.maps()
    return [_planned(study, "sketch", f"{map.name}-{rank}", rank, map=map) for map in maps for rank in study.ranks]


def _ablations(study: Study) -> list[Entry]:
    """What each part of the method is worth, at one mean rank and, unless it says so, with the map in use."""
    make = partial(_planned, study, "ablation", rank=study.mean_rank)
    graded = study.traces.score_part()[1] is not None
    methods = METHODS if graded else ("error", "uniform")
    found = [make(FULL), make("random-basis", random=True), make("offline-map", same_ranks="offline")]
    found += [make(f"allocation-{method}", method=method) for method in methods]
    for map in study.settings.maps():
        if map.name in ("lowrank", "prior"):
            found += [make(f"{map.name}-pivots-{p}", map=replace(map, pivots=p)) for p in PIVOTS]
        if map.name in ("lowrank", "ridge"):
            found += [make(f"{map.name}-ridge-{r:g}", map=replace(map, ridge=r)) for r in RIDGES]
    tokens = min(study.length, study.calibration_length)
    found += [make(f"window-{w}", window=w) for w in WINDOWS if 2 * w <= tokens]
    return found


def _plans(study: Study) -> list[Entry]:
    if study.plan is None:
        return []
    return _ready("plan", [sketch_system(study.plan, "given")], study.plan.window)


FAMILIES = {
    "exact": Family("the full state, read at every token: standard decoding and buffered replay", _exact),
    "sketch": Family("exact states, read through sketches, by coefficient map and mean rank", _sketches),
    "quantised": Family("the state itself quantised, at every token", _baseline("quantised", _quantised)),
    "pruned": Family("channels of the state pruned away", _baseline("pruned", pruned_systems)),
    "key-reduced": Family("key channels of the state reduced", _baseline("key-reduced", key_reduced_systems)),
    "read-only": Family("exact states, read through a copy", _baseline("read-only", read_only_systems)),
    "ablation": Family("the sketch with one part replaced, at one mean rank", _ablations),
    "plan": Family("the plan of --plan", _plans),
}
"""Families by name, in the order of tables."""


def entries(study: Study) -> list[Entry]:
    """List all systems that a layer's kind allows.

    Parameters
    ----------
    study : Study
        The layer.

    Returns
    -------
    list of Entry
        In the order of the families.
    """
    return [entry for family in FAMILIES.values() for entry in family.list(study)]


def select(listed: Sequence[Sequence[Entry]], names: Sequence[str]) -> list[list[Entry]]:
    """Pick systems by name.

    Parameters
    ----------
    listed : sequence of sequence of Entry
        What there is, for each layer.
    names : sequence of str
        Families, or ``family/setting`` with ``*`` and ``?`` as wildcards; none for all.

    Returns
    -------
    list of list of Entry
        What is picked, for each layer.

    Raises
    ------
    ValueError
        If a name fits nothing, listing all that there is.
    """
    for name in names:
        if not any(_fits(entry, name) for own in listed for entry in own):
            raise ValueError(
                f"systems: expected names of families or systems, got {name!r}; there are {_known(listed)}"
            )
    return [[entry for entry in own if not names or any(_fits(entry, name) for name in names)] for own in listed]


def series(name: str) -> str:
    """Name of the curve that a system belongs to: its own without the one number that is varied.

    Parameters
    ----------
    name : str
        ``family/setting``.

    Returns
    -------
    str
        Such as ``sketch/ridge`` for ``sketch/ridge-8``.
    """
    family, _, setting = name.partition("/")
    return f"{family}/{re.sub(r'(^|-)[0-9.]+(-bits?)?(?=-|$)', '', setting).strip('-')}"


def random_basis(study: Study) -> SketchBasis:
    """Draw the random orthonormal basis that calibration is judged against.

    Parameters
    ----------
    study : Study
        The layer.

    Returns
    -------
    SketchBasis
        Of the calibrated basis's size, with its mean state metric for the maps that need one.
    """
    basis = study.calibrated().basis
    return SketchBasis.random(study.traces.layer, basis.rank_max, study.seed, basis.e0, basis.window)


def _ready(family: str, systems: Iterable[System], window: int) -> list[Entry]:
    """Entries of systems that need no calibration by the study, named by their names in words."""
    return [
        Entry(family, re.sub(r"[^a-z0-9.]+", "-", system.name.lower()).strip("-"), window, partial(_same, system))
        for system in systems
    ]


def _same(system: System) -> System:
    return system


def _planned(
    study: Study,
    family: str,
    name: str,
    rank: float,
    *,
    map: CoefficientMap | None = None,
    method: str | None = None,
    window: int | None = None,
    random: bool = False,
    same_ranks: str | None = None,
) -> Entry:
    """A sketch with the study's settings but for what is named; `same_ranks` is a map to read at the base's ranks."""
    window = window or study.settings.window

    def build() -> System:
        layer = study.calibrated(window)
        plan = layer.plan(
            rank,
            map=map or study.settings.map,
            method=method or study.method,
            basis=random_basis(study) if random else None,
        )
        if same_ranks:
            plan = SketchPlan(layer.basis, plan.ranks, window, same_ranks)
        return sketch_system(plan, name)

    def objective(ranks: npt.NDArray[np.int64]) -> float | None:
        scores = study.calibrated(window).scores
        if not scores.graded:
            return None
        sketched = np.flatnonzero(ranks != DENSE)  # a full read loses nothing
        return float(scores.objective("gradient")[sketched, ranks[sketched]].sum())

    return Entry(family, name, window, build, objective)


def _fits(entry: Entry, name: str) -> bool:
    return name == entry.family or fnmatchcase(entry.name, name)


def _known(listed: Sequence[Sequence[Entry]]) -> str:
    """All families with their settings, each once."""
    settings: dict[str, dict[str, None]] = {}
    for own in listed:
        for entry in own:
            settings.setdefault(entry.family, {})[entry.setting] = None
    return "; ".join(f"{family} ({', '.join(names)})" for family, names in settings.items())
