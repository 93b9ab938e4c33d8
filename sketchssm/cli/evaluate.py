"""``sketchssm evaluate``: retained energy, traffic and errors of systems on traces, or predictions of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np

import sketchssm
from sketchssm.cli import options
from sketchssm.cli.options import AT_LEAST_ONE, COUNT, NEW_FOLDER, NUMBERS, PATH
from sketchssm.study.tasks import TASKS, Prompts, make_prompts

if TYPE_CHECKING:
    from sketchssm.calibrate.plans import Settings
    from sketchssm.cli.output import Output
    from sketchssm.plans.plan import SketchPlan
    from sketchssm.transformers.loading import ModelText

TRACE_OPTIONS = (
    *("systems", "plan_file", "ranks", "mean_rank", "every", "seed", "out", "plots", "suffix"),
    *options.MAP_SETTINGS,
)
"""Names of the options that have no effect on a model; the seed has one on tasks."""

EXACT = ("standard", "replay")


class Recall(NamedTuple):
    """Recall tasks to make from a text, and how heads decode them."""

    tasks: tuple[str, ...]
    prompts: int  # of each task and distance
    distances: tuple[int, ...]
    facts: int
    decoded: int

    def make(self, source: ModelText, seed: int) -> list[Prompts]:
        """Prompts of each task at each distance."""
        text, encode = source.haystack()
        rng = np.random.default_rng(seed)
        shared: Any = {"encode": encode, "prompts": self.prompts, "rng": rng, "length": source.length}
        made = [
            make_prompts(task, text, distance=distance, facts=None if task == "needle" else [self.facts], **shared)
            for task in self.tasks
            for distance in self.distances
        ]
        most = min(prompts.question for prompts in made)
        if self.decoded > most:
            raise click.UsageError(
                f"--decoded: expected at most the {most} tokens before a question, got {self.decoded}"
            )
        return made


def _recall(
    tasks: tuple[str, ...] | None, prompts: int, distances: tuple[int, ...], facts: int, decoded: int
) -> Recall | None:
    if tasks is None:
        options.refuse("without --tasks", tuple(signature(_recall).parameters))
        return None
    if set(tasks) == {"needle"}:
        options.refuse("on the task needle", ("facts",))
    return Recall(tasks, prompts, distances, facts, decoded)


def _task(text: str) -> str:
    if text not in TASKS:
        raise ValueError(f"expected tasks among {', '.join(TASKS)}, got {text!r}")
    return text


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
    help="Write results.json into this folder.",
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
@options.model_options
@click.option("--plans", help="For --model: file or folder of plans, or the exact systems standard or replay.")
@options.gather(
    "asked",
    _recall,
    click.option(
        "--tasks",
        type=options.Commas("task,task,...", _task),
        help=f"For --model: recall tasks made from --text, among {', '.join(TASKS)}.",
    ),
    click.option("--prompts", type=COUNT, default=100, help="Prompts of each of --tasks at each --distance."),
    click.option(
        "--distance",
        "distances",
        type=NUMBERS,
        default="1024",
        help="Tokens from the first asked fact to the questions.",
    ),
    click.option("--facts", type=COUNT, default=4, help="Facts in each prompt of --tasks, except needle."),
    click.option(
        "--decoded",
        type=click.IntRange(min=0),
        default=0,
        help="Last tokens before the questions of --tasks that heads decode too.",
    ),
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
    source: ModelText | None,
    plans: str | None,
    asked: Recall | None,
    json_file: str | None,
) -> None:
    """Decode the test sequences of TRACES with every system and report retained energy, traffic and errors.

    Each file is calibrated first.

    With --model, compare the predictions of a model with and without --plans on a text, and with --tasks its recall.
    """
    if source is not None:
        options.refuse("with --model", [name for name in TRACE_OPTIONS if name != "seed"])
        if asked is None:
            options.refuse("with --model and without --tasks", ("seed",))
        if plans is None:
            raise click.UsageError("--plans: expected plans of the model, standard or replay")
        from sketchssm.cli.output import Output

        options.check_files({"--text": source.text, "--plans": None if plans in EXACT else plans}, json=json_file)
        _of_model(source, plans, asked, seed, backend, Output(json_file))
        return
    options.refuse("without --model", ("plans", "tasks"))
    if plots and out is None:
        raise click.UsageError("--plots: expected --out FOLDER to draw into")
    if not plots:
        options.refuse("without --plots", ("suffix",))
    from sketchssm.calibrate.traces import Traces, named_errors
    from sketchssm.cli.output import Output
    from sketchssm.study.evaluate import Study, evaluate, select
    from sketchssm.study.evaluate.evaluation import RESULT_FILE
    from sketchssm.study.evaluate.tables import all_tables
    from sketchssm.study.plots import draw, picture_files

    files = [] if out is None else [out / RESULT_FILE]
    if out is not None and plots:
        files += picture_files(out, f".{suffix}")
    options.check_files({"TRACES": traces, "--plan": plan_file}, out=files, json=json_file)
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
        found = evaluate(studies, chosen, backend, step)
    for table in all_tables(found.layers):
        output.table(*table)
    output.finish(found.plain(sketchssm.__version__))
    written = [] if out is None else [found.save(out, sketchssm.__version__)]
    if out is not None and plots:
        written += draw(found.layers, out, f".{suffix}").values()
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


def _of_model(source: ModelText, plans: str, asked: Recall | None, seed: int, backend: str, output: Output) -> None:
    """Compare a model with heads with the model itself, and with exact heads: theirs is the part of the arithmetic."""
    from sketchssm.plans.model_plans import load_plans
    from sketchssm.study.tables import number, percent
    from sketchssm.transformers import evaluate

    given = plans if plans in EXACT else load_plans(plans)
    prompts = [] if asked is None else asked.make(source, seed)
    with output.progress("loading the model", 1):
        model, rows = source.load(least=1)
    alone = plans == "standard"
    with output.progress("evaluating", (1 if alone else 2) * len(rows)) as step:
        monitor = {} if plans in EXACT else {"monitor": 1}
        found = evaluate(model, rows, given, backend=backend, progress=step, **monitor)
        exact = found if alone else evaluate(model, rows, "standard", backend=backend, progress=step)
    columns = ["", "less traffic", "loss (nats)", "perplexity", "loss increase", "same top-1", "KL (nats)"]
    systems = [["transformers", "1.00x", f"{found.loss:.4f}", f"{found.perplexity:.2f}", "", "", ""]]
    for name, own in (("exact heads", exact), (f"with {plans}" if plans in EXACT else "with plans", found)):
        error = number(own.increase_error, ".4f", " of one row", " ± ")
        losses = [f"{own.patched_loss:.4f}", f"{own.patched_perplexity:.2f}", f"{own.increase:+.4f}{error}"]
        systems.append([name, f"{own.reduction:.2f}x", *losses, percent(own.agreement), f"{own.divergence:.2e}"])
    output.table(f"{type(model).__name__} on {found.tokens} tokens, with {plans}", columns, systems)
    columns = ["layer", "standard, kB/token", "with heads, kB/token", "less traffic", "reported error"]
    layers = []
    for name, cost in found.layers.items():
        kilobytes = [f"{cost.standard / 1e3:.1f}", f"{cost.patched / 1e3:.1f}", f"{cost.standard / cost.patched:.2f}x"]
        layers.append([name, *kilobytes, number(found.errors.get(name, np.nan), ".1e", "")])
    output.table("State traffic of one sequence, and errors that heads report", columns, layers, words=1)
    facts = ("increase", "perplexity", "patched_perplexity", "reduction")
    known = {name: getattr(found, name) for name in facts} | vars(found)
    compared = {name: getattr(exact, name) for name in ("patched_loss", "increase", "agreement", "divergence")}
    answers = {} if asked is None else {"tasks": _answers(model, prompts, given, asked.decoded, backend, output)}
    output.finish({"plans": plans} | known | {"exact": compared} | answers)


def _answers(
    model: Any, prompts: list[Prompts], plans: Any, decoded: int, backend: str, output: Output
) -> list[dict[str, Any]]:
    """Recall of a model, with heads, and with exact heads that begin from zero states."""
    from sketchssm.study.tables import share
    from sketchssm.transformers import recall

    ways: dict[str, dict[str, Any]] = {
        "transformers": {},
        "exact heads": {"plans": "standard", "decoded": decoded},
        "with plans": {"plans": plans, "decoded": decoded},
        "states wiped": {"plans": "standard", "decoded": decoded, "wiped": True},
    }
    cells, found = [], []
    with output.progress("recall", len(ways) * sum(len(each.ids) for each in prompts)) as step:
        for each in prompts:
            scores = {way: recall(model, each, backend=backend, progress=step, **how) for way, how in ways.items()}
            cells.append([each.task, str(each.distance), *map(share, scores.values())])
            found.append({"task": each.task, "distance": each.distance, "prompts": len(each.ids), **scores})
    output.table("Right answers", ["task", "distance", *ways], cells)
    return found
