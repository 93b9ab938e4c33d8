"""Every system that an evaluation can measure, by family and setting, with the ablations of the sketch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial

from sketchssm.calibrate.traces import named_errors
from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.formats import FORMATS
from sketchssm.layer.recurrence import FULL_STATE, Layer, Tokens
from sketchssm.layer.residual import STEPS
from sketchssm.plans import traffic
from sketchssm.plans.basis import SketchBasis
from sketchssm.study.evaluate.baselines import (
    key_reduced_systems,
    pruned_systems,
    quantised_systems,
    read_only_systems,
)
from sketchssm.study.evaluate.study import Study
from sketchssm.study.systems import System, exact_systems, sketch_system

PIVOTS = (1, 2, 4, 8)
RIDGES = (0, 0.01, 0.1, 1)
WINDOWS = (4, 8, 16, 32)
RESIDUAL_RANKS = (2, 4, 8)

FULL_METHOD = "full-method"
"""The ablation with no part replaced: the base of all others."""


@dataclass(frozen=True)
class Entry:
    """A system at one setting, built when it is needed: `build` may have to calibrate first."""

    family: str
    setting: str
    window: int
    build: Callable[[], System]

    @property
    def name(self) -> str:
        """``family/setting``."""
        return f"{self.family}/{self.setting}"


def _exact(study: Study) -> list[Entry]:
    """Standard decode and replay, which read the full state at every token."""
    window = study.settings.window
    return _ready("exact", exact_systems(study.traces.layer, window), window)


def _rounded_states(study: Study) -> list[Entry]:
    """States of 16 bits: standard decode rounds them at every token, the sketch at one mean rank once a window."""
    found = []
    for state_dtype in ("bfloat16", "float16"):
        standard = replace(
            exact_systems(study.traces.layer, state_dtype=state_dtype)[0], name=f"standard-{state_dtype}"
        )
        found += _ready("rounded-states", [standard], study.settings.window)
        name = f"sketch-{state_dtype}"
        found.append(_planned(study, "rounded-states", name, study.mean_rank, state_dtype=state_dtype))
    return found


def _sketches(study: Study) -> list[Entry]:
    """Every map at every mean rank, and the study's map with a random basis."""
    make = partial(_planned, study, "sketch")
    found = [make(f"{map.name}-{rank}", rank, map=map) for map in study.settings.maps() for rank in study.ranks]
    return found + [make(f"random-basis-{rank}", rank, random=True) for rank in study.ranks]


def _narrow(study: Study) -> list[Entry]:
    """The study's map in every format of few bits, at every mean rank."""
    forms = [form for form in FORMATS.values() if form.scaled]
    make = partial(_planned, study, "narrow")
    return [make(f"{form.name}-{rank}", rank, sketch_dtype=form.name) for form in forms for rank in study.ranks]


def _ablations(study: Study) -> list[Entry]:
    """The sketch at one mean rank with one part replaced; its map is the study's, or the one that begins the name."""
    make = partial(_planned, study, "ablation", rank=study.mean_rank)
    graded = study.traces.score_part()[1] is not None
    methods: tuple[str, ...] = ("gradient", "error", "uniform") if graded else ("error", "uniform")
    found = [make(FULL_METHOD), make("random-basis", random=True)]
    found += [make(f"allocation-{method}", method=method) for method in methods]
    for map in study.settings.maps():
        if map.name == "lowrank":
            found += [make(f"{map.name}-pivots-{p}", map=replace(map, pivots=p)) for p in PIVOTS]
        if map.name in ("lowrank", "ridge"):
            found += [make(f"{map.name}-ridge-{r:g}", map=replace(map, ridge=r)) for r in RIDGES]
    return found + [make(f"window-{w}", window=w) for w in WINDOWS if _has_flushes(study, w)]


def _plan(study: Study) -> list[Entry]:
    """The plan that the caller gave, if any."""
    plan = study.plan
    return [] if plan is None else _ready("plan", [sketch_system(plan, "given")], plan.window)


def _residuals(study: Study) -> list[Entry]:
    """Adapted bases in int8 at a few uniform ranks, with residuals, where a full read moves more bytes."""
    map, window, layer = CoefficientMap("subspace"), study.settings.window, study.traces.layer
    make = partial(_planned, study, "residual", map=map, method="uniform", sketch_dtype="int8")

    def read(rank: int, bits: int = 0) -> float:
        shape = layer.kind, layer.key_dim, layer.value_dim
        return float(traffic.sketch_read(*shape, rank, window, map, sketch_dtype="int8", residual_bits=bits))

    ranks = [rank for rank in RESIDUAL_RANKS if rank <= min(layer.key_dim, layer.value_dim)]
    pairs = [(rank, bits) for rank in ranks for bits in STEPS if read(rank, bits) < read(FULL_STATE)]
    return [make(f"{rank}+{bits}-bit", rank, residual_bits=bits) for rank, bits in pairs]


def _baseline(family: str, make: Callable[[Layer, Tokens, int], list[System]]) -> Callable[[Study], list[Entry]]:
    """Settings of a baseline, calibrated on the calibration sequences if needed."""

    def listed(study: Study) -> list[Entry]:
        window = study.settings.window
        return _ready(family, make(study.traces.layer, study.traces.calib, window), window)

    return listed


FAMILIES: dict[str, Callable[[Study], list[Entry]]] = {
    "exact": _exact,
    "rounded-states": _rounded_states,
    "sketch": _sketches,
    "narrow": _narrow,
    "residual": _residuals,
    "quantised": _baseline("quantised", quantised_systems),
    "pruned": _baseline("pruned", pruned_systems),
    "key-reduced": _baseline("key-reduced", key_reduced_systems),
    "read-only": _baseline("read-only", read_only_systems),
    "ablation": _ablations,
    "plan": _plan,
}
"""The systems of each family on one layer, in the order of tables."""


def entries(study: Study, names: Sequence[str] = ()) -> list[Entry]:
    """List the systems of a layer by families; those that the kind of the layer excludes are left out.

    `names` are families, or ``family/setting`` with ``*`` and ``?`` as wildcards; none for all.
    """
    prefixes = [name.partition("/")[0] for name in names] or ["*"]
    # listing a baseline may calibrate it
    families = [family for family in FAMILIES if any(fnmatchcase(family, prefix) for prefix in prefixes)]
    listed = [entry for family in families for entry in FAMILIES[family](study)]
    return [entry for entry in listed if not names or any(_fits(entry, name) for name in names)]


def select(studies: Sequence[Study], names: Sequence[str]) -> list[list[Entry]]:
    """List the systems of several layers, with every name (see `entries`) checked.

    ValueError if a name fits no system of any layer. The message names systems of the same setting or, if there are
    none, the systems of the same family, or else all systems.
    """
    chosen = []
    for study in studies:
        with named_errors(study.traces):
            chosen.append(entries(study, names))
    for name in names:
        if not any(_fits(entry, name) for own in chosen for entry in own):
            known: dict[str, dict[str, None]] = {}
            for entry in (entry for study in studies for entry in entries(study)):
                known.setdefault(entry.family, {})[entry.setting] = None
            raise ValueError(
                "systems: expected families, or systems such as exact/standard and sketch/ridge-*, got "
                f"{name!r}; {_nearest(name, known)}"
            )
    return chosen


def _ready(family: str, systems: Iterable[System], window: int) -> list[Entry]:
    """Entries of systems that exist already, named by their names in lower case with dashes."""

    def entry(system: System) -> Entry:
        setting = re.sub(r"[^a-z0-9.]+", "-", system.name.lower()).strip("-")
        return Entry(family, setting, window, lambda: system)

    return [entry(system) for system in systems]


def _has_flushes(study: Study, window: int) -> bool:
    """Whether the sequences are long enough for two flushes."""
    return 2 * window <= min(study.length, study.calibration_length)


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
    state_dtype: str = "float32",
    sketch_dtype: str | None = None,
    residual_bits: int | None = None,
) -> Entry:
    """A sketch with the settings of the study except those given."""
    window = window or study.settings.window

    def build() -> System:
        layer = study.calibrated(window)
        basis = layer.basis
        if random:
            basis = SketchBasis.random(basis.layer, basis.rank_max, study.seed, window)
        settings = study.settings
        own, form = map or settings.map, sketch_dtype or settings.sketch_dtype
        bits = residual_bits
        if bits is None:
            bits = settings.residual_bits if own == settings.map else 0
        plan = layer.plan(rank, own, method or settings.method, basis, form, bits)
        return sketch_system(plan, name, state_dtype=state_dtype)

    return Entry(family, name, window, build)


def _nearest(name: str, known: Mapping[str, Collection[str]]) -> str:
    """Describe the systems that a wrong name may mean, by the settings of each family."""
    family, _, setting = name.rpartition("/")
    meant = [f"{own}/{setting}" for own, settings in known.items() if setting in settings]
    if meant:
        return f"did you mean {' or '.join(meant)}?"
    near = {family: known[family]} if family in known else known
    return "there are " + "; ".join(f"{own} ({', '.join(settings)})" for own, settings in near.items())


def _fits(entry: Entry, name: str) -> bool:
    return name == entry.family or fnmatchcase(entry.name, name)
