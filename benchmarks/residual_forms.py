"""Forms of a residual at equal bytes: scales, levels, rotations, feedback, low-rank parts and formats.

    python benchmarks/residual_forms.py traces/*.npz

Each form replaces one part of the stored one (map `subspace` in int8, rank 4, 2 bits), in float64. Two errors count:
`read`, the energy that reads lose over that of all state reads, and `state`, the mean of ``|S_served - S|^2 / |S|^2``,
which favours no query; both are means over heads. The table has a form's error over that of the stored one, moved to
the form's bytes along the convex hull of ranks 1 to 16 with 1 to 3 bits: geometric mean over the layers, and largest.
It goes to benchmarks/results/residual-forms.json.
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np
from narrow import WINDOW, collect_windows, shares, whole_windows
from reports import about, write

from sketchssm import Moments, fit_basis
from sketchssm.calibrate.traces import Traces
from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.residual import STEPS
from sketchssm.reference.codes import sketched_read, stored
from sketchssm.reference.maps import coefficient_map
from sketchssm.reference.residual import encode_residual
from sketchssm.study.evaluate.measure import rounded

EVERY = 4  # windows of which one is measured
STORED = [(rank, bits) for bits in STEPS for rank in (1, 2, 3, 4, 6, 8, 12, 16)]
SUBSPACE, RIDGE = CoefficientMap("subspace"), CoefficientMap("ridge")
LEVELS = {  # of least squared error for a normal distribution (Max, 1960), and bits of a code
    "Lloyd-Max, 2 bits": ([0.4528, 1.510], 2),
    "three levels, 1.6 bits": ([0.0, 1.224], 1.6),
    "Lloyd-Max, 3 bits": ([0.2451, 0.7560, 1.344, 2.152], 3),
}


def rms(x, axis):
    return np.sqrt(np.square(x).mean(axis, keepdims=True)) + 1e-300


def both(x):
    """Scales of rows times scales of columns."""
    rows = rms(x, -1)
    return rows * rms(x / rows, -2)


def uniform(x, scale, bits=2, gain=1.0):
    half, step = 2 ** (bits - 1), STEPS[bits]
    return (np.clip(np.floor(x / (step * scale)), -half, half - 1) + 0.5) * step * scale * gain


def levelled(x, scale, levels):
    """The nearest of the levels and their negatives."""
    sizes = np.array(levels)
    middles = (sizes[1:] + sizes[:-1]) / 2
    return np.copysign(sizes[np.searchsorted(middles, np.abs(x / scale))], x) * scale


def searched(x, scale):
    """The best of several steps for each row."""
    tries = np.stack([uniform(x, scale * f) for f in np.linspace(0.7, 1.4, 15)])
    best = np.square(tries - x).sum(-1, keepdims=True).argmin(0)[None]
    return np.take_along_axis(tries, best, 0)[0]


def blocks(x, size=32):
    parts = x.reshape(*x.shape[:-1], -1, size)
    return uniform(parts, rms(parts, -1)).reshape(x.shape)


def stored_code(x, bits=2):
    return encode_residual(x, bits).matrix


def hadamard(size):
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


def rotated(x, turn, code=stored_code):
    return code(x @ turn) @ turn.T


def by_energy(x):
    """3 bits in the first half of the directions, 1 in the second."""
    half = x.shape[-1] // 2
    return np.concatenate([stored_code(x[..., :half], 3), stored_code(x[..., half:], 1)], -1)


def forms(layer, basis, turns):
    """Name, bytes and ``make(head, states)`` of every form; states are ``(n, K, V)``."""
    K, V = layer.key_dim, layer.value_dim
    scales = 2 * (K + V)

    def served(head, states, code, rank=4, map=SUBSPACE, dtype="int8", outside=False):
        omega = basis.omega[head, :, :rank]
        low = sketched_read(SketchFormat.of(dtype), map, states, omega) if rank else 0.0
        coded = code(states.swapaxes(-1, -2) - low)
        return low + (coded - coded @ omega @ omega.T if outside else coded)

    def size(bits=2, rank=4, map=SUBSPACE, dtype="int8", own=scales):
        low = SketchFormat.of(dtype).bytes(map, rank, K, V) if rank else 0
        return float(low + bits * K * V / 8 + own)

    def fed_back(head, states):
        int8, omega, whole = SketchFormat.of("int8"), basis.omega[head, :, :4], states.swapaxes(-1, -2)
        rows = stored(int8, coefficient_map(SUBSPACE, states, omega))
        coded = stored_code(whole - sketched_read(int8, SUBSPACE, states, omega))
        columns = stored(int8, rows @ (whole - coded).swapaxes(-1, -2))
        return columns.swapaxes(-1, -2) @ rows + coded

    def with_turn(head, states, turn, code):
        return served(head, states, partial(rotated, turn=turn[head], code=code))

    for rank, bits in STORED:
        code = partial(stored_code, bits=bits)
        yield f"rank {rank} + {bits} bits", size(bits, rank), partial(served, code=code, rank=rank)
    yield "no low-rank part", size(rank=0), partial(served, code=stored_code, rank=0)
    yield "ridge", size(map=RIDGE), partial(served, code=stored_code, map=RIDGE)
    yield (
        "ridge, residual outside its basis",
        size(map=RIDGE),
        partial(served, code=stored_code, map=RIDGE, outside=True),
    )
    yield "factors in bfloat16", size(dtype="bfloat16"), partial(served, code=stored_code, dtype="bfloat16")
    yield "U fitted to what the codes leave", size(), fed_back
    simple = {
        "levels without gain": (lambda x: uniform(x, both(x)), scales),
        "scales of rows": (lambda x: uniform(x, rms(x, -1)), 2 * V),
        "scales of blocks of 32": (blocks, 2 * V * K / 32),
        "step searched for each row": (lambda x: searched(x, both(x)), scales),
    }
    for name, (code, own) in simple.items():
        yield name, size(own=own), partial(served, code=code)
    for name, (levels, bits) in LEVELS.items():
        yield name, size(bits), partial(served, code=lambda x, levels=levels: levelled(x, both(x), levels))
    flat = np.broadcast_to(hadamard(K), (layer.heads, K, K))
    yield "Hadamard rotation", size(), partial(with_turn, turn=flat, code=stored_code)
    yield "calibrated rotation", size(), partial(with_turn, turn=turns, code=stored_code)
    yield "calibrated rotation, 3 and 1 bits", size(), partial(with_turn, turn=turns, code=by_energy)


def state_error(states, make):
    errors = []
    for head in range(states.shape[1]):
        own = states[:, head]
        missed = make(head, own) - own.swapaxes(-1, -2)
        errors.append((np.square(missed).sum((-1, -2)) / np.square(own).sum((-1, -2))).mean())
    return float(np.mean(errors))


def layer_table(traces):
    """Bytes and both errors of every form."""
    layer, moments = traces.layer, Moments(traces.layer, window=WINDOW)
    moments.update(*traces.calib)
    basis = fit_basis(moments, rank_max=16)
    states, queries = (x[::EVERY] for x in collect_windows(layer, whole_windows(traces.test)))
    turns = np.linalg.eigh(np.einsum("nhwk,nhwl->hkl", queries, queries))[1][..., ::-1]
    found = {}
    for name, size, make in forms(layer, basis, turns):
        found[name] = {"bytes": size, "read": shares((states, queries), make), "state": state_error(states, make)}
    return found


def hull(points):
    """Lower convex hull of ``(bytes, logarithm of the error)``, by rising bytes."""
    kept = []
    for x, y in sorted(points):
        while len(kept) > 1:
            (x0, y0), (x1, y1) = kept[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):  # the last is below the line from the one before it
                break
            kept.pop()
        kept.append((x, y))
    return np.array(kept).T


def ratios(layers, error):
    """Each form's error over the stored form's at equal bytes: geometric mean over layers, and largest."""
    table = {}
    for found in layers.values():
        points = {name: (x["bytes"], np.log(x[error])) for name, x in found.items()}
        curve = hull(points[f"rank {rank} + {bits} bits"] for rank, bits in STORED)
        above = {name: y - np.interp(x, *curve) for name, (x, y) in points.items()}
        for name, own in above.items():
            table.setdefault(name, []).append(np.exp(own - above["rank 4 + 2 bits"]))
    return {name: [float(np.exp(np.log(own).mean())), float(max(own))] for name, own in table.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "residual-forms.json")
    arguments = parser.parse_args()
    layers = {path.stem: layer_table(Traces.load(path)) for path in arguments.traces}
    read, state = (ratios(layers, error) for error in ("read", "state"))
    for name in read:
        columns = "   ".join(
            f"{key} {mean:6.2f} {most:6.2f}" for key, (mean, most) in (("read", read[name]), ("state", state[name]))
        )
        print(f"{name:36} {columns}")
    made = about("CPU", arguments=[path.name for path in arguments.traces])
    own = {"window": WINDOW, "read": read, "state": state, "layers": layers}
    write(rounded(made | own), arguments.json)


if __name__ == "__main__":
    main()
