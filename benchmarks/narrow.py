"""Residual energy of state reads by the bytes of what is read: sketches in few bits, and read-only copies.

    python benchmarks/narrow.py traces/*.npz

In float64, on test text, with bases from the calibration text and one rank for all heads: the energy that reads lose
over the energy of the reads, mean over heads. Bytes are those of a state's sketch and map (`SketchFormat.bytes`), or
of a copy's codes and 16-bit scales. `noise` is the error of a code: the energy by which coding some columns changes
the reads through these columns, over the energy of these reads, mean over heads and two ranks. Allocation uses their
means (`sketchssm.formats`). The table goes to benchmarks/results/narrow.json.
"""

import argparse
import json
import re
import shlex
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import ml_dtypes
import numpy as np

from sketchssm import Moments, fit_basis
from sketchssm.calibrate.windows import host_tokens, walk
from sketchssm.coefficients import CoefficientMap
from sketchssm.evaluate.measure import rounded
from sketchssm.formats import FP8, INT4, INT8, SketchFormat
from sketchssm.recurrence import Tokens
from sketchssm.reference import maps, narrow, quantise
from sketchssm.traces import Traces

HERE = Path(__file__).parent
WINDOW = 16
SKETCHES = (
    ("lowrank", "bfloat16", 4, None),
    *(("ridge", "bfloat16", rank, None) for rank in (4, 8, 16)),
    *(("ridge", name, rank, None) for name in ("int8", "fp8") for rank in (4, 8, 12, 16)),
    *(("ridge", "int8+int4", rank, wide) for rank, wide in ((8, 4), (12, 6), (16, 8), (24, 8))),
    *((name, "int8", rank, None) for name in ("lowrank", "prior", "offline") for rank in (8, 16)),
)
COPIES = (8, 6, 4)
NOISE_RANKS = (8, 16)


def collect_windows(layer, tokens):
    """States ``(n, heads, K, V)`` at window starts, and the queries ``(n, heads, W - 1, K)`` that read them."""
    whole = tokens.v.shape[1] // WINDOW * WINDOW
    found = []
    part = Tokens(*(None if x is None else x[:, :whole] for x in tokens))
    walk(layer, host_tokens(layer, *part), WINDOW, None, found.append)
    return [np.concatenate(parts) for parts in ([r.state for r in found], [r.queries for r in found])]


def bfloat16(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def read_matrix(form, map, states, omega, projection, wide):
    """Matrices ``(n, V, K)`` of sketched reads, with the rounding of bfloat16 too."""
    if form.name == "bfloat16":
        sketch = bfloat16(states.swapaxes(-1, -2) @ omega)
        return sketch @ bfloat16(maps.coefficient_map(map, states, omega, projection))
    return narrow.sketched_read(form, map, states, omega, projection, wide or 0)


def shares(windows, make):
    """Energy that reads through matrices ``make(head, states)`` lose, over that of all reads, mean over heads."""
    states, queries = windows
    lost = []
    for head in range(states.shape[1]):
        matrices = states[:, head].swapaxes(-1, -2)
        whole = queries[:, head] @ matrices.swapaxes(-1, -2)
        missed = whole - queries[:, head] @ make(head, states[:, head]).swapaxes(-1, -2)
        lost.append(np.square(missed).sum() / np.square(whole).sum())
    return float(np.mean(lost))


def coding_noise(windows, basis):
    """Noise of every code: of 8 bits on the leading half of the columns in order of energy, of 4 bits on the rest."""
    states, queries = windows
    found = {code.name: [] for code in (INT8, FP8, INT4)}
    for rank in NOISE_RANKS:
        for head, omega in enumerate(basis.columns(rank, weighted=False)[0]):
            q, b = narrow.split_form(states[:, head], omega, CoefficientMap("ridge").effective_ridge)
            order = narrow.energy_order(b)[..., None]
            columns, rows = (np.take_along_axis(x, order, axis=-2) for x in (q.swapaxes(-1, -2), b))
            for code, part in ((INT8, slice(rank // 2)), (FP8, slice(rank // 2)), (INT4, slice(rank // 2, None))):
                left, right = columns[:, part], rows[:, part]
                reads = queries[:, head] @ right.swapaxes(-1, -2) @ left
                coded = [codes * scale[..., None] for codes, scale in (narrow.encode(x, code) for x in (left, right))]
                change = queries[:, head] @ coded[1].swapaxes(-1, -2) @ coded[0] - reads
                found[code.name].append(np.square(change).sum() / np.square(reads).sum())
    return {name: float(np.mean(shares)) for name, shares in found.items()}


def layer_table(traces):
    """Bytes and residual energy of every form on one layer, and the noise of the codes."""
    layer = traces.layer
    moments = Moments(layer, window=WINDOW)
    moments.update(*traces.calib)
    basis, windows = fit_basis(moments), collect_windows(layer, traces.test)
    stored = {}
    for name, dtype, rank, wide in SKETCHES:
        form, map = SketchFormat.of(dtype), CoefficientMap(name)
        columns = basis.columns(rank, weighted=map.weighted)

        def make(head, states, form=form, map=map, columns=columns, wide=wide):
            return read_matrix(form, map, states, *(x[head] for x in columns), wide)

        label = f"{name} {dtype} {rank}" if wide is None else f"{name} {dtype} {wide}+{rank - wide}"
        size = float(form.bytes(map, rank, layer.key_dim, layer.value_dim, wide))
        stored[label] = {"bytes": size, "lost": shares(windows, make)}
    for bits in COPIES:
        size = (bits * layer.key_dim * layer.value_dim + 16 * (layer.key_dim + layer.value_dim)) / 8

        def copied(head, states, bits=bits):
            return quantise.round_trip(states.swapaxes(-1, -2), bits, zero=False)

        lost = shares(windows, copied)
        stored[f"copy {bits} bits"] = {"bytes": size, "lost": lost}
    noise = coding_noise(windows, basis)
    return {
        "kind": layer.kind,
        "key_dim": layer.key_dim,
        "value_dim": layer.value_dim,
        "stored": stored,
        "noise": noise,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, default=HERE / "results" / "narrow.json")
    arguments = parser.parse_args()
    layers = {}
    for path in arguments.traces:
        layers[path.stem] = layer_table(Traces.load(path))
        print(path.name, flush=True)
        for label, found in layers[path.stem]["stored"].items():
            print(f"  {label:24} {found['bytes']:7.0f} {found['lost']:.5f}")
        print(" ", layers[path.stem]["noise"], flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True
    )
    about = {
        "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": "CPU",
        "command": shlex.join(["python", "benchmarks/narrow.py", *(path.name for path in arguments.traces)]),
        "window": WINDOW,
    }
    text = json.dumps(rounded(about | {"layers": layers}), indent=1)
    # innermost tables on one line each
    text = re.sub(r"\{[^{}]+\}", lambda found: " ".join(found[0].split()), text)
    arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
