"""``sketchssm evaluate``: retained energy, traffic and errors of systems on traces, or predictions of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

import sketchssm
from sketchssm.cli import options
from sketchssm.cli.options import AT_LEAST_ONE, COUNT, NEW_FILE, NEW_FOLDER, NUMBERS, PATH

if TYPE_CHECKING:
    from sketchssm.calibrate.plans import Settings
    from sketchssm.cli.output import Output
    from sketchssm.plans.plan import SketchPlan
    from sketchssm.transformers.loading import ModelText

__all__ = ["command"]

TRACE_OPTIONS = (
    *("systems", "plan_file", "ranks", "mean_rank", "every", "seed", "out", "plots", "suffix", "report"),
    *options.MAP_SETTINGS,
)
"""Names of the options that have no effect on a model."""


EXACT = ("standard", "replay")


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
    type=PATH,
    help="Measure this plan, as the system plan/given; without --systems, only this plan and the exact systems. For "
    "several TRACES: the plans of a model, or a folder; their names are those of the trace files.",
)
@click.option("--ranks", type=NUMBERS, default="2,4,6,8,12,16", help="Mean ranks of the sketches.")
@click.option("--mean-rank", type=AT_LEAST_ONE, default=8.0, help="Mean rank of the ablations.")
@click.option("--every", type=COUNT, default=64, help="Tokens from one point of the curves over tokens to the next.")
@options.map_settings
@options.backend
@options.seed
@click.option(
    "--out",
    type=NEW_FOLDER,
    help="Write results.json and CSV files into this folder, and use the finished results in it.",
)
@click.option(
    "--plots",
    is_flag=True,
    callback=options.needs_matplotlib,
    help="Draw pictures into the folder of --out (needs matplotlib).",
)
@click.option(
    "--format",
    "suffix",
    type=click.Choice(["png", "svg"]),
    default="png",
    help="Format of the pictures of --plots.",
)
@click.option(
    "--report",
    type=NEW_FILE,
    callback=options.needs_matplotlib,
    help="Write everything as one page of HTML (needs matplotlib).",
)
@options.model_options
@click.option("--plans", help="For --model: file or folder of plans, or the exact systems standard or replay.")
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
    plans: str | None,
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
            raise click.UsageError("--plans: expected plans of the model, standard or replay")
        from sketchssm.cli.output import Output

        options.check_files({"--text": source.text, "--plans": None if plans in EXACT else plans}, json=json_file)
        _of_model(source, plans, backend, Output(json_file))
        return
    options.refuse("without --model", ("plans",))
    if plots and out is None:
        raise click.UsageError("--plots: expected --out FOLDER to draw into")
    if not plots:
        options.refuse("without --plots", ("suffix",))
    from sketchssm.calibrate.traces import Traces, named_errors
    from sketchssm.cli.output import Output
    from sketchssm.cli.page import write_page
    from sketchssm.study.evaluate import Study, evaluate, select
    from sketchssm.study.evaluate.evaluation import RESULT_FILES
    from sketchssm.study.evaluate.tables import all_tables
    from sketchssm.study.plots import draw, picture_files

    files = [] if out is None else [out / name for name in RESULT_FILES]
    if out is not None and plots:
        files += picture_files(out, f".{suffix}")
    options.check_files({"TRACES": traces, "--plan": plan_file}, out=files, report=report, json=json_file)
    output = Output(json_file)
    plans_of = [None for _ in traces] if plan_file is None else _plans_of(traces, plan_file)
    names = [name.strip() for names in systems for name in names.split(",")]
    alone = plan_file is not None and not names
    if alone:
        options.refuse("with --plan unless --systems asks for sketches", ("ranks", "mean_rank", *options.MAP_SETTINGS))
        names = ["exact", "plan"]
    studies = []
    for recorded, plan in zip(map(Traces.load, traces), plans_of, strict=True):
        own = replace(settings, window=plan.window) if alone and plan is not None else settings
        with named_errors(recorded):
            studies.append(Study(recorded, own, ranks, mean_rank, seed, plan, every))
    chosen = select(studies, names)
    _refuse_ignored({entry.family for own in chosen for entry in own})
    if not any("random-basis" in entry.name for own in chosen for entry in own):
        options.refuse("without the systems random-basis", ("seed",))
    with output.progress("", sum(map(len, chosen))) as step:
        found = evaluate(studies, chosen, out, backend, step)
    for table in all_tables(found.layers):
        output.table(*table)
    output.finish(found.plain(sketchssm.__version__))
    written = [] if out is None else found.save(out, sketchssm.__version__)
    if out is not None and plots:
        written += draw(found.layers, out, f".{suffix}").values()
    if report is not None:
        written.append(write_page(found, report))
    if written:
        output.say("\nWritten: " + ", ".join(map(str, written)))


def _plans_of(traces: Sequence[Path], file: Path) -> list[SketchPlan]:
    """The plan of each trace file: by its name, or the only plan for the only file."""
    from sketchssm.plans.model_plans import load_plans

    plans, names = load_plans(file), [path.stem for path in traces]
    if len(plans) == len(names) == 1:
        return list(plans.values())
    if lacking := [name for name in names if name not in plans]:
        had = ", ".join(plans)
        raise click.UsageError(f"--plan: expected plans named as the trace files, {', '.join(lacking)}, got {had}")
    return [plans[name] for name in names]


def _refuse_ignored(families: set[str]) -> None:
    """Refuse settings of sketches if none of the chosen families has sketches."""
    if not families & {"sketch", "narrow"}:
        options.refuse("without the families sketch and narrow", ("ranks",))
    if not families & {"ablation", "rounded-states"}:
        options.refuse("without the families ablation and rounded-states", ("mean_rank",))
    sketched = families & {"sketch", "ablation", "rounded-states", "narrow"}
    if not sketched:
        options.refuse("without sketches", [name for name in options.MAP_SETTINGS if name != "window"])
    if sketched == {"narrow"}:
        options.refuse("on the family narrow, which has every format", ("sketch_dtype",))


def _of_model(source: ModelText, plans: str, backend: str, output: Output) -> None:
    """Compare a model with heads with the model itself, and with exact heads: theirs is the part of the arithmetic."""
    from sketchssm.plans.model_plans import load_plans
    from sketchssm.study.tables import number, percent
    from sketchssm.transformers import evaluate

    given = plans if plans in EXACT else load_plans(plans)
    model, rows = source.load(least=1)
    with output.progress("evaluating", 2 * len(rows)) as step:
        found = evaluate(model, rows, given, backend=backend, progress=step)
        exact = evaluate(model, rows, "standard", backend=backend, progress=step)
    columns = ["", "less traffic", "loss (nats)", "perplexity", "loss increase", "same top-1", "KL (nats)"]
    systems = [["transformers", "1.00x", f"{found.loss:.4f}", f"{found.perplexity:.2f}", "", "", ""]]
    for name, own in (("exact heads", exact), (f"with {plans}" if plans in EXACT else "with plans", found)):
        error = number(own.increase_error, ".4f", " of one row", " ± ")
        losses = [f"{own.patched_loss:.4f}", f"{own.patched_perplexity:.2f}", f"{own.increase:+.4f}{error}"]
        systems.append([name, f"{own.reduction:.2f}x", *losses, percent(own.agreement), f"{own.divergence:.2e}"])
    output.table(f"{type(model).__name__} on {found.tokens} tokens, with {plans}", columns, systems)
    columns = ["layer", "standard, kB/token", "with heads, kB/token", "less traffic"]
    layers = []
    for name, cost in found.layers.items():
        kilobytes = [f"{cost.standard / 1e3:.1f}", f"{cost.patched / 1e3:.1f}", f"{cost.standard / cost.patched:.2f}x"]
        layers.append([name, *kilobytes])
    output.table("State traffic of one sequence", columns, layers, words=1)
    facts = ("increase", "perplexity", "patched_perplexity", "reduction")
    known = {name: getattr(found, name) for name in facts} | vars(found)
    compared = {name: getattr(exact, name) for name in ("patched_loss", "increase", "agreement", "divergence")}
    output.finish({"plans": plans} | known | {"exact": compared})
