"""The multiple-choice knapsack behind allocations: one action for each head, within one budget of bytes.

With a price on bytes instead of the budget, the heads are independent. Every price gives a lower bound on the sum of
scores within the budget (equation *alloc-dual*), and so a limit on the distance of a choice from the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.reference.recurrence import Array

Choice = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Actions:
    """Score, read bytes, rank and residual bits ``(heads, actions)``: sketches by rising cost, then the full read.

    A score is inf for an action that a head can't take.
    """

    score: Array
    cost: Array
    rank: Choice
    bits: Choice

    @classmethod
    def joined(cls, layers: Sequence[Actions]) -> Actions:
        """The heads of several layers, with equally many actions."""
        return cls(*(np.concatenate([getattr(x, name) for x in layers]) for name in cls.__dataclass_fields__))

    def front(self) -> Actions:
        """The same actions without the sketches that score no better than a cheaper one."""
        before = np.minimum.accumulate(self.score[:, :-1], axis=1)
        better = np.isfinite(before)
        better[:, 1:] &= self.score[:, 1:-1] < before[:, :-1]
        order = np.argsort(~better, axis=1, kind="stable")[:, : better.sum(axis=1).max(initial=0)]
        order = np.concatenate([order, np.full((len(order), 1), better.shape[1])], axis=1)
        kept = np.take_along_axis(np.append(better, np.ones((len(order), 1), dtype=bool), axis=1), order, axis=1)

        def taken(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.take_along_axis(x, order, axis=1)

        return Actions(np.where(kept, taken(self.score), np.inf), taken(self.cost), taken(self.rank), taken(self.bits))

    def totals(self, choice: Choice) -> tuple[float, float]:
        """Objective and read bytes of one action per head."""
        rows = np.arange(choice.size)
        return float(self.score[rows, choice].sum()), float(self.cost[rows, choice].sum())

    def taken(self, choice: Choice) -> tuple[Choice, Choice]:
        """Rank and bits of one action per head."""
        rows = np.arange(choice.size)
        return self.rank[rows, choice], self.bits[rows, choice]

    def bound(self, budget: float) -> float:
        """Lower bound on the objective of every choice within a budget."""
        return _bisect(self, budget)[2]

    def solve(self, budget: float) -> tuple[Choice, float]:
        """A choice within a budget that the cheapest actions meet, and the bound; for a `front`."""
        choice, beyond, bound = _bisect(self, budget)
        return _spend(self, _upgrade(self, choice, beyond, budget), budget), bound


def _bisect(table: Actions, budget: float) -> tuple[Choice, Choice, float]:
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


def _upgrade(table: Actions, choice: Choice, beyond: Choice, budget: float) -> Choice:
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


def _spend(table: Actions, choice: Choice, budget: float) -> Choice:
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
