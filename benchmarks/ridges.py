"""Errors of the `ridge` map by its ridge: long runs, and sketches that are hard to invert.

    python benchmarks/ridges.py traces/*.npz

Real layers decode their test text repeatedly; made-up layers decode keys and values whose sketches are nearly
singular. Every head has the same rank. An error is the norm of the state reads' error / the norm of all outputs. It is
measured in float64 (`exact`), on the `cpu` backend, and with the arithmetic of the CUDA kernels in NumPy
(`two_slices`): products of two bf16 slices, Gram matrix and Cholesky factor in float32. The table goes to
benchmarks/results/ridges.json.
"""

import argparse
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
from narrow import WINDOW, collect_windows, whole_windows
from reports import INNER_TABLES, about, write

from sketchssm import Moments, SketchHead, SketchPlan, fit_basis
from sketchssm.calibrate.traces import Traces
from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.recurrence import KINDS, Layer, Tokens
from sketchssm.reference import maps
from sketchssm.reference.recurrence import run
from sketchssm.study.evaluate.measure import rounded

HERE = Path(__file__).parent
RANKS, RIDGES = (4, 8, 16, 32), (0.01, 0.003, 0.001, 0.0003, 0.0001)
BELOW = (5e-5, 2e-5, 1e-6)  # below the least ridge in use: what `two_slices` would do there
STORED = ("bfloat16", "float32")


def repeated(tokens, length):
    """All sequences after one another, again and again: one sequence of `length` tokens."""

    def joined(x):
        flat = x.reshape(1, -1, *x.shape[2:])
        return np.tile(flat, (1, -(-length // flat.shape[1]), *[1] * (x.ndim - 2)))[:, :length]

    return Tokens(*(None if x is None else joined(x) for x in tokens))


def made_up(kind, case, length, test):
    """Tokens of a layer whose sketches are hard to invert, ``(1, length, ...)``, to calibrate on or to test."""
    layer = Layer(kind, 4, 128, 64, 4)
    # what keys and values are made of belongs to the layer; the rest to the sequence
    fixed, rng = (np.random.default_rng(seed) for seed in (7, int(test)))
    mixers = [fixed.standard_normal((4, n, size)) for n, size in zip(CASES[case], (128, 64), strict=True)]

    def drawn(mixer):
        few = rng.standard_normal((1, length, *mixer.shape[:2])) * 0.85 ** np.arange(mixer.shape[1])
        return np.einsum("bthn,hnd->bthd", few, mixer)

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q, k, v = drawn(mixers[0]), drawn(mixers[0]), drawn(mixers[1])
    if case.startswith("nearly"):
        v += 1e-3 * np.linalg.norm(v, axis=-1, keepdims=True) * unit(rng.standard_normal(v.shape))
    if case == "other queries" and test:
        q = rng.standard_normal(q.shape)
    most = 1e-4 if case == "slow decay" else 0.02
    g = -most * rng.random((1, length, 4, 128) if layer.channel_decays else (1, length, 4))
    beta = rng.random((1, length, 4)) if layer.erases else None
    return layer, Tokens(*(None if x is None else x.astype(np.float32) for x in (unit(q), unit(k), v, g, beta)))


CASES = {
    "slow decay": (128, 64),
    "three keys": (3, 64),
    "one value": (128, 1),
    "two values": (128, 2),
    "nearly two values": (128, 2),
    "other queries": (128, 64),
}
"""Made-up layers, with the number of directions that a head's keys and values have."""


def in_float64(states, phi, ridge):
    """Sketches ``(n, V, G)`` and maps ``(n, G, K)`` of states ``(n, K, V)``."""
    return states.swapaxes(-1, -2) @ phi, maps.ridge_map(states, phi, ridge)


def sliced(x):
    """Two bf16 slices of float32 numbers, truncated as the kernels do."""
    high = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    rest = x - high
    return high, (rest.view(np.uint32) & 0xFFFF0000).view(np.float32)


@np.errstate(over="ignore", invalid="ignore")  # where the ridge is too small, what overflows shows as NaN
def two_slices(states, phi, ridge, stored):
    """What `in_float64` gives as the kernels make and store it."""
    s, high, low = states.swapaxes(-1, -2).astype(np.float32), *sliced(phi.astype(np.float32))
    s_high, s_low = sliced(np.ascontiguousarray(s))
    u = s_high @ high + (s_high @ low + s_low @ high)
    mu = np.square(s).sum(axis=(-1, -2), dtype=np.float32)[:, None, None] / np.float32(s.shape[-1])
    u_high, u_low = (x.swapaxes(-1, -2) for x in sliced(u))
    cross = (u_high @ s_high + u_high @ s_low + (u_low @ s_high + u_low @ s_low)) / mu
    gram = u.swapaxes(-1, -2) @ u / mu + np.float32(ridge) * np.eye(u.shape[-1], dtype=u.dtype)
    rank = gram.shape[-1]
    for j in range(rank):  # the diagonal holds its inverse
        inverse = 1 / np.sqrt(np.maximum(gram[:, j, j], np.float32(1e-20)))
        gram[:, j:, j] *= inverse[:, None]
        gram[:, j, j] = inverse
        gram[:, j + 1 :, j + 1 :] -= gram[:, j + 1 :, None, j] * gram[:, None, j + 1 :, j]
    for i in range(rank):
        cross[:, i] = (cross[:, i] - np.einsum("nj,njk->nk", gram[:, i, :i], cross[:, :i])) * gram[:, i, i, None]
    for i in reversed(range(rank)):
        above = np.einsum("nj,njk->nk", gram[:, i + 1 :, i], cross[:, i + 1 :])
        cross[:, i] = (cross[:, i] - above) * gram[:, i, i, None]
    kept = ml_dtypes.bfloat16 if stored == "bfloat16" else np.float32
    return (x.astype(kept).astype(np.float32) for x in (u, cross))


def lost(windows, phi, make):
    """Energy that reads through sketches and maps ``make(states, phi)`` lose, over all heads."""
    total = 0.0
    for head, columns in enumerate(phi):
        states, queries = (x[:, head] for x in windows)
        sketch, coefficients = make(states, columns)
        with np.errstate(invalid="ignore"):
            read = queries @ coefficients.swapaxes(-1, -2) @ sketch.swapaxes(-1, -2)
        total += np.square(queries @ states - read).sum()
    return total


def errors(layer, calib, test):
    """Relative output errors by way of computing, rank and ridge."""
    moments = Moments(layer, window=WINDOW)
    moments.update(*calib)
    basis = fit_basis(moments)
    output, _ = run(layer, *test)
    size, windows = np.square(output).sum(), collect_windows(layer, whole_windows(test))
    found = {}
    for rank in RANKS:
        for ridge in RIDGES + BELOW:
            plan = SketchPlan(basis, np.full(layer.heads, rank), WINDOW, CoefficientMap("ridge", ridge=ridge))
            phi, ways = plan.omega.astype(np.float64), {}
            for stored in STORED:
                made = lost(windows, phi, partial(two_slices, ridge=ridge, stored=stored))
                ways[f"two_slices {stored}"] = made
                if ridge in RIDGES:
                    head = SketchHead(plan, 1, "cpu", sketch_dtype=stored)
                    ways[f"cpu {stored}"] = np.square(head.step(*test) - output).sum()
            if ridge in RIDGES:
                ways["exact"] = lost(windows, phi, partial(in_float64, ridge=ridge))
            for name, energy in ways.items():
                found.setdefault(name, {}).setdefault(rank, {})[f"{ridge:g}"] = float(np.sqrt(energy / size))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json", type=Path, default=HERE / "results" / "ridges.json")
    arguments = parser.parse_args()
    layers = {}
    for path in arguments.traces:
        traces = Traces.load(path)
        layers[traces.name] = errors(traces.layer, traces.fit_part(), repeated(traces.test, arguments.tokens))
        print(path.name, flush=True)
    for kind in KINDS:
        for case in CASES:
            layer, calib = made_up(kind, case, 1024, test=False)
            layers[f"{kind}, {case}"] = errors(layer, calib, made_up(kind, case, arguments.tokens, test=True)[1])
            print(kind, case, flush=True)
    made = about("CPU", arguments=[path.name for path in arguments.traces])
    settings = {"tokens": arguments.tokens, "window": WINDOW}
    write(rounded(made | settings | {"output_error": layers}), arguments.json, INNER_TABLES)


if __name__ == "__main__":
    main()
