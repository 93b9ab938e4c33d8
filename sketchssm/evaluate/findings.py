"""What an evaluation says: the headline, what each part of the method is worth, what grows over tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sketchssm.evaluate.evaluation import LayerResults
from sketchssm.evaluate.ideal import CLOSE
from sketchssm.evaluate.measure import Measurement
from sketchssm.evaluate.registry import FULL, series
from sketchssm.recurrence import ROUNDING

__all__ = [
    "BAND",
    "RIVALS",
    "Ablation",
    "Growth",
    "Headline",
    "ablations",
    "growth",
    "headline",
    "last_over_first",
    "own_sketches",
    "sketches_and_copies",
    "times",
]

BAND = (9.0, 11.0)
"""Traffic reductions at which the paper's sketches keep their accuracy."""

LEAST = 4.0
"""Traffic reduction from which on quantised and pruned states are compared with those sketches."""

RIVALS = ("quantised", "pruned", "key-reduced")
"""Families whose states are themselves compressed."""

GROWS = 1.25
"""An error whose last quarter is this many times its first one grows; one that is as many times less shrinks."""


class Headline(NamedTuple):
    """The sketches within `BAND` against the best compressed state at `LEAST` or more, on one layer."""

    layer: str
    sketches: list[Measurement]
    rival: Measurement | None

    @property
    def worst(self) -> Measurement | None:
        """The sketch of these with the largest error."""
        return max(self.sketches, key=lambda s: s.output_error, default=None)

    @property
    def best(self) -> Measurement | None:
        """The sketch of these with the smallest error."""
        return min(self.sketches, key=lambda s: s.output_error, default=None)

    @property
    def margin(self) -> float | None:
        """How many times less error the worst of the sketches has than the best rival; None without either."""
        worst = self.worst
        return None if worst is None or self.rival is None else times(self.rival.output_error, worst.output_error)


class Ablation(NamedTuple):
    """What replacing one part of the base sketch costs: ``error`` times its output error, ``retained`` lost."""

    layer: str
    setting: str
    reduction: float
    error: float
    retained: float


class Growth(NamedTuple):
    """How a system's errors go on over tokens: last quarter of its curve over the first; None where exact."""

    layer: str
    name: str
    output: float | None
    state: float | None


def headline(layer: LayerResults) -> Headline:
    """Compare the sketch with compressed states.

    Parameters
    ----------
    layer : LayerResults
        Results of one layer.

    Returns
    -------
    Headline
        Sketches of the map in use, the best rival.
    """
    sketches = [s for s in own_sketches(layer) if BAND[0] <= s.reduction <= BAND[1]]
    # a quarter of the state pruned away is four times less to within rounding
    rivals = [s for s in layer.systems if s.family in RIVALS and s.reduction >= LEAST * (1 - 1e-6)]
    return Headline(layer.name, sketches, min(rivals, key=lambda s: s.output_error, default=None))


def ablations(layer: LayerResults) -> list[Ablation]:
    """Compare every ablation with the base sketch.

    Parameters
    ----------
    layer : LayerResults
        Results of one layer.

    Returns
    -------
    list of Ablation
        Empty where the base was not measured.
    """
    base = layer.find(f"ablation/{FULL}")
    if base is None:
        return []
    return [
        Ablation(
            layer.name, s.setting, s.reduction, times(s.output_error, base.output_error), base.retained - s.retained
        )
        for s in layer.systems
        if s.family == "ablation" and s is not base
    ]


def growth(layer: LayerResults, systems: Sequence[Measurement]) -> list[Growth]:
    """Say how errors go on over tokens.

    Parameters
    ----------
    layer : LayerResults
        Results of one layer.
    systems : sequence of Measurement
        Which of its systems.

    Returns
    -------
    list of Growth
        One per system; empty for curves of fewer than four points.
    """
    return [
        Growth(layer.name, s.name, last_over_first(s.drift["output_error"]), last_over_first(s.drift["state_error"]))
        for s in systems
        if len(s.drift["tokens"]) >= 4
    ]


def own_sketches(layer: LayerResults) -> list[Measurement]:
    """List the sketches of the map in use.

    Parameters
    ----------
    layer : LayerResults
        Results of one layer.

    Returns
    -------
    list of Measurement
        At all mean ranks.
    """
    return [s for s in layer.systems if series(s.name) == f"sketch/{layer.map}"]


def sketches_and_copies(layer: LayerResults) -> list[tuple[Measurement, Measurement]]:
    """Pair every read-only variant with the best sketch of the map in use that moves no more.

    Parameters
    ----------
    layer : LayerResults
        Results of one layer.

    Returns
    -------
    list of tuple of Measurement
        Sketch and variant; variants that no sketch is as cheap as are left out.
    """
    pairs = []
    for copy in (s for s in layer.systems if s.family == "read-only"):
        sketches = [s for s in own_sketches(layer) if s.reduction >= copy.reduction * CLOSE]
        if sketches:
            pairs.append((min(sketches, key=lambda s: s.output_error), copy))
    return pairs


def times(error: float, by: float) -> float:
    """Say how many times one error is another, either of which may be infinite.

    Parameters
    ----------
    error, by : float
        Errors.

    Returns
    -------
    float
        ``error / by``; 1 for equal ones.
    """
    if by == 0:
        return math.inf if error else 1.0
    return error / by if math.isfinite(by) else 0.0 if math.isfinite(error) else 1.0


def last_over_first(curve: Sequence[float]) -> float | None:
    """Say how an error goes on over tokens.

    Parameters
    ----------
    curve : sequence of float
        At least four points.

    Returns
    -------
    float or None
        Mean of the last quarter over that of the first; None where it is exact to float32 rounding.
    """
    points = np.array(curve)
    quarter = len(points) // 4
    if points.max() < ROUNDING:
        return None
    return times(float(points[-quarter:].mean()), float(points[:quarter].mean()))
