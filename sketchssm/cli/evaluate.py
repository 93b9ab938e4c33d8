"""``sketchssm evaluate``: what systems retain, cost and lose on traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sketchssm.cli import options
from sketchssm.cli.options import Numbers
from sketchssm.coefficients import CoefficientMap

if TYPE_CHECKING:
    from sketchssm.cli.output import Output
    from sketchssm.evaluate.study import Study
    from sketchssm.plan import SketchPlan
    from sketchssm.traces import Traces

__all__ = ["command"]


@click.command("evaluate")
@options.trace_files
@click.option(
    "--systems",
    metavar="NAME,NAME,...",
    multiple=True,
    help="Families (exact, sketch, ...) or systems (sketch/ridge-8; * and ? are wildcards).  [default: all]",
)
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    help="Measure this plan beside the exact systems; with --systems, as the family plan beside those.",
)
@click.option(
    "--ranks", type=Numbers(), default="2,4,6,8,12,16", show_default=True, help="Mean ranks of the sketches."
)
@click.option(
    "--mean-rank",
    type=click.FloatRange(min=1),
    default=8.0,
    show_default=True,
    help="Budget of the ablations.",
)
@click.option(
    "--every",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Tokens from one point of the drift curves to the next.",
)
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    help="With --plan alone: rows that decode at once, sequences repeated.  [default: one per test sequence]",
)
@options.map_settings
@options.backend
@options.seed
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write results.json and CSV files into this folder, and go on with what is there.",
)
@click.option("--plots", is_flag=True, help="Draw pictures into the folder of --out (needs matplotlib).")
@click.option(
    "--format", "suffix", type=click.Choice(["png", "svg"]), default="png", show_default=True, help="Of them."
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all of it as one page of HTML (needs matplotlib).",
)
@options.output
def command(
    traces: tuple[Path, ...],
    systems: tuple[str, ...],
    plan_file: Path | None,
    ranks: tuple[int, ...],
    mean_rank: float,
    every: int,
    rows: int | None,
    window: int,
    map_name: str,
    pivots: int | None,
    ridge: float | None,
    method: str | None,
    weighting: str,
    backend: str,
    seed: int,
    out: Path | None,
    plots: bool,
    suffix: str,
    report: Path | None,
    json_file: str | None,
) -> None:
    """Decode the test sequences of TRACES with every system and say what each retains, costs and loses.

    Each file is calibrated first. Finished parts are kept in the folder of --out, so that a run that was interrupted
    goes on where it stopped.
    """
    if plots and out is None:
        raise click.UsageError("--plots: expected --out FOLDER to draw into")
    if plan_file is not None and len(traces) > 1:
        raise click.UsageError(f"--plan: expected one trace file, got {len(traces)}")
    if rows is not None and (plan_file is None or systems or report is not None):
        raise click.UsageError("--rows: expected with --plan alone, without --systems and --report")
    from sketchssm.cli.output import Output
    from sketchssm.evaluate.settings import Settings
    from sketchssm.evaluate.study import Study
    from sketchssm.plan import SketchPlan
    from sketchssm.traces import Traces

    output = Output(json_file)
    plan = None if plan_file is None else SketchPlan.load(plan_file)
    names = [name.strip() for names in systems for name in names.split(",")]
    if plan is not None and not names and report is None:
        _check_plan(output, Traces.load(traces[0]), plan, backend, rows, out, plots)
        return
    settings = Settings(window, CoefficientMap(map_name, pivots, ridge), weighting)
    studies = [Study(Traces.load(path), settings, ranks, mean_rank, method, seed, plan, every) for path in traces]
    _evaluate(output, studies, names, backend, out, f".{suffix}" if plots else None, report)


def _evaluate(
    output: Output,
    studies: Sequence[Study],
    names: Sequence[str],
    backend: str,
    out: Path | None,
    suffix: str | None,
    report: Path | None,
) -> None:
    """Measure the chosen systems, print the tables and write the files that were asked for."""
    from sketchssm.cli.comparison import show_evaluation
    from sketchssm.cli.page import write_page
    from sketchssm.evaluate.evaluation import evaluate
    from sketchssm.evaluate.pictures import draw
    from sketchssm.evaluate.registry import entries, select
    from sketchssm.plots import load_pyplot

    if suffix or report:
        load_pyplot()  # what is missing is best said before the work
    chosen = select([entries(study) for study in studies], names)
    with output.progress("", sum(len(own) + 1 for own in chosen)) as step:
        found = evaluate(studies, chosen, out, backend, step)
    show_evaluation(output, found)
    output.finish(found.plain())
    written = []
    if out is not None:
        written += found.save(out)
        if suffix:
            written += draw(found.layers, out, suffix).values()
    if report is not None:
        written.append(write_page(found, report))
    if written:
        output.say("\nWritten: " + ", ".join(str(path) for path in written))


def _check_plan(
    output: Output, traces: Traces, plan: SketchPlan, backend: str, rows: int | None, out: Path | None, plots: bool
) -> None:
    """Measure a ready plan beside the exact systems, with times."""
    from sketchssm.cli.output import Output
    from sketchssm.cli.report import draw, measure_plan, show

    with output.progress("", 4) as step:
        report = measure_plan(traces, plan, backend=backend, rows=rows, step=step)
    show(output, [report], "Systems")
    results = {"layers": [report.plain()]}
    output.finish(results)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        Output(str(out / "results.json")).finish(results)
        if plots:
            draw(output, [report], out)
