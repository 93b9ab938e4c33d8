"""A search for plans as a table, and as JSON holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sketchssm.study.planning.search import PlanPoint, PlanSearch, budget_name
from sketchssm.study.tables import Table


def frontier_table(found: PlanSearch, standard: float | None = None, met: bool = True) -> Table:
    """List the points of the frontier; the chosen one has an arrow.

    `standard` are the seconds of standard decode, for searches with measured times. `met` tells whether the chosen
    point meets the target.
    """

    def row(point: PlanPoint) -> list[str]:
        own = point.candidate
        arrow = "->" if point is found.chosen else ""
        cells = [arrow, str(own.map), own.sketch_dtype, str(own.window)]
        most = max(int(plan.ranks.max()) for plan in point.plans)
        cells += [budget_name(own, point.budget), str(most) if most > 0 else "-"]
        cells += [f"{point.traffic:.3f}", f"{point.error:.4f}"]
        if standard is not None and point.seconds is not None:
            cells += [f"{1e6 * point.seconds:.1f}", f"{standard / point.seconds:.2f}x"]
        return cells

    columns = ["", "map", "format", "window", "budget", "largest", "traffic", "error"]
    columns += [] if standard is None else ["step, us", "speed-up"]
    weighted = "weighted by gradients, " if found.graded else ""
    title = f"Frontier of {len(found.points)} points (error of the outputs, {weighted}held-out calibration text)"
    plans = "chosen plans" if met else "nearest plans (none meet the target)"
    note = f"Error of the {plans} on the test text, without gradients: {found.test_error():.4f}."
    return Table(title, columns, [row(point) for point in found.frontier], note, 3)


def describe(found: PlanSearch, files: list[Path], standard: float | None = None) -> dict[str, Any]:
    """Describe all points as JSON holds them, with the files of the chosen plans."""

    def plain(point: PlanPoint) -> dict[str, Any]:
        measured = {name: getattr(point, name) for name in ("budget", "traffic", "error", "seconds")}
        return vars(point.candidate) | {"map": str(point.candidate.map)} | measured

    return {
        "plans": [str(path) for path in files],
        "chosen": plain(found.chosen),
        "test_error": found.test_error(),
        "standard_seconds": standard,
        "frontier": [plain(point) for point in found.frontier],
        "points": [plain(point) for point in found.points],
    }
