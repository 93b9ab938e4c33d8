"""Time sketched decode on this CPU with flushes every 16, 32, 64 and 128 tokens and refreshes between them.

    python benchmarks/cpu_refresh.py --json benchmarks/results/cpu-refresh.json

Each row is one layer at the shape of a model in use, with mixed ranks around a plan's usual mean. All rows are at the
same positions. The systems take turns, 128 tokens at a time, so that other load on the machine slows all alike. Errors
are those of one row against the float64 reference of the same plan, because the bases are random.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from cpu_reports import new_report, write
from cpu_window import MEAN_RANKS, mixed_ranks

import sketchssm as ss
from sketchssm.layer.recurrence import MAX_FLUSH_EVERY
from sketchssm.study import bench
from sketchssm.study.bench.workloads import random_tokens, token_at
from sketchssm.study.evaluate.measure import relative_error

WINDOW = 16


def plans(layer: ss.Layer, name: str, dtype: str) -> dict[int, ss.SketchPlan]:
    """One plan for each number of tokens from flush to flush."""
    ranks = mixed_ranks(layer.heads, MEAN_RANKS[layer.kind])
    basis = ss.SketchBasis.random(layer, int(ranks.max()), window=WINDOW)
    return {every: ss.SketchPlan(basis, ranks, WINDOW, name, dtype, flush_every=every) for every in (16, 32, 64, 128)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = ["nemotron-3-super", "qwen3-next", "kimi-linear"]
    parser.add_argument("--shapes", nargs="+", choices=bench.SHAPES, default=shapes)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--map", default="ridge")
    parser.add_argument("--sketch-dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3, help="of 128 tokens for each system")
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args()
    report = new_report() | {"copy_bandwidth": bench.copy_bandwidth()}
    print(f"{report['device']}, {args.map}, {args.sketch_dtype}, batch {args.batch}; microseconds of a step")
    print(f"{'shape':18}{'flush every':>12}{'read':>8}{'refresh':>9}{'flush':>8}{'step':>8}{'error':>9}")
    for shape in args.shapes:
        layer = bench.SHAPES[shape]
        tokens = random_tokens(layer, args.batch, MAX_FLUSH_EVERY, 0)
        steps = [token_at(tokens, t) for t in range(MAX_FLUSH_EVERY)]
        start = np.random.default_rng(0).standard_normal((1, *layer.state_shape)).astype(np.float32)
        heads, errors = {}, {}
        for every, plan in plans(layer, args.map, args.sketch_dtype).items():
            heads[every] = ss.SketchHead(plan, args.batch, "cpu")
            heads[every].load_state(np.broadcast_to(start, (args.batch, *layer.state_shape)))
            outputs = np.stack([np.array(heads[every].step(*token)[:1]) for token in steps], axis=1)
            twin = ss.SketchHead(plan, 1, "reference")
            twin.load_state(start)
            errors[every] = relative_error(outputs, twin.step(*(x if x is None else x[:1] for x in tokens)))
        times: dict[int, list[list[float]]] = {every: [] for every in heads}
        for _ in range(args.rounds):
            for every, head in heads.items():
                own = []
                for token in steps:
                    began = time.perf_counter()
                    head.step(*token)
                    own.append(time.perf_counter() - began)
                times[every].append(own)
        place = np.arange(1, MAX_FLUSH_EVERY + 1)
        for every, own in times.items():
            typical = 1e6 * np.median(own, axis=0)
            flushes = place % every == 0
            refreshes = (place % WINDOW == 0) & ~flushes
            row = {
                "shape": shape,
                "batch": args.batch,
                "map": args.map,
                "sketch_dtype": args.sketch_dtype,
                "flush_every": every,
                "read_microseconds": float(typical[~flushes & ~refreshes].mean()),
                "refresh_microseconds": float(typical[refreshes].mean()) if refreshes.any() else None,
                "flush_microseconds": float(typical[flushes].mean()),
                "microseconds": float(typical.mean()),
                "error": errors[every],
            }
            report["rows"].append(row)
            refresh = "-" if row["refresh_microseconds"] is None else f"{row['refresh_microseconds']:.0f}"
            print(f"{shape:18}{every:12}{row['read_microseconds']:8.0f}{refresh:>9}{row['flush_microseconds']:8.0f}"
                  f"{row['microseconds']:8.0f}{row['error']:9.1e}", flush=True)  # fmt: skip
    write(report, args.json)


if __name__ == "__main__":
    main()
