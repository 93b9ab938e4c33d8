"""Everything that is measured on one layer's traces, and the tables that show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sketchssm.calibrate.basis import SketchBasis
from sketchssm.cli.calibrate import ranks_text
from sketchssm.cli.output import Output, percent, scientific
from sketchssm.evaluate import (
    AllocationResult,
    Calibrated,
    MapEnergy,
    System,
    SystemResult,
    collect_windows,
    compare,
    compare_allocations,
    exact_systems,
    plan_energy,
    retained_energy,
    sketch_system,
)
from sketchssm.evaluate.settings import Settings
from sketchssm.plan import SketchPlan
from sketchssm.traces import Traces

__all__ = ["STAGES", "LayerReport", "draw", "measure_layer", "measure_plan", "show", "show_margins"]

STAGES = 7
"""Steps of progress of `measure_layer` beside one for each rank: the exact systems' two, and its own."""

PAPER = "lowrank"
"""The paper's map, which the others are compared with."""


@dataclass(frozen=True)
class LayerReport:
    """What was measured on one layer.

    Attributes
    ----------
    name, kind : str
        Layer.
    systems : list of SystemResult
        Decode systems.
    retained : dict
        Retained energy of each sketch by system name, mean over heads.
    calibrated : Calibrated or None
        Basis and scores; None where a ready plan was measured.
    maps : list of MapEnergy
        Retained energy by map and rank; the last one is of a random basis.
    mean_rank : float
        Budget of `allocations`.
    allocations : list of AllocationResult
        Allocation methods.
    """

    name: str
    kind: str
    systems: list[SystemResult]
    retained: dict[str, float]
    calibrated: Calibrated | None = None
    maps: list[MapEnergy] = field(default_factory=list)
    mean_rank: float = 0.0
    allocations: list[AllocationResult] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """What goes into JSON: everything but the arrays of the calibration."""
        shown = ("name", "kind", "systems", "retained", "maps", "mean_rank", "allocations")
        return {name: getattr(self, name) for name in shown}


def measure_layer(
    traces: Traces,
    settings: Settings,
    ranks: Sequence[int],
    *,
    method: str | None,
    mean_rank: float,
    backend: str,
    rows: int | None,
    seed: int,
    step: Callable[[str], None],
) -> LayerReport:
    """Calibrate a layer, decode its test sequences with every system, and compare maps and allocations."""
    label = traces.name
    step(f"{label}: calibrating")
    layer = settings.calibrate(traces)
    windows = collect_windows(traces.layer, traces.test, settings.window)
    systems = exact_systems(traces.layer, settings.window)
    for rank in ranks:
        plan = layer.plan(rank, map=settings.map, method=method)
        systems.append(sketch_system(plan, f"sketch, mean rank {rank}"))
    results = _decode(systems, traces, settings.window, backend, rows, step)
    step(f"{label}: maps")
    columns = min(max(ranks), layer.basis.rank_max)
    measured = [rank for rank in ranks if rank <= columns]
    energies = retained_energy(layer.basis, windows, measured, settings.maps())
    step(f"{label}: random basis")
    random = SketchBasis.random(traces.layer, columns, seed, layer.basis.e0, settings.window)
    energies += retained_energy(random, windows, measured, ["exact"], "random")
    step(f"{label}: allocation")
    allocations = compare_allocations([layer], [windows], mean_rank, map=settings.map)
    retained = {s.name: float(plan_energy(s.plan, windows).retained.mean()) for s in systems if s.plan is not None}
    return LayerReport(traces.name, traces.layer.kind, results, retained, layer, energies, mean_rank, allocations)


def measure_plan(
    traces: Traces, plan: SketchPlan, *, backend: str, rows: int | None, step: Callable[[str], None]
) -> LayerReport:
    """Decode the test sequences with a ready plan beside the exact systems."""
    if plan.layer != traces.layer:
        raise ValueError(f"plan: expected one for {traces.layer}, got one for {plan.layer}")
    systems = [*exact_systems(traces.layer, plan.window), sketch_system(plan, f"plan, mean rank {plan.mean_rank:.2f}")]
    results = _decode(systems, traces, plan.window, backend, rows, step)
    windows = collect_windows(traces.layer, traces.test, plan.window)
    retained = {systems[-1].name: float(plan_energy(plan, windows).retained.mean())}
    return LayerReport(traces.name, traces.layer.kind, results, retained)


def _decode(
    systems: Sequence[System],
    traces: Traces,
    window: int,
    backend: str,
    rows: int | None,
    step: Callable[[str], None],
) -> list[SystemResult]:
    return compare(
        systems,
        traces.layer,
        traces.test,
        window=window,
        backend=backend,
        rows=rows,
        progress=lambda name: step(f"{traces.name}: {name}"),
    )


def show(output: Output, reports: Sequence[LayerReport], title: str) -> None:
    """Print the comparison of the systems."""
    rows: list[list[str]] = []
    for report in reports:
        standard = report.systems[0].microseconds
        rows += [[]] if rows else []
        for r in report.systems:
            rows.append([
                report.name, r.name, f"{r.reduction:.2f}x", scientific(r.output_error), scientific(r.flush_error),
                scientific(r.state_error), percent(report.retained.get(r.name, 1.0)), f"{r.microseconds:.2f}",
                f"{standard / r.microseconds:.2f}x",
            ])  # fmt: skip
    first = reports[0].systems[0]
    output.table(
        f"{title} ({first.backend}, {first.rows} rows per step)",
        [
            "layer",
            "system",
            "less traffic",
            "output error",
            "at flush",
            "state error",
            "retained",
            "us/token",
            "speed",
        ],
        rows,
        words=2,
    )
    output.say(
        "Errors are relative norms against the float64 recurrence on held-out text; at flush: the worst of the "
        "windows' last tokens. Retained: share of the state reads' energy, mean over heads; allocation by gradients "
        "gives ranks to the heads that the loss feels. us/token: a step's time over its rows."
    )


def show_margins(output: Output, reports: Sequence[LayerReport]) -> None:
    """Print what calibration, the map and the allocation are worth, each with its margin."""
    ranks = reports[0].maps[0].ranks
    headings = [f"rank {rank}" for rank in ranks]
    _show_bases(output, reports, headings)
    _show_maps(output, reports, headings)
    _show_allocations(output, reports)


def _show_bases(output: Output, reports: Sequence[LayerReport], headings: list[str]) -> None:
    rows: list[list[str]] = []
    for report in reports:
        calibrated = next(e for e in report.maps if e.map.name == "exact")
        random = report.maps[-1]
        rows += [[]] if rows else []
        rows += [[report.name, e.basis, *map(percent, e.retained.mean(axis=0))] for e in (calibrated, random)]
        rows.append([report.name, "margin", *_times_less(calibrated, random)])
    output.table(
        "Calibrated against random basis: retained energy, exact map", ["layer", "basis", *headings], rows, words=2
    )
    output.say("margin: how many times less energy is lost.")


def _show_maps(output: Output, reports: Sequence[LayerReport], headings: list[str]) -> None:
    rows: list[list[str]] = []
    for report in reports:
        rows += [[]] if rows else []
        energies = [e for e in report.maps if e.basis == "calibrated"]
        for e in energies:
            cells = [
                f"{percent(kept)} @{reduction:.1f}x"
                for kept, reduction in zip(e.retained.mean(axis=0), e.reduction, strict=True)
            ]
            rows.append([report.name, e.map.name, *cells])
        paper = next(e for e in energies if e.map.name == PAPER)
        prior = next(e for e in energies if e.map.name == "prior")
        rows.append([report.name, f"margin of prior over {PAPER}", *_times_less(prior, paper)])
    output.table(
        "Coefficient maps: retained energy @ traffic reduction, all heads at one rank",
        ["layer", "map", *headings],
        rows,
        words=2,
    )
    output.say(f"margin: how many times less energy is lost at the same bytes; {PAPER} is the paper's map.")


def _show_allocations(output: Output, reports: Sequence[LayerReport]) -> None:
    rows: list[list[str]] = []
    for report in reports:
        rows += [[]] if rows else []
        uniform = next(a for a in report.allocations if a.method == "uniform")
        for a in report.allocations:
            objective = "-" if a.objective is None else f"{a.objective:.3g}"
            margin = "-" if not a.objective or not uniform.objective else f"{uniform.objective / a.objective:.2f}x"
            rows.append([
                report.name, a.method, ranks_text(a.ranks[0]), f"{a.reduction:.2f}x", percent(a.error),
                f"{uniform.error / a.error:.2f}x" if a.error else "-", objective, margin,
            ])  # fmt: skip
    output.table(
        f"Rank allocation at mean rank {reports[0].mean_rank:g}",
        ["layer", "by", "ranks", "less traffic", "energy lost", "margin", "J", "margin"],
        rows,
        words=3,
    )
    output.say(
        "energy lost: of all heads' state reads together, on held-out text. J: gradient-weighted error, on the "
        "sequences that ranks were scored on. margin: how many times less than uniform."
    )


def _times_less(better: MapEnergy, worse: MapEnergy) -> list[str]:
    """How many times less energy one setting loses than another, per rank."""
    lost, more = (1 - e.retained.mean(axis=0) for e in (better, worse))
    return [f"{b / a:.2f}x" if a > 0 else "-" for a, b in zip(lost, more, strict=True)]


def draw(output: Output, reports: Sequence[LayerReport], folder: Path) -> None:
    """Draw the pictures of calibrated layers into a folder."""
    from sketchssm import plots

    layers = [report for report in reports if report.calibrated is not None]
    made = [plots.error_against_traffic({r.name: r.systems for r in reports}, folder / "error-against-traffic.png")]
    for report in layers:
        assert report.calibrated is not None
        made.append(
            plots.spectrum(report.calibrated.basis, report.maps, folder / f"spectrum-{report.name}.png", report.name)
        )
    if layers:
        ranks = {
            f"{report.name} ({a.method})": np.asarray(a.ranks[0])
            for report in layers
            for a in report.allocations
            if a.method != "uniform"
        }
        made.append(plots.rank_heatmap(ranks, folder / "ranks.png"))
    output.say("Pictures: " + ", ".join(str(path) for path in made))
