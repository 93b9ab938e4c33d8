"""``sketchssm demo``: calibrate, plan, decode and compare on the traces that come with the package."""

from __future__ import annotations

import time
from pathlib import Path

import click

from sketchssm.cli import options
from sketchssm.cli.options import Numbers
from sketchssm.coefficients import CoefficientMap

__all__ = ["command"]

ROWS = 128
"""Rows that decode at once on a compiled backend: 34 MB of states, more than most caches hold."""


@click.command("demo")
@click.option("--ranks", type=Numbers(), default="2,4,8,16", show_default=True, help="Mean ranks of the sketches.")
@click.option(
    "--rows", type=click.IntRange(min=1), help=f"Rows that decode at once.  [default: {ROWS}; 1 on the reference]"
)
@options.map_settings
@options.backend
@options.seed
@options.plots
@options.output
def command(
    ranks: tuple[int, ...],
    rows: int | None,
    window: int,
    map_name: str,
    pivots: int | None,
    ridge: float | None,
    method: str | None,
    weighting: str,
    backend: str,
    seed: int,
    plots: Path | None,
    json_file: str | None,
) -> None:
    """Calibrate, plan, decode and compare, on real traces of one small layer of each kind."""
    from sketchssm.cli.output import Output
    from sketchssm.cli.report import STAGES, draw, measure_layer, show, show_margins
    from sketchssm.evaluate.settings import Settings
    from sketchssm.recurrence import KINDS
    from sketchssm.traces import Traces

    started = time.perf_counter()
    output = Output(json_file)
    settings = Settings(window, CoefficientMap(map_name, pivots, ridge), weighting)
    rows = rows or (1 if backend == "reference" else ROWS)
    output.say(
        "Each layer: bases from two sequences of real traces, ranks from a third, then a fourth is decoded.\n"
        f"Map {settings.map}, window {window}. Kernels are compiled on first use, which can take a minute."
    )
    with output.progress("", len(KINDS) * (STAGES + len(ranks))) as step:
        reports = [
            measure_layer(
                Traces.shipped(kind),
                settings,
                ranks,
                method=method,
                mean_rank=4,
                backend=backend,
                rows=rows,
                seed=seed,
                step=step,
            )
            for kind in KINDS
        ]
    show_margins(output, reports)
    show(output, reports, "The comparison")
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        draw(output, reports, plots)
    took = time.perf_counter() - started
    compiling = sum(result.first_call_seconds for report in reports for result in report.systems)
    output.say(
        f"\nTook {took:.0f} s, of which first calls {compiling:.0f} s (compiling, or loading what was compiled); "
        "times per token do not count them."
    )
    output.finish({
        "layers": [report.plain() for report in reports],
        "seconds": took,
        "first_call_seconds": compiling,
        "settings": settings,
    })  # fmt: skip
