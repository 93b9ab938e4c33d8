"""``sketchssm bench``: times of decode systems on this machine's GPU or CPU."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import click

import sketchssm
from sketchssm.cli import options
from sketchssm.cli.options import NOT_NEGATIVE, NUMBERS, OLD_FOLDER, PATH
from sketchssm.layer.checks import ACTIVATIONS
from sketchssm.layer.coefficients import DEFAULT_MAP, MAPS, CoefficientMap
from sketchssm.layer.formats import DEFAULT_FORMAT, FORMATS

BATCHES = {"cuda": (1, 8, 32, 128, 256, 512), "cpu": (1, 8, 32)}


@click.command("bench")
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    help="A layer's shape by name, or all; may be repeated.  [default: five]",
)
@click.option("--batch", "batches", type=NUMBERS, help="Rows of a step.  [default: 1,8,32; on a GPU also 128,256,512]")
@click.option("--window", "windows", type=NUMBERS, default="16", help="Tokens from one flush to the next.")
@click.option("--rank", "ranks", type=NUMBERS, help="Mean rank.  [default: 5 to 7, as the model allows]")
@click.option(
    "--map",
    "maps",
    type=click.Choice(MAPS),
    multiple=True,
    default=(DEFAULT_MAP,),
    help="Coefficient map; may be repeated.",
)
@click.option(
    "--sketch-dtype",
    "sketch_dtypes",
    type=click.Choice(list(FORMATS)),
    multiple=True,
    default=(DEFAULT_FORMAT,),
    help="Format of sketches and maps; may be repeated.",
)
@options.residual_bits
@click.option(
    "--plan",
    "plan_files",
    type=PATH,
    multiple=True,
    help="Time this plan, or each plan of a model or a folder, instead of --shape; may be repeated.",
)
@click.option("--seconds", type=NOT_NEGATIVE, help="Time per measurement.  [default: 0.5, on a GPU 0.05]")
@click.option(
    "--duty",
    type=float,
    default=1.0,
    help="Share of the time that a GPU works; below 1 the GPU rests between windows and stays below its power limit.",
)
@click.option(
    "--state-dtype",
    type=click.Choice(ACTIVATIONS),
    default="float32",
    help="Type of states in memory; rounded once a window, in standard decode at every token.",
)
@click.option("--raw-gate", is_flag=True, help="Give heads of kda raw gate inputs instead of log-decays.")
@click.option("--peers", is_flag=True, help="Time other libraries' standard decode as well, on a GPU.")
@click.option(
    "--peer-path",
    type=OLD_FOLDER,
    help="Folder with the authors' package (SNU-ARC/SketchSSM): time its kernels as well.",
)
@click.option("--calibrate", is_flag=True, help="Time moments, rank scores and joint scores, instead of decode.")
@options.backend
@options.seed
@options.output
def command(
    shapes: tuple[str, ...],
    batches: tuple[int, ...] | None,
    windows: tuple[int, ...],
    ranks: tuple[int, ...] | None,
    maps: tuple[str, ...],
    sketch_dtypes: tuple[str, ...],
    residual_bits: str,
    plan_files: tuple[Path, ...],
    seconds: float | None,
    duty: float,
    state_dtype: str,
    raw_gate: bool,
    peers: bool,
    peer_path: Path | None,
    calibrate: bool,
    backend: str,
    seed: int,
    json_file: str | None,
) -> None:
    """Time decode systems on random inputs, amortised over a window.

    The floor of a time is the bytes that the step must move over the copy bandwidth measured first. The error compares
    the outputs of the timed system with the same system in float64: it is the error of the arithmetic, not of the
    sketch.
    """
    from sketchssm import cuda
    from sketchssm.cli.output import Output
    from sketchssm.study import bench

    if backend == "auto":
        backend = "cpu" if cuda.missing() else "cuda"
    device = "cuda" if backend == "cuda" else "cpu"
    if calibrate:
        kept = {"shapes", "seconds", "calibrate", "backend", "seed", "json_file"}
        options.refuse("with --calibrate", [name for name in _parameters() if name not in kept])
        if backend == "reference":
            raise click.BadParameter("calibration computes in NumPy (cpu) or CuPy (cuda)", param_hint="--backend")
    if plan_files:
        options.refuse(
            "with --plan",
            ("shapes", "windows", "ranks", "maps", "sketch_dtypes", "residual_bits"),
        )
    elif residual_bits != "0" and "subspace" not in maps:
        raise click.UsageError("--residual-bits: has no effect without --map subspace")
    _check(shapes, duty, peers or peer_path is not None, raw_gate, device)
    names = list(bench.SHAPES) if "all" in shapes else shapes or bench.COMMON
    options.check_files({"--plan": plan_files}, json=json_file)
    made = {
        "version": sketchssm.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["sketchssm", *sys.argv[1:]]),
    }
    if calibrate:
        output = Output(json_file)
        with output.progress("timing", len(names)) as step:
            sums = bench.time_calibration(names, device, seconds, seed, step)
        output.table(*bench.calibration_table(sums))
        output.finish(made | vars(sums))
        return

    if plan_files:
        cases = [case for path in plan_files for case in bench.Case.of_plans(path)]
    else:
        chosen = [CoefficientMap(name) for name in maps]
        cases = [
            bench.Case.random(
                name,
                bench.SHAPES[name],
                window,
                ranks or (bench.MEAN_RANKS[name],),
                chosen,
                sketch_dtypes,
                seed,
                cuda.MAX_RANK if device == "cuda" else None,
                int(residual_bits),
            )
            for name, window in product(names, windows)
        ]
    if raw_gate:
        if not any(case.layer.channel_decays for case in cases):
            raise click.UsageError("--raw-gate: has no effect without a decay per channel")
        cases = [case.with_raw_gate(seed) for case in cases]
    batches = batches or BATCHES[device]
    cases = [replace(case, batch=n, state_dtype=state_dtype) for case, n in product(cases, batches)]

    output = Output(json_file)
    told = [f"The device worked for {duty:.0%} of the time, and rested between windows."] if duty < 1 else []
    with output.progress("timing", len(cases) + (backend == "cuda")) as step:
        how: Any = {"seconds": seconds, "duty": duty, "seed": seed, "peers": peers, "peer_path": peer_path}
        report = bench.time_cases(cases, backend, progress=step, **how)
    compiled = sum(r.first_call_seconds for r in report.results) + report.compile_seconds
    told.append(f"First calls (compiling, or loading compiled kernels) took {compiled:.1f} s more, not counted.")
    for table in bench.time_tables(report):
        output.table(*table)
    for line in (*told, *report.not_timed):
        output.say(line)
    output.finish(made | {"state_dtype": state_dtype} | vars(report))


def _parameters() -> list[str]:
    """Names of the command's parameters."""
    return [param.name for param in click.get_current_context().command.params if param.name]


def _check(shapes: Sequence[str], duty: float, peers: bool, raw_gate: bool, device: str) -> None:
    """Refuse unknown shapes, and options of a GPU on a CPU."""
    from sketchssm.study import bench

    for name in shapes:
        if name not in (*bench.SHAPES, "all"):
            expected = f"expected all or some of {', '.join(bench.SHAPES)}, got {name}"
            raise click.BadParameter(expected, param_hint="--shape")
    if not 0 < duty <= 1:
        raise click.BadParameter(f"expected a share in (0, 1], got {duty}", param_hint="--duty")
    if device != "cuda" and duty < 1:
        raise click.BadParameter("only a GPU rests", param_hint="--duty")
    if device != "cuda" and peers:
        raise click.BadParameter("other libraries are timed on a GPU only", param_hint="--peers")
    if raw_gate and peers:
        raise click.BadParameter("other libraries are timed with log-decays only", param_hint="--raw-gate")
