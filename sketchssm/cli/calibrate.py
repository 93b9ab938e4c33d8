"""``sketchssm calibrate``: plans from traces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sketchssm.cli import options
from sketchssm.cli.models import ModelText, calibrate_model, model_options

if TYPE_CHECKING:
    from sketchssm.calibrate.plans import Settings

__all__ = ["command"]


@click.command("calibrate")
@options.trace_files
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Plan file or, for several trace files, a folder with one plan each. For --model: file of all plans.",
)
@click.option(
    "--mean-rank",
    type=options.FiniteRange(min=1),
    default=7.0,
    show_default=True,
    help="Budget: the read bytes of all heads at this rank.",
)
@click.option(
    "--flush-every",
    type=click.IntRange(min=2),
    help="Tokens from one flush to the next: a multiple of the window, at most 128. Between flushes sketches are "
    "refreshed without reading the state.  [default: the window]",
)
@options.rank_max
@options.map_settings
@model_options
@options.output
def command(
    traces: tuple[Path, ...],
    out: Path,
    mean_rank: float,
    flush_every: int | None,
    rank_max: int | None,
    settings: Settings,
    source: ModelText | None,
    json_file: str | None,
) -> None:
    """Make plans from TRACES, one npz file per layer, or of all layers of a --model.

    Bases are fitted on the first two thirds of the calibration sequences and ranks are scored on the rest. Several
    files share one budget: ranks go to the layers and heads that need them. So do the layers of a model.
    """
    if source is not None:
        from sketchssm.cli.output import Output

        options.check_files([source.text], out=out, json=json_file)
        calibrate_model(source, out, mean_rank, flush_every, rank_max, settings, Output(json_file))
    else:
        calibrate_traces(traces, out, mean_rank, flush_every, rank_max, settings, json_file)


def calibrate_traces(
    traces: tuple[Path, ...],
    out: Path,
    mean_rank: float,
    flush_every: int | None,
    rank_max: int | None,
    settings: Settings,
    json_file: str | None,
) -> None:
    """Make one plan for each trace file."""
    import numpy as np

    from sketchssm import traffic
    from sketchssm.backends import common_rank
    from sketchssm.calibrate.allocation import allocate_ranks, warn_of_limit
    from sketchssm.calibrate.plans import calibrate
    from sketchssm.calibrate.refreshes import refresh_errors
    from sketchssm.cli.output import Output, percent, ranks_text, scientific
    from sketchssm.plan import SketchPlan
    from sketchssm.recurrence import FULL_STATE, check_flush_every
    from sketchssm.traces import Traces

    every = check_flush_every(flush_every, settings.window)
    target = plan_paths(traces, out)
    options.check_files(traces, out=target, json=json_file)
    output = Output(json_file)
    layers = []
    with output.progress("calibrating", len(traces)) as step:
        for path in traces:
            step(f"calibrating {path.name}")
            recorded = Traces.load(path)
            try:
                most = rank_max or common_rank(recorded.layer, settings.window, every)
                layers.append(calibrate(recorded, settings.window, most, settings.weighting))
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
    scores = [layer.scores for layer in layers]
    allocation = allocate_ranks(
        scores,
        mean_rank,
        settings.method,
        map=settings.map,
        sketch_dtype=settings.sketch_dtype,
        full_reads=every == settings.window,
    )
    if every > settings.window:
        warn_of_limit(scores, allocation.tables, every)

    rows, report = [], []
    standard = used = 0.0
    for layer, table, path in zip(layers, allocation.tables, target, strict=True):
        plan, ranks = SketchPlan(layer.basis, table, map=settings.map, flush_every=every), table.ranks
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)
        whole = plan.layer.heads * traffic.standard(plan.layer.key_dim, plan.layer.value_dim)
        standard, used = standard + whole, used + whole / plan.reduction
        ideal = layer.scores.retained[range(plan.layer.heads), ranks]
        facts: dict[str, Any] = {
            "plan": str(path),
            "kind": plan.layer.kind,
            "ranks": ranks,
            "sketch_dtype": plan.sketch_dtype,
            "wide": plan.wide,
            "reduction": plan.reduction,
            "retained_ideal": float(np.where(ranks == FULL_STATE, 1.0, ideal).mean()),
        }
        errors = []
        if every > settings.window:
            measured = refresh_errors(plan, *layer.traces.score_part()[0])
            facts |= {"output_error_flushed": measured.flushed, "output_error": measured.refreshed}
            errors = [scientific(measured.flushed), scientific(measured.refreshed)]
        report.append(facts)
        rows.append([
            str(path), plan.layer.kind, ranks_text(ranks), f"{plan.reduction:.2f}x", percent(facts["retained_ideal"]),
            *errors,
        ])  # fmt: skip
    made = f"{settings.map}, {settings.sketch_dtype}, window {settings.window}, by {allocation.method}"
    title = f"Plans at mean rank {mean_rank:g} ({made})"
    columns = ["plan", "kind", "ranks", "less traffic", "retained (ideal map)"]
    if every > settings.window:
        columns += [f"error, flush every {settings.window}", f"error, flush every {every}"]
    output.table(title, columns, rows, words=3)
    if every > settings.window:
        output.say(
            "error: norm of the error of all outputs over the norm of the outputs, on the sequences that ranks were "
            "scored on, in float64; the difference is what the refreshes add."
        )
    output.say(
        f"All layers: {standard / used:.2f}x less state traffic than standard decode; no table within "
        f"the budget scores better by more than {percent(allocation.gap)}."
    )
    totals = {"reduction": standard / used, "gap": allocation.gap, "method": allocation.method}
    output.finish({"plans": report, **totals})


def plan_paths(traces: tuple[Path, ...], out: Path) -> list[Path]:
    """Plan file of each trace file: `out` itself for one trace file, a file in the folder `out` for several."""
    if len(traces) == 1 and not out.is_dir():
        return [out]
    paths = [out / f"{path.stem}.safetensors" for path in traces]
    twice = {path.name for path in paths if sum(other == path for other in paths) > 1}
    if twice:
        raise click.UsageError(f"TRACES: expected files with different names, got {', '.join(sorted(twice))} twice")
    if out.is_file():
        raise click.UsageError(f"--out: expected a folder for {len(traces)} trace files, got the file {out}")
    return paths
