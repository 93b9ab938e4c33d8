"""``sketchssm plan``: the plans that meet a target, found by measurement."""

from __future__ import annotations

from pathlib import Path

import click

from sketchssm.cli import options
from sketchssm.cli.options import COUNT, NUMBERS, POSITIVE, Commas
from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.formats import SketchFormat


def _map(text: str) -> CoefficientMap:
    """A map from its name, or from ``name:ridge``."""
    name, _, ridge = text.partition(":")
    try:
        value = float(ridge) if ridge else None
    except ValueError as error:
        raise ValueError(f"expected a number after {name}:, got {ridge!r}") from error
    return CoefficientMap(name, ridge=value)


@click.command("plan")
@options.trace_files
@click.option("--out", required=True, type=click.Path(), help="Plan file, or a folder: one plan for each trace file.")
@click.option("--error", type=POSITIVE, help="Target: at most this error of the outputs.")
@click.option(
    "--traffic",
    type=POSITIVE,
    help="Target: at most this share of standard decode's bytes, ring, inputs and outputs included.",
)
@click.option("--microseconds", type=POSITIVE, help="Target: time of a step of all layers; needs --time-on.")
@click.option(
    "--maps",
    type=Commas("map,map,...", _map),
    help="Coefficient maps, with their ridge after a colon if it is not the default: ridge:0.01,lowrank.  "
    "[default: subspace], which has residuals of 1 to 3 bits.",
)
@click.option(
    "--sketch-dtypes",
    type=Commas("name,name,...", lambda text: SketchFormat.of(text).name),
    default="bfloat16,int8",
)
@click.option("--windows", type=NUMBERS, default="16,32", help="Tokens from one flush to the next.")
@click.option("--mean-ranks", type=NUMBERS, default="2,3,4,6,8,10,12,16", help="Budgets without residuals.")
@click.option(
    "--reductions",
    type=Commas("x,x,...", float),
    default="7,8,9,10,12,14,16",
    help="Budgets with residuals: times less state traffic.",
)
@options.time_on
@click.option("--batch", type=COUNT, default=32, help="Rows of a timed step.")
@options.backend
@options.output
def command(
    traces: tuple[Path, ...],
    out: str,
    error: float | None,
    traffic: float | None,
    microseconds: float | None,
    maps: tuple[CoefficientMap, ...] | None,
    sketch_dtypes: tuple[str, ...],
    windows: tuple[int, ...],
    mean_ranks: tuple[int, ...],
    reductions: tuple[float, ...],
    time_on: str | None,
    batch: int,
    backend: str,
    json_file: str | None,
) -> None:
    """Choose map, format, window, ranks and residuals for TRACES, one npz file per layer, by measurement.

    Exactly one of --error, --traffic and --microseconds is the target.
    """
    targets = {"--error": error, "--traffic": traffic, "--microseconds": microseconds}
    given = [name for name, value in targets.items() if value is not None]
    if len(given) != 1:
        named = " and ".join(given) or "none"
        raise click.UsageError(f"target: expected one of --error, --traffic and --microseconds, got {named}")
    if not traces:
        raise click.UsageError("TRACES: expected trace files")
    if time_on is None:
        options.refuse("without --time-on", ("batch",))
        if microseconds is not None:
            raise click.UsageError("--microseconds: expected --time-on cpu or --time-on cuda with this target")
    names = {each.name for each in maps or ()}
    if maps and "subspace" not in names:
        options.refuse("without the map subspace", ("reductions",))
    if names <= {"subspace"}:
        options.refuse("with the map subspace alone", ("mean_ranks",))
    from sketchssm.calibrate.traces import Traces
    from sketchssm.cli.output import Output, plan_paths, save_plans
    from sketchssm.study.planning import StepTimes, UnmetTargetError, autoplan, candidates
    from sketchssm.study.planning.report import describe, frontier_table

    files = plan_paths(traces, out)
    options.check_files({"TRACES": traces}, out=files, json=json_file)
    output = Output(json_file)
    layers = [Traces.load(path) for path in traces]
    chosen = {} if maps is None else {"maps": maps}
    tried = candidates(**chosen, sketch_dtypes=sketch_dtypes, windows=windows)
    times = None if time_on is None else StepTimes(time_on, batch)
    unmet = None
    try:
        steps = sum(len(reductions if each.residual_bits else mean_ranks) for each in tried)
        with output.progress("planning", steps) as step:
            found = autoplan(
                layers,
                error=error,
                traffic=traffic,
                seconds=None if microseconds is None else 1e-6 * microseconds,
                candidates=tried,
                mean_ranks=mean_ranks,
                reductions=reductions,
                time_of=times,
                backend=backend,
                progress=step,
            )
    except UnmetTargetError as caught:
        unmet, found = caught, caught.found
    standard = None if times is None else times.standard(found.plans)
    output.table(*frontier_table(found, standard, met=unmet is None))
    if unmet is not None:
        raise unmet
    save_plans(found.plans, files)
    output.finish(describe(found, files, standard))
