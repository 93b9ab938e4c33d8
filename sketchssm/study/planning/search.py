"""The search: plans of every candidate with several budgets, their errors and costs, and the choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sketchssm.calibrate.plans import joint_plans, plan_layers, reduction_of
from sketchssm.calibrate.traces import Traces
from sketchssm.layer.checks import check_instance, check_items, check_number
from sketchssm.plans.plan import SketchPlan
from sketchssm.study.bench.results import step_bytes
from sketchssm.study.planning.candidate import Candidate
from sketchssm.study.planning.candidate import candidates as all_candidates
from sketchssm.study.planning.layers import Energies, TracedLayer
from sketchssm.study.systems import exact_systems, sketch_system

MEAN_RANKS = (2, 3, 4, 6, 8, 10, 12, 16)
REDUCTIONS = (7, 8, 9, 10, 12, 14, 16)

Measure = Callable[[Sequence[SketchPlan]], float]


@dataclass(frozen=True, eq=False)
class PlanPoint:
    """Plans of all layers with the same settings, and their cost and error.

    Parameters
    ----------
    candidate : Candidate
        Settings that all layers share.
    budget : float
        Mean rank, see `allocate_ranks`; with residuals the traffic reduction, see `allocate_joint`.
    plans : tuple of SketchPlan
        A plan for each layer.
    error : float
        Relative error of the outputs: root mean square over all heads, on the sequences that ranks were scored on.
        Weighted by the gradient of the loss if `PlanSearch.graded`.
    traffic : float
        Bytes that a step of all layers moves, relative to standard decode with float32 states. Unlike the byte
        model of `SketchPlan.reduction`, this includes the ring, inputs and outputs, which depend on the window.
    seconds : float or None
        Measured time of a step of all layers.
    """

    candidate: Candidate
    budget: float
    plans: tuple[SketchPlan, ...]
    error: float
    traffic: float
    seconds: float | None = None

    @property
    def cost(self) -> float:
        """The measured time if there is one, else the traffic."""
        return self.traffic if self.seconds is None else self.seconds

    def __str__(self) -> str:
        """Settings and budget."""
        return f"{self.candidate}, {budget_name(self.candidate, self.budget)}"


@dataclass(frozen=True, eq=False)
class PlanSearch:
    """Result of `autoplan`.

    Parameters
    ----------
    points : list of PlanPoint
        All points, in the order of the search.
    chosen : PlanPoint
        The point that meets the target.
    graded : bool
        Whether errors are weighted by the gradient of the loss.
    layers : list of TracedLayer
        The layers.
    """

    points: list[PlanPoint]
    chosen: PlanPoint
    graded: bool
    layers: list[TracedLayer]

    @property
    def frontier(self) -> list[PlanPoint]:
        """Points that no other beats in both cost and error, cheapest first."""
        return frontier(self.points)

    @property
    def plans(self) -> tuple[SketchPlan, ...]:
        """The chosen plans, one for each layer."""
        return self.chosen.plans

    def test_error(self, point: PlanPoint | None = None) -> float:
        """Relative error of a point's outputs on the test sequences, which the search has not used.

        Parameters
        ----------
        point : PlanPoint, optional
            Default: the chosen point.

        Returns
        -------
        float
            Root mean square over all heads, without gradients.
        """
        plans = (point or self.chosen).plans
        return _root_mean([layer.test_error(plan) for layer, plan in zip(self.layers, plans, strict=True)])


class UnmetTargetError(ValueError):
    """No point meets the target: `found` is the search, with the nearest point as the chosen one."""

    def __init__(self, message: str, found: PlanSearch) -> None:
        super().__init__(message)
        self.found = found


def autoplan(
    layers: Sequence[Traces],
    *,
    error: float | None = None,
    traffic: float | None = None,
    seconds: float | None = None,
    candidates: Iterable[Candidate] | None = None,
    mean_ranks: Sequence[float] = MEAN_RANKS,
    reductions: Sequence[float] = REDUCTIONS,
    time_of: Measure | None = None,
    backend: str = "auto",
    progress: Callable[[str], None] = lambda label: None,
) -> PlanSearch:
    """Choose map, format, window, ranks and residuals for all layers of a model together, by measurement.

    Every candidate is planned at every mean rank, with residuals at every reduction. Its plans decode the sequences
    that ranks were scored on, and the outputs are compared with float64.

    ===============  ================================================================  =====================
    target           chosen                                                            cost
    ===============  ================================================================  =====================
    ``error=``       the cheapest point with at most this relative error               bytes, or `time_of`
    ``traffic=``     the least error with at most this traffic                         bytes
    ``seconds=``     the least error within this time of a step of all layers          `time_of`
    ===============  ================================================================  =====================

    Parameters
    ----------
    layers : sequence of Traces
        Traces of each layer.
    error, traffic, seconds : float
        The target: exactly one of them.
    candidates : iterable of Candidate, optional
        Settings to try; default `sketchssm.study.planning.candidates()`.
    mean_ranks : sequence of float, default (2, 3, 4, 6, 8, 10, 12, 16)
        Budgets to try without residuals; those beyond K or V of a layer are left out.
    reductions : sequence of float, default (7, 8, 9, 10, 12, 14, 16)
        Budgets to try with residuals: times less state traffic than standard decode. Those that are beyond the lowest
        rank with the fewest bits are left out.
    time_of : callable, optional
        Measures the seconds of a step of all layers from their plans, for example `StepTimes`. It is called for
        points that no point of the same settings beats in both bytes and error.
    backend : {"auto", "reference", "cpu", "cuda"}, default "auto"
        Where to decode.
    progress : callable, optional
        Called with a label before each point.

    Returns
    -------
    PlanSearch
        All points, the frontier and the chosen plans.

    Raises
    ------
    ValueError
        If there are no layers, no budget is possible, the errors of a candidate can't be measured, not exactly one
        target is given, the target `seconds` lacks its measurement, or no point meets the target. The latter is an
        `UnmetTargetError`, whose attribute `found` is the search with the nearest point.
    """
    name, bound = _target(error=error, traffic=traffic, seconds=seconds)
    if time_of is not None and not callable(time_of):
        raise TypeError(f"time_of: expected a function of the plans, got {time_of!r}")
    if name == "seconds" and time_of is None:
        raise ValueError("time_of: expected a measurement of a step's time for the target seconds, got None")
    layers = check_items("layers", layers, "Traces")
    mean_ranks = check_items("mean_ranks", mean_ranks, "numbers")
    for rank in mean_ranks:
        check_number("mean_ranks", rank, "numbers of at least 1", lambda number: number >= 1)
    if not layers:
        raise ValueError("layers: expected at least one, got none")
    for traces in layers:
        check_instance("layers", traces, Traces)
    reductions = check_items("reductions", reductions, "numbers")
    for each in reductions:
        check_number("reductions", each, "finite numbers above 0", lambda number: 0 < number < np.inf)
    known = [TracedLayer(traces, backend) for traces in layers]
    graded = all(layer.graded for layer in known)
    tried = all_candidates() if candidates is None else check_items("candidates", candidates, "Candidates")
    for candidate in tried:
        check_instance("candidates", candidate, Candidate)
    if not tried:
        raise ValueError("candidates: expected at least one, got none")
    budgets = _budgets(known, tried, mean_ranks, reductions)
    points: list[PlanPoint] = []
    for candidate, some in zip(tried, budgets, strict=True):
        own = []
        for budget in some:
            progress(f"{candidate}, {budget_name(candidate, budget)}")
            plans = _plans(known, candidate, budget)
            lost = [layer.error(plan, graded) for layer, plan in zip(known, plans, strict=True)]
            own.append(PlanPoint(candidate, budget, plans, _root_mean(lost), _traffic(plans)))
        points += own if time_of is None else [replace(p, seconds=time_of(p.plans)) for p in frontier(own)]

    def reached(point: PlanPoint) -> float:
        return float(getattr(point, name))

    within = [point for point in points if reached(point) <= bound]
    best = (lambda p: (p.cost, p.error)) if name == "error" else (lambda p: (p.error, p.cost))
    chosen = min(within, key=best) if within else min(points, key=reached)
    result = PlanSearch(points, chosen, graded, known)
    if not within:
        least = f"the least is {reached(chosen):g} ({chosen})"
        raise UnmetTargetError(f"{name}: expected a target within reach, got {bound:g}; {least}", result)
    return result


def frontier(points: Iterable[PlanPoint]) -> list[PlanPoint]:
    """Points that no other beats in both cost and error, cheapest first."""
    found: list[PlanPoint] = []
    for point in sorted(points, key=lambda point: (point.cost, point.error)):
        if not found or point.error < found[-1].error:
            found.append(point)
    return found


def _target(**given: float | None) -> tuple[str, float]:
    """The one target that is given, by name."""
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) != 1:
        raise ValueError(f"target: expected one of {', '.join(given)}, got {', '.join(named) or 'none'}")
    ((name, value),) = named.items()
    check_number(name, value, "a finite number above 0", lambda number: 0 < number < np.inf)
    return name, float(value)


def budget_name(candidate: Candidate, budget: float) -> str:
    """Name a budget: ``mean rank 8`` or, with residuals, ``9x less traffic``."""
    return f"{budget:g}x less traffic" if candidate.residual_bits else f"mean rank {budget:g}"


def _budgets(
    layers: Sequence[TracedLayer], tried: Sequence[Candidate], mean_ranks: Sequence[float], reductions: Sequence[float]
) -> list[list[float]]:
    """Those of the budgets that are possible for each candidate."""
    most, shapes, found, bounds = min(layer.rank_limit for layer in layers), [layer.layer for layer in layers], [], {}
    for each in tried:
        if not each.residual_bits:
            bounds["mean_ranks"] = f"from 1 to {most} (K and V bound it), got {mean_ranks!r}"
            found.append([rank for rank in mean_ranks if rank <= most])
            continue
        bits = min(each.residual_bits)
        limit = reduction_of(shapes, each.window, 1, each.sketch_dtype, bits)
        bounds["reductions"] = f"up to {limit:.4g} (rank 1, {bits}-bit residuals), got {reductions!r}"
        found.append([reduction for reduction in reductions if reduction <= limit])
    if not any(found):
        name, bound = next(iter(bounds.items()))
        raise ValueError(f"{name}: expected at least one {bound}")
    return found


def _plans(layers: Sequence[TracedLayer], candidate: Candidate, budget: float) -> tuple[SketchPlan, ...]:
    """Plan all layers under one budget."""
    bases, scores = zip(*(layer.calibrated(candidate) for layer in layers), strict=True)
    if candidate.residual_bits:
        return tuple(joint_plans(bases, [layer.joint(candidate) for layer in layers], budget)[0])
    plans, _ = plan_layers(
        bases,
        scores,
        budget,
        map=candidate.map,
        sketch_dtype=candidate.sketch_dtype,
    )
    return tuple(plans)


def _traffic(plans: Sequence[SketchPlan]) -> float:
    """Bytes that a GPU moves in a step of all layers / bytes of standard decode."""
    sums = np.zeros(2)
    for plan in plans:
        systems = sketch_system(plan, "sketch"), exact_systems(plan.layer)[0]
        moved = [step_bytes(own, plan.layer, 1, plan.window, on_device=True) for own in systems]
        sums += [own.amortised(plan.window) for own in moved]
    return float(sums[0] / sums[1])


def _root_mean(energies: Sequence[Energies]) -> float:
    """Root of the mean over heads of relative squared errors, from sums ``(2, heads)`` of each layer."""
    lost, whole = np.concatenate(energies, axis=1)
    return float(np.sqrt(np.divide(lost, whole, out=np.zeros_like(lost), where=whole > 0).mean()))
