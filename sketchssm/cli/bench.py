"""``sketchssm bench``: times of decode systems on this machine's GPU or CPU."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

import sketchssm
from sketchssm.backends import ACTIVATIONS
from sketchssm.cli import options
from sketchssm.cli.arrivals import time_and_show
from sketchssm.cli.options import Numbers
from sketchssm.coefficients import DEFAULT_MAP, MAPS, CoefficientMap
from sketchssm.formats import DEFAULT_FORMAT, FORMATS

if TYPE_CHECKING:
    from sketchssm.bench import BenchResult, Case
    from sketchssm.cli.output import Output

__all__ = ["command"]

BATCHES = {"cuda": (1, 8, 32, 128, 256, 512), "cpu": (1, 8, 32)}
ARRIVING = {"cuda": (32, 128, 256), "cpu": (8, 32)}
"""Batches of ``--arrivals``."""


@click.command("bench")
@click.option("--shape", "shapes", multiple=True, help="A layer's shape by name; may be repeated.  [default: all]")
@click.option(
    "--batch", "batches", type=Numbers(), help="Rows of a step.  [default: 1,8,32 and on a GPU also 128,256,512]"
)
@click.option(
    "--window", "windows", type=Numbers(), default="16", show_default=True, help="Tokens from one flush to the next."
)
@click.option(
    "--rank", "ranks", type=Numbers(), help="Mean rank of the sketch's heads.  [default: 5 to 7, as the model allows]"
)
@click.option(
    "--map",
    "maps",
    type=click.Choice(MAPS),
    multiple=True,
    help=f"Coefficient map; may be repeated.  [default: {DEFAULT_MAP}]",
)
@click.option(
    "--pivots", type=click.IntRange(min=1), help="Pivot count of lowrank and prior.  [default: the map's own]"
)
@click.option(
    "--sketch-dtype",
    "sketch_dtypes",
    type=click.Choice(list(FORMATS)),
    multiple=True,
    help="Format of sketches and maps; may be repeated. In int8+int4 half of the columns have 8 bits.  "
    f"[default: {DEFAULT_FORMAT}]",
)
@click.option(
    "--plan",
    "plan_files",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Time this plan at its layer's shape, instead of --shape; may be repeated.",
)
@click.option(
    "--seconds", type=options.FiniteRange(min=0), help="Time for each measurement.  [default: 0.5, on a GPU 0.05]"
)
@click.option(
    "--duty",
    type=float,
    default=1.0,
    show_default=True,
    help="Share of the time that a GPU works; below 1 the GPU rests between windows and stays below its power limit.",
)
@click.option(
    "--state-dtype",
    type=click.Choice(ACTIVATIONS),
    default="float32",
    show_default=True,
    help="Type of states in memory; rounded once a window, in standard decode at every token.",
)
@click.option("--raw-gate", is_flag=True, help="Give heads of kda raw gate inputs instead of log-decays.")
@click.option("--peers", is_flag=True, help="Time other libraries' standard decode as well, on a GPU.")
@click.option("--arrivals", is_flag=True, help="Let requests arrive and leave at random, instead of whole windows.")
@click.option(
    "--layers", type=click.IntRange(min=1), default=32, show_default=True, help="Layers of the model, for --arrivals."
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Timed steps, for --arrivals; rounded up to whole windows.",
)
@click.option(
    "--tokens",
    type=options.FiniteRange(min=1),
    default=256,
    show_default=True,
    help="Mean length of a request, for --arrivals.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the times of a step into this PNG or SVG file (needs matplotlib).",
)
@options.backend
@options.seed
@options.output
def command(
    shapes: tuple[str, ...],
    batches: tuple[int, ...] | None,
    windows: tuple[int, ...],
    ranks: tuple[int, ...] | None,
    maps: tuple[str, ...],
    pivots: int | None,
    sketch_dtypes: tuple[str, ...],
    plan_files: tuple[Path, ...],
    seconds: float | None,
    duty: float,
    state_dtype: str,
    raw_gate: bool,
    peers: bool,
    arrivals: bool,
    layers: int,
    steps: int,
    tokens: float,
    plot: Path | None,
    backend: str,
    seed: int,
    json_file: str | None,
) -> None:
    """Time decode systems on random inputs, amortised over a window.

    The floor of a time is the bytes that the step must move over the copy bandwidth measured first. The error compares
    the outputs of the timed system with the same system in float64: it is the error of the arithmetic, not of the
    sketch.
    """
    from sketchssm import bench, cuda
    from sketchssm.cli.output import Output
    from sketchssm.figures import check
    from sketchssm.plots import step_times

    unknown = [name for name in shapes if name not in bench.SHAPES]
    if unknown:
        raise click.BadParameter(f"expected some of {', '.join(bench.SHAPES)}, got {unknown[0]}", param_hint="--shape")
    if arrivals:
        options.refuse("with --arrivals", ("seconds", "peers", "plot"))
    else:
        options.refuse("without --arrivals", ("layers", "steps", "tokens"))
    if backend == "auto":
        backend = "cpu" if cuda.missing() else "cuda"
    if peers and backend != "cuda":
        raise click.BadParameter("other libraries are timed on a GPU only", param_hint="--peers")
    if not 0 < duty <= 1:
        raise click.BadParameter(f"expected a share in (0, 1], got {duty}", param_hint="--duty")
    if duty < 1 and backend != "cuda":
        raise click.BadParameter("only a GPU rests", param_hint="--duty")
    if raw_gate and peers:
        raise click.BadParameter("other libraries are timed with log-decays only", param_hint="--raw-gate")
    if plan_files:
        options.refuse("with --plan", ("shapes", "windows", "ranks", "maps", "pivots", "sketch_dtypes"))
    options.check_files(plan_files, plot=plot, json=json_file)
    if plot is not None:
        check(plot)
    batches = batches or (ARRIVING if arrivals else BATCHES)["cuda" if backend == "cuda" else "cpu"]
    if plan_files:
        cases = _plan_cases(plan_files)
    else:
        chosen = [CoefficientMap(name, pivots) for name in maps or (DEFAULT_MAP,)]
        formats = sketch_dtypes or (DEFAULT_FORMAT,)
        cases = [
            _shape_case(name, window, ranks, chosen, formats, seed)
            for name in shapes or bench.SHAPES
            for window in windows
        ]
    if raw_gate:
        cases = [_raw(case, seed) for case in cases]
    cases = [dataclasses.replace(case, batch=n, state_dtype=state_dtype) for case in cases for n in batches]
    output = Output(json_file)
    made = {
        "version": sketchssm.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["sketchssm", *sys.argv[1:]]),
        "state_dtype": state_dtype,
    }
    if arrivals:
        settings = {"layers": layers, "steps": steps, "mean_tokens": tokens, "duty": duty, "seed": seed}
        output.finish(made | vars(time_and_show(cases, backend, output, **settings)))
        return
    with output.progress("timing", len(cases) + (backend == "cuda")) as step:
        report = bench.time_cases(cases, backend, seconds=seconds, duty=duty, peers=peers, seed=seed, progress=step)
    _show(output, report.results, report.copy_bandwidth)
    if duty < 1:
        output.say(f"The device worked for {duty:.0%} of the time, and rested between windows.")
    compiled = sum(r.first_call_seconds for r in report.results) + report.compile_seconds
    output.say(f"First calls (compiling, or loading compiled kernels) took {compiled:.1f} s more, not counted above.")
    for message in report.not_timed:
        output.say(message)
    if plot is not None:
        output.say(f"Drew {step_times(report.results, plot)}.")
    output.finish(made | vars(report))


def _shape_case(
    name: str,
    window: int,
    ranks: Sequence[int] | None,
    maps: Sequence[CoefficientMap],
    formats: Sequence[str],
    seed: int,
) -> Case:
    """A shape of a model in use, with random plans at every rank, map and format; the batch is set later."""
    from sketchssm import bench

    layer = bench.SHAPES[name]
    spread = [bench.spread_ranks(layer.heads, mean, layer.key_dim) for mean in ranks or (bench.MEAN_RANKS[name],)]
    plans = [
        bench.random_plan(layer, own, window, map, seed, form) for own in spread for map in maps for form in formats
    ]
    return bench.Case(name, layer, 1, window, plans)


def _plan_cases(files: Sequence[Path]) -> list[Case]:
    """A case per plan file, named by the file; the batch is set later."""
    from sketchssm import bench
    from sketchssm.plan import SketchPlan

    plans = [(path.stem, SketchPlan.load(path)) for path in files]
    return [bench.Case(name, plan.layer, 1, plan.window, [plan]) for name, plan in plans]


def _raw(case: Case, seed: int) -> Case:
    """The case with raw gate inputs if its layer is kda, else the case itself."""
    from sketchssm import bench

    if case.layer.kind != "kda":
        return case
    return dataclasses.replace(case, shape=f"{case.shape}, raw gate", gate=bench.random_gate(case.layer, seed))


def _show(output: Output, results: list[BenchResult], bandwidth: float) -> None:
    headings = ["system", "batch", "read", "flush", "step", "MB", "GB/s", "speed", "error", "of states"]
    for (shape, window), group in groupby(results, lambda r: (r.shape, r.window)):
        mine = list(group)
        title = f"{shape}, W = {window}, on {mine[0].backend}: microseconds, and share of the floor"
        output.table(title, headings, _rows(mine))
    output.say(
        f"Floor: the bytes that a step must move at the copy's {bandwidth / 1e9:.1f} GB/s. step: amortised over a "
        "window, with its MB and GB/s;\nspeed: standard's step over it. Errors are relative, of one row against "
        "the same system in float64."
    )


def _rows(results: list[BenchResult]) -> Iterator[list[str]]:
    from sketchssm.cli.output import scientific

    for i, (_, group) in enumerate(groupby(results, lambda r: r.batch)):
        if i:
            yield []
        mine = list(group)
        standard = next((r.microseconds for r in mine if r.system == "standard"), None)
        for r in mine:
            yield [
                r.system, f"{r.batch}",
                _time(r.read_microseconds, r.read_fraction),
                _time(r.flush_microseconds, r.flush_fraction),
                _time(r.microseconds, r.fraction),
                f"{r.bytes / 1e6:.2f}", f"{r.gigabytes_per_second:.1f}",
                "-" if standard is None else f"{standard / r.microseconds:.2f}x",
                scientific(r.error), scientific(r.state_error),
            ]  # fmt: skip


def _time(microseconds: float, share: float) -> str:
    text = f"{microseconds:.1f}" if microseconds < 1000 else f"{microseconds:.0f}"
    return f"{text} {f'{100 * share:.0f}%':>4}"
