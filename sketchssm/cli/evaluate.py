"""``sketchssm evaluate``: what a plan retains, costs and loses on traces."""

from __future__ import annotations

from pathlib import Path

import click

from sketchssm.cli import options
from sketchssm.cli.options import Numbers

__all__ = ["command"]


@click.command("evaluate")
@options.trace_files
@click.option(
    "--plan", "plan_file", type=click.Path(path_type=Path), help="Measure this plan; its settings replace those below."
)
@click.option("--ranks", type=Numbers(), default="2,4,8,16", show_default=True, help="Mean ranks of the sketches.")
@click.option(
    "--mean-rank",
    type=click.FloatRange(min=1),
    default=4.0,
    show_default=True,
    help="Budget at which allocation methods are compared.",
)
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    help="Rows that decode at once, sequences repeated.  [default: one per test sequence]",
)
@options.map_settings
@options.backend
@options.seed
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write results.json, and pictures if asked for, into this folder.",
)
@click.option("--plots", is_flag=True, help="Draw pictures into the folder of --out (needs matplotlib).")
@options.output
def command(
    traces: tuple[Path, ...],
    plan_file: Path | None,
    ranks: tuple[int, ...],
    mean_rank: float,
    rows: int | None,
    window: int,
    map_name: str | None,
    pivots: int,
    ridge: float | None,
    method: str | None,
    weighting: str,
    backend: str,
    seed: int,
    out: Path | None,
    plots: bool,
    json_file: str | None,
) -> None:
    """Decode the test sequences of TRACES and say what is retained, what it costs and what is lost.

    Without --plan, each file is calibrated first, and bases, maps and allocation methods are compared as well.
    """
    if plots and out is None:
        raise click.UsageError("--plots: expected --out FOLDER to draw into")
    if plan_file is not None and len(traces) > 1:
        raise click.UsageError(f"--plan: expected one trace file, got {len(traces)}")
    from sketchssm.cli.output import Output
    from sketchssm.cli.report import STAGES, draw, measure_layer, measure_plan, show, show_margins
    from sketchssm.evaluate.settings import Settings
    from sketchssm.plan import SketchPlan
    from sketchssm.traces import Traces

    output = Output(json_file)
    settings = Settings(window, map_name, pivots, ridge, weighting)
    with output.progress("", len(traces) * (STAGES + len(ranks))) as step:
        if plan_file is not None:
            plan = SketchPlan.load(plan_file)
            reports = [measure_plan(Traces.load(traces[0]), plan, backend=backend, rows=rows, step=step)]
        else:
            reports = [
                measure_layer(
                    Traces.load(path),
                    settings,
                    ranks,
                    method=method,
                    mean_rank=mean_rank,
                    backend=backend,
                    rows=rows,
                    seed=seed,
                    step=step,
                )
                for path in traces
            ]
    show(output, reports, "Systems")
    if plan_file is None:
        show_margins(output, reports)
    results = {"layers": [report.plain() for report in reports]}
    output.finish(results)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        Output(str(out / "results.json")).finish(results)
        if plots:
            draw(output, reports, out)
