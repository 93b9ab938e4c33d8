"""``sketchssm bench``: decode systems on this machine's CPU."""

from __future__ import annotations

from typing import Any

import click

from sketchssm.cli import options
from sketchssm.cli.options import Numbers
from sketchssm.plan import MAPS

__all__ = ["command"]


@click.command("bench")
@click.option("--shape", "shapes", multiple=True, help="A layer's shape by name; may be repeated.  [default: all]")
@click.option("--batch", "batches", type=Numbers(), default="1,8,32", show_default=True, help="Rows of a step.")
@click.option(
    "--window", "windows", type=Numbers(), default="16", show_default=True, help="Tokens from one flush to the next."
)
@click.option(
    "--rank", "ranks", type=Numbers(), default="8", show_default=True, help="Rank of every head of the sketch."
)
@click.option(
    "--map",
    "maps",
    type=click.Choice(MAPS),
    multiple=True,
    help="Coefficient map; may be repeated.  [default: SketchPlan's]",
)
@click.option(
    "--pivots", type=click.IntRange(min=1), default=4, show_default=True, help="Pivot count of lowrank and prior."
)
@click.option(
    "--seconds", type=click.FloatRange(min=0), default=0.5, show_default=True, help="Time for each measurement."
)
@options.backend
@options.seed
@options.output
def command(
    shapes: tuple[str, ...],
    batches: tuple[int, ...],
    windows: tuple[int, ...],
    ranks: tuple[int, ...],
    maps: tuple[str, ...],
    pivots: int,
    seconds: float,
    backend: str,
    seed: int,
    json_file: str | None,
) -> None:
    """Time decode systems on random inputs, amortised over a window.

    The floor is the bytes that a step must move over the copy bandwidth measured first. The error is that of the timed
    system's own outputs against the same system in float64, so it is the arithmetic's, not the sketch's.
    """
    from sketchssm import bench
    from sketchssm.cli.output import Output, scientific
    from sketchssm.evaluate.settings import Settings

    unknown = [name for name in shapes if name not in bench.SHAPES]
    if unknown:
        raise click.BadParameter(f"expected some of {', '.join(bench.SHAPES)}, got {unknown[0]}", param_hint="--shape")
    output = Output(json_file)
    bandwidth = bench.copy_bandwidth()
    names = shapes or tuple(bench.SHAPES)
    cases = [(name, batch, window) for name in names for batch in batches for window in windows]
    sketches = [(rank, chosen) for rank in ranks for chosen in maps or (Settings().map,)]
    results = []
    with output.progress("timing", len(cases)) as step:
        for name, batch, window in cases:
            layer = bench.SHAPES[name]
            plans = [bench.random_plan(layer, rank, window, chosen, pivots, seed) for rank, chosen in sketches]
            step(f"{name}, batch {batch}, window {window}")
            results += bench.measure(
                name,
                layer,
                bench.systems(layer, window, plans),
                batch,
                window,
                bandwidth,
                backend=backend,
                seconds=seconds,
                seed=seed,
            )
    rows: list[list[str]] = []
    for i, r in enumerate(results):
        if i and (r.shape, r.batch, r.window) != (results[i - 1].shape, results[i - 1].batch, results[i - 1].window):
            rows.append([])
        rows.append([
            r.shape, r.system, f"{r.batch}", f"{r.window}",
            f"{r.read_microseconds:.0f}", f"{r.flush_microseconds:.0f}", f"{r.microseconds:.0f}",
            f"{r.bytes / 1e6:.2f}", f"{r.gigabytes_per_second:.1f}", f"{r.fraction:.2f}",
            scientific(r.error),
        ])  # fmt: skip
    title = (
        f"One layer, microseconds per step on {results[0].backend}; measured copy bandwidth {bandwidth / 1e9:.1f} GB/s"
    )
    headings = ["shape", "system", "batch", "W", "read", "flush", "amortised", "MB", "GB/s", "of floor", "error"]
    output.table(title, headings, rows, words=2)
    compiled = sum(r.first_call_seconds for r in results)
    output.say(f"First calls (compiling, or loading what was compiled) took {compiled:.1f} s more, not counted above.")
    report: dict[str, Any] = {"copy_bandwidth": bandwidth, "results": results}
    output.finish(report)
