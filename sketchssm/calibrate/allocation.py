"""Rank allocation: the sketch rank of every head, under one budget of read traffic.

This is the paper's appendix *Offline sketch-rank allocation*. Every head gets a rank or a full read. The rank table
minimises the sum of the scores within the budget (equation *m-allocation*), which is a multiple-choice knapsack
(`sketchssm.calibrate.knapsack`).

A sketch in codes has a noise n (`sketchssm.layer.formats`), which counts as a loss: the score of a rank is

    J(G) + n N(G),

with the score N(G) of noise with the energy of a read through G columns (`RankScores.noise_objective`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sketchssm.calibrate.knapsack import Actions
from sketchssm.calibrate.scores import SCORES, SUMS, RankScores
from sketchssm.calibrate.sums import common_weighting
from sketchssm.layer.checks import check_choice, check_instance, check_items, check_number, check_size
from sketchssm.layer.coefficients import DEFAULT_MAP, CoefficientMap
from sketchssm.layer.formats import DEFAULT_FORMAT, SketchFormat
from sketchssm.layer.recurrence import FULL_STATE, Layer
from sketchssm.layer.residual import check_residual_bits
from sketchssm.plans import traffic
from sketchssm.reference.recurrence import Array

METHODS = (*SCORES, "uniform")


class Traffic(NamedTuple):
    """Cost of a rank table.

    ``read_bytes`` is the sum over heads of the bytes of one read between flushes, which the budget bounds.
    ``reduction`` is the state traffic of standard decode over that of the table, flushes included.
    """

    read_bytes: float
    reduction: float


@dataclass(frozen=True, eq=False)
class Allocation:
    """A rank table with its quality, from `allocate_ranks` or `allocate_joint`.

    Parameters
    ----------
    ranks : ndarray of int64, (heads,), or list of them
        Rank of each head, `FULL_STATE` for a full read; one array per layer for a sequence of scores.
    objective : float
        Sum of the scores J of the chosen ranks (P).
    bound : float
        Lower bound on the objective of every table within the budget (D).
    budget : float
        Read bytes of all heads at the mean rank (B).
    traffic : Traffic
        Read bytes and traffic reduction of the table.
    method : str
        Score that the table minimises.
    sketch_dtype : str
        Format of the sketches.
    residual_bits : int, or ndarray of int64, (heads,), or list of them
        Bits of the residuals' codes, of all sketched heads or of each head.
    """

    ranks: npt.NDArray[np.int64] | list[npt.NDArray[np.int64]]
    objective: float
    bound: float
    budget: float
    traffic: Traffic
    method: str
    sketch_dtype: str = DEFAULT_FORMAT
    residual_bits: int | npt.NDArray[np.int64] | list[npt.NDArray[np.int64]] = 0

    @property
    def gap(self) -> float:
        """Duality gap ``(P - D) / P``: no allocation within the budget reduces the objective by a larger share."""
        return max(0.0, (self.objective - self.bound) / self.objective) if self.objective > 0 else 0.0


def allocate_ranks(
    scores: RankScores | Sequence[RankScores],
    mean_rank: float,
    method: str | None = None,
    *,
    map: str | CoefficientMap = DEFAULT_MAP,
    sketch_dtype: str = DEFAULT_FORMAT,
    rank_max: int | None = None,
    residual_bits: int = 0,
) -> Allocation:
    """Allocate ranks to heads within the read traffic of a mean rank.

    Parameters
    ----------
    scores : RankScores or sequence of them
        Scores of one layer, or of several layers that share the budget.
    mean_rank : float
        Mean rank; the budget is the read traffic of all heads at this rank.
    method : {"gradient", "perturbation", "error", "uniform"}, optional
        Score to minimise, see `RankScores.objective`; "uniform" gives every head the mean rank, rounded
        down to stay within the budget, and reports the objective and bound of the default score. Default: the
        weighting of the scores if all layers have the same, else "error".
    map : CoefficientMap or str, default "ridge"
        Coefficient map, which sets the cost of a rank; see `sketchssm.plans.traffic.sketch_read`.
    sketch_dtype : {"float32", "bfloat16", "int8"}, default "bfloat16"
        Format of the sketches, which sets the cost of a rank.
    rank_max : int, optional
        Largest rank of a head; backend "cuda" takes 16. Default: each layer's largest scored rank.
    residual_bits : {0, 1, 2, 3}, default 0
        Bits of the residual's codes of every sketched head, which add to the cost of a rank. Needs the method
        "uniform", as rank scores do not know the errors of residuals; `allocate_joint` does.

    Returns
    -------
    Allocation
        Rank table with its certificate.

    Raises
    ------
    ValueError
        If there are no scores or no samples of a layer, a score is not finite, the mean rank is below 1 or, for
        "uniform", beyond the ranks that can be given, or the method is unknown, or needs gradients or weights
        that were not given or are all zero, or residuals come with another method than "uniform". Also if the format
        is unknown, or `rank_max` is beyond the scored ranks of all layers.
    """
    single = isinstance(scores, RankScores)
    layers: Any = (scores,) if isinstance(scores, RankScores) else check_items("scores", scores, "RankScores")
    if not layers:
        raise ValueError("scores: expected scores of at least one layer, got none")
    for index, layer in enumerate(layers):
        check_instance("scores", layer, RankScores)
        if not layer.samples.any():
            raise ValueError(
                f"scores: expected samples of at least one head of every layer, got none for layer {index}: sequences "
                f"must be longer than the window of {layer.window} tokens and write a state"
            )
        if not all((np.isfinite(x) & (x >= 0)).all() for x in (getattr(layer, name) for name in SUMS)):
            raise ValueError(
                f"scores: expected finite sums of at least 0, got others for layer {index}: are the keys normalised?"
            )
    check_residual_bits(residual_bits)
    cost = _Cost(CoefficientMap.of(map), SketchFormat.of(sketch_dtype), residual_bits)
    default = common_weighting(layers)
    method = default if method is None else method
    check_choice("method", method, METHODS)
    if residual_bits and method != "uniform":
        raise ValueError(f"method: expected 'uniform' with residual bits, got {method!r}; allocate_joint has scores")
    if method not in ("error", "uniform"):
        for index, layer in enumerate(layers):
            if layer.weighting not in (None, "error") and not layer.paired.any():
                what = "weights" if layer.weighting == "perturbation" else "gradients"
                raise ValueError(f"scores: {method!r} needs {what}, got only zeros for layer {index}")
    width = max(layer.rank_max for layer in layers)
    if rank_max is not None and check_size("rank_max", rank_max) > width:
        raise ValueError(f"rank_max: expected at most the largest scored rank, {width}, got {rank_max}")
    table, most = _actions(layers, default if method == "uniform" else method, cost, rank_max or width)
    check_mean_rank(mean_rank)
    if method == "uniform":
        _check_uniform(mean_rank, most)

    with np.errstate(over="ignore"):  # an infinite budget is one
        budget = sum(layer.layer.heads * cost.of(layer, np.asarray(mean_rank)).item() for layer in layers)
    if method == "uniform":
        bound = table.bound(budget)
        choice = (table.rank == int(mean_rank)).argmax(axis=1)
    else:
        table = table.front()
        choice, bound = table.solve(budget)

    objective, used = table.totals(choice)
    ends = np.cumsum([layer.layer.heads for layer in layers])[:-1]
    ranks = np.split(table.taken(choice)[0], ends)
    after = sum(float(cost.of(layer, own, traffic.sketch).sum()) for layer, own in zip(layers, ranks, strict=True))
    shapes = [layer.layer for layer in layers]
    before = sum(shape.heads * traffic.standard(shape.key_dim, shape.value_dim) for shape in shapes)
    spent = Traffic(used, before / after)
    chosen = ranks[0] if single else ranks
    return Allocation(chosen, objective, bound, budget, spent, method, cost.form.name, residual_bits)


def default_reduction(asked: bool) -> float:
    """Traffic reduction of plans with residuals: 10 if the calibration has asked questions, else 9.

    A small mamba2 model without attention lost 27% of its answers without questions at 10, and 7% at 9.
    """
    return 10.0 if asked else 9.0


def budget_of(
    mean_rank: Any,
    reduction: Any,
    map: str | CoefficientMap | None = None,
    method: str | None = None,
    asked: bool = False,
) -> tuple[float, float | None]:
    """Check a budget: a mean rank, or a reduction of traffic, which asks for residuals.

    The default is that of `default_reduction`, or mean rank 7 where the map or the method is of pure sketches.
    """
    if None not in (mean_rank, reduction):
        raise ValueError(f"mean_rank: expected none beside a reduction, got {mean_rank!r}")
    pure = method == "uniform" or (map is not None and CoefficientMap.of(map).name != "subspace")
    if mean_rank is None and reduction is None and not pure:
        reduction = default_reduction(asked)
    rank = 7.0 if mean_rank is None else mean_rank
    check_mean_rank(rank)
    return float(rank), reduction


def check_mean_rank(mean_rank: Any) -> None:
    """Check the budget of an allocation."""
    check_number("mean_rank", mean_rank, "a finite number of at least 1", lambda number: 1 <= number < np.inf)


def check_uniform(
    mean_rank: float,
    layers: Sequence[Layer],
    window: int,
    *,
    map: str | CoefficientMap,
    sketch_dtype: str,
    residual_bits: int,
    rank_max: int,
) -> None:
    """Refuse, before any scores of up to `rank_max`, a mean rank that the method "uniform" can't give every head."""
    cost = _Cost(CoefficientMap.of(map), SketchFormat.of(sketch_dtype), residual_bits)
    ranks = np.arange(1, rank_max + 1)
    fits = (cost.fits(x, window, ranks, min(x.key_dim, x.value_dim)) for x in layers)
    _check_uniform(mean_rank, min(int(ranks[own].max(initial=0)) for own in fits))


def _check_uniform(mean_rank: float, most: int) -> None:
    if mean_rank > most:
        raise ValueError(f"mean_rank: expected at most {most} for a uniform rank, got {mean_rank!r}")


class _Cost(NamedTuple):
    """Cost of ranks in a map and format, beside a residual."""

    map: CoefficientMap
    form: SketchFormat
    residual_bits: int

    def of(self, scores: RankScores, rank: npt.NDArray[Any], count: Any = traffic.sketch_read) -> Array:
        """Bytes of a read between flushes, or with `traffic.sketch` of a token, flushes included."""
        return self.read(scores.layer, scores.window, rank, count)

    def read(self, layer: Layer, window: int, rank: npt.NDArray[Any], count: Any = traffic.sketch_read) -> Array:
        """See `of`."""
        form = {"sketch_dtype": self.form.name, "residual_bits": self.residual_bits}
        found: Array = count(layer.kind, layer.key_dim, layer.value_dim, rank, window, self.map, **form)
        return found

    def fits(self, layer: Layer, window: int, ranks: npt.NDArray[Any], rank_max: int) -> npt.NDArray[Any]:
        """Which ranks a head can take: up to `rank_max`, with fewer bytes than the full read."""
        full = float(self.read(layer, window, np.asarray(FULL_STATE)))
        return (ranks <= rank_max) & (self.read(layer, window, ranks) < full)


def _actions(layers: Sequence[RankScores], method: str, cost: _Cost, rank_max: int) -> tuple[Actions, int]:
    """Ranks of all heads and the full read, and the largest rank that every head can take.

    A head can't take a sketch of an unscored rank, or with at least the bytes of the full read.
    """
    ranks = np.arange(1, rank_max + 1)
    tables, limits = [], []
    for layer in layers:
        full, used = float(cost.of(layer, np.asarray(FULL_STATE))), cost.of(layer, ranks)
        fits = cost.fits(layer.layer, layer.window, ranks, layer.rank_max)
        curves, reads = layer.objective(method), layer.noise_objective(method)
        score = np.full((layer.layer.heads, ranks.size + 1), np.inf)
        score[:, :-1][:, fits] = curves[:, ranks[fits]] + cost.form.noise * reads[:, ranks[fits]]
        score[:, -1] = 0.0
        bits = np.append(np.full(ranks.size, cost.residual_bits), 0)
        own = np.append(used, full), np.append(ranks, FULL_STATE), bits
        tables.append(Actions(score, *(np.broadcast_to(x, score.shape) for x in own)))
        limits.append(int(ranks[fits].max(initial=0)))
    return Actions.joined(tables), min(limits)
