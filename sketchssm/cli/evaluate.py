"""``sketchssm evaluate``: retained energy, traffic and errors of systems on traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sketchssm.cli import options
from sketchssm.cli.models import ModelText, evaluate_model, model_options
from sketchssm.cli.options import Numbers

if TYPE_CHECKING:
    from sketchssm.calibrate.plans import Settings

__all__ = ["command"]


TRACE_OPTIONS = (
    *("systems", "plan_file", "ranks", "mean_rank", "every", "seed", "out", "plots", "suffix", "report"),
    *options.MAP_SETTINGS,
)
"""Names of the options that have no effect on a model."""


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
    help="Measure this plan, as the system plan/given; without --systems, only this plan and the exact systems.",
)
@click.option(
    "--ranks", type=Numbers(), default="2,4,6,8,12,16", show_default=True, help="Mean ranks of the sketches."
)
@click.option(
    "--mean-rank", type=options.FiniteRange(min=1), default=8.0, show_default=True, help="Mean rank of the ablations."
)
@click.option(
    "--every",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Tokens from one point of the curves over tokens to the next.",
)
@options.map_settings
@options.backend
@options.seed
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write results.json and CSV files into this folder, and use the finished results in it.",
)
@options.plots(is_flag=True, help="Draw pictures into the folder of --out (needs matplotlib).")
@click.option(
    "--format",
    "suffix",
    type=click.Choice(["png", "svg"]),
    default="png",
    show_default=True,
    help="Format of the pictures of --plots.",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=options.needs_matplotlib,
    help="Write everything as one page of HTML (needs matplotlib).",
)
@model_options
@click.option(
    "--plans",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Plans of --model, from sketchssm calibrate --model.",
)
@options.output
def command(
    traces: tuple[Path, ...],
    systems: tuple[str, ...],
    plan_file: Path | None,
    ranks: tuple[int, ...],
    mean_rank: float,
    every: int,
    settings: Settings,
    backend: str,
    seed: int,
    out: Path | None,
    plots: bool,
    suffix: str,
    report: Path | None,
    source: ModelText | None,
    plans: Path | None,
    json_file: str | None,
) -> None:
    """Decode the test sequences of TRACES with every system and report retained energy, traffic and errors.

    Each file is calibrated first. Finished results are kept in the folder of --out, so an interrupted run can
    continue.

    With --model, compare the predictions of a model with and without --plans on a text.
    """
    if source is not None:
        options.refuse("with --model", TRACE_OPTIONS)
        if plans is None:
            raise click.UsageError("--plans: expected plans of the model")
        from sketchssm.cli.output import Output

        options.check_files([source.text, plans], json=json_file)
        evaluate_model(source, plans, backend, Output(json_file))
        return
    options.refuse("without --model", ("plans",))
    if plots and out is None:
        raise click.UsageError("--plots: expected --out FOLDER to draw into")
    if not plots:
        options.refuse("without --plots", ("suffix",))
    if plan_file is not None and len(traces) > 1:
        raise click.UsageError(f"--plan: expected one trace file, got {len(traces)}")
    options.check_files([*traces, plan_file], report=report, json=json_file)
    from sketchssm.cli.output import Output
    from sketchssm.cli.page import write_page
    from sketchssm.cli.tables import show_all
    from sketchssm.evaluate import Study, evaluate, select
    from sketchssm.plan import SketchPlan
    from sketchssm.plots import draw
    from sketchssm.traces import Traces

    output = Output(json_file)
    plan = None if plan_file is None else SketchPlan.load(plan_file)
    names = [name.strip() for names in systems for name in names.split(",")]
    if plan is not None and not names:
        options.refuse("with --plan unless --systems asks for sketches", ("ranks", "mean_rank", *options.MAP_SETTINGS))
        names, settings = ["exact", "plan"], replace(settings, window=plan.window)
    studies = [Study(Traces.load(path), settings, ranks, mean_rank, seed, plan, every) for path in traces]
    chosen = select(studies, names)
    _refuse_ignored({entry.family for own in chosen for entry in own})
    with output.progress("", sum(map(len, chosen))) as step:
        found = evaluate(studies, chosen, out, backend, step)
    show_all(output, found.layers)
    output.finish(found.plain())
    written = []
    if out is not None:
        written += found.save(out)
        if plots:
            written += draw(found.layers, out, f".{suffix}").values()
    if report is not None:
        written.append(write_page(found, report))
    if written:
        output.say("\nWritten: " + ", ".join(str(path) for path in written))


def _refuse_ignored(families: set[str]) -> None:
    """Refuse settings of sketches if none of the chosen families has sketches."""
    if not families & {"sketch", "narrow"}:
        options.refuse("without the families sketch and narrow", ("ranks",))
    if not families & {"ablation", "rounded-states"}:
        options.refuse("without the families ablation and rounded-states", ("mean_rank",))
    sketched = families & {"sketch", "narrow", "ablation", "rounded-states"}
    if not sketched:
        options.refuse("without sketches", [name for name in options.MAP_SETTINGS if name != "window"])
    if sketched == {"narrow"}:
        options.refuse("on the family narrow, which has every format", ("sketch_dtype",))
