"""Rank allocation: the sketch rank of every head, under one budget of read traffic.

This is the paper's appendix *Offline sketch-rank allocation*. Every head gets a rank or a full read. The rank table
minimises the sum of the scores within the budget (equation *m-allocation*), which is a multiple-choice knapsack. With
a price on traffic instead of the budget, the heads are independent; this gives a lower bound (equation *alloc-dual*)
and so a limit on the distance of a table from the optimum.

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

from sketchssm.calibrate.scores import SCORES, SUMS, RankScores
from sketchssm.layer.checks import check_items, check_number, check_size
from sketchssm.layer.coefficients import DEFAULT_MAP, CoefficientMap
from sketchssm.layer.formats import DEFAULT_FORMAT, SketchFormat
from sketchssm.layer.recurrence import FULL_STATE, check_choice, check_instance
from sketchssm.layer.residual import check_residual_bits
from sketchssm.plans import traffic
from sketchssm.reference.recurrence import Array

__all__ = ["METHODS", "Allocation", "Traffic", "allocate_ranks", "check_mean_rank"]

METHODS = (*SCORES, "uniform")

Choice = npt.NDArray[np.int64]


class Traffic(NamedTuple):
    """Cost of a rank table.

    ``read_bytes`` is the sum over heads of the bytes of one read between flushes, which the budget bounds.
    ``reduction`` is the state traffic of standard decode over that of the table, flushes included.
    """

    read_bytes: float
    reduction: float


@dataclass(frozen=True, eq=False)
class Allocation:
    """A rank table with its quality, from `allocate_ranks`.

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
    residual_bits : int
        Bits of the residuals' codes.
    """

    ranks: npt.NDArray[np.int64] | list[npt.NDArray[np.int64]]
    objective: float
    bound: float
    budget: float
    traffic: Traffic
    method: str
    sketch_dtype: str = DEFAULT_FORMAT
    residual_bits: int = 0

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
    method : {"gradient", "error", "sensitivity", "uniform"}, optional
        Score to minimise, see `RankScores.objective`; "uniform" gives every head the mean rank, rounded
        down to stay within the budget, and reports the objective and bound of the default score. Default: "uniform"
        with residuals, whose errors the scores do not know; else "gradient" if all layers have gradients, else
        "error".
    map : CoefficientMap or str, default "ridge"
        Coefficient map, which sets the cost of a rank; see `sketchssm.plans.traffic.sketch_read`.
    sketch_dtype : {"float32", "bfloat16", "int8"}, default "bfloat16"
        Format of the sketches, which sets the cost of a rank.
    rank_max : int, optional
        Largest rank of a head. Default: each layer's largest scored rank.
    residual_bits : {0, 1, 2, 3}, default 0
        Bits of the residual's codes of every sketched head, which add to the cost of a rank.

    Returns
    -------
    Allocation
        Rank table with its certificate.

    Raises
    ------
    ValueError
        If there are no scores or no samples of a layer, a score is not finite, the mean rank is below 1 or, for
        "uniform", beyond the ranks that can be given, or the method is unknown, or needs gradients that were not given
        or are all zero. Also if the format is unknown, or `rank_max` is beyond the scored ranks of all layers.
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
    default = "gradient" if all(layer.graded for layer in layers) else "error"
    if method is None:
        method = "uniform" if residual_bits else default
    check_choice("method", method, METHODS)
    if method in ("gradient", "sensitivity"):
        for index, layer in enumerate(layers):
            if layer.graded and not layer.sensitivity.any():
                raise ValueError(f"scores: {method!r} needs gradients, got only zeros for layer {index}")
    width = max(layer.rank_max for layer in layers)
    if rank_max is not None and check_size("rank_max", rank_max) > width:
        raise ValueError(f"rank_max: expected at most the largest scored rank, {width}, got {rank_max}")
    table = _Table.of(layers, default if method == "uniform" else method, cost, rank_max or width)
    check_mean_rank(mean_rank)
    if method == "uniform" and mean_rank > table.uniform_limit:
        raise ValueError(f"mean_rank: expected at most {table.uniform_limit} for a uniform rank, got {mean_rank!r}")

    with np.errstate(over="ignore"):  # an infinite budget is one
        budget = sum(layer.layer.heads * cost.read(layer, np.asarray(mean_rank)).item() for layer in layers)
    if method == "uniform":
        bound = _bisect(table, budget)[2]
        choice = (table.rank == int(mean_rank)).argmax(axis=1)
    else:
        table = table.front()
        choice, beyond, bound = _bisect(table, budget)
        choice = _spend(table, _upgrade(table, choice, beyond, budget), budget)

    objective, used = table.totals(choice)
    rows, ends = np.arange(choice.size), np.cumsum([layer.layer.heads for layer in layers])[:-1]
    ranks = np.split(table.rank[rows, choice], ends)
    after = sum(float(cost.read(layer, own, traffic.sketch).sum()) for layer, own in zip(layers, ranks, strict=True))
    shapes = [layer.layer for layer in layers]
    before = sum(shape.heads * traffic.standard(shape.key_dim, shape.value_dim) for shape in shapes)
    spent = Traffic(used, before / after)
    chosen = ranks[0] if single else ranks
    return Allocation(chosen, objective, bound, budget, spent, method, cost.form.name, residual_bits)


def check_mean_rank(mean_rank: Any) -> None:
    """Check the budget of an allocation."""
    check_number("mean_rank", mean_rank, "a finite number of at least 1", lambda number: 1 <= number < np.inf)


class _Cost(NamedTuple):
    """Cost of ranks in a map and format, beside a residual."""

    map: CoefficientMap
    form: SketchFormat
    residual_bits: int

    def read(self, layer: RankScores, rank: npt.NDArray[Any], count: Any = traffic.sketch_read) -> Array:
        """Bytes of a read between flushes, or with `traffic.sketch` of a token, flushes included."""
        shape = layer.layer.kind, layer.layer.key_dim, layer.layer.value_dim
        form = {"sketch_dtype": self.form.name, "residual_bits": self.residual_bits}
        found: Array = count(*shape, rank, layer.window, self.map, **form)
        return found


@dataclass(frozen=True)
class _Table:
    """Score, read bytes and rank ``(N, actions)``: sketches by rising cost, then the full read.

    A score is inf for a choice that a head can't take: a sketch of an unscored rank, or with at least the bytes of the
    full read.
    """

    score: Array
    cost: Array
    rank: Choice
    uniform_limit: int

    @classmethod
    def of(cls, layers: Sequence[RankScores], method: str, cost: _Cost, rank_max: int) -> _Table:
        decay = _shared_decay(layers) if method == "sensitivity" else None
        ranks = np.arange(1, rank_max + 1)
        tables, limits = [], []
        for layer in layers:
            heads = layer.layer.heads
            full = float(cost.read(layer, np.asarray(FULL_STATE)))
            used = cost.read(layer, ranks)
            fits = (ranks <= layer.rank_max) & (used < full)
            own_decay = None if decay is None else decay[: layer.rank_max + 1]
            curves, reads = layer.objective(method, own_decay), layer.noise_objective(method, own_decay)
            score = np.full((heads, ranks.size + 1), np.inf)
            score[:, :-1][:, fits] = curves[:, ranks[fits]] + cost.form.noise * reads[:, ranks[fits]]
            score[:, -1] = 0.0
            own = np.append(used, full), np.append(ranks, FULL_STATE)
            tables.append((score, *(np.broadcast_to(x, score.shape) for x in own)))
            limits.append(int(ranks[fits].max(initial=0)))
        scores, costs, rows = (np.concatenate(parts) for parts in zip(*tables, strict=True))
        return cls(scores, costs, rows, min(limits))

    def front(self) -> _Table:
        """The same table without the sketches that score no better than a cheaper one."""
        before = np.minimum.accumulate(self.score[:, :-1], axis=1)
        better = np.isfinite(before)
        better[:, 1:] &= self.score[:, 1:-1] < before[:, :-1]
        order = np.argsort(~better, axis=1, kind="stable")[:, : better.sum(axis=1).max(initial=0)]
        order = np.concatenate([order, np.full((len(order), 1), better.shape[1])], axis=1)
        kept = np.take_along_axis(np.append(better, np.ones((len(order), 1), dtype=bool), axis=1), order, axis=1)

        def taken(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.take_along_axis(x, order, axis=1)

        score = np.where(kept, taken(self.score), np.inf)
        return _Table(score, taken(self.cost), taken(self.rank), self.uniform_limit)

    def totals(self, choice: Choice) -> tuple[float, float]:
        """Objective and read bytes of one action per head."""
        rows = np.arange(choice.size)
        return float(self.score[rows, choice].sum()), float(self.cost[rows, choice].sum())


def _bisect(table: _Table, budget: float) -> tuple[Choice, Choice, float]:
    """Find the price at which the independent choices of the heads meet the budget.

    Returns the choices at the lowest feasible price, those at the next lower price, and the best bound.
    """

    def choose(price: float) -> tuple[Choice, float, float]:
        penalised = table.score + price * table.cost
        choice = penalised.argmin(axis=1)  # argmin takes the first of equals, which is the cheapest
        return choice, table.totals(choice)[1], float(penalised.min(axis=1).sum()) - price * budget

    beyond, used, bound = choose(0.0)
    if used <= budget:
        return beyond, beyond, bound
    # A step up costs at least a byte: at a price of the largest score every head takes its cheapest action.
    low, high = 0.0, float(table.score.max(where=np.isfinite(table.score), initial=0.0))
    feasible, _, value = choose(high)
    bound = max(bound, value)
    while low < (middle := (low + high) / 2) < high:  # until float64 has no price in between
        choice, used, value = choose(middle)
        bound = max(bound, value)
        if used > budget:
            low, beyond = middle, choice
        else:
            high, feasible = middle, choice
    return feasible, beyond, bound


def _upgrade(table: _Table, choice: Choice, beyond: Choice, budget: float) -> Choice:
    """Move heads to their choices at the next lower price as far as the budget goes, the largest gain first.

    Heads with equal curves change their choices at one price. All these moves gain equally much per byte.
    """
    choice, rows = choice.copy(), np.arange(choice.size)
    gain = table.score[rows, choice] - table.score[rows, beyond]
    extra = table.cost[rows, beyond] - table.cost[rows, choice]
    slack = budget - table.totals(choice)[1]
    for head in np.argsort(-gain, kind="stable"):
        if gain[head] > 0 and extra[head] <= slack:
            choice[head] = beyond[head]
            slack -= extra[head]
    return choice


def _spend(table: _Table, choice: Choice, budget: float) -> Choice:
    """Spend the rest of the budget: make the single-head substitution with the largest gain until none gains."""
    choice = choice.copy()
    rows = np.arange(choice.size)
    while True:
        slack = budget - table.totals(choice)[1]
        gain = table.score[rows, choice][:, None] - table.score
        gain[table.cost - table.cost[rows, choice][:, None] > slack] = 0.0
        head, action = np.unravel_index(gain.argmax(), gain.shape)
        if gain[head, action] <= 0:
            return choice
        choice[head] = action


def _shared_decay(layers: Sequence[RankScores]) -> Array:
    """Share of energy lost at each rank, mean over all heads that are scored at the rank."""
    width = max(layer.rank_max for layer in layers)
    lost = [
        np.pad(1.0 - layer.retained, ((0, 0), (0, width - layer.rank_max)), constant_values=np.nan) for layer in layers
    ]
    return np.nanmean(np.concatenate(lost), axis=0)
