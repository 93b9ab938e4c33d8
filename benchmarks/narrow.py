"""Residual energy of state reads by bytes: sketches in few bits, and read-only copies.

    python benchmarks/narrow.py traces/*.npz
    python benchmarks/narrow.py traces/*.npz --backend cpu

The residual energy is the energy of the reads' error / the energy of the state reads, mean over heads, on test text
with bases from the calibration text and one rank for all heads. Bytes are those of a state's sketch and map
(`SketchFormat.bytes`), or of a copy's codes and 16-bit scales.

Without `--backend`, reads are computed in float64 from the equations of `sketchssm.reference`. With a backend, its
heads decode the test text. The errors of their outputs between flushes are the errors of the reads, since the rest of
an output is exact. Forms that the backend lacks are left out, by name.

`noise` is the error of int8, in float64 alone: the energy by which coding some columns changes the reads through
these columns, over the energy of these reads, mean over heads and two ranks. Allocation uses its mean
(`sketchssm.layer.formats`).

The table goes to benchmarks/results/narrow.json, with a backend to narrow-BACKEND.json.
"""

import argparse
from fnmatch import fnmatchcase
from pathlib import Path

import ml_dtypes
import numpy as np
from reports import INNER_TABLES, about, write

from sketchssm import Moments, SketchHead, SketchPlan, fit_basis
from sketchssm.arrays.interop import to_host
from sketchssm.calibrate.traces import Traces
from sketchssm.calibrate.windows import host_tokens
from sketchssm.heads.registry import BACKENDS
from sketchssm.layer.checks import UnsupportedError
from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.formats import SketchFormat
from sketchssm.reference import maps, quantise
from sketchssm.reference.codes import sketched_read, split_form, stored
from sketchssm.reference.recurrence import run
from sketchssm.reference.walk import walk
from sketchssm.study.baselines import CopyReadHead
from sketchssm.study.baselines.quantised import COPY
from sketchssm.study.bench.device import device_name
from sketchssm.study.evaluate.measure import rounded

HERE = Path(__file__).parent
WINDOW = 16
SKETCHES = (
    ("lowrank", "bfloat16", 4),
    *(("ridge", "bfloat16", rank) for rank in (4, 8, 16)),
    *(("ridge", "int8", rank) for rank in (4, 8, 12, 16)),
    *(("lowrank", "int8", rank) for rank in (8, 16)),
)
COPIES = (8, 6, 4)
NOISE_RANKS = (8, 16)


def whole_windows(tokens):
    """Tokens up to the end of the last whole window."""
    whole = tokens.v.shape[1] // WINDOW * WINDOW
    return tokens.at(np.s_[:, :whole])


def collect_windows(layer, tokens):
    """States ``(n, heads, K, V)`` at window starts, and the queries ``(n, heads, W - 1, K)`` that read them."""
    found = []
    walk(layer, host_tokens(layer, *tokens), WINDOW, found.append)
    return [np.concatenate(parts) for parts in ([r.state for r in found], [r.queries for r in found])]


def bfloat16(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def read_matrix(form, map, states, omega):
    """Matrices ``(n, V, K)`` of sketched reads, with the rounding of bfloat16 too."""
    if form.name == "bfloat16":
        sketch = bfloat16(states.swapaxes(-1, -2) @ omega)
        return sketch @ bfloat16(maps.coefficient_map(map, states, omega))
    return sketched_read(form, map, states, omega)


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


class FromEquations:
    """Shares of lost energy in float64, from the equations of the reference."""

    def __init__(self, layer, basis, tokens):
        self.basis, self.windows = basis, collect_windows(layer, tokens)

    def sketch(self, map, dtype, rank):
        form, columns = SketchFormat.of(dtype), self.basis.omega[..., :rank]

        def make(head, states):
            return read_matrix(form, map, states, columns[head])

        return shares(self.windows, make)

    def copy(self, bits):
        return shares(
            self.windows, lambda head, states: quantise.round_trip(states.swapaxes(-1, -2), bits, zero=False)
        )


class FromHeads:
    """Shares of lost energy from the outputs of a backend's heads."""

    def __init__(self, layer, basis, tokens, backend):
        self.layer, self.basis, self.tokens, self.backend = layer, basis, tokens, backend
        self.output = run(layer, *tokens)[0]
        states, queries = collect_windows(layer, tokens)
        self.energy = np.square(queries @ states).sum(axis=(0, 2, 3))

    def lost(self, head):
        if self.backend == "cuda":
            head.warmup("float32")
        missed = to_host(head.step(*self.tokens), "o") - self.output
        return float(np.mean(np.square(missed).sum(axis=(0, 1, 3)) / self.energy))

    def sketch(self, map, dtype, rank):
        heads, rows = self.layer.heads, len(self.output)
        plan = SketchPlan(self.basis, [rank] * heads, WINDOW, map, dtype)
        return self.lost(SketchHead(plan, rows, self.backend))

    def copy(self, bits):
        if self.backend not in COPY.engines:
            raise UnsupportedError(f"backend: {self.backend!r} has no copies")
        return self.lost(CopyReadHead(self.layer, len(self.output), self.backend, bits=bits, window=WINDOW))


def coding_noise(windows, basis):
    """Noise of int8 on the half of the columns with more energy."""
    states, queries = windows
    form, found = SketchFormat.of("int8"), []
    for rank in NOISE_RANKS:
        for head, omega in enumerate(basis.omega[..., :rank]):
            q, b = split_form(states[:, head], omega, CoefficientMap("ridge").effective_ridge)
            order = np.argsort(-np.square(b).sum(axis=-1), axis=-1, kind="stable")[:, : rank // 2, None]
            left, right = (np.take_along_axis(x, order, axis=-2) for x in (q.swapaxes(-1, -2), b))
            reads = queries[:, head] @ right.swapaxes(-1, -2) @ left
            coded = (stored(form, x) for x in (right, left))
            change = queries[:, head] @ next(coded).swapaxes(-1, -2) @ next(coded) - reads
            found.append(np.square(change).sum() / np.square(reads).sum())
    return {"int8": float(np.mean(found))}


def layer_table(traces, backend=None, forms=("*",)):
    """Bytes and residual energy of the forms on one layer whose names match; in float64 also what needs no form."""
    layer, tokens = traces.layer, whole_windows(traces.test)
    moments = Moments(layer, window=WINDOW)
    moments.update(*traces.calib)
    basis = fit_basis(moments)
    reads = FromHeads(layer, basis, tokens, backend) if backend else FromEquations(layer, basis, tokens)
    stored = {}

    def add(label, size, measure, *settings):
        if not any(fnmatchcase(label, pattern) for pattern in forms):
            return
        try:
            stored[label] = {"bytes": float(size), "lost": measure(*settings)}
        except UnsupportedError as error:
            print(f"  {label}: left out, {error}", flush=True)

    for name, dtype, rank in SKETCHES:
        map = CoefficientMap(name)
        size = SketchFormat.of(dtype).bytes(map, rank, layer.key_dim, layer.value_dim)
        add(f"{name} {dtype} {rank}", size, reads.sketch, map, dtype, rank)
    for bits in COPIES:
        size = (bits * layer.key_dim * layer.value_dim + 16 * (layer.key_dim + layer.value_dim)) / 8
        add(f"copy {bits} bits", size, reads.copy, bits)
    found = {"kind": layer.kind, "key_dim": layer.key_dim, "value_dim": layer.value_dim, "stored": stored}
    if backend:
        return found
    return found | {"noise": coding_noise(reads.windows, basis)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--backend", choices=BACKENDS, help="measure the heads of this backend")
    parser.add_argument(
        "--forms",
        nargs="+",
        default=["*"],
        help="names of forms, such as 'ridge int8 *'; default: all",
    )
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/narrow.json, or narrow-BACKEND.json")
    arguments = parser.parse_args()
    backend = arguments.backend
    target = arguments.json or HERE / "results" / f"narrow{f'-{backend}' if backend else ''}.json"
    layers = {}
    for path in arguments.traces:
        layers[path.stem] = layer_table(Traces.load(path), backend, arguments.forms)
        print(path.name, flush=True)
        for label, found in layers[path.stem]["stored"].items():
            print(f"  {label:24} {found['bytes']:7.0f} {found['lost']:.5f}")
        print("", flush=True)
    options = ["--backend", backend] if backend else []
    options += [] if arguments.forms == ["*"] else ["--forms", *arguments.forms]
    device = device_name() if backend == "cuda" else "CPU"
    made = about(device, arguments=[*(path.name for path in arguments.traces), *options])
    write(rounded(made | {"window": WINDOW, "layers": layers}), target, INNER_TABLES)


if __name__ == "__main__":
    main()
