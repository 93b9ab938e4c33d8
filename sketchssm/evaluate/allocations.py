"""Rank allocation methods against each other, at one budget of read traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sketchssm.calibrate.allocation import METHODS
from sketchssm.coefficients import DEFAULT_MAP, CoefficientMap
from sketchssm.evaluate.calibrated import Calibrated, allocate
from sketchssm.evaluate.energy import plan_energy
from sketchssm.evaluate.windows import Windows
from sketchssm.plan import SketchPlan
from sketchssm.recurrence import DENSE

__all__ = ["AllocationResult", "compare_allocations"]


@dataclass(frozen=True)
class AllocationResult:
    """What one allocation method made of a budget.

    Attributes
    ----------
    method : str
        Allocation method.
    ranks : list of ndarray, (heads,)
        Ranks of each layer.
    reduction : float
        Traffic reduction.
    error : float
        Share of the state-read outputs' energy lost on test windows, through the plan's own map, heads and layers
        added up.
    objective : float or None
        Gradient-weighted objective: the sum of ``J(rank)`` over heads, on the sequences that ranks were scored on;
        None without gradients.
    """

    method: str
    ranks: list[npt.NDArray[np.int64]]
    reduction: float
    error: float
    objective: float | None


def compare_allocations(
    layers: Sequence[Calibrated],
    windows: Sequence[Windows],
    mean_rank: float,
    *,
    map: str | CoefficientMap = DEFAULT_MAP,
    methods: Sequence[str] | None = None,
) -> list[AllocationResult]:
    """Allocate one budget by several methods and measure what the plans lose.

    Parameters
    ----------
    layers : sequence of Calibrated
        Layers that share the budget.
    windows : sequence of Windows
        Test windows of each layer.
    mean_rank : float
        The budget: what all heads would read at this rank.
    map : CoefficientMap or str, default "ridge"
        Coefficient map.
    methods : sequence of str, optional
        Methods to compare; default all that the layers have data for.

    Returns
    -------
    list of AllocationResult
        One per method.
    """
    graded = all(layer.default_method == "gradient" for layer in layers)
    if methods is None:
        methods = METHODS if graded else ("error", "uniform")
    results = []
    for method in methods:
        allocation = allocate(layers, mean_rank, map=map, method=method)
        lost = energy = objective = 0.0
        for layer, ranks, held_out in zip(layers, allocation.ranks, windows, strict=True):
            plan = SketchPlan(layer.basis, ranks, layer.basis.window, map)
            measured = plan_energy(plan, held_out)
            lost += float(measured.lost.sum())
            energy += float(measured.energy.sum())
            if graded:
                scores = layer.scores.objective("gradient")
                sketched = ranks != DENSE  # a full read loses nothing
                objective += float(scores[np.flatnonzero(sketched), ranks[sketched]].sum())
        results.append(
            AllocationResult(
                method,
                list(allocation.ranks),
                allocation.traffic.reduction,
                lost / energy if energy else 0.0,
                objective if graded else None,
            )
        )
    return results
