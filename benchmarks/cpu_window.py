"""Decode a layer on the CPU with standard, replayed and sketched states, and time each token of whole windows.

    python benchmarks/cpu_window.py --shapes nemotron-3-super qwen3-next kimi-linear --batch 16 64

Every system steps through its public head, argument checks included. The systems take turns, window by window, so that
a noisy machine slows all of them alike; times are medians over the windows. `copy` is what two arrays of the state's
size can be copied at by the same threads in the same run, `standard` is also given as a fraction of it. Errors are
relative to float64: of the state for all systems, of the outputs for standard and replay; of a sketch's outputs
against the reference sketch of the same plan, since how well random bases approximate says nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import numba
import numpy as np

from sketchssm import SketchHead, SketchPlan
from sketchssm.baselines import ReplayHead, StandardHead
from sketchssm.calibrate.basis import SketchBasis
from sketchssm.head import DecodeHead
from sketchssm.recurrence import Layer
from sketchssm.reference.recurrence import run

SHAPES = {
    "nemotron-3-super": (Layer("mamba2", 128, 128, 64, 8), 5),
    "nemotron-nano-9b-v2": (Layer("mamba2", 128, 128, 80, 8), 5),
    "qwen3-next": (Layer("gdn", 32, 128, 128, 16), 7),
    "kimi-linear": (Layer("kda", 32, 128, 128, 32), 7),
}
CHECK_WINDOWS = 2


@numba.njit(parallel=True, cache=True)
def copy(source, target, parts):
    share = source.size // parts
    for part in numba.prange(parts):
        target[part * share : (part + 1) * share] = source[part * share : (part + 1) * share]


def tokens(layer: Layer, batch: int, count: int, rng: np.random.Generator) -> list[list[np.ndarray | None]]:
    """Inputs token by token: unit keys with a common direction per head, decays of 1 to 1000 tokens."""

    def unit(*shape: int) -> np.ndarray:
        x = rng.standard_normal(shape, dtype=np.float32)
        x += 2 * rng.standard_normal((1, layer.key_heads, layer.key_dim), dtype=np.float32)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    rate = np.exp(rng.uniform(np.log(1e-3), 0, layer.token_shapes()["g"])).astype(np.float32)
    result: list[list[np.ndarray | None]] = []
    for _ in range(count):
        key_shape = (batch, layer.key_heads, layer.key_dim)
        gate = -rate * rng.random((batch, *rate.shape), dtype=np.float32)
        beta = rng.random((batch, layer.heads), dtype=np.float32) if layer.erases else None
        value = rng.standard_normal((batch, layer.heads, layer.value_dim), dtype=np.float32)
        result.append([unit(*key_shape), unit(*key_shape), value, gate, beta])
    return result


def mixed_ranks(heads: int, mean: int) -> np.ndarray:
    """Ranks from 2 to ``2 mean - 2`` around their mean."""
    spread = np.linspace(-(mean - 2), mean - 2, heads).round().astype(int)
    return np.random.default_rng(0).permutation(mean + spread)


def make_plan(layer: Layer, mean: int, window: int, map_: str) -> SketchPlan:
    ranks = mixed_ranks(layer.heads, mean)
    return SketchPlan(SketchBasis.random(layer, int(ranks.max())), ranks, window=window, map=map_)


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def errors(layer: Layer, heads: dict[str, DecodeHead], plan: SketchPlan, inputs: list) -> dict[str, dict[str, float]]:
    """Errors of one row over a few windows, from a zero state."""
    sequence = [None if x[0] is None else np.stack([y[:1] for y in x], axis=1) for x in zip(*inputs, strict=True)]
    output, state = run(layer, *sequence)
    expected = {"sketch": SketchHead(plan, 1, "reference").step(*sequence)}
    found = {}
    for name, head in heads.items():
        head.reset()
        y = head.step(*sequence, slots=np.array([0]))
        head.flush()
        found[name] = {
            "output": relative(y, expected.get(name, output)),
            "state": relative(head.state[:1], state),
        }
    return found


def measure(name: str, batch: int, args: argparse.Namespace) -> dict:
    layer, mean = SHAPES[name]
    window = args.window
    plan = make_plan(layer, mean, window, args.map)
    rng = np.random.default_rng(0)
    inputs = tokens(layer, batch, window * CHECK_WINDOWS, rng)
    systems: dict[str, DecodeHead] = {
        "standard": StandardHead(layer, batch, "cpu"),
        "replay": ReplayHead(layer, batch, "cpu", window=window),
        "sketch": SketchHead(plan, batch, "cpu", sketch_dtype=args.sketch_dtype),
    }
    error = errors(layer, systems, plan, inputs)
    start = rng.standard_normal((batch, *layer.state_shape), dtype=np.float32)
    for head in systems.values():
        head.load_state(start)
    target = np.empty_like(start)
    sweep = np.zeros(args.evict << 18, dtype=np.float32)
    times: dict[str, list[list[float]]] = {system: [] for system in (*systems, "copy")}
    for repeat in range(args.repeats + 1):
        for system, head in systems.items():
            seconds = []
            for token in inputs[:window]:
                sweep += 1
                begin = time.perf_counter()
                head.step(*token)
                seconds.append(time.perf_counter() - begin)
            times[system].append(seconds)
        begin = time.perf_counter()
        copy(start.reshape(-1), target.reshape(-1), 16 * numba.get_num_threads())
        times["copy"].append([time.perf_counter() - begin])
        if repeat == 0:  # compilation and first touch
            for series in times.values():
                series.clear()
    traffic = 2 * start.nbytes
    bandwidth = traffic / np.median(times["copy"])
    result = {"shape": name, "batch": batch, "copy_GB_s": bandwidth / 1e9, "state_MB": start.nbytes / 1e6}
    for system in systems:
        each = 1e3 * np.median(times[system], axis=0)
        best = 1e3 * np.min(times[system], axis=0)
        result[system] = {
            "ms": float(each.mean()),
            "ms_best": float(best.mean()),
            "read_ms": float(each[:-1].mean()),
            "flush_ms": float(each[-1]),
            **{f"{what}_error": value for what, value in error[system].items()},
        }
    result["standard"]["fraction_of_copy"] = traffic / (result["standard"]["ms"] * 1e-3) / bandwidth
    for system in ("replay", "sketch"):
        result[system]["speedup"] = result["standard"]["ms"] / result[system]["ms"]
    return result


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=["nemotron-3-super", "qwen3-next", "kimi-linear"]
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--map", default="lowrank")
    parser.add_argument("--sketch-dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=9, help="windows per system")
    parser.add_argument("--evict", type=int, default=0, metavar="MB",
                        help="write this much between tokens, as a model's other layers would")  # fmt: skip
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args()
    report = {
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "threads": numba.get_num_threads(),
        "command": " ".join(["python", *sys.argv]),
        "rows": [],
    }
    print(f"{report['cpu']}, {report['threads']} threads, W={args.window}, {args.map}, {args.sketch_dtype}")
    print(f"{'shape':20}{'batch':>6}{'copy':>7} {'system':9}{'ms':>8}{'best':>8}{'read':>8}{'flush':>8}"
          f"{'of copy':>9}{'speedup':>8}{'o error':>9}{'S error':>9}")  # fmt: skip
    for name in args.shapes:
        for batch in args.batch:
            row = measure(name, batch, args)
            report["rows"].append(row)
            for system in ("standard", "replay", "sketch"):
                it = row[system]
                share = f"{it['fraction_of_copy']:.0%}" if "fraction_of_copy" in it else ""
                speed = f"{it['speedup']:.2f}x" if "speedup" in it else ""
                print(f"{name:20}{batch:6}{row['copy_GB_s']:7.1f} {system:9}{it['ms']:8.3f}{it['ms_best']:8.3f}"
                      f"{it['read_ms']:8.3f}{it['flush_ms']:8.3f}{share:>9}{speed:>8}{it['output_error']:9.1e}"
                      f"{it['state_error']:9.1e}", flush=True)  # fmt: skip
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
