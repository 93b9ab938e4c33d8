"""``sketchssm demo``: calibrate, plan, decode and compare on the traces that come with the package."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

import sketchssm
from sketchssm.cli import options
from sketchssm.cli.options import COUNT, NUMBERS

if TYPE_CHECKING:
    from sketchssm.calibrate.plans import Settings
    from sketchssm.study.evaluate import Study

MEAN_RANK = 4
"""Mean rank of the ablations."""

ROWS = 128
"""Rows of a timed step: 34 MB of states, more than most caches hold."""


@click.command("demo")
@click.option("--ranks", type=NUMBERS, default="2,4,8,16", help="Mean ranks of the sketches.")
@click.option("--rows", type=COUNT, default=ROWS, help="Rows of a timed step.")
@options.map_settings
@options.backend
@options.seed
@options.output
def command(
    ranks: tuple[int, ...],
    rows: int,
    settings: Settings,
    backend: str,
    seed: int,
    json_file: str | None,
) -> None:
    """Calibrate, plan, decode and compare, on real traces of one small layer of each kind.

    The reference backend is not timed.
    """
    from sketchssm.calibrate.traces import SHIPPED, Traces
    from sketchssm.cli.output import Output
    from sketchssm.study.evaluate import Study, evaluate, select, tables

    if backend == "reference":
        options.refuse("with --backend reference, which is not timed", ("rows",))
    options.check_files({}, json=json_file)
    started = time.perf_counter()
    output = Output(json_file)
    output.say(
        "Each layer: bases from two sequences of real traces, ranks from a third, then a fourth is decoded.\n"
        f"Map {settings.map}, window {settings.window}. Kernels are compiled on first use."
    )
    studies = [Study(Traces.shipped(kind), settings, ranks, MEAN_RANK, seed) for kind in SHIPPED]
    sketches = [f"sketch/{settings.map.name}-{rank}" for rank in ranks]
    replaced = ["ablation/full-method", "ablation/random-basis", "ablation/allocation-*"]
    chosen = select(studies, ["exact", *sketches, *replaced])
    with output.progress("", sum(map(len, chosen)) + len(studies)) as step:
        found = evaluate(studies, chosen, backend, step)
        used = found.layers[0].systems[0].backend
        times = {} if used == "reference" else _times(studies, sketches, used, rows, step)
    compared = [
        dataclasses.replace(layer, systems=[s for s in layer.systems if s.family != "ablation"])
        for layer in found.layers
    ]
    output.table(*tables.ablations(found.layers))
    output.table(*tables.details(compared, times or None))
    took = time.perf_counter() - started
    timed = f"Times: steps of {rows} rows on {used}. " if times else ""
    output.say(f"\n{timed}The demo took {took:.0f} s.")
    per_token = [{"layer": layer, "system": name, "microseconds": took} for (layer, name), took in times.items()]
    output.finish(found.plain(sketchssm.__version__) | {"times": per_token, "rows": rows, "seconds": took})


def _times(
    studies: Sequence[Study], sketches: Sequence[str], backend: str, rows: int, progress: Callable[[str], None]
) -> dict[tuple[str, str], float]:
    """Microseconds per token by layer and system."""
    from sketchssm.study import bench

    def case(study: Study) -> bench.Case:
        settings, layer = study.settings, study.calibrated()
        chosen: Any = {name: getattr(settings, name) for name in ("map", "method", "sketch_dtype", "residual_bits")}
        plans = [layer.plan(rank, **chosen) for rank in study.ranks]
        return bench.Case(study.traces.name, study.traces.layer, rows, settings.window, plans)

    cases = [case(study) for study in studies]
    results = bench.time_cases(cases, backend, seconds=0.05, progress=progress).results
    names = ["exact/standard", "exact/replay", *sketches]
    timed = [(study.traces.name, name) for study in studies for name in names]
    return {key: r.microseconds / rows for key, r in zip(timed, results, strict=True)}
