"""``sketchssm calibrate``: plans from traces, or of a model of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sketchssm.cli import options
from sketchssm.cli.options import AT_LEAST_ONE, COUNT, NEW_FILE, NUMBERS, OLD_FILE, POSITIVE

if TYPE_CHECKING:
    from sketchssm.calibrate.plans import Settings
    from sketchssm.cli.output import Output
    from sketchssm.plans.model_plans import AllocationSummary, ModelPlans
    from sketchssm.plans.plan import SketchPlan
    from sketchssm.transformers.loading import ModelText

QUESTIONS = 16
"""Questions about a text, if not chosen."""

ROOM = 512
"""Fewest tokens of a row for this default: facts need some."""


@click.command("calibrate")
@options.trace_files
@click.option(
    "--out",
    required=True,
    type=click.Path(),
    help="Plan file, or a folder: one plan for each trace file. For --model: file of all plans.",
)
@click.option("--mean-rank", type=AT_LEAST_ONE, help="Budget without residuals: the read bytes at this rank.")
@click.option(
    "--reduction",
    type=POSITIVE,
    help="Budget of plans with residuals: how many times less traffic than standard decode. Each head gets a rank and "
    "1 to 3 bits, or those of --residual-bits.  [default: 10 with questions, else 9; for other maps and some methods "
    "--mean-rank 7]",
)
@click.option("--sample", type=NUMBERS, help="For --model: tokens for bases and tokens for ranks, instead of --rows.")
@click.option(
    "--resume", type=NEW_FILE, help="For --model: file for the sums so far, from which a later run continues."
)
@click.option(
    "--questions",
    type=click.IntRange(min=0),
    help="For --model: prompts with questions about facts in --text, whose answers plans with residuals keep.  "
    f"[default: {QUESTIONS} with a tokenizer, gradients and a --length of {ROOM} or more, else 0]",
)
@click.option("--keep", type=NEW_FILE, help="For --model: also write its calibration, from which --from makes plans.")
@click.option("--from", "calibration", type=OLD_FILE, help="Instead of TRACES: a calibration that --keep wrote.")
@click.option("--microseconds", type=POSITIVE, help="With --from: budget, the time of a step of all layers.")
@options.time_on
@click.option("--batch", type=COUNT, default=32, help="Rows of a timed step.")
@click.option("--import", "imported", type=OLD_FILE, help="For --model: its calibration.pt of the paper's authors.")
@options.rank_max
@options.map_settings
@options.model_options
@options.output
def command(
    traces: tuple[Path, ...],
    out: str,
    mean_rank: float | None,
    reduction: float | None,
    sample: tuple[int, ...] | None,
    resume: Path | None,
    questions: int | None,
    keep: Path | None,
    calibration: Path | None,
    microseconds: float | None,
    time_on: str | None,
    batch: int,
    imported: Path | None,
    rank_max: int | None,
    settings: Settings,
    source: ModelText | None,
    json_file: str | None,
) -> None:
    """Make plans from TRACES, one npz file per layer, or of all layers of a --model.

    Bases are fitted on the first two thirds of the calibration sequences and ranks are scored on the rest. Several
    files share one budget: ranks go to the layers and heads that need them. So do the layers of a model.
    """
    from sketchssm.calibrate.allocation import budget_of
    from sketchssm.cli.output import Output, plan_paths

    if reduction is not None:
        options.refuse("with --reduction", ("mean_rank",))
    # the default without questions: those of a model, or of a calibration, are not known yet
    rank, unasked = budget_of(mean_rank, reduction, settings.map, settings.method)
    mean_rank = rank if unasked is None else None
    if calibration is None:
        options.refuse("without --from", ("microseconds",))
    if microseconds is None:
        options.refuse("without --microseconds", ("time_on", "batch"))
    elif time_on is None:
        raise click.UsageError("--microseconds: expected --time-on cpu or --time-on cuda beside it")
    budget: dict[str, Any] = {"mean_rank": mean_rank, "reduction": reduction, "rank_max": rank_max}
    if calibration is not None:
        options.refuse("with --from", ("keep", "imported", "window", "sample", "resume", "questions"))
        options.check_files({"--from": calibration}, out=Path(out), json=json_file)
        if microseconds is not None:
            options.refuse("with --microseconds", ("mean_rank", "reduction"))
            budget = {"seconds": 1e-6 * microseconds, "time_on": time_on, "batch": batch, "rank_max": rank_max}
        _from_calibration(calibration, Path(out), settings, Output(json_file), **budget)
        return
    if source is None:
        options.refuse("without --model", ("keep", "imported", "sample", "resume", "questions"))
        files = plan_paths(traces, out)
        options.check_files({"TRACES": traces}, out=files, json=json_file)
        _from_traces(traces, files, settings, Output(json_file), **budget | {"reduction": unasked})
        return
    path = Path(out)
    options.check_files(
        {"--text": source.text, "--import": imported}, out=path, keep=keep, resume=resume, json=json_file
    )
    if imported is not None:
        ignored = ("text", "rows", "length", "window", "sample", "resume", "reduction", "questions")
        options.refuse("with --import", ignored)
        if mean_rank is None:
            raise click.UsageError("--mean-rank: expected a mean rank with --import, whose scores have no residuals")
    if not keep and unasked is None and not settings.residual_bits:
        options.refuse("without residuals", ("questions",))
    if settings.method not in (None, "gradient"):
        options.refuse(f"with --method {settings.method}", ("questions",))
    if sample is not None:
        options.refuse("with --sample", ("rows",))
        if len(sample) != 2:
            raise click.UsageError(f"--sample: expected two numbers, for bases and for ranks, got {len(sample)}")
        source = replace(source, rows=sum(-(-tokens // source.length) for tokens in sample))
    for file in (keep, resume):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
    run = {"sample": sample, "resume": resume}
    _of_model(source, path, settings, Output(json_file), keep, imported, questions, run, **budget)


def _from_traces(
    traces: tuple[Path, ...],
    files: list[Path],
    settings: Settings,
    output: Output,
    *,
    mean_rank: float | None,
    reduction: float | None,
    rank_max: int | None,
) -> None:
    """Make one plan for each trace file."""
    from sketchssm.calibrate.calibration import Calibration, LayerCalibration, make_plans
    from sketchssm.calibrate.plans import calibrate, check_method, check_settings, residual_settings
    from sketchssm.calibrate.traces import Traces, named_errors
    from sketchssm.cli.output import save_plans
    from sketchssm.cuda import MAX_RANK

    made: Any = {name: x for name, x in vars(settings).items() if name != "window"}
    _, form, bits = residual_settings(**made, reduction=reduction)
    layers, tokens, rank = {}, 0, mean_rank or 0.0
    with output.progress("calibrating", len(traces)) as step:
        for path, file in zip(traces, map(str, files), strict=True):
            step(f"calibrating {path.name}")
            recorded = Traces.load(path)
            with named_errors(recorded):
                check_method(recorded, settings.method)
                if len(traces) == 1 or settings.method == "uniform":  # more layers may share a reduction
                    check_settings([recorded.layer], settings.window, rank, reduction, rank_max, **made)
                most = rank_max or min(MAX_RANK, recorded.layer.key_dim, recorded.layer.value_dim)
                layer = calibrate(recorded, settings.window, most)
                joint = layer.joint(bits, form, settings.method) if bits and settings.method != "uniform" else None
            layers[file] = LayerCalibration(layer.basis, layer.scores, joint)
            tokens = max(tokens, math.prod(recorded.calib.v.shape[:2]))  # of the same text
    plans, summary = make_plans(Calibration(layers, tokens=tokens), mean_rank, reduction, rank_max=None, **made)
    save_plans(list(plans.values()), files)
    facts, totals = _show(output, "Plans", "plan", plans, summary)
    output.finish({"plans": [{"plan": name} | own for name, own in facts.items()]} | totals)


def _of_model(
    source: ModelText,
    out: Path,
    settings: Settings,
    output: Output,
    keep: Path | None,
    imported: Path | None,
    questions: int | None,
    run: dict[str, Any],
    **budget: Any,
) -> None:
    """Make one file with the plans of a model, and a file of its calibration to keep."""
    from sketchssm.calibrate.allocation import default_reduction
    from sketchssm.calibrate.plans import check_settings
    from sketchssm.transformers import calibrate, collect, import_calibration, layers
    from sketchssm.transformers.calibration import progress_steps

    chosen = vars(settings) | budget
    if imported is not None:
        calibration = import_calibration(imported, source.load_model(), budget["rank_max"])
    else:
        with output.progress("loading the model", 1):
            model, rows = source.load(least=2 if run["sample"] is None else source.rows)
        residuals = settings.residual_bits or budget["mean_rank"] is None
        if (residuals or keep) and settings.method in (None, "gradient"):
            asked = _questions(source, model, rows[0], settings, questions)
            questions = len(asked.get("prompts", ()))
            run |= asked
            output.say(f"Questions about facts in the text: {questions or 'none'}")
        if budget["mean_rank"] is None and budget["reduction"] is None:
            chosen["reduction"] = default_reduction(bool(questions))
        _, form, bits = check_settings([x.layer for x in layers(model).values()], **chosen)
        with output.progress("calibrating", progress_steps(len(rows) + (questions or 0))) as step:
            if keep is None:
                _write_plans(calibrate(model, rows, progress=step, **run, **chosen), out, output)
                return
            sizes: Any = {name: chosen[name] for name in ("window", "method", "rank_max")}
            if bits:
                sizes["sketch_dtype"] = form
            calibration = collect(model, rows, progress=step, **run, **sizes)
    if keep is not None:
        calibration.save(keep)
        output.say(f"Written: {keep}")
    plans = calibration.plans(**{name: x for name, x in chosen.items() if name not in ("window", "rank_max")})
    _write_plans(plans, out, output)


def _questions(source: ModelText, model: Any, row: Any, settings: Settings, number: int | None) -> dict[str, Any]:
    """Prompts and answers of some questions; of the default number if the text and the model allow them."""
    from sketchssm.transformers.passes import without_gradients

    if number is not None:
        return source.questions(number) if number else {}
    assert source.text is not None
    if source.text.suffix == ".npy" or source.length < ROOM:
        return {}
    if settings.method is None and without_gradients(model, row[: settings.window + 2]):
        return {}
    try:
        return source.questions(QUESTIONS)
    except ValueError:  # facts of many tokens, such as one for each byte, have no room
        return {}


def _from_calibration(path: Path, out: Path, settings: Settings, output: Output, **budget: Any) -> None:
    """Make one file with the plans of a model from its calibration."""
    from sketchssm.calibrate.calibration import Calibration

    chosen = budget | {name: x for name, x in vars(settings).items() if name != "window"}
    calibration = Calibration.load(path)
    if "seconds" not in chosen:
        _write_plans(calibration.plans(**chosen), out, output)
        return
    from sketchssm.study.planning import StepTimes, plans_within

    times = StepTimes(chosen.pop("time_on"), chosen.pop("batch"))
    with output.progress("timing plans", 8) as step:
        plans = plans_within(calibration, chosen.pop("seconds"), times, progress=step, **chosen)
    _write_plans(plans, out, output)


def _write_plans(plans: ModelPlans, out: Path, output: Output) -> None:
    """Write the plans of a model, and print them."""
    from sketchssm.cli.output import save_plans

    save_plans([plans], [out])
    name = plans.fingerprint.model
    facts, totals = _show(output, f"Plans of {name}", "layer", plans, plans.allocation)
    output.say(f"Written: {out}")
    output.finish({"plans": str(out), "model": name, "layers": facts} | totals)


def _show(
    output: Output, title: str, what: str, plans: Mapping[str, SketchPlan], made: AllocationSummary
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Print plans by name; return what JSON holds of each and of all."""
    from sketchssm.plans.plan import total_reduction
    from sketchssm.study.tables import percent, ranks_text

    rows, facts = [], {}
    for name, plan in plans.items():
        kept = made.retained[name]
        heads = ranks_text(plan.ranks, plan.residual_bits)
        rows.append([name, plan.layer.kind, heads, f"{plan.reduction:.2f}x", percent(kept)])
        own = {each: getattr(plan, each) for each in ("ranks", "residual_bits", "sketch_dtype", "reduction")}
        facts[name] = {"kind": plan.layer.kind, "retained_ideal": kept} | own
    kept_by = "retained" if made.method.startswith("joint") else "retained (ideal map)"
    columns = [what, "kind", "ranks", "less traffic", kept_by]
    bits = sorted({bits for plan in plans.values() for bits in plan.residual_bits.tolist() if bits})
    kept_bits = f" and residuals of {', '.join(map(str, bits))} bits" if bits else ""
    form = f"{plan.map}, {plan.sketch_dtype}{kept_bits}"
    settings = f"{form}, window {plan.window}, by {made.method}"
    at = f"at mean rank {made.mean_rank:g}" if made.mean_rank else "of full reads"
    output.table(f"{title} {at} ({settings})", columns, rows, words=3)
    totals = {"reduction": total_reduction(plans.values()), "gap": made.gap}
    output.say(
        f"All layers: {totals['reduction']:.2f}x less state traffic than standard decode; no allocation within the "
        f"budget scores better by more than {percent(made.gap)}. {made.tokens} tokens of text."
    )
    return facts, totals | {"method": made.method, "tokens": made.tokens}
