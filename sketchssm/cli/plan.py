"""``sketchssm plan``: the plans that meet a target, found by measurement."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sketchssm.cli import options
from sketchssm.coefficients import MAPS, CoefficientMap
from sketchssm.formats import FORMATS

if TYPE_CHECKING:
    from sketchssm.planning import PlanPoint, PlanSearch

__all__ = ["command"]


class Names(click.ParamType[tuple[str, ...]]):
    """Names with commas between them, each one of those that are known."""

    name = "name,name,..."

    def __init__(self, known: tuple[str, ...]) -> None:
        self._known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Parse ``"ridge,lowrank"``; what follows a colon is a parameter and is not checked here."""
        if isinstance(value, tuple):
            return value
        names = tuple(part.strip() for part in str(value).split(","))
        for name in names:
            if name.partition(":")[0] not in self._known:
                self.fail(f"expected names from {', '.join(self._known)}, got {name!r}", param, ctx)
        return names


@click.command("plan")
@options.trace_files
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Plan file or, for several trace files, a folder with one plan each.",
)
@click.option(
    "--error", type=options.FiniteRange(min=0, min_open=True), help="Target: at most this error of the outputs."
)
@click.option(
    "--traffic",
    type=options.FiniteRange(min=0, min_open=True),
    help="Target: at most this share of standard decode's bytes, ring, inputs and outputs included.",
)
@click.option(
    "--microseconds",
    type=options.FiniteRange(min=0, min_open=True),
    help="Target: at most this time of a step of all layers; needs --time-on.",
)
@click.option(
    "--maps",
    type=Names(MAPS),
    help="Coefficient maps, with their ridge after a colon if it is not the default: ridge:0.01,offline.  "
    "[default: ridge,ridge:0.01,lowrank,prior,offline]",
)
@click.option("--sketch-dtypes", type=Names(tuple(FORMATS)), default="bfloat16,int8,int8+int4", show_default=True)
@click.option(
    "--windows",
    type=options.Numbers(),
    default="16,32",
    show_default=True,
    help="Tokens of a window, from one sketch to the next.",
)
@click.option(
    "--flushes", type=options.Numbers(), default="1,4", show_default=True, help="Windows from one flush to the next."
)
@click.option("--mean-ranks", type=options.Numbers(), default="2,3,4,6,8,10,12,16", show_default=True)
@options.rank_max
@click.option(
    "--time-on",
    type=click.Choice(["cpu", "cuda"]),
    callback=options.check_backend,
    help="Measure times on this backend.  [default: count bytes]",
)
@click.option("--batch", type=click.IntRange(min=1), default=32, show_default=True, help="Rows of a timed step.")
@options.backend
@options.plots(type=click.Path(dir_okay=False, path_type=Path), help="Draw the frontier (needs matplotlib).")
@options.output
def command(
    traces: tuple[Path, ...],
    out: Path,
    error: float | None,
    traffic: float | None,
    microseconds: float | None,
    maps: tuple[str, ...] | None,
    sketch_dtypes: tuple[str, ...],
    windows: tuple[int, ...],
    flushes: tuple[int, ...],
    mean_ranks: tuple[int, ...],
    rank_max: int | None,
    time_on: str | None,
    batch: int,
    backend: str,
    plots: Path | None,
    json_file: str | None,
) -> None:
    """Choose map, format, window, flushes and ranks for TRACES, one npz file per layer, by measurement.

    Exactly one of --error, --traffic and --microseconds is the target.
    """
    if sum(target is not None for target in (error, traffic, microseconds)) != 1:
        raise click.UsageError("target: expected one of --error, --traffic and --microseconds")
    if not traces:
        raise click.UsageError("TRACES: expected trace files")
    if time_on is None:
        options.refuse("without --time-on", ("batch",))
        if microseconds is not None:
            raise click.UsageError("--microseconds: expected --time-on cpu or --time-on cuda with this target")
    from sketchssm import figures
    from sketchssm.cli.calibrate import plan_paths
    from sketchssm.cli.output import Output
    from sketchssm.planning import StepTimes, autoplan, candidates
    from sketchssm.plots import draw_frontier
    from sketchssm.traces import Traces

    target = plan_paths(traces, out)
    options.check_files(traces, out=target, plots=plots, json=json_file)
    if plots is not None:
        figures.check(plots)
    output = Output(json_file)
    chosen_maps = {} if maps is None else {"maps": [_map(name) for name in maps]}
    tried = candidates(**chosen_maps, sketch_dtypes=sketch_dtypes, windows=windows, flushes=flushes)
    times = None if time_on is None else StepTimes(time_on, batch)
    with output.progress("planning", len(tried) * len(mean_ranks)) as step:
        found = autoplan(
            [Traces.load(path) for path in traces],
            error=error,
            traffic=traffic,
            seconds=None if microseconds is None else 1e-6 * microseconds,
            candidates=tried,
            mean_ranks=mean_ranks,
            time_of=times,
            rank_max=rank_max,
            backend=backend,
            progress=step,
        )
    for plan, path in zip(found.plans, target, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)
    standard = None if times is None else times.standard(found.plans)
    _show(output, found, standard)
    if plots is not None:
        output.say(f"\nWritten: {draw_frontier(found, plots)}")
    output.finish(_plain(found, target, standard))


def _map(name: str) -> CoefficientMap:
    """A map from its name, or from ``name:ridge``."""
    name, _, ridge = name.partition(":")
    try:
        value = float(ridge) if ridge else None
    except ValueError as error:
        raise click.UsageError(f"--maps: expected a number after {name}:, got {ridge!r}") from error
    try:
        return CoefficientMap(name, ridge=value)
    except ValueError as error:
        raise click.UsageError(f"--maps: {error}") from error


def _show(output: Any, found: PlanSearch, standard: float | None) -> None:
    """Print the frontier as a table; the chosen point has an arrow."""
    timed = ["step, us", "speed-up"] if standard is not None else []
    columns = ["", "map", "format", "window", "flush", "mean rank", "traffic", "error", *timed]
    rows = []
    for point in found.frontier:
        own = point.candidate
        row = ["->" if point is found.chosen else "", str(own.map), own.sketch_dtype, str(own.window)]
        row += [str(own.flush_every), f"{point.mean_rank:g}", f"{point.traffic:.3f}", f"{point.error:.4f}"]
        if standard is not None and point.seconds is not None:
            row += [f"{1e6 * point.seconds:.1f}", f"{standard / point.seconds:.2f}x"]
        rows.append(row)
    weighted = "weighted by gradients, " if found.graded else ""
    title = f"Frontier of {len(found.points)} points (error of the outputs, {weighted}held-out calibration text)"
    output.table(title, columns, rows, words=3)
    output.say(f"Error of the chosen plans on the test text, without gradients: {found.test_error():.4f}.")


def _plain(found: PlanSearch, paths: list[Path], standard: float | None) -> dict[str, Any]:
    """All points as JSON holds them."""

    def plain(point: PlanPoint) -> dict[str, Any]:
        own = point.candidate
        return {
            "map": str(own.map),
            "sketch_dtype": own.sketch_dtype,
            "window": own.window,
            "flush_every": own.flush_every,
            "mean_rank": point.mean_rank,
            "traffic": point.traffic,
            "error": point.error,
            "seconds": point.seconds,
        }

    return {
        "plans": [str(path) for path in paths],
        "chosen": plain(found.chosen),
        "test_error": found.test_error(),
        "standard_seconds": standard,
        "frontier": [plain(point) for point in found.frontier],
        "points": [plain(point) for point in found.points],
    }
