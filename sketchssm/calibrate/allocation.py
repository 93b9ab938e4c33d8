"""Rank allocation: the sketch rank of every head, under one budget of read traffic.

This is the paper's appendix *Offline sketch-rank allocation*. Every head takes a rank or a full read. The table
minimises the sum of the scores within the budget (equation *m-allocation*), which is a multiple-choice knapsack. A
price on traffic makes the heads independent and gives a lower bound (equation *alloc-dual*). The bound certifies how
far a table can be from the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sketchssm import traffic
from sketchssm.calibrate.scores import SCORES, RankScores
from sketchssm.coefficients import DEFAULT_MAP, CoefficientMap
from sketchssm.recurrence import DENSE
from sketchssm.reference.recurrence import Array

__all__ = ["METHODS", "Allocation", "Traffic", "allocate_ranks"]

METHODS = (*SCORES, "uniform")

Choice = npt.NDArray[np.int64]


class Traffic(NamedTuple):
    """Cost of a rank table.

    ``read_bytes`` is the sum over heads of the bytes of one read between flushes, which the budget bounds.
    ``reduction`` is the state traffic of standard decoding over that of the table, flushes included.
    """

    read_bytes: float
    reduction: float


@dataclass(frozen=True, eq=False)
class Allocation:
    """A rank table with its quality, from `allocate_ranks`.

    Parameters
    ----------
    ranks : ndarray of int64, (heads,), or list of them
        Rank of each head, `DENSE` for a full read; one array per layer for a sequence of scores.
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
    """

    ranks: npt.NDArray[np.int64] | list[npt.NDArray[np.int64]]
    objective: float
    bound: float
    budget: float
    traffic: Traffic
    method: str

    @property
    def gap(self) -> float:
        """Duality certificate ``(P - D) / P``: no table within the budget is better by a larger share."""
        return max(0.0, (self.objective - self.bound) / self.objective) if self.objective > 0 else 0.0


def allocate_ranks(
    scores: RankScores | Sequence[RankScores],
    mean_rank: float,
    method: str | None = None,
    *,
    map: str | CoefficientMap = DEFAULT_MAP,
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
        down to stay within the budget, and reports the objective and bound of the default score. Default: "gradient"
        if all layers have gradients, else "error".
    map : CoefficientMap or str, default "ridge"
        Coefficient map, which sets the cost of a rank; see `sketchssm.traffic.sketch_read`.

    Returns
    -------
    Allocation
        Rank table with its certificate.

    Raises
    ------
    ValueError
        If there are no scores or no samples of a layer, the mean rank is below 1 or, for "uniform", beyond the ranks
        that can be given, or the method is unknown or needs gradients that were not given.
    """
    single = isinstance(scores, RankScores)
    layers: list[RankScores] = [scores] if isinstance(scores, RankScores) else list(scores)
    if not layers:
        raise ValueError("scores: expected those of at least one layer, got none")
    for index, layer in enumerate(layers):
        if not layer.samples.any():
            raise ValueError(
                f"scores: expected samples of at least one head of every layer, got none for layer {index}: sequences "
                f"must be longer than the window of {layer.window} tokens and write a state"
            )
    map = CoefficientMap.of(map)
    default = "gradient" if all(layer.graded for layer in layers) else "error"
    method = method or default
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    table = _Table.of(layers, default if method == "uniform" else method, map)
    if not (np.isfinite(mean_rank) and mean_rank >= 1):
        raise ValueError(f"mean_rank: expected a finite number of at least 1, got {mean_rank!r}")
    if method == "uniform" and mean_rank > table.uniform_limit:
        raise ValueError(f"mean_rank: expected at most {table.uniform_limit} for a uniform rank, got {mean_rank!r}")

    mean_reads = [_read(layer, np.asarray(mean_rank), map).item() for layer in layers]
    budget = sum(layer.layer.heads * read for layer, read in zip(layers, mean_reads, strict=True))
    choice, beyond, bound = _bisect(table, budget)
    if method == "uniform":
        choice = np.full_like(choice, int(mean_rank) - 1)
    else:
        choice = _spend(table, _upgrade(table, choice, beyond, budget), budget)

    objective, used = table.totals(choice)
    ranks = np.where(choice == table.cost.shape[1] - 1, DENSE, choice + 1)
    per_layer = np.split(ranks, np.cumsum([layer.layer.heads for layer in layers])[:-1])
    cost = Traffic(used, _reduction(layers, per_layer, map))
    return Allocation(per_layer[0] if single else per_layer, objective, bound, budget, cost, method)


@dataclass(frozen=True)
class _Table:
    """Score and read bytes ``(N, actions)`` of ranks 1, 2, ... and, last, the full read.

    A score is inf for a rank that a head can't take: an unscored rank, or one as dear as the full read.
    """

    score: Array
    cost: Array
    uniform_limit: int

    @classmethod
    def of(cls, layers: Sequence[RankScores], method: str, map: CoefficientMap) -> _Table:
        width = max(layer.rank_max for layer in layers)
        decay = _shared_decay(layers, width) if method == "sensitivity" else None
        scores, costs, limits = [], [], []
        for layer in layers:
            heads, limit = layer.layer.heads, layer.rank_max
            full = float(_read(layer, np.asarray(DENSE), map))
            cost = _read(layer, np.arange(1, width + 1), map)
            limit = min(limit, int((cost < full).sum()))  # G*: a wider sketch costs as much as the state
            score = np.full((heads, width + 1), np.inf)
            curves = layer.objective(method, None if decay is None else decay[: layer.rank_max + 1])
            score[:, :limit] = curves[:, 1 : limit + 1]
            score[:, -1] = 0.0
            scores.append(score)
            costs.append(np.broadcast_to(np.append(cost, full), score.shape))
            limits.append(limit)
        return cls(np.concatenate(scores), np.concatenate(costs), min(limits))

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


def _read(layer: RankScores, rank: npt.NDArray[np.generic], map: CoefficientMap) -> Array:
    shape = layer.layer
    return traffic.sketch_read(shape.kind, shape.key_dim, shape.value_dim, rank, layer.window, map)


def _reduction(layers: Sequence[RankScores], ranks: Sequence[Choice], map: CoefficientMap) -> float:
    """Traffic reduction over all heads of all layers: the ratio of the summed bytes."""
    before = after = 0.0
    for layer, own in zip(layers, ranks, strict=True):
        shape = layer.layer
        size = (shape.key_dim, shape.value_dim)
        before += shape.heads * traffic.standard(*size)
        after += float(traffic.sketch(shape.kind, *size, own, layer.window, map).sum())
    return before / after


def _shared_decay(layers: Sequence[RankScores], width: int) -> Array:
    """Share of energy lost at each rank, mean over all heads that are scored at the rank."""
    lost = [
        np.pad(1.0 - layer.retained, ((0, 0), (0, width - layer.rank_max)), constant_values=np.nan) for layer in layers
    ]
    return np.nanmean(np.concatenate(lost), axis=0)
