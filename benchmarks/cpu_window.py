"""Time windows of sketched decode and standard decode on this CPU, with the errors of the same runs.

    python benchmarks/cpu_window.py --json benchmarks/results/cpu-window.json

Each row is one layer at the shape of a model in use, with mixed ranks around a plan's usual mean, for every map. The
systems take turns, window by window, through their public heads with argument checks (see
`sketchssm.study.bench.measure_host`). Errors are against float64; those of a sketch are against the reference sketch
of the same plan, because the bases are random.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import numpy as np
from reports import about, cpu_model, write

from sketchssm import SketchPlan
from sketchssm.layer.coefficients import MAPS
from sketchssm.layer.recurrence import Layer
from sketchssm.plans.basis import SketchBasis
from sketchssm.study import bench
from sketchssm.study.systems import System, exact_systems, sketch_system

MEAN_RANKS = {"mamba2": 5, "gdn": 7, "kda": 7}
WINDOW = 16


def mixed_ranks(heads: int, mean: int) -> np.ndarray:
    """Ranks from 2 to ``2 mean - 2`` around their mean."""
    spread = np.linspace(-(mean - 2), mean - 2, heads).round().astype(int)
    return np.random.default_rng(0).permutation(mean + spread)


def systems(layer: Layer, maps: list[str]) -> list[System]:
    ranks = mixed_ranks(layer.heads, MEAN_RANKS[layer.kind])
    basis = SketchBasis.random(layer, int(ranks.max()), window=WINDOW)
    return [
        *exact_systems(layer, WINDOW),
        *(sketch_system(SketchPlan(basis, ranks, window=WINDOW, map=name), name) for name in maps),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = ["nemotron-3-super", "qwen3-next", "kimi-linear"]
    parser.add_argument("--shapes", nargs="+", choices=bench.SHAPES, default=shapes)
    parser.add_argument("--batch", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--maps", nargs="+", choices=MAPS, default=["ridge", "lowrank"])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each system")
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args()
    report = about(cpu_model()) | {"rows": []}
    print(f"{report['device']}, W = {WINDOW}; microseconds of a step")
    print(f"{'shape':18}{'batch':>6}  {'system':10}{'read':>8}{'flush':>8}{'window':>8}{'GB/s':>7}{'of copy':>8}"
          f"{'speed':>7}{'output':>9}{'state':>9}")  # fmt: skip
    for shape in args.shapes:
        layer = bench.SHAPES[shape]
        for batch in args.batch:
            bandwidth = bench.copy_bandwidth()
            results = bench.measure_host(shape, layer, systems(layer, args.maps), batch, WINDOW, bandwidth,
                                    backend="cpu", seconds=args.seconds)  # fmt: skip
            for it in results:
                speed = results[0].microseconds / it.microseconds
                report["rows"].append(asdict(it) | {"speedup": speed, "copy_bandwidth": bandwidth})
                print(f"{shape:18}{batch:6}  {it.system:10}{it.read_microseconds:8.0f}{it.flush_microseconds:8.0f}"
                      f"{it.microseconds:8.0f}{it.gigabytes_per_second:7.1f}{it.fraction:8.0%}{speed:6.2f}x"
                      f"{it.error:9.1e}{it.state_error:9.1e}", flush=True)  # fmt: skip
    write(report, args.json)


if __name__ == "__main__":
    main()
