"""Times and floors of standard decode, buffered replay and sketch on a GPU, one flat row per shape and batch.

    python benchmarks/cuda_step.py --batches 32,256 --json benchmarks/results/cuda-step.json

For comparisons of commits. The measurements are those of `sketchssm bench --backend cuda` (see docs/cuda.md); this
script writes their numbers, for one map, with the names of earlier reports. `--systems standard,peers` leaves replay
and sketches out and times the other installed libraries. `--raw-gate` gives heads of kda raw gate inputs.
`--sketch-dtype` and `--mean-rank` list formats of sketches and mean ranks of all shapes; each pair is timed.
`--monitor 1` measures the sketch's error at every flush. With a large `--tolerance` flushes compare it too; with a
small one all rows are soon read exactly. `--full-state-heads 8` makes eight heads full-state heads.
"""

import argparse
import itertools
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from reports import about, write

from sketchssm.layer.coefficients import MAPS
from sketchssm.layer.formats import DEFAULT_FORMAT, FORMATS
from sketchssm.layer.recurrence import FULL_STATE
from sketchssm.study import bench


def flat(name, result):
    """A result's numbers under a system's name."""
    buffered = name in ("replay", "sketch")
    if not buffered:
        times = {"": (result.microseconds, result.fraction)}
    else:
        times = {
            "read_": (result.read_microseconds, result.read_fraction),
            "flush_": (result.flush_microseconds, result.flush_fraction),
        }
    row = {}
    for part, (microseconds, share) in times.items():
        row |= {f"{name}_{part}us": round(microseconds, 2), f"{name}_{part}floor": round(share, 3)}
    if buffered:
        row[f"{name}_window_us"] = round(result.microseconds, 2)
    return row | {f"{name}_output_error": result.error, f"{name}_state_error": result.state_error}


def measure(shape, batch, state_dtype, bandwidth, args):
    """Rows of one shape and batch: one for the systems without sketches, one for each plan."""
    layer = bench.SHAPES[shape]
    gate = bench.random_gate(layer) if args.raw_gate and layer.channel_decays else None
    work = bench.Workload(layer, batch, args.window, raw_gate=gate is not None)
    pace = {"seconds": args.seconds, "duty": args.duty}
    head = {"shape": shape, "batch": batch, "map": args.map, "state_dtype": state_dtype}
    head |= {} if gate is None else {"raw_gate": True}
    rows = []
    for sketch_dtype, mean in itertools.product(args.sketch_dtype, args.mean_rank):
        ranks = bench.spread_ranks(layer.heads, mean or bench.MEAN_RANKS[shape], args.rank_max)
        ranks[np.arange(args.full_state_heads) * layer.heads // max(args.full_state_heads, 1)] = FULL_STATE
        plan = bench.random_plan(layer, ranks, args.window, args.map, 0, sketch_dtype)
        row = dict(head)
        row |= {} if sketch_dtype == DEFAULT_FORMAT else {"sketch_dtype": sketch_dtype}
        row |= {} if mean is None else {"mean_rank": mean}
        row["rank_max"] = args.rank_max
        row |= {"full_state_heads": args.full_state_heads} if args.full_state_heads else {}
        watched = {"monitor": args.monitor} if args.monitor else {}
        watched |= {} if args.tolerance is None else {"tolerance": args.tolerance}
        row |= watched
        listed = bench.systems(layer, args.window, [plan], gate, state_dtype)
        for name, system in zip(("standard", "replay", "sketch"), listed, strict=True):
            if name == "sketch" and watched:
                system = replace(system, build=partial(system.build, **watched))
            if name in args.systems and not (rows and name != "sketch"):
                row |= flat(name, bench.measure_device(shape, system, work, bandwidth, **pace))
        rows.append(row)
    for peer in bench.PEERS if "peers" in args.systems else ():
        if peer.kind != layer.kind or gate is not None or peer.missing():
            continue
        try:
            rows[0] |= flat(peer.name, bench.measure_peer(shape, peer, work, bandwidth, **pace))
        except RuntimeError as error:
            print(f"{shape}, batch {batch}: {peer.name} was not timed: {error}", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(bench.COMMON))
    parser.add_argument("--batches", default="1,8,32,128,256,512")
    parser.add_argument("--systems", default="standard,replay,sketch")
    parser.add_argument("--map", choices=MAPS, default="lowrank")
    parser.add_argument("--sketch-dtype", nargs="+", choices=FORMATS, default=[DEFAULT_FORMAT])
    parser.add_argument("--mean-rank", type=int, nargs="+", default=[None], help="default: each shape's own")
    parser.add_argument("--rank-max", type=int, default=16, help="largest rank of a head")
    parser.add_argument("--full-state-heads", type=int, default=0, help="of each layer, less than all")
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--state-dtypes", default="float32", help="types of states in memory, with commas")
    parser.add_argument("--monitor", type=int, default=0, help="one flush of so many is measured")
    parser.add_argument("--tolerance", type=float, help="error above which rows are read exactly; with --monitor")
    parser.add_argument("--raw-gate", action="store_true", help="for kda")
    parser.add_argument("--seconds", type=float, default=0.05, help="for each system")
    parser.add_argument("--duty", type=float, default=1.0, help="share of the time that the device works")
    parser.add_argument("--commit", help="for the report, where this is no clone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.systems = args.systems.split(",")
    bandwidth = bench.device_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s", flush=True)
    results = []
    for shape in args.shapes.split(","):
        for batch in map(int, args.batches.split(",")):
            for state_dtype in args.state_dtypes.split(","):
                for row in measure(shape, batch, state_dtype, bandwidth, args):
                    results.append(row)
                    print(*(f"{k}={v:.2e}" if k.endswith("error") else f"{k}={v}" for k, v in row.items()), flush=True)
    if args.json:
        settings = {"copy_gb_s": bandwidth / 1e9, "window": args.window, "duty": args.duty}
        write(about(bench.device_name(), args.commit) | settings | {"results": results}, args.json)


if __name__ == "__main__":
    main()
