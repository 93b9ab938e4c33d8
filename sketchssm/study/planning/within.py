"""Plans of a calibration for a budget of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from sketchssm.calibrate.allocation import budget_of
from sketchssm.calibrate.calibration import Calibration
from sketchssm.layer.checks import check_instance, check_items, check_number
from sketchssm.plans.model_plans import ModelPlans
from sketchssm.study.planning.search import MEAN_RANKS, REDUCTIONS, Measure


def plans_within(
    calibration: Calibration,
    seconds: float,
    time_of: Measure,
    *,
    budgets: Iterable[float] | None = None,
    progress: Callable[[str], None] = lambda label: None,
    **settings: Any,
) -> ModelPlans:
    """Make the plans of most traffic whose step takes at most some time, by measurement.

    Parameters
    ----------
    calibration : Calibration
        Bases and scores.
    seconds : float
        Time of a step of all layers.
    time_of : callable
        Measures the seconds of a step of all layers from their plans: a `StepTimes`.
    budgets : iterable of float, optional
        Budgets to try: reductions where plans have residuals, else mean ranks. Those that no plans meet are left out.
        Default: those of `autoplan`.
    progress : callable, optional
        Called with a label before each budget.
    **settings
        `map`, `sketch_dtype`, `residual_bits`, `method` and `rank_max` of `Calibration.plans`.

    Returns
    -------
    ModelPlans
        Plans by the names of the layers.

    Raises
    ------
    ValueError
        If an argument is out of range, or every budget takes longer.
    """
    check_instance("calibration", calibration, Calibration)
    check_number("seconds", seconds, "a finite number above 0", lambda number: 0 < number < np.inf)
    if not callable(time_of):
        raise TypeError(f"time_of: expected a function of the plans, got {time_of!r}")
    _, reduction = budget_of(None, None, settings.get("map"), settings.get("method"))
    pure = reduction is None or any(own.joint is None for own in calibration.layers.values())
    name, usual = ("mean_rank", MEAN_RANKS) if pure else ("reduction", REDUCTIONS)
    tried = check_items("budgets", usual if budgets is None else budgets, "numbers")
    for each in tried:
        check_number("budgets", each, "finite numbers above 0", lambda number: 0 < number < np.inf)
    if not tried:
        raise ValueError("budgets: expected at least one number, got none")
    least, refused = np.inf, None
    for budget in sorted(tried, reverse=pure):
        progress(f"{name} {budget:g}")
        try:
            plans = calibration.plans(**{name: budget}, **settings)
        except ValueError as error:  # beyond the scored ranks, or the fewest bytes
            refused = refused or error
            continue
        taken = time_of(list(plans.values()))
        if taken <= seconds:
            return plans
        least = min(least, taken)
    if refused is not None and least == np.inf:
        raise refused
    raise ValueError(
        f"seconds: expected at least {least:.3g} ({1e6 * least:.3g} microseconds), the least of the plans that were "
        f"timed, got {seconds:g}"
    )
