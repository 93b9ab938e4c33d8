"""Plans from traces: a basis from some sequences, rank scores from others, plans of one or more layers from both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.calibrate.allocation import METHODS, Allocation, allocate_ranks, check_uniform
from sketchssm.calibrate.basis import fit_basis
from sketchssm.calibrate.joint_allocation import MAP, allocate_joint, check_reduction
from sketchssm.calibrate.joint_scores import JointScores
from sketchssm.calibrate.moments import Moments
from sketchssm.calibrate.scores import RankScores
from sketchssm.calibrate.traces import Traces
from sketchssm.cuda import MAX_RANK
from sketchssm.layer.checks import check_choice, check_instance, check_items, check_size
from sketchssm.layer.coefficients import DEFAULT_MAP, MAPS, CoefficientMap
from sketchssm.layer.formats import DEFAULT_FORMAT, SketchFormat
from sketchssm.layer.recurrence import FULL_STATE, Layer, check_window
from sketchssm.layer.residual import STEPS, check_residual_bits
from sketchssm.plans import traffic
from sketchssm.plans.basis import SketchBasis
from sketchssm.plans.plan import SketchPlan


@dataclass(frozen=True)
class Settings:
    """Settings of plans, as in the options of `sketchssm calibrate`; ValueError if the format is unknown."""

    window: int = 16
    map: CoefficientMap = field(default_factory=CoefficientMap)
    method: str | None = None  # see `allocate_ranks`; None: "gradient" if the traces have gradients, else "error"
    sketch_dtype: str = DEFAULT_FORMAT
    residual_bits: int = 0

    def __post_init__(self) -> None:
        SketchFormat.of(self.sketch_dtype)
        check_residual_bits(self.residual_bits)

    def maps(self) -> list[CoefficientMap]:
        """Return every map: `map` with its parameters, the others with their defaults."""
        return [self.map if name == self.map.name else CoefficientMap(name) for name in MAPS]


@dataclass(frozen=True)
class Calibrated:
    """Calibration of one layer: bases fitted to `Traces.fit_part`, scores measured on `Traces.score_part`."""

    traces: Traces
    basis: SketchBasis
    scores: RankScores

    def plan(
        self,
        mean_rank: float,
        map: str | CoefficientMap = "ridge",
        method: str | None = None,
        basis: SketchBasis | None = None,
        sketch_dtype: str = DEFAULT_FORMAT,
        residual_bits: int = 0,
    ) -> SketchPlan:
        """Make a plan for one mean rank, a budget of read bytes; `basis` replaces the calibrated basis only.

        With residuals, ranks are allocated by `allocate_joint` unless the method is "uniform".
        """
        form: Any = {"sketch_dtype": sketch_dtype, "residual_bits": residual_bits}
        if residual_bits and method != "uniform":
            residual_settings(map, sketch_dtype, residual_bits, method, None)
            budget = reduction_of([self.traces.layer], self.basis.window, mean_rank, sketch_dtype, residual_bits)
            scores = self.joint((residual_bits,), sketch_dtype, method)
            return SketchPlan(basis or self.basis, allocate_joint(scores, budget), self.basis.window, map)
        allocation = allocate_ranks(self.scores, mean_rank, method, map=map, **form)
        return SketchPlan(basis or self.basis, allocation, self.basis.window, map)

    def joint(
        self, bits: Sequence[int] = tuple(STEPS), sketch_dtype: str = "int8", method: str | None = None
    ) -> JointScores:
        """Score ranks with residuals of some bits, with the gradients of the traces unless the method is "error"."""
        check_method(self.traces, method)
        held_out, grad = self.traces.score_part()
        scores = JointScores(self.basis, bits=bits, sketch_dtype=sketch_dtype)
        scores.update(*held_out, grad=None if method == "error" else grad)
        return scores


def check_method(traces: Traces, method: str | None) -> None:
    """Refuse an allocation method for which there are no gradients, or no passes of a model."""
    known = ("uniform", "error") if traces.score_part()[1] is None else ("gradient", "uniform", "error")
    if method not in (None, *known):
        raise ValueError(f"method: expected {' or '.join(map(repr, known))} of these traces, got {method!r}")


def calibrate(traces: Traces, window: int = 16, rank_max: int | None = None) -> Calibrated:
    """Fit bases of `rank_max` columns (default min(K, V)) and score ranks, on disjoint calibration sequences."""
    check_instance("traces", traces, Traces)
    held_out, grad = traces.score_part()
    moments = Moments(traces.layer, window=window)
    moments.update(*traces.fit_part())
    basis = fit_basis(moments, rank_max)
    scores = RankScores(basis)
    scores.update(*held_out, grad=grad)
    return Calibrated(traces, basis, scores)


def plan_layers(
    bases: Sequence[SketchBasis],
    scores: Sequence[RankScores],
    mean_rank: float,
    method: str | None = None,
    *,
    map: str | CoefficientMap = DEFAULT_MAP,
    sketch_dtype: str = DEFAULT_FORMAT,
    rank_max: int | None = None,
    residual_bits: int = 0,
) -> tuple[list[SketchPlan], Allocation]:
    """Make plans of several layers, from the basis and the scores of each, under one budget.

    `mean_rank` is the budget: the read bytes of all heads at this rank. `method` is that of `allocate_ranks`.
    `rank_max` is the largest rank of a head; by default each layer's largest scored rank.
    """
    bases, scores = check_items("bases", bases, "SketchBasis"), check_items("scores", scores, "RankScores")
    if len(bases) != len(scores) or not bases:
        raise ValueError(f"scores: expected those of each of at least one basis, got {len(scores)} for {len(bases)}")
    form: Any = {"map": map, "sketch_dtype": sketch_dtype, "residual_bits": residual_bits}
    allocation = allocate_ranks(scores, mean_rank, method, rank_max=rank_max, **form)
    return [SketchPlan(*own, **form) for own in zip(bases, allocation.ranks, strict=True)], allocation


def joint_plans(
    bases: Sequence[SketchBasis],
    scores: Sequence[JointScores],
    reduction: float,
    answers: Sequence[JointScores] | None = None,
) -> tuple[list[SketchPlan], Allocation]:
    """Make plans with residuals of several layers, under one budget; `reduction` and `answers` of `allocate_joint`."""
    allocation = allocate_joint(scores, reduction, answers)
    every: Any = allocation.residual_bits  # one array per layer
    tables = zip(bases, allocation.ranks, every, strict=True)
    form: Any = {"map": MAP, "sketch_dtype": allocation.sketch_dtype}
    return [SketchPlan(basis, ranks, residual_bits=bits, **form) for basis, ranks, bits in tables], allocation


def residual_settings(
    map: str | CoefficientMap | None,
    sketch_dtype: str | None,
    residual_bits: int,
    method: str | None,
    reduction: float | None,
) -> tuple[CoefficientMap, str, Sequence[int]]:
    """Map, format and possible bits of plans, checked; no bits without residuals.

    A `reduction` asks for residuals, of `residual_bits` or, if that is 0, of any bits. The defaults with residuals are
    the map "subspace" and int8.
    """
    own = check_residual_bits(residual_bits)
    bits = (own,) if own else () if reduction is None else tuple(STEPS)
    chosen = CoefficientMap.of(map or (MAP if bits else DEFAULT_MAP))
    form = SketchFormat.of(sketch_dtype or ("int8" if bits else DEFAULT_FORMAT)).name
    if bits and chosen.name != MAP:
        raise ValueError(f"map: expected {MAP!r} with residuals, got {chosen.name!r}")
    if method is not None:
        check_choice("method", method, METHODS)
    if method == "uniform" and reduction is not None:
        raise ValueError(
            f"reduction: expected None with the method 'uniform', which has a mean rank, got {reduction!r}"
        )
    return chosen, form, bits


def check_settings(
    layers: Sequence[Layer],
    window: int,
    mean_rank: float,
    reduction: float | None,
    rank_max: int | None,
    *,
    map: str | CoefficientMap | None,
    sketch_dtype: str | None,
    residual_bits: int,
    method: str | None,
) -> tuple[CoefficientMap, str, Sequence[int]]:
    """See `residual_settings`; refuses, before any sums, a budget that no plans of the layers meet."""
    chosen, form, bits = residual_settings(map, sketch_dtype, residual_bits, method, reduction)
    check_window(window)
    most = MAX_RANK if rank_max is None else check_size("rank_max", rank_max)
    if reduction is not None:
        check_reduction(reduction, layers, window, form, bits)
    elif method == "uniform":
        own: Any = {"map": chosen, "sketch_dtype": form, "residual_bits": residual_bits, "rank_max": most}
        check_uniform(mean_rank, layers, window, **own)
    return chosen, form, bits


def reduction_of(
    layers: Sequence[Layer], window: int, mean_rank: float, sketch_dtype: str, residual_bits: int
) -> float:
    """Traffic reduction of layers whose heads have one rank, which may be fractional, and one number of bits."""
    form: Any = {"sketch_dtype": sketch_dtype, "residual_bits": residual_bits}
    before = after = 0.0
    for layer in layers:
        shape = layer.key_dim, layer.value_dim
        before += layer.heads * traffic.standard(*shape)
        after += layer.heads * float(traffic.sketch(layer.kind, *shape, mean_rank, window, MAP, **form))
    return before / after


def mean_sketch_rank(plans: Sequence[SketchPlan]) -> float:
    """Mean rank of all sketched heads of several layers; 0 if there are none."""
    ranks = np.concatenate([plan.ranks[plan.ranks != FULL_STATE] for plan in plans])
    return float(ranks.mean()) if ranks.size else 0.0


def mean_retained(scores: RankScores, ranks: npt.NDArray[np.int64]) -> float:
    """Share of the energy of all heads' state reads that least-squares coefficients retain at some ranks."""
    lost = np.where(ranks == FULL_STATE, 0.0, scores.error[range(len(ranks)), ranks]).sum()
    return float(1.0 - lost / (scores.error[:, 0].sum() or 1.0))
