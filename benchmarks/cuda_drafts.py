"""Times of draft reads on a GPU beside reads of one token, at the same window positions.

    python benchmarks/cuda_drafts.py --drafts 4 --json benchmarks/results/cuda-drafts.json

A call of `--drafts` tokens a row is two launches: the flush kernel (here every row has room, so it folds nothing), and
the draft read. At each window position, the call is timed, and then a step of one token, which advances the position.
The outputs of both are compared with float64.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from reports import about, write

from sketchssm.arrays.interop import to_host
from sketchssm.layer.formats import DEFAULT_FORMAT, FORMATS
from sketchssm.layer.recurrence import Tokens
from sketchssm.study import bench
from sketchssm.study.bench.device import ACTIVATION, slot_sets, typical_times
from sketchssm.study.bench.graphs import captured, upload
from sketchssm.study.bench.results import step_bytes


def errors_of(system, work, drafts, got, steps):
    """Errors of the first row's drafts ``(positions, drafts, heads, V)`` and steps ``(window, heads, V)``."""
    row = work.one_row()
    twin = system.build(1, "reference")
    twin.load_state(work.start[None])
    wants, plain = [], []
    for t in range(work.window):
        if t + drafts < work.window:
            wants.append(twin.step(*row.at(np.s_[:, t : t + drafts]), draft=True)[0])
        plain.append(twin.step(*row.at(np.s_[:, t : t + 1]))[0, 0])
    pairs = (got, np.stack(wants)), (steps, np.stack(plain))
    return [float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in pairs]


def together(steps):
    """Inputs ``(batch, tokens, ...)`` of several steps."""
    stacked = (
        None if x[0] is None else np.stack([to_host(y, "input") for y in x], 1) for x in zip(*steps, strict=True)
    )
    return upload(Tokens(*stacked), ACTIVATION)


def measure(shape, batch, args):
    """Microseconds of drafts and of one token, by position."""
    import cupy

    layer, window, drafts = bench.SHAPES[shape], args.window, args.drafts
    ranks = bench.spread_ranks(layer.heads, args.rank or bench.MEAN_RANKS[shape])
    plan = bench.random_plan(layer, ranks, window, args.map, 0, args.sketch_dtype, args.residual_bits)
    work = bench.Workload(layer, batch, window)
    system = bench.systems(layer, window, [plan], None)[2]
    needed = step_bytes(system, layer, batch, window, on_device=True)
    sets = slot_sets(batch, needed.read, 4 * int(np.prod(layer.state_shape)))
    head = system.build(sets * batch, "cuda")
    head.warmup(ACTIVATION)
    slots = [cupy.arange(i * batch, (i + 1) * batch, dtype=np.int64) for i in range(sets)]
    start = cupy.asarray(np.broadcast_to(work.start, (batch, *layer.state_shape)))
    for some in slots:
        head.load_state(start, slots=some)
    positions = window - drafts
    several = [together(work.steps[p : p + drafts]) for p in range(positions)]
    outputs = [cupy.empty((batch, drafts, layer.heads, layer.value_dim), x.v.dtype) for x in several]
    singles = [cupy.empty((batch, layer.heads, layer.value_dim), several[0].v.dtype) for _ in work.steps]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:  # loads the draft's kernels
        head.step(*several[0], slots=slots[0], out=outputs[0], draft=True)
    stream.synchronize()

    def draft(p):
        for some in slots:
            head.step(*several[p], slots=some, out=outputs[p], draft=True)

    def step(p):
        for some in slots:
            head.step(*work.steps[p], slots=some, out=singles[p])

    graphs = []
    for p in range(window):
        graphs += [captured(partial(draft, p), stream)] if p < positions else []
        graphs.append(captured(partial(step, p), stream))
    launches = [partial(graph.launch, stream) for graph in graphs]
    for launch in launches:
        launch()
    stream.synchronize()
    got, steps = (np.stack([to_host(x[0], "out").astype(np.float64) for x in y]) for y in (outputs, singles))
    draft_error, step_error = errors_of(system, work, drafts, got, steps)
    times = typical_times(launches, stream, args.seconds, args.duty) / sets
    of_drafts, of_steps = times[: 2 * positions : 2], times[1 : 2 * positions : 2]
    return {
        "shape": shape,
        "batch": batch,
        "map": args.map,
        "system": system.name,
        "drafts": drafts,
        "draft_us": round(float(of_drafts.mean()), 2),
        "read_us": round(float(of_steps.mean()), 2),
        "ratio": round(float(of_drafts.mean() / of_steps.mean()), 3),
        "draft_us_by_position": [round(float(x), 2) for x in of_drafts],
        "read_us_by_position": [round(float(x), 2) for x in of_steps],
        "draft_error": draft_error,
        "read_error": step_error,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="nemotron-3-super,qwen3-next,kimi-linear")
    parser.add_argument("--batches", default="256")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--map", default="lowrank")
    parser.add_argument("--rank", type=int, help="mean rank (default: the shape's)")
    parser.add_argument("--sketch-dtype", choices=FORMATS, default=DEFAULT_FORMAT)
    parser.add_argument("--residual-bits", type=int, default=0, help="with the map subspace")
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each shape and batch")
    parser.add_argument("--duty", type=float, default=1.0, help="share of the time that the device works")
    parser.add_argument("--commit", help="for the report, where this is no clone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for shape in args.shapes.split(","):
        for batch in map(int, args.batches.split(",")):
            results.append(measure(shape, batch, args))
            print(" ".join(f"{k}={v}" for k, v in results[-1].items()), flush=True)
    if args.json:
        settings = {"window": args.window, "duty": args.duty}
        write(about(bench.device_name(), args.commit) | settings | {"results": results}, args.json)


if __name__ == "__main__":
    main()
