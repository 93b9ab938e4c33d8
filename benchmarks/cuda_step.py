"""Times the CUDA engines against the memory's own speed: standard, buffered replay and sketch, per shape and batch.

    python benchmarks/cuda_step.py --batches 32,256 --json benchmarks/results/cuda-step.json

Every time is a CUDA graph's replay, median over repetitions. A window's graph goes through all W positions, reads its
cursors from the device like any other caller, and takes turns over several sets of slots where one would fit in the
caches. 'floor' is the bytes that the operation must move over the copy bandwidth measured in the same run; the errors
are those of the timed engines' own outputs at flush steps and of their states, against standard decode of the same
tokens in float64 on the device.
"""

import argparse
import datetime
import json
import shlex
import subprocess
import sys
from pathlib import Path

import cupy
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from cuda_support import make_plan, make_tokens, tokens_to_device

from sketchssm.cuda.engines import ReplayEngine, SketchEngine, StandardEngine
from sketchssm.cuda.layout import map_elements
from sketchssm.recurrence import Layer, Tokens

SPREAD = {5: [1, 2, 3, 4, 5, 6, 8, 11], 6: [1, 2, 4, 5, 6, 7, 9, 14], 7: [1, 3, 4, 6, 7, 8, 11, 16]}
SHAPES = {
    "nemotron-3-super": (Layer("mamba2", 128, 128, 64, 8), 5),
    "nemotron-nano-9b-v2": (Layer("mamba2", 128, 128, 80, 8), 6),
    "qwen3-next": (Layer("gdn", 32, 128, 128, 16), 7),
    "qwen3.5-large": (Layer("gdn", 64, 128, 128, 16), 7),
    "kimi-linear": (Layer("kda", 32, 128, 128, 32), 7),
}
CACHE = 400 << 20  # bytes that no cache holds


def graph_of(work, stream):
    with stream:
        work()
        stream.synchronize()
        stream.begin_capture()
        work()
        return stream.end_capture()


def median_us(graph, stream, repeats):
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    times = []
    for i in range(repeats + 2):
        start.record(stream)
        graph.launch(stream)
        stop.record(stream)
        stop.synchronize()
        if i >= 2:
            times.append(1e3 * cupy.cuda.get_elapsed_time(start, stop))
    return float(np.median(times))


def copy_bandwidth(stream):
    """Bytes read plus bytes written per second of a 2 GiB device-to-device copy."""
    a, b = (cupy.ones(1 << 29, dtype=np.float32) for _ in range(2))

    class Copies:
        def launch(self, stream):  # not a graph: its copy nodes would go through the slower copy engines
            for _ in range(4):
                cupy.cuda.runtime.memcpyAsync(b.data.ptr, a.data.ptr, a.nbytes, 3, stream.ptr)

    return 4 * 2 * a.nbytes / (median_us(Copies(), stream, 7) * 1e-6)


def row_bytes(layer, ranks, plan, window):
    """Bytes of one row: state, a token's inputs and output, one ring token, its packed sketch."""
    state = 4 * layer.heads * layer.value_dim * layer.key_dim
    ring = 2 * (layer.key_heads * layer.key_dim + layer.heads * layer.value_dim)
    ring += 4 * layer.heads * (layer.gate_channels + layer.erases)
    token = ring + 2 * (layer.key_heads * layer.key_dim + layer.heads * layer.value_dim)
    sketch = sum(2 * (r * layer.value_dim + map_elements(plan, r)) for r in map(int, ranks))
    return state, token, ring, sketch


def float64_outputs(layer, inputs, steps):
    """Standard decode in float64 on the device: outputs at the last step, and states (batch, heads, V, K)."""
    batch = inputs[0].v.shape[0]
    state = cupy.zeros((batch, *layer.state_shape), dtype=np.float64)
    for t in range(steps):
        x = inputs[t % len(inputs)]
        q, k = (cupy.repeat(_wide(y)[:, 0], layer.group, axis=1) for y in (x.q, x.k))
        a = cupy.exp(x.g[:, 0].astype(np.float64))
        state *= a[:, :, None, :] if layer.kind == "kda" else a[..., None, None]
        w = _wide(x.v)[:, 0]
        if layer.erases:
            w = x.beta[:, 0, :, None] * (w - cupy.einsum("bhvk,bhk->bhv", state, k))
        state += w[..., None] * k[:, :, None, :]
    return cupy.einsum("bhvk,bhk->bhv", state, q), state


def _wide(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def relative(got, want):
    return float(cupy.linalg.norm((got.astype(np.float64) - want).ravel()) / cupy.linalg.norm(want.ravel()))


def measure(name, batch, bandwidth, stream, args):
    layer, mean = SHAPES[name]
    rng = np.random.default_rng(1)
    ranks = np.resize(SPREAD[mean], layer.heads)
    plan = make_plan(layer, ranks, rng, map=args.map, window=args.window)
    state, token, ring, sketch = row_bytes(layer, ranks, plan, args.window)
    inputs = make_inputs(layer, batch, rng)
    out = cupy.full((batch, 1, layer.heads, layer.value_dim), 0xFFFF, dtype=np.uint16)
    least = state if "standard" in args.systems else sketch + 8 * ring
    sets = min(max(1, -(-CACHE // (batch * least))), 24)
    slots = [cupy.arange(i * batch, (i + 1) * batch) for i in range(sets)]
    result = {"shape": name, "batch": batch, "sets": sets, "map": args.map}

    def note(what, us, bytes_per_row):
        result[f"{what}_us"] = round(us, 2)
        result[f"{what}_floor"] = round(batch * bytes_per_row / bandwidth * 1e6 / us, 3)

    if "standard" in args.systems:
        note(
            "standard",
            time_standard(StandardEngine(layer, sets * batch), inputs, slots, out, stream, args.repeats),
            2 * state + token,
        )
        cupy.get_default_memory_pool().free_all_blocks()
    start = cupy.asarray(rng.standard_normal((1, *layer.state_shape)), np.float32)
    for system in ("replay", "sketch"):
        if system not in args.systems:
            continue
        sketched = system == "sketch"
        engine = SketchEngine(plan, sets * batch) if sketched else ReplayEngine(layer, sets * batch, args.window)
        engine.warmup()
        engine.load_state(start.repeat(batch, 0), slots[0])
        if batch <= 256:
            errors = check_outputs(engine, inputs, slots[0], out)
            result[f"{system}_flush_error"], result[f"{system}_state_error"] = errors
        read, flush = time_window(engine, inputs, slots, out, stream, args.repeats)
        stored = sketch if sketched else state
        note(f"{system}_read", read, stored + token + ring + ring * (args.window - 2) / 2)
        note(f"{system}_flush", flush, 2 * state + ring * (args.window - 1) + token + (sketch if sketched else 0))
        result[f"{system}_window_us"] = round((read * (args.window - 1) + flush) / args.window, 2)
        del engine
        cupy.get_default_memory_pool().free_all_blocks()
    return result


def make_inputs(layer, batch, rng):
    """Four different tokens for every row, on the device."""
    host = make_tokens(layer, min(batch, 32), 4, "bfloat16", rng, hard_gates=False)
    inputs = []
    for t in range(4):
        one = tokens_to_device(Tokens(*(x if x is None else x[:, t : t + 1] for x in host)), "bfloat16")
        copies = -(-batch // 32)
        inputs.append(
            Tokens(*(x if x is None else cupy.tile(x, (copies, *[1] * (x.ndim - 1)))[:batch].copy() for x in one))
        )
    return inputs


def check_outputs(engine, inputs, slots, out):
    """Relative errors of the second flush's outputs and of the states, from two windows that start at zero."""
    engine.reset(slots)
    for t in range(2 * engine.window):
        out[...] = 0xFFFF
        engine.step(inputs[t % 4], slots, out)
    want, states = float64_outputs(engine.layer, inputs, 2 * engine.window)
    return relative(_wide(out)[:, 0], want), relative(engine.state[: slots.size], states)


def time_standard(engine, inputs, slots, out, stream, repeats):
    """Microseconds of a step."""
    graph = graph_of(lambda: [engine.step(inputs[i % 4], some, out) for i, some in enumerate(slots)], stream)
    return median_us(graph, stream, repeats) / len(slots)


def time_window(engine, inputs, slots, out, stream, repeats):
    """Microseconds of a read step, averaged over the window's positions, and of a flush step."""

    def steps(count, first):
        engine.position[...] = first
        for t in range(count):
            for some in slots:
                engine.step(inputs[t % 4], some, out)

    window = engine.window
    read = median_us(graph_of(lambda: steps(window - 1, 0), stream), stream, repeats)
    flush = median_us(graph_of(lambda: steps(1, window - 1), stream), stream, repeats)
    return read / len(slots) / (window - 1), flush / len(slots)


def git_commit():
    """The clone's commit, or an empty string."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--batches", default="1,8,32,128,256,512")
    parser.add_argument("--systems", default="standard,replay,sketch")
    parser.add_argument("--map", default="lowrank")
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json")
    parser.add_argument("--commit", help="for the report, where this is no clone")
    args = parser.parse_args()
    args.systems = args.systems.split(",")
    stream = cupy.cuda.Stream(non_blocking=True)
    bandwidth = copy_bandwidth(stream)
    cupy.get_default_memory_pool().free_all_blocks()
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s", flush=True)
    results = []
    for name in args.shapes.split(","):
        for batch in map(int, args.batches.split(",")):
            with stream:
                results.append(measure(name, batch, bandwidth, stream, args))
            cupy.get_default_memory_pool().free_all_blocks()
            print(
                " ".join(f"{k}={v:.2e}" if k.endswith("error") else f"{k}={v}" for k, v in results[-1].items()),
                flush=True,
            )
    if args.json:
        device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
        report = {
            "device": device,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": args.commit or git_commit(),
            "command": shlex.join(["python", *sys.argv]),
            "copy_gb_s": bandwidth / 1e9,
            "window": args.window,
            "results": results,
        }
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
