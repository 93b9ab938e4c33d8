"""``sketchssm bench``: decode systems on this machine's GPU or CPU."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import sketchssm
from sketchssm.cli import options
from sketchssm.cli.options import Numbers
from sketchssm.coefficients import DEFAULT_MAP, MAPS, CoefficientMap

if TYPE_CHECKING:
    from sketchssm.bench import BenchResult
    from sketchssm.cli.output import Output
    from sketchssm.evaluate.systems import System
    from sketchssm.gates import GateInput
    from sketchssm.plan import SketchPlan
    from sketchssm.recurrence import Layer

__all__ = ["command"]

BATCHES = {"cuda": (1, 8, 32, 128, 256, 512), "cpu": (1, 8, 32)}
SECONDS = {"cuda": 0.05, "cpu": 0.5}


@dataclass(frozen=True)
class Case:
    """What is timed together: all systems at one shape, batch and window."""

    shape: str
    layer: Layer
    batch: int
    window: int
    plans: list[SketchPlan]
    gate: GateInput | None

    def systems(self) -> list[System]:
        """What is timed."""
        from sketchssm import bench

        return bench.systems(self.layer, self.window, self.plans, self.gate)


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
    help="Coefficient map; may be repeated.  [default: SketchPlan's]",
)
@click.option(
    "--pivots", type=click.IntRange(min=1), help="Pivot count of lowrank and prior.  [default: the map's own]"
)
@click.option(
    "--seconds", type=click.FloatRange(min=0), help="Time for each measurement.  [default: 0.5, on a GPU 0.05]"
)
@click.option(
    "--duty",
    type=float,
    default=1.0,
    show_default=True,
    help="Share of the time that a GPU works; with less it rests between windows, out of reach of its power limit.",
)
@click.option("--raw-gate", is_flag=True, help="Give heads of kda raw gate inputs instead of log-decays.")
@click.option("--peers", is_flag=True, help="Time other libraries' standard decode as well, on a GPU.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the steps' times into this PNG or SVG file (needs matplotlib).",
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
    seconds: float | None,
    duty: float,
    raw_gate: bool,
    peers: bool,
    plot: Path | None,
    backend: str,
    seed: int,
    json_file: str | None,
) -> None:
    """Time decode systems on random inputs, amortised over a window.

    The floor is the bytes that a step must move over the copy bandwidth measured first. The error is that of the timed
    system's own outputs against the same system in float64, so it is the arithmetic's, not the sketch's.
    """
    from sketchssm import bench, cuda
    from sketchssm.cli.output import Output
    from sketchssm.plots import load_pyplot, step_times

    unknown = [name for name in shapes if name not in bench.SHAPES]
    if unknown:
        raise click.BadParameter(f"expected some of {', '.join(bench.SHAPES)}, got {unknown[0]}", param_hint="--shape")
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
    if plot is not None:
        if plot.suffix not in (".png", ".svg"):
            raise click.BadParameter(f"expected a name that ends in .png or .svg, got {plot}", param_hint="--plot")
        load_pyplot()  # what is missing is missing before anything is timed
    kind = "cuda" if backend == "cuda" else "cpu"
    chosen = [CoefficientMap(name, pivots) for name in maps or (DEFAULT_MAP,)]
    cases = []
    for name in shapes or bench.SHAPES:
        layer = bench.SHAPES[name]
        gate = bench.random_gate(layer, seed) if raw_gate and layer.kind == "kda" else None
        shape = name if gate is None else f"{name}, raw gate"
        for window in windows:
            spread = [
                bench.spread_ranks(layer.heads, mean, layer.key_dim) for mean in ranks or (bench.MEAN_RANKS[name],)
            ]
            plans = [bench.random_plan(layer, r, window, m, seed) for r in spread for m in chosen]
            cases += [Case(shape, layer, batch, window, plans, gate) for batch in batches or BATCHES[kind]]
    output = Output(json_file)
    time: Timing = partial(_on_device, duty, peers) if kind == "cuda" else partial(_on_host, backend)
    report = time(output, cases, SECONDS[kind] if seconds is None else seconds, seed)
    results: list[BenchResult] = report["results"]
    _show(output, results, report["copy_bandwidth"])
    if duty < 1:
        output.say(f"The device worked for {duty:.0%} of the time, and rested between windows.")
    compiled = sum(r.first_call_seconds for r in results) + report.get("compile_seconds", 0.0)
    output.say(f"First calls (compiling, or loading what was compiled) took {compiled:.1f} s more, not counted above.")
    for message in report.get("not_timed", []):
        output.say(message)
    if plot is not None:
        output.say(f"Drew {step_times(results, plot)}.")
    made = {"version": sketchssm.__version__, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    output.finish(made | {"command": shlex.join(["sketchssm", *sys.argv[1:]])} | report)


Timing = Callable[["Output", list[Case], float, int], dict[str, Any]]


def _on_host(backend: str, output: Output, cases: list[Case], seconds: float, seed: int) -> dict[str, Any]:
    from sketchssm import bench

    bandwidth = bench.copy_bandwidth()
    results = []
    with output.progress("timing", len(cases)) as step:
        for case in cases:
            step(f"{case.shape}, batch {case.batch}, window {case.window}")
            results += bench.measure(
                case.shape,
                case.layer,
                case.systems(),
                case.batch,
                case.window,
                bandwidth,
                backend=backend,
                seconds=seconds,
                seed=seed,
            )
    return {"copy_bandwidth": bandwidth, "results": results}


def _on_device(
    duty: float, peers: bool, output: Output, cases: list[Case], seconds: float, seed: int
) -> dict[str, Any]:
    from sketchssm import bench

    others = [peer for peer in bench.PEERS if peers and any(case.layer.kind == peer.kind for case in cases)]
    lacking = {peer: lack for peer in others if (lack := peer.missing())}
    messages = [f"{peer.name} was not timed: {lack} is not installed." for peer, lack in lacking.items()]
    ready = [peer for peer in others if peer not in lacking]
    pace = {"seconds": seconds, "duty": duty}
    results = []
    with output.progress("compiling", len(cases) + 1) as step:
        step("compiling")
        listed = {id(case): case.systems() for case in cases}
        one_batch = {(case.shape, case.window): case for case in cases}
        compiled = bench.compile_all([system for case in one_batch.values() for system in listed[id(case)]])
        bandwidth = bench.device_bandwidth()
        for case in cases:
            step(f"{case.shape}, batch {case.batch}, window {case.window}")
            work = bench.Workload(case.layer, case.batch, case.window, seed, case.gate is not None)
            for system in listed[id(case)]:
                try:
                    results.append(bench.measure_device(case.shape, system, work, bandwidth, **pace))
                except MemoryError as error:
                    messages.append(_not_timed(case, system.name, error))
            for peer in (peer for peer in ready if peer.kind == case.layer.kind):
                try:
                    results.append(bench.measure_peer(case.shape, peer, work, bandwidth, **pace))
                except (MemoryError, RuntimeError) as error:
                    messages.append(_not_timed(case, peer.name, error))
    return {
        "device": bench.device_name(),
        "copy_bandwidth": bandwidth,
        "duty": duty,
        "compile_seconds": compiled,
        "not_timed": messages,
        "results": results,
    }


def _not_timed(case: Case, name: str, error: Exception) -> str:
    return f"{case.shape}, batch {case.batch}: {name} was not timed: {' '.join(str(error).split())}"


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
