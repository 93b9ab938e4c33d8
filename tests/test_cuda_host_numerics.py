"""CUDA kernels at the limits of their arithmetic: scales, gates and weak directions."""

import ml_dtypes
import numpy as np
import pytest
from gpu.cuda_pairs import (
    ReplayEngine,
    SketchEngine,
    StandardEngine,
    compare_window,
    load_same,
    poisoned,
    run_pair,
)
from gpu.cuda_support import (
    EXACT,
    LAYERS,
    RANKS,
    RIDGE,
    STORED,
    TIPPED,
    make_plan,
    make_tokens,
    round_to,
    tokens_to_device,
)
from host import fixtures
from samples import REPEATED, reflections, relative

from sketchssm.arrays.options import EngineOptions
from sketchssm.layer.recurrence import FULL_STATE, Layer, Tokens
from sketchssm.reference import engines as reference
from sketchssm.reference.recurrence import run

cupy, machine, pytestmark = fixtures.of_host, fixtures.of_kernels, fixtures.cold


def test_no_ridge_and_a_sketch_of_rank_one(rng, cupy):
    """A state in one direction of the basis: rounding errors of its Gram matrix are below the floor."""
    layer = LAYERS["mamba2"]
    plan = make_plan(layer, [16] * layer.heads, rng, map="ridge", ridge=0.0)
    device, oracle = (SketchEngine(plan, 4, "float32", output_dtype="float32"), reference.SketchEngine(plan, 4))
    keys = np.einsum("bhg,hkg->bhk", rng.standard_normal((4, layer.heads, 16)), plan.omega)
    start = np.einsum("bhv,bhk->bhvk", rng.standard_normal((4, layer.heads, layer.value_dim)), keys)
    # two slices leave out 2^-16, and the sketch is nearly zero in all directions but one
    assert compare_window(device, oracle, start.astype(np.float32), "bfloat16", rng, cupy) < 1e-3


@pytest.mark.parametrize(
    ("name", "kind", "stored"),
    [
        *(("mamba2", "ridge", "bfloat16"), ("gdn", "lowrank", "bfloat16"), ("gdn", "ridge", "bfloat16")),
        *(("kda", "ridge", "bfloat16"), ("gdn-96", "lowrank", "float32")),
        *(("gdn", "ridge", "int8"), ("mamba2", "lowrank", "int8")),
        *(("kda", "ridge", "int8"), ("kda", "lowrank", "int8")),
    ],
)
def test_scaling_a_state_scales_its_reads(name, kind, stored, rng, cupy):
    """Also where float32 cannot hold the squares of states (2^62 and more) or loses them (2^-80). Powers of two change
    no digit and no code, except where the lower halves of split numbers fall below 2^-126.
    """
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng, map=kind, ridge=RIDGE[kind])
    engine = poisoned(SketchEngine(plan, 1, stored, output_dtype="float32"))
    start = rng.standard_normal((1, *layer.state_shape)).astype(np.float32)
    start[:, :, layer.value_dim // 2 :] *= 2.0**-12  # groups of warps that scale their parts differently
    tokens = make_tokens(layer, 1, 18, "bfloat16", rng, hard_gates=False)

    def run(exponent):
        engine.load_state(cupy.asarray(np.ldexp(start, exponent)), cupy.arange(1))
        out = cupy.empty(tokens.v.shape, np.float32)
        scaled = tokens_to_device(tokens._replace(v=np.ldexp(tokens.v, exponent)), "bfloat16")
        engine.step(scaled, cupy.arange(1), out)
        return np.ldexp(out.get(), -exponent)

    want = run(0)
    oracle = reference.SketchEngine(plan, 1, "int8" if stored == "int8" else "float32")
    exact = np.empty(want.shape)
    oracle.load_state(start.astype(np.float64), np.arange(1))
    oracle.step(tokens, np.arange(1), exact)
    assert relative(want, exact) < STORED[stored]
    for exponent in (-80, -62, -40, -30, 30, 40, 62, 100):  # of 40: one group of warps is extreme, the other is not
        assert relative(run(exponent), want) < 1e-9


@pytest.mark.parametrize("name", ["mamba2", "gdn"])  # a dense map of more than 16 columns, and one of fewer
def test_the_ridge_is_small_beside_a_weak_direction(name, rng, cupy):
    """A direction with 1e-4 of the metric's mean diagonal, as much as the least ridge: about half of it is read."""
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng, map="ridge", ridge=0.0)
    plan.omega[...] = np.eye(*plan.omega.shape[1:])
    start = round_to(rng.standard_normal((2, *layer.state_shape)), "bfloat16")
    start[..., 0] *= 2.0**-7
    tokens = make_tokens(layer, 2, 3, "bfloat16", rng, hard_gates=False)
    for x in (tokens.v, tokens.g, *(() if tokens.beta is None else (tokens.beta,))):
        x[...] = 0
    tokens.q[...] = np.eye(layer.key_dim)[0]
    device, oracle = poisoned(SketchEngine(plan, 2, output_dtype="float32")), reference.SketchEngine(plan, 2)
    device.load_state(cupy.asarray(start), cupy.arange(2))
    oracle.load_state(start.astype(np.float64), np.arange(2))
    got, want, _ = run_pair(device, oracle, tokens, np.tile(np.arange(2), (3, 1)), "bfloat16")
    assert relative(got, want) < STORED["bfloat16"]
    sketched = plan.ranks > 0
    full = start[:, sketched][..., 0]
    assert 0.2 < np.linalg.norm(got[:, 0, sketched]) / np.linalg.norm(full) < 0.8


def test_no_residual_is_negative(rng, cupy):
    """If the pivots hold the whole state, the residual is only rounding, of both signs."""
    layer = LAYERS["gdn"]
    plan = make_plan(layer, [7, FULL_STATE, 16, 2], rng, ridge=0.0)
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
    """Columns that each add 2e-2 of their norm to the columns before them. A Cholesky factor loses the later pivots to
    rounding. The kernels leave them out, so the worst read errs about as much as with all pivots in float64. Pivots
    that are mostly rounding errors make some reads err more: by three times their size with other random numbers.
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


def check_replay(layer, tokens, rng):
    """Compare windows of 16 tokens of two rows with the reference."""
    device, oracle = poisoned(ReplayEngine(layer, 2, 16, output_dtype="float32")), reference.ReplayEngine(layer, 2, 16)
    load_same(device, oracle, rng)
    table = np.tile(np.arange(2), (tokens.v.shape[1], 1))
    got, want, _ = run_pair(device, oracle, tokens, table, "bfloat16")
    assert relative(got, want) < EXACT
    assert relative(device.state.get(), oracle.state) < EXACT


@pytest.mark.parametrize("gate", [0.0, -3.4, -50.0, -np.inf])  # -3.4: the limit of TILED_GRAM
@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_gates_of_one_strength(name, gate, rng, cupy):
    layer = LAYERS[name]
    tokens = make_tokens(layer, 2, 20, "bfloat16", rng, hard_gates=False)
    tokens.g[...] = gate
    if layer.kind == "kda":
        tokens.g[..., ::3] = -0.1  # next to channels that keep most of what they hold
    check_replay(layer, tokens, rng)


@pytest.mark.parametrize(("gate", "size"), [(-12.0, 1e5), (-np.inf, 1e17)])
@pytest.mark.parametrize(
    ("name", "activation"),
    [
        *((name, "bfloat16") for name in ("mamba2", "gdn", "kda")),
        *((name, "float16") for name in ("mamba2-80", "gdn-96")),
    ],
)
def test_what_has_been_forgotten_costs_nothing(name, activation, gate, size, rng, cupy):
    """A huge state and huge values decay to nothing, or to the size of the others, by the end of the window."""
    layer = LAYERS[name]
    device = poisoned(ReplayEngine(layer, 2, 16, activation_dtype=activation, output_dtype="float32"))
    oracle = reference.ReplayEngine(layer, 2, 16)
    start = size * rng.standard_normal((2, *layer.state_shape)).astype(np.float32)
    device.load_state(cupy.asarray(start), cupy.arange(2))
    oracle.load_state(start.astype(np.float64), np.arange(2))
    tokens = make_tokens(layer, 2, 16, activation, rng, hard_gates=False)
    tokens.v[:, :3] = round_to(tokens.v[:, :3] * 1e4, activation)
    tokens.g[:, 5] = gate
    run_pair(device, oracle, tokens, np.tile(np.arange(2), (16, 1)), activation)
    assert relative(device.state.get(), oracle.state) < EXACT


@pytest.mark.parametrize("keys", REPEATED)
@pytest.mark.parametrize(
    ("kind", "key_dim", "activation"),
    [("gdn", 96, "bfloat16"), ("gdn", 128, "float32"), ("kda", 128, "bfloat16")],
)
def test_windows_of_reflections_are_as_exact_as_single_tokens(kind, key_dim, activation, keys, rng, cupy):
    """Folds by matrices err by more and more times as much as standard decode: 10 to 50 after 512 such tokens."""
    layer, length = Layer(kind, 1, key_dim, 128, 1), 160
    q, k, v, *gates = reflections(rng, layer, keys, length)
    tokens = Tokens(*(round_to(x, activation) for x in (q, k, v)), *gates)
    want = run(layer, *(x.astype(np.float64) for x in tokens))
    options, errors = {"activation_dtype": activation, "output_dtype": "float32"}, []
    for engine in (StandardEngine(layer, 1, **options), ReplayEngine(layer, 1, 16, **options)):
        out = cupy.empty(tokens.v.shape, np.float32)
        engine.step(tokens_to_device(tokens, activation), cupy.arange(1), out)
        engine.flush(cupy.arange(1))
        errors.append((relative(out.get(), want[0]), relative(engine.state.get(), want[1])))
    assert (np.array(errors[1]) < 2 * np.array(errors[0])).all()


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_sketches_after_windows_with_betas_above_one(name, rng, cupy):
    """A flush that folds token by token stores the sketch of the state that it leaves, in all heads."""
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize([7, 1, 16, FULL_STATE], layer.heads), rng, map="ridge", ridge=RIDGE["ridge"])
    device = poisoned(SketchEngine(plan, 2, "float32", output_dtype="float32"))
    tokens = make_tokens(layer, 2, 40, "bfloat16", rng, hard_gates=False)
    tokens.beta[...] *= 2
    table = np.tile(np.arange(2), (40, 1))
    got, want, _ = run_pair(device, reference.SketchEngine(plan, 2), tokens, table, "bfloat16")
    assert relative(got, want) < 3e-5  # rounding to float32, which the solve of the map enlarges


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_keys_of_zeros_and_tiny_keys(name, rng, cupy):
    """With beta = 2 and with beta below 1; keys of norm 1e-20 write next to nothing."""
    layer = LAYERS[name]
    tokens = make_tokens(layer, 2, 40, "bfloat16", rng, hard_gates=False)
    tokens.k[:, ::3] = 0
    tokens.k[:, 1::3] = round_to(1e-20 * tokens.k[:, 1::3], "bfloat16")
    tokens.beta[1] = 2
    check_replay(layer, tokens, rng)


@pytest.mark.parametrize("stored", TIPPED)
def test_standard_rounds_at_every_token(stored, rng, machine):
    """Tokens of one call give the same as tokens of several, bit for bit."""
    layer = LAYERS["gdn"]
    tokens = make_tokens(layer, 3, 5, "bfloat16", rng)
    outs, states = [], []
    for parts in (range(1, 6), [5]):
        engine = StandardEngine(layer, 3, output_dtype="float32", state_dtype=stored)
        out, first = machine.full(tokens.v.shape, np.nan, np.float32), 0
        for last in parts:
            some = tokens._replace(**{name: x[:, first:last] for name, x in tokens._asdict().items()})
            piece = machine.full(some.v.shape, np.nan, np.float32)
            engine.step(tokens_to_device(some, "bfloat16"), machine.arange(3), piece)
            out[:, first:last], first = piece, last
        outs.append(out.get())
        states.append(engine.state.get())
    assert np.array_equal(outs[0], outs[1])
    assert np.array_equal(states[0], states[1])


def test_numbers_beyond_fp16_become_infinite(rng, machine):
    """Loaded, written by a token, and folded by a flush; as in the reference."""
    layer = Layer("mamba2", 2, 64, 64, 1)
    ends = np.array([65504, 65519.9, 65520, -65520, 1e6, -np.inf, 1e-7, 2**-25], np.float32)
    start = np.resize(ends, (1, *layer.state_shape))
    engines = (
        StandardEngine(layer, 1, state_dtype="float16"),
        reference.StandardEngine(layer, 1, EngineOptions(state_dtype="float16")),
    )
    with np.errstate(over="ignore"):
        engines[0].load_state(machine.asarray(start), machine.arange(1))
    engines[1].load_state(start.astype(np.float64), np.arange(1))
    assert np.array_equal(engines[0].state.get(), engines[1].state)
    tokens = make_tokens(layer, 1, 4, "bfloat16", rng, hard_gates=False)
    tokens.v[:, 1] *= 2.0**20
    for kind, settings in ((StandardEngine, ()), (ReplayEngine, (4,))):
        device = kind(layer, 1, *settings, output_dtype="float32", state_dtype="float16")
        oracle = getattr(reference, f"{'Replay' if settings else 'Standard'}Engine")(
            layer, 1, *settings, EngineOptions(state_dtype="float16")
        )
        run_pair(device, oracle, tokens, np.zeros((4, 1), np.int64), "bfloat16")
        infinite = np.isinf(oracle.state)
        assert infinite.any() and not infinite.all()
        assert np.array_equal(np.isinf(device.state.get()), infinite)
        assert relative(device.state.get()[~infinite].astype(float), oracle.state[~infinite]) < TIPPED["float16"]
