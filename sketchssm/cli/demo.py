"""``sketchssm demo``: calibrate, plan, decode and compare on the traces that come with the package."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import click

import sketchssm
from sketchssm.cli import options
from sketchssm.cli.options import NUMBERS

if TYPE_CHECKING:
    from sketchssm.calibrate.plans import Settings

MEAN_RANK = 4
"""Mean rank of the ablations."""


@click.command("demo")
@click.option("--ranks", type=NUMBERS, default="2,4,8,16", help="Mean ranks of the sketches.")
@options.map_settings
@options.backend
@options.seed
@options.output
def command(
    ranks: tuple[int, ...],
    settings: Settings,
    backend: str,
    seed: int,
    json_file: str | None,
) -> None:
    """Calibrate, plan, decode and compare, on real traces of one small layer of each kind."""
    from sketchssm.calibrate.traces import SHIPPED, Traces
    from sketchssm.cli.output import Output
    from sketchssm.study.evaluate import Study, evaluate, select, tables

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
    chosen = select(studies, ["exact", *sketches, "residual/*+2-bit", *replaced])
    with output.progress("", sum(map(len, chosen))) as step:
        found = evaluate(studies, chosen, backend, step)
    compared = [
        dataclasses.replace(layer, systems=[s for s in layer.systems if s.family != "ablation"])
        for layer in found.layers
    ]
    output.table(*tables.ablations(found.layers))
    output.table(*tables.details(compared))
    took = time.perf_counter() - started
    output.say(f"\nThe demo took {took:.0f} s on {found.layers[0].systems[0].backend}.")
    output.finish(found.plain(sketchssm.__version__) | {"seconds": took})
