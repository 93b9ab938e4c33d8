"""CUDA kernels, compiled by g++ and run on the host, against the float64 reference (see tests/host/README.md)."""

from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest
from gpu.cuda_support import (
    ReplayEngine,
    SketchEngine,
    StandardEngine,
    check_raw_gates,
    error,
    make_plan,
    make_tokens,
    named_gate,
    round_to,
    run_mixed,
    run_pair,
    slot_table,
    tokens_to_device,
    with_blocks,
)
from host import compiler, standin

from sketchssm.cuda import engines as cuda_engines
from sketchssm.cuda import modules, standard
from sketchssm.gates import GateInput
from sketchssm.recurrence import DENSE, Layer, Tokens
from sketchssm.reference import engines as reference

if missing := compiler.missing():
    pytest.skip(missing, allow_module_level=True)

# engines without a warmup() compile at their first step
pytestmark = pytest.mark.filterwarnings("ignore:loading kernel:RuntimeWarning")

# float32 arithmetic over a few windows; the reference takes the same rounded inputs in float64
EXACT = 2e-6
# bf16 sketches and maps (8 bits): a few roundings of relative size 2^-9 in a row; float32 ones: several times the
# 2^-16 that two bf16 slices leave out of the basis, of the state and of U in S U
STORED = {"bfloat16": 1.2e-2, "float32": 1e-4}

LAYERS = {
    "mamba2": Layer("mamba2", 16, 128, 64, 2),
    "mamba2-80": Layer("mamba2", 4, 64, 80, 1),
    "mamba2-128": Layer("mamba2", 2, 128, 128, 1),  # raw keys with two places for states
    "gdn": Layer("gdn", 4, 128, 128, 2),
    "gdn-96": Layer("gdn", 2, 64, 96, 2),
    "kda": Layer("kda", 3, 128, 128, 3),
    "kda-64": Layer("kda", 2, 64, 64, 1),
    "kda-raw": Layer("kda", 3, 128, 128, 3),  # raw gate inputs
    "kda-64-bounded": Layer("kda", 2, 64, 64, 1),
}
RANKS = {"mamba2": [5, 1, 17, DENSE, 40, 8], "gdn": [7, DENSE, 16, 2], "kda": [9, 33, 1]}
RIDGE = {"lowrank": 0.1, "prior": 0.01, "ridge": 0.001, "exact": 0.0, "offline": 0.0}

_modules = {}  # compiled once for all tests of this file


@pytest.fixture
def cupy(monkeypatch):
    """The stand-in for CuPy, with threads in a random order."""
    standin.install(monkeypatch)
    monkeypatch.setattr(modules, "_modules", _modules)
    monkeypatch.setattr(standin, "order", 0x5EED)
    return standin


def poisoned(engine):
    """The warm engine, with NaN in its ring, which kernels must write before they read."""
    engine.warmup()
    for ring in engine.ring:
        ring.view(np.uint8)[...] = 0xFF
    return engine


def token(tokens, t, rows=slice(None)):
    return Tokens(*(None if x is None else np.ascontiguousarray(x[rows, t : t + 1]) for x in tokens))


# The kernels


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("activation", ["bfloat16", "float16", "float32"])
def test_standard(name, activation, rng, cupy):
    layer = LAYERS[name]
    gate = named_gate(name, layer, rng)
    device, oracle = (
        StandardEngine(layer, 5, activation_dtype=activation, output_dtype="float32", gate=gate),
        reference.StandardEngine(layer, 5),
    )
    tokens = make_tokens(layer, 3, 12, activation, rng, gate=gate)
    got, want, _ = run_pair(device, oracle, layer, tokens, slot_table(3, 5, 12, rng), activation, gate)
    assert error(got, want) < EXACT
    assert error(device.state.get(), oracle.state) < EXACT


@pytest.mark.parametrize(
    ("name", "window", "activation"),
    [
        *((name, 16, "bfloat16") for name in LAYERS),
        *(("mamba2-80", 4, "float32"), ("gdn-96", 8, "float16"), ("kda-64", 32, "float32")),
        *(("mamba2-80", 32, "float16"), ("gdn-96", 32, "float32"), ("kda-64", 4, "bfloat16")),
        *(("kda-raw", 8, "float16"), ("kda-raw", 16, "float32"), ("kda-raw", 32, "bfloat16")),
        *(("kda-64-bounded", 4, "bfloat16"), ("kda-64-bounded", 32, "float32")),
    ],
)
def test_replay(name, window, activation, rng, cupy):
    layer, length = LAYERS[name], 2 * window + 5
    gate = named_gate(name, layer, rng)
    device = poisoned(ReplayEngine(layer, 5, window, activation_dtype=activation, output_dtype="float32", gate=gate))
    oracle = reference.ReplayEngine(layer, 5, window)
    tokens = make_tokens(layer, 4, length, activation, rng, gate=gate)
    got, want, where = run_pair(device, oracle, layer, tokens, slot_table(4, 5, length, rng), activation, gate)
    assert np.unique(where[:, -1]).size > 1  # the rows are at different tokens of their windows
    flushes = where == window - 1
    assert flushes.any()
    assert error(got[flushes], want[flushes]) < EXACT
    assert error(got[~flushes], want[~flushes]) < EXACT
    assert np.array_equal(device.position.get(), oracle.position)
    device.flush(cupy.arange(5))
    oracle.flush(np.arange(5))
    assert error(device.state.get(), oracle.state) < EXACT


@pytest.mark.parametrize(
    ("name", "kind", "stored"),
    [
        *((name, kind, "bfloat16") for name in ("mamba2", "gdn", "kda", "kda-raw") for kind in ("lowrank", "ridge")),
        *(
            (name, kind, "float32")
            for name in ("mamba2-80", "gdn-96", "kda-64")
            for kind in ("prior", "exact", "offline")
        ),
        ("mamba2-128", "lowrank", "bfloat16"),
        ("kda-64-bounded", "prior", "float32"),
    ],
)
def test_sketch(name, kind, stored, rng, cupy):
    """Mixed ranks, dense heads, padding, staggered windows; gates of 0, -50 and -inf among the rest."""
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng, map=kind, ridge=RIDGE[kind])
    check_sketch(plan, stored, "bfloat16", rng, cupy, named_gate(name, layer, rng))


def check_sketch(plan, stored, activation, rng, cupy, gate=None, blocks=None):
    layer, length = plan.layer, 2 * plan.window + 4
    device = SketchEngine(plan, 5, stored, activation_dtype=activation, output_dtype="float32", gate=gate)
    oracle = reference.SketchEngine(plan, 5)
    poisoned(device).sketch.view(np.uint8)[...] = 0xFF
    if blocks:
        with_blocks(device, blocks)
    device.reset(cupy.arange(5))
    start = rng.standard_normal((5, *layer.state_shape)).astype(np.float32)
    device.load_state(cupy.asarray(start), cupy.arange(5))
    oracle.load_state(start.astype(np.float64), np.arange(5))
    tokens = make_tokens(layer, 4, length, activation, rng, gate=gate)
    got, want, where = run_pair(device, oracle, layer, tokens, slot_table(4, 5, length, rng), activation, gate)
    flushes, dense = where == plan.window - 1, plan.ranks == DENSE
    assert flushes.any()
    assert error(got[flushes], want[flushes]) < EXACT
    assert error(device.state.get(), oracle.state) < EXACT
    if dense.any():
        assert error(got[~flushes][:, dense], want[~flushes][:, dense]) < EXACT
    assert error(got[~flushes][:, ~dense], want[~flushes][:, ~dense]) < STORED[stored]


@pytest.mark.parametrize(
    ("name", "window", "kind", "activation"),
    [
        ("mamba2-80", 4, "ridge", "float16"),
        ("gdn", 8, "prior", "bfloat16"),
        ("kda-raw", 4, "lowrank", "bfloat16"),
        ("kda-64-bounded", 8, "lowrank", "float32"),
    ],
)
def test_steps_of_mixed_sizes(name, window, kind, activation, rng, cupy):
    """Steps of any number of rows and tokens, windows that end inside a step, and flushes ahead of time."""
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng, map=kind, ridge=RIDGE[kind], window=window)
    gate = named_gate(name, layer, rng)
    device = SketchEngine(plan, 5, activation_dtype=activation, output_dtype="float32", gate=gate)
    oracle = reference.SketchEngine(plan, 5)
    poisoned(device).sketch.view(np.uint8)[...] = 0xFF
    device.reset(cupy.arange(5))
    start = rng.standard_normal((5, *layer.state_shape)).astype(np.float32)
    device.load_state(cupy.asarray(start), cupy.arange(5))
    oracle.load_state(start.astype(np.float64), np.arange(5))
    got, want, exact = run_mixed(device, oracle, layer, 3 * window + 20, activation, rng, gate)
    dense = plan.ranks == DENSE
    assert exact.any()
    assert not exact.all()
    assert error(got[exact], want[exact]) < EXACT
    assert error(got[~exact][:, ~dense], want[~exact][:, ~dense]) < STORED["bfloat16"]
    assert not dense.any() or error(got[~exact][:, dense], want[~exact][:, dense]) < EXACT
    device.flush(cupy.arange(5))
    oracle.flush(np.arange(5))
    assert error(device.state.get(), oracle.state) < EXACT


def test_no_tokens(rng, cupy):
    """A step without tokens launches nothing and moves no cursor."""
    layer = Layer("gdn", 4, 64, 64, 2)
    device = SketchEngine(make_plan(layer, [3, DENSE, 5, 2], rng, window=8), 2, output_dtype="float32")
    tokens = make_tokens(layer, 2, 0, "bfloat16", rng)
    device.step(tokens_to_device(tokens, "bfloat16"), cupy.arange(2), cupy.zeros((2, 0, 4, 64), np.float32))
    assert device.position.tolist() == [0, 0]


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda", "kda-64"])
def test_reads_of_what_bf16_holds(name, rng, cupy):
    """bf16 represents these states and maps: the error is what two slices of weights and queries leave out."""
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize([9, 17, 3], layer.heads), rng, map="offline")
    plan.omega[...] = plan.projection[...] = np.eye(*plan.omega.shape[1:])
    device, oracle = SketchEngine(plan, 3, output_dtype="float32"), reference.SketchEngine(plan, 3)
    start = round_to(rng.standard_normal((3, *layer.state_shape)), "bfloat16")
    poisoned(device).load_state(cupy.asarray(start), cupy.arange(3))
    oracle.load_state(start.astype(np.float64), np.arange(3))
    length = plan.window - 1
    tokens = make_tokens(layer, 3, length, "bfloat16", rng)
    got, want, _ = run_pair(device, oracle, layer, tokens, np.tile(np.arange(3), (length, 1)), "bfloat16")
    assert error(got, want) < 1e-5


@pytest.mark.parametrize(
    ("layer", "kind", "window", "activation"),
    [
        (Layer("kda", 3, 64, 80, 3), "lowrank", 16, "bfloat16"),
        (Layer("kda", 2, 128, 96, 1), "ridge", 8, "bfloat16"),
        (Layer("kda", 2, 128, 128, 2), "ridge", 32, "bfloat16"),
        (Layer("kda", 2, 64, 80, 2), "ridge", 4, "float32"),
        (Layer("gdn", 4, 64, 80, 2), "ridge", 16, "float16"),
        (Layer("gdn", 2, 128, 128, 2), "lowrank", 32, "bfloat16"),
        (Layer("mamba2", 4, 128, 96, 2), "lowrank", 32, "float32"),
        (Layer("mamba2", 6, 128, 64, 2), "ridge", 4, "bfloat16"),
        (Layer("mamba2", 4, 64, 96, 4), "lowrank", 8, "bfloat16"),
        (Layer("gdn", 3, 128, 128, 1), "lowrank", 16, "bfloat16"),
        (Layer("gdn", 4, 64, 80, 2), "lowrank", 16, "bfloat16"),
        (Layer("mamba2", 4, 64, 96, 2), "ridge", 8, "bfloat16"),
    ],
    ids=lambda x: f"{x.kind}-{x.value_dim}" if isinstance(x, Layer) else None,
)
def test_sketch_of_other_shapes(layer, kind, window, activation, rng, cupy):
    """Shapes with other roles, groups, places and buffers in the flush, and reads with one head per tile."""
    plan = make_plan(
        layer, np.resize([9, DENSE, 33, 1, 40], layer.heads), rng, map=kind, ridge=RIDGE[kind], window=window
    )
    check_sketch(plan, "bfloat16", activation, rng, cupy)


@pytest.mark.parametrize(
    ("name", "value_dim", "output"),
    [
        ("mamba2", 80, "bfloat16"),
        ("mamba2", 128, "float16"),
        ("gdn", 96, "float16"),
        ("kda", 64, "bfloat16"),
        ("kda", 80, "float16"),
    ],
)
def test_output_types(name, value_dim, output, rng, cupy):
    """Outputs of 16 bits are those in float32, rounded: reads gather them in other pieces."""
    layer = Layer(name, 6, 64, value_dim, 6 if name == "kda" else 3)
    plan = make_plan(layer, [1, 9, DENSE, 20, 3, DENSE], rng, window=8)
    tokens = tokens_to_device(make_tokens(layer, 3, 9, "bfloat16", rng), "bfloat16")
    start = cupy.asarray(rng.standard_normal((3, *layer.state_shape)).astype(np.float32))
    outs = []
    for type_ in ("float32", output):
        engine = poisoned(SketchEngine(plan, 3, output_dtype=type_))
        engine.load_state(start, cupy.arange(3))
        outs.append(cupy.full((3, 9, 6, value_dim), np.nan, ml_dtypes.bfloat16 if type_ == "bfloat16" else type_))
        engine.step(tokens, cupy.arange(3), outs[-1])
    assert np.array_equal(outs[1], outs[0].astype(outs[1].dtype))


@pytest.mark.parametrize("neighbour", [DENSE, 4])
def test_an_infinite_value_stays_in_its_tile(neighbour, rng, cupy):
    """It spoils a part of both heads that share matrix products; a dense head shares none."""
    layer = Layer("gdn", 4, 64, 64, 2)
    plan = make_plan(layer, [neighbour, 5, 3, 9], rng, window=8)
    tokens = make_tokens(layer, 2, 6, "bfloat16", rng, hard_gates=False)
    tokens.v[0, 1, 0, 5] = np.inf
    engine = poisoned(SketchEngine(plan, 2, activation_dtype="bfloat16", output_dtype="float32"))
    engine.load_state(cupy.asarray(rng.standard_normal((2, *layer.state_shape)).astype(np.float32)), cupy.arange(2))
    out = cupy.zeros((2, 6, 4, 64), np.float32)
    engine.step(tokens_to_device(tokens, "bfloat16"), cupy.arange(2), out)
    spoilt = (~np.isfinite(out.get())).sum(axis=-1)
    want = np.zeros((2, 6, 4), int)
    want[0, 1:, 0] = 1 if neighbour == DENSE else 2  # every 16th channel of 32
    want[0, 1:, 1] = 0 if neighbour == DENSE else 2
    assert np.array_equal(spoilt, want)


@pytest.mark.parametrize(
    ("layer", "kind", "window", "activation"),
    [
        (Layer("kda", 3, 128, 128, 3), "ridge", 16, "bfloat16"),
        (Layer("kda", 3, 128, 128, 3), "lowrank", 16, "bfloat16"),
        (Layer("kda", 3, 64, 80, 3), "prior", 16, "bfloat16"),
        (Layer("kda", 3, 128, 128, 3), "lowrank", 32, "bfloat16"),
        (Layer("gdn", 3, 128, 64, 1), "exact", 8, "float16"),
    ],
    ids=lambda x: x.kind if isinstance(x, Layer) else None,
)
def test_epilogue_warps_in_turn(layer, kind, window, activation, rng, cupy):
    """Ranks up to 16, with room for sums and columns of two tiles; one block computes all tiles in turn."""
    plan = make_plan(layer, [9, DENSE, 16], rng, map=kind, ridge=RIDGE[kind], window=window)
    check_sketch(plan, "bfloat16", activation, rng, cupy, blocks=1)


@pytest.mark.parametrize("kind", ["lowrank", "ridge"])
def test_sketch_in_little_shared_memory(kind, rng, cupy, monkeypatch):
    """One place for the state and one buffer of prepared keys, as on sm_80."""
    monkeypatch.setenv("SKETCHSSM_CUDA_OPTIONS", "-DHOST_MOST_SHARED=166912")
    monkeypatch.setattr(modules, "_modules", {})
    plan = make_plan(LAYERS["kda"], np.array([9, DENSE, 3]), rng, map=kind, ridge=RIDGE[kind])
    check_sketch(plan, "bfloat16", "bfloat16", rng, cupy)


@pytest.mark.parametrize("kind", ["ridge", "exact"])
def test_no_ridge_and_a_sketch_of_rank_one(kind, rng, cupy):
    """A state in one direction of the basis: rounding errors of its Gram matrix are below the floor."""
    layer = LAYERS["mamba2"]
    plan = make_plan(layer, [32] * layer.heads, rng, map=kind, ridge=0.0)
    device, oracle = (
        SketchEngine(plan, 4, "float32", output_dtype="float32"),
        reference.SketchEngine(plan, 4),
    )
    keys = np.einsum("bhg,hkg->bhk", rng.standard_normal((4, layer.heads, 32)), plan.omega)
    start = np.einsum("bhv,bhk->bhvk", rng.standard_normal((4, layer.heads, layer.value_dim)), keys)
    device.load_state(cupy.asarray(start.astype(np.float32)), cupy.arange(4))
    oracle.load_state(start, np.arange(4))
    tokens = make_tokens(layer, 4, 2, "bfloat16", rng, hard_gates=False)
    got, want, _ = run_pair(device, oracle, layer, tokens, np.tile(np.arange(4), (2, 1)), "bfloat16")
    # two slices leave out 2^-16, and the sketch is nearly zero in all directions but one
    assert error(got, want) < 1e-3


@pytest.mark.parametrize(
    ("name", "kind", "stored"),
    [
        *(("mamba2", "ridge", "bfloat16"), ("gdn", "lowrank", "bfloat16"), ("gdn", "ridge", "bfloat16")),
        *(("kda", "ridge", "bfloat16"), ("gdn-96", "prior", "float32")),
    ],
)
def test_scaling_a_state_scales_its_reads(name, kind, stored, rng, cupy):
    """Also where float32 cannot hold the squares of states (2^62 and more) or loses them (2^-80).

    Powers of two change no digit, except where the lower halves of split numbers fall below 2^-126.
    """
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng, map=kind, ridge=RIDGE[kind])
    engine = poisoned(SketchEngine(plan, 2, stored, output_dtype="float32"))
    start = rng.standard_normal((2, *layer.state_shape)).astype(np.float32)
    start[:, :, layer.value_dim // 2 :] *= 2.0**-12  # groups of warps that scale their parts differently
    tokens = make_tokens(layer, 2, 20, "bfloat16", rng, hard_gates=False)

    def run(exponent):
        engine.load_state(cupy.asarray(np.ldexp(start, exponent)), cupy.arange(2))
        out = cupy.empty((2, 20, layer.heads, layer.value_dim), np.float32)
        scaled = tokens_to_device(tokens._replace(v=np.ldexp(tokens.v, exponent)), "bfloat16")
        engine.step(scaled, cupy.arange(2), out)
        return np.ldexp(out.get(), -exponent)

    want = run(0)
    oracle, exact = reference.SketchEngine(plan, 2), np.empty(want.shape)
    oracle.load_state(start.astype(np.float64), np.arange(2))
    oracle.step(tokens, np.arange(2), exact)
    assert error(want, exact) < STORED[stored]
    for exponent in (-80, -62, -30, 30, 62, 100):
        assert error(run(exponent), want) < 1e-9


@pytest.mark.parametrize("name", ["mamba2", "gdn"])  # a dense map of more than 16 columns, and one of fewer
def test_the_ridge_is_small_beside_a_weak_direction(name, rng, cupy):
    """A direction with 1e-4 of the metric's mean diagonal, as much as the least ridge: about half of it is read."""
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng, map="ridge", ridge=0.0)
    plan.omega[...] = plan.projection[...] = np.eye(*plan.omega.shape[1:])
    start = round_to(rng.standard_normal((2, *layer.state_shape)), "bfloat16")
    start[..., 0] *= 2.0**-7
    tokens = make_tokens(layer, 2, 3, "bfloat16", rng, hard_gates=False)
    for x in (tokens.v, tokens.g, *(() if tokens.beta is None else (tokens.beta,))):
        x[...] = 0
    tokens.q[...] = np.eye(layer.key_dim)[0]
    device, oracle = poisoned(SketchEngine(plan, 2, output_dtype="float32")), reference.SketchEngine(plan, 2)
    device.load_state(cupy.asarray(start), cupy.arange(2))
    oracle.load_state(start.astype(np.float64), np.arange(2))
    got, want, _ = run_pair(device, oracle, layer, tokens, np.tile(np.arange(2), (3, 1)), "bfloat16")
    assert error(got, want) < STORED["bfloat16"]
    sketched = plan.ranks > 0
    full = start[:, sketched][..., 0]
    assert 0.2 < np.linalg.norm(got[:, 0, sketched]) / np.linalg.norm(full) < 0.8


def test_no_residual_is_negative(rng, cupy):
    """Of a state that its pivots see whole nothing is left but rounding, of both signs."""
    layer = LAYERS["gdn"]
    plan = make_plan(layer, [7, DENSE, 16, 2], rng, map="lowrank", ridge=0.0)
    mixed = rng.standard_normal((8, layer.heads, 128, 4)) @ rng.standard_normal((8, layer.heads, 4, 16))
    start = np.einsum("bhvg,hkg->bhvk", mixed, plan.omega)
    engine = poisoned(SketchEngine(plan, 8, output_dtype="float32"))
    engine.load_state(cupy.asarray(start.astype(np.float32)), cupy.arange(8))
    numbers = engine.sketch.get().view(ml_dtypes.bfloat16).astype(np.float32)
    for rank, offset, _, _ in engine._heads.get()[[0, 2]]:
        pivots = min(rank, 4)
        first = offset + rank * layer.value_dim + pivots * layer.key_dim + rank * pivots
        shares = numbers[:, first : first + rank]
        assert 0 <= shares.min() <= shares.max() <= 1  # without the clamp some denominators are negative


def test_pivots_that_almost_depend_on_each_other(rng, cupy):
    """Columns that each add 2e-2 of their norm to the columns before them.

    A Cholesky factor loses the later pivots to rounding. The kernels leave them out, so the worst read errs
    about as much as with all pivots in float64. Pivots that are mostly rounding errors make some reads err more:
    by three times their size with other random numbers.
    """
    layer = Layer("mamba2", 4, 64, 64, 1)
    plan = make_plan(layer, [8] * 4, rng, pivots=8, window=8)
    start = np.empty((24, *layer.state_shape), np.float32)
    for row, h in np.ndindex(24, layer.heads):
        q = np.linalg.qr(rng.standard_normal((64, 10)))[0]
        columns = 0.5 * np.triu(rng.standard_normal((10, 8)), 1)
        columns[0], columns[np.arange(1, 8), np.arange(1, 8)] = 1, 0.026
        omega = plan.omega[h]
        outside = np.eye(64) - omega @ omega.T
        start[row, h] = q @ (columns @ omega.T + 0.3 * rng.standard_normal((10, 64)) @ outside)
    tokens = make_tokens(layer, 24, 7, "bfloat16", rng, hard_gates=False)
    tokens.v[...] = 0
    device = poisoned(SketchEngine(plan, 24, "float32", output_dtype="float32"))
    device.load_state(cupy.asarray(start), cupy.arange(24))
    got = cupy.empty(tokens.v.shape, np.float32)
    device.step(tokens_to_device(tokens, "bfloat16"), cupy.arange(24), got)
    want, exact = np.empty((2, *tokens.v.shape))
    for engine, out in ((reference.SketchEngine(plan, 24), want), (reference.StandardEngine(layer, 24), exact)):
        engine.load_state(start.astype(np.float64), np.arange(24))
        engine.step(tokens, np.arange(24), out)
    worst = [np.linalg.norm(out - exact, axis=-1).max() for out in (got.get(), want)]
    assert worst[0] < 1.04 * worst[1]


@pytest.mark.parametrize("gate", [0.0, -3.4, -50.0, -np.inf])  # -3.4: the limit of TILED_GRAM in transform_keys.cuh
@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_gates_of_one_strength(name, gate, rng, cupy):
    layer = LAYERS[name]
    device, oracle = poisoned(ReplayEngine(layer, 2, 16, output_dtype="float32")), reference.ReplayEngine(layer, 2, 16)
    start = rng.standard_normal((2, *layer.state_shape)).astype(np.float32)
    device.load_state(cupy.asarray(start), cupy.arange(2))
    oracle.load_state(start.astype(np.float64), np.arange(2))
    tokens = make_tokens(layer, 2, 20, "bfloat16", rng, hard_gates=False)
    tokens.g[...] = gate
    if layer.kind == "kda":
        tokens.g[..., ::3] = -0.1  # next to channels that keep most of what they hold
    got, want, _ = run_pair(device, oracle, layer, tokens, np.tile(np.arange(2), (20, 1)), "bfloat16")
    assert error(got, want) < EXACT
    assert error(device.state.get(), oracle.state) < EXACT


@pytest.mark.parametrize(("gate", "size"), [(-12.0, 1e5), (-np.inf, 1e17)])
@pytest.mark.parametrize(
    ("name", "activation"),
    [
        *((name, "bfloat16") for name in ("mamba2", "gdn", "kda")),
        *((name, "float16") for name in ("mamba2-80", "gdn-96")),
    ],
)
def test_what_has_been_forgotten_costs_nothing(name, activation, gate, size, rng, cupy):
    """A huge state and huge values that have decayed to nothing, or to the others' size, at the end of the window."""
    layer = LAYERS[name]
    device = poisoned(ReplayEngine(layer, 2, 16, activation_dtype=activation, output_dtype="float32"))
    oracle = reference.ReplayEngine(layer, 2, 16)
    start = size * rng.standard_normal((2, *layer.state_shape)).astype(np.float32)
    device.load_state(cupy.asarray(start), cupy.arange(2))
    oracle.load_state(start.astype(np.float64), np.arange(2))
    tokens = make_tokens(layer, 2, 16, activation, rng, hard_gates=False)
    tokens.v[:, :3] = round_to(tokens.v[:, :3] * 1e4, activation)
    tokens.g[:, 5] = gate
    run_pair(device, oracle, layer, tokens, np.tile(np.arange(2), (16, 1)), activation)
    assert error(device.state.get(), oracle.state) < EXACT


@pytest.mark.parametrize("name", ["kda-raw", "kda-64-bounded"])
def test_raw_gates_of_any_size(name, rng, cupy):
    """Biases and inputs of up to 30, rates from e^-6 to e^6; standard decode, whose outputs depend on every gate."""
    layer = LAYERS[name]
    shape = layer.heads, layer.key_dim
    gate = GateInput(
        np.linspace(-6, 6, layer.heads), rng.uniform(-30, 30, shape), named_gate(name, layer, rng).lower_bound
    )
    device = StandardEngine(layer, 4, output_dtype="float32", gate=gate)
    oracle = reference.StandardEngine(layer, 4)
    tokens = make_tokens(layer, 4, 12, "bfloat16", rng, gate=gate)
    tokens.g[...] = round_to(rng.uniform(-30, 30, tokens.g.shape), "bfloat16")
    got, want, _ = run_pair(device, oracle, layer, tokens, np.tile(np.arange(4), (12, 1)), "bfloat16", gate)
    assert error(got, want) < EXACT
    assert error(device.state.get(), oracle.state) < EXACT


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_padding_and_fresh_slots(name, rng, cupy):
    """A padding row outputs zeros and changes no slot; after a reset a slot that held NaN equals a fresh one."""
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize(RANKS[name], layer.heads), rng)
    fresh, used = (poisoned(SketchEngine(plan, 3, output_dtype="float32")) for _ in range(2))
    used.state[1] = np.nan
    used.position[1] = 7
    used.sketch.view(np.uint8)[...] = 0xFF
    used.reset(cupy.asarray([1]))
    before = used.state.get()
    for t in range(18):
        tokens = tokens_to_device(make_tokens(layer, 2, 1, "bfloat16", rng), "bfloat16")
        outs = [cupy.empty((2, 1, layer.heads, layer.value_dim), np.float32) for _ in range(2)]
        fresh.step(tokens, cupy.asarray([-1, 1]), outs[0])
        used.step(tokens, cupy.asarray([-1, 1]), outs[1])
        assert not outs[0][0].any() and np.isfinite(outs[0]).all()
        assert np.array_equal(*outs)
        assert used.position.tolist() == [0, (t + 1) % 16, 0]
    assert np.array_equal(used.state[[0, 2]], before[[0, 2]], equal_nan=True)
    assert np.array_equal(fresh.state, used.state)


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda", "kda-raw"])
def test_several_tokens_and_batches_are_bitwise_single_ones(name, rng, cupy):
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng)
    gate = named_gate(name, layer, rng)
    tokens = make_tokens(layer, 6, 20, "bfloat16", rng, gate=gate)
    at_once, alone = (poisoned(SketchEngine(plan, 6, output_dtype="float32", gate=gate)) for _ in range(2))
    for engine in (at_once, alone):
        engine.reset(cupy.arange(6))
    out = cupy.empty((6, 20, layer.heads, layer.value_dim), np.float32)
    at_once.step(tokens_to_device(tokens, "bfloat16", gate), cupy.arange(6), out)
    for t in range(20):
        single = cupy.empty((1, 1, layer.heads, layer.value_dim), np.float32)
        alone.step(tokens_to_device(token(tokens, t, slice(4, 5)), "bfloat16", gate), cupy.asarray([2]), single)
        assert np.array_equal(out[4, t], single[0, 0])
    assert np.array_equal(at_once.state[4], alone.state[2])


@pytest.mark.parametrize("name", ["mamba2", "mamba2-80", "gdn", "gdn-96", "kda-raw", "kda-64-bounded"])
def test_blocks_of_standard_decode_do_not_matter(name, rng, cupy, monkeypatch):
    layer = LAYERS[name]
    gate = named_gate(name, layer, rng)
    tokens = tokens_to_device(make_tokens(layer, 3, 5, "bfloat16", rng, gate=gate), "bfloat16", gate)
    results = []
    for many, size in ((standard.MANY_WARPS, standard.BLOCK_BYTES), (1, 2048)):  # blocks of four warps; of one or two
        monkeypatch.setattr(standard, "MANY_WARPS", many)
        monkeypatch.setattr(standard, "BLOCK_BYTES", size)
        engine = StandardEngine(layer, 5, output_dtype="float32", gate=gate)
        out = cupy.empty((3, 5, layer.heads, layer.value_dim), np.float32)
        out[...] = np.nan
        engine.step(tokens, cupy.asarray([4, -1, 0]), out)
        results.append((out, engine.state))
    for of_large, of_small in zip(*results, strict=True):
        assert np.array_equal(of_large, of_small)


MANY_HEADS = {
    "mamba2-96": Layer("mamba2", 24, 64, 96, 12),
    "gdn-64": Layer("gdn", 24, 64, 64, 12),
    "kda-64": Layer("kda", 24, 64, 64, 24),
}


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda", *MANY_HEADS])
def test_claims_of_a_flush_do_not_matter(name, rng, cupy):
    """Bitwise equal results where one block takes more tiles than its queue holds, and where many take a few.

    Few heads have a sketch. Between two of them, warps would get ahead of the warp that finishes sketches by more than
    a queue's length if the kernel let them. (Blocks run one after the other here: the first takes all tiles.)
    """
    layer = (LAYERS | MANY_HEADS)[name]
    ranks = np.where(np.arange(layer.heads) % (12 if name in MANY_HEADS else 3), DENSE, 17)
    plan = make_plan(layer, ranks, rng)
    tokens = tokens_to_device(make_tokens(layer, 5, 20, "bfloat16", rng), "bfloat16")
    start = rng.standard_normal((5, *layer.state_shape)).astype(np.float32)
    results = []
    for blocks in (None, 1, 2, 40):
        engine = poisoned(SketchEngine(plan, 5, output_dtype="float32"))
        if blocks:
            with_blocks(engine, blocks)
        out = cupy.empty((5, 20, layer.heads, layer.value_dim), np.float32)
        engine.load_state(cupy.asarray(start), cupy.arange(5))
        engine.step(tokens, cupy.asarray([3, -1, 0, 4, 1]), out)
        engine.flush(cupy.arange(5))
        results.append((out, engine.state, engine.sketch, engine.position))
    for other in results[1:]:
        for array, same in zip(results[0], other, strict=True):
            assert np.array_equal(array.view(np.uint8), same.view(np.uint8))


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda", "kda-raw"])
def test_shares_of_a_read_step_do_not_matter(name, rng, cupy, monkeypatch):
    """Bitwise equal results where few warps do everything: one tile after the other in room for one, or ahead.

    With room for four, a block may have three tiles at most, so that there are many blocks.
    """
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng)
    gate = named_gate(name, layer, rng)
    tokens = tokens_to_device(make_tokens(layer, 5, 18, "bfloat16", rng, gate=gate), "bfloat16", gate)
    outs = []
    for room in (None, 1, 2, 4):
        engine = SketchEngine(plan, 5, output_dtype="float32", gate=gate)
        least = modules.size_of(modules.load(engine.variants()[0]), "read_shared_bytes")
        tables = 512 * 8 + (128 * 72 if layer.kind == "mamba2" else 0)  # of most rows and scores: here are few
        least += 1024 - tables
        with monkeypatch.context() as patch:
            if room:
                patch.setattr(cuda_engines, "shared_limit", lambda size=room * least: size)
            poisoned(engine)
        engine.reset(cupy.arange(5))
        if room:
            _, row_tiles, max_tiles, _ = engine._read_limits
            engine._read_limits = 1, row_tiles, max_tiles if room < 4 else 3, 4
        outs.append(cupy.empty((5, 18, layer.heads, layer.value_dim), np.float32))
        engine.step(tokens, cupy.asarray([3, -1, 0, 4, 1]), outs[-1])
    for other in outs[1:]:
        assert np.array_equal(outs[0], other)


@pytest.mark.parametrize("kind", ["lowrank", "ridge"])
@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda", "kda-raw"])
def test_order_of_threads_does_not_matter(name, kind, rng, cupy, monkeypatch):
    """Bitwise equal results in any order of the threads, which a missing barrier would break."""
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng, map=kind, ridge=RIDGE[kind])
    start = rng.standard_normal((2, *layer.state_shape)).astype(np.float32)
    gate = named_gate(name, layer, rng)
    tokens = tokens_to_device(make_tokens(layer, 2, 17, "bfloat16", rng, gate=gate), "bfloat16", gate)
    results = []
    for order in (0, 1, 2, 3):
        monkeypatch.setattr(standin, "order", order)
        engine = poisoned(SketchEngine(plan, 2, output_dtype="float32", gate=gate))
        engine.load_state(cupy.asarray(start), cupy.arange(2))
        out = cupy.empty((2, 17, layer.heads, layer.value_dim), np.float32)
        engine.step(tokens, cupy.arange(2), out)
        results.append((out, engine.state, engine.sketch))
    for other in results[1:]:
        for array, same in zip(results[0], other, strict=True):
            assert np.array_equal(array.view(np.uint8), same.view(np.uint8))


def test_decays_that_transform_warps_leave_the_solver(rng, cupy, monkeypatch):
    """One block, all channels decay, at another rate for each token: bitwise equal results in many orders of threads.

    A tile's largest decays must stay until the solver has read them: those of another would scale writes by other
    powers. Without the producer's wait for the solver, one of these orders brings that out.
    """
    layer = LAYERS["kda"]
    tokens = make_tokens(layer, 4, 17, "bfloat16", rng, hard_gates=False)
    tokens.g[...] = rng.uniform(-2, -1, tokens.g.shape) * rng.uniform(1, 8, (*tokens.g.shape[:3], 1))
    moved = tokens_to_device(tokens, "bfloat16")
    start = rng.standard_normal((4, *layer.state_shape)).astype(np.float32)
    states = []
    for order in range(12):
        monkeypatch.setattr(standin, "order", order)
        engine = poisoned(ReplayEngine(layer, 4, 16, output_dtype="float32"))
        engine.load_state(cupy.asarray(start), cupy.arange(4))
        with_blocks(engine, 1)
        engine.step(moved, cupy.arange(4), cupy.empty((4, 17, layer.heads, layer.value_dim), np.float32))
        states.append(engine.state)
    for state in states[1:]:
        assert np.array_equal(states[0].view(np.uint8), state.view(np.uint8))


def test_an_interrupted_step_leaves_others_whole(rng, cupy, monkeypatch):
    """The interruption comes between the two launches of a step, after a read has reported that no flush is due."""
    layer = LAYERS["gdn"]
    plan = make_plan(layer, [7, 3, 16, 2], rng, window=4)
    engines = [poisoned(SketchEngine(plan, 2, output_dtype="float32")) for _ in range(2)]
    tokens = make_tokens(layer, 1, 6, "bfloat16", rng)
    outs = [cupy.empty((1, 1, layer.heads, layer.value_dim), np.float32) for _ in engines]

    def step(which, t, slot):
        one = tokens_to_device(token(tokens, t), "bfloat16")
        engines[which].step(one, cupy.asarray([slot]), outs[which])

    for engine in engines:
        engine.reset(cupy.arange(2))
    for t in range(6):
        for which in (0, 1):
            if t == 3 and which == 1:
                with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    interrupt = Mock(side_effect=KeyboardInterrupt)
                    patch.setattr(engines[1], "_flush", [interrupt] * 3)  # of every mode
                    step(1, 0, 1)
            step(which, t, 0)
        assert np.array_equal(*outs)
    assert np.array_equal(engines[0].state[0], engines[1].state[0])
    assert np.isfinite(outs[0]).all()


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("rate_log", [0.7, 6.0, 20.0, 40.0])
def test_what_raw_gates_make(rate_log, bound, cupy):
    check_raw_gates(cupy, rate_log, bound)
