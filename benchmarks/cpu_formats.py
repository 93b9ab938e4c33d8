"""Time reads and windows of sketches in every format on this CPU, with the errors of the same heads.

    NUMBA_NUM_THREADS=1 python benchmarks/cpu_formats.py --json benchmarks/results/cpu-formats.json

The formats take turns, window by window, so that other load on the machine slows all of them alike and no head finds
its sketches in a cache. Times are processor time of one thread, because other programs may use the cores in between.
Each token's time is the least of all rounds. `--formats` also takes `standard` decode, and `int8+2`: the map
`subspace` and residuals of 2 bits, where the other formats have the map `ridge`. Errors are those of a first window's
outputs and state, one row, against the reference head of the same format in float64.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from reports import about, cpu_model, write

import sketchssm as ss
from sketchssm.cpu.workers import worker_count
from sketchssm.layer.formats import FORMATS, SketchFormat
from sketchssm.layer.residual import STEPS, residual_bytes
from sketchssm.study import bench
from sketchssm.study.bench.workloads import token_at
from sketchssm.study.evaluate.measure import relative_error

WINDOW = 16

CHOICES = ("standard", *FORMATS, *(f"int8+{bits}" for bits in STEPS))


def make(name: str, layer: ss.Layer, rank: int, batch: int) -> tuple[ss.DecodeHead, ss.DecodeHead, float]:
    """A head, its twin of one slot in float64, and the bytes that a read moves of a slot's sketches."""
    if name == "standard":
        return ss.StandardHead(layer, batch, "cpu"), ss.StandardHead(layer, 1, "reference"), 0.0
    form, _, bits = name.partition("+")
    ranks, bits = bench.spread_ranks(layer.heads, rank, layer.key_dim), int(bits or 0)
    plan = bench.random_plan(layer, ranks, WINDOW, "subspace" if bits else "ridge", 0, form, bits)
    size = SketchFormat.of(form).bytes(plan.map, ranks, layer.key_dim, layer.value_dim).sum()
    size += layer.heads * residual_bytes(bits, layer.key_dim, layer.value_dim)
    return ss.SketchHead(plan, batch, "cpu"), ss.SketchHead(plan, 1, "reference"), float(size)


def measure(shape: str, rank: int, batch: int, rounds: int, formats: list[str]) -> list[dict[str, object]]:
    """Rows of one shape and mean rank; times in microseconds."""
    layer = bench.SHAPES[shape]
    tokens = bench.random_tokens(layer, batch, WINDOW)
    one = tokens.at(np.s_[:1])
    steps = [token_at(tokens, t) for t in range(WINDOW)]
    start = np.random.default_rng(0).standard_normal((1, *layer.state_shape)).astype(np.float32)
    heads, rows = [], []
    for name in formats:
        head, twin, modelled = make(name, layer, rank, batch)
        head.load_state(np.broadcast_to(start, (batch, *layer.state_shape)))
        twin.load_state(start)
        got = np.stack([head.step(*token)[:1] for token in steps], axis=1)
        error = relative_error(got, np.asarray(twin.step(*one), dtype=np.float64))
        sketch = sum(part.bytes for part in head.parts if part.name == "sketch")
        heads.append(head)
        rows.append({"shape": shape, "mean_rank": rank, "batch": batch, "sketch_dtype": name,
                     "read_bytes_per_slot": modelled, "sketch_part_bytes": sketch,
                     "output_error": error, "state_error": relative_error(head.state[:1], twin.state)})  # fmt: skip
    least = np.full((len(heads), WINDOW), np.inf)
    for _ in range(rounds):
        for own, head in zip(least, heads, strict=True):
            for t, token in enumerate(steps):
                begun = time.process_time()
                head.step(*token)
                own[t] = min(own[t], 1e6 * (time.process_time() - begun))
    for row, own in zip(rows, least, strict=True):
        row |= {"read": float(own[:-1].mean()), "flush": float(own[-1]), "step": float(own.mean())}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = ["nemotron-3-super", "qwen3-next", "kimi-linear"]
    parser.add_argument("--shapes", nargs="+", choices=bench.SHAPES, default=shapes)
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 16], help="mean ranks")
    parser.add_argument("--formats", nargs="+", choices=CHOICES, default=list(FORMATS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=30, help="windows of each head")
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args()
    if worker_count() != 1:
        parser.error("set NUMBA_NUM_THREADS=1: processor time is that of all threads")
    report = about(cpu_model()) | {"rows": []}
    report["command"] = f"NUMBA_NUM_THREADS=1 {report['command']}"
    print(f"{report['device']}, W = {WINDOW}, batch {args.batch}; processor microseconds, least of {args.rounds}")
    print(f"{'shape':18}{'rank':>5}  {'format':10}{'read':>8}{'flush':>8}{'step':>8}{'output':>9}{'state':>9}")
    for shape in args.shapes:
        for rank in args.ranks:
            for row in measure(shape, rank, args.batch, args.rounds, args.formats):
                report["rows"].append(row)
                name = row["sketch_dtype"]
                print(f"{shape:18}{rank:5}  {name:10}{row['read']:8.0f}{row['flush']:8.0f}{row['step']:8.0f}"
                      f"{row['output_error']:9.1e}{row['state_error']:9.1e}", flush=True)  # fmt: skip
    write(report, args.json)


if __name__ == "__main__":
    main()
