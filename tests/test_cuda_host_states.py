"""16-bit states in the CUDA kernels against the reference, which rounds alike."""

import ml_dtypes
import numpy as np
import pytest
from gpu.cuda_support import (
    LAYERS,
    RANKS,
    RIDGE,
    TIPPED,
    ReplayEngine,
    StandardEngine,
    check_sketch,
    error,
    make_plan,
    make_tokens,
    named_gate,
    poisoned,
    run_pair,
    slot_table,
    tokens_to_device,
)
from host import fixtures

from sketchssm.arrays.options import EngineOptions
from sketchssm.layer.recurrence import FULL_STATE, Layer
from sketchssm.reference import engines as reference

cupy, host, pytestmark = fixtures.of_kernels, fixtures.of_host, fixtures.cold

TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def wide(state):
    return state.get().astype(np.float64)


# Types differ in how a number is converted, shapes in which numbers a thread has: every kind meets both types, and
# every shape one of them. So also below.
@pytest.mark.parametrize(
    ("name", "stored"),
    [
        *((name, stored) for name in ("mamba2", "gdn", "kda") for stored in TYPES),
        *((name, "bfloat16") for name in ("mamba2-80", "gdn-96", "kda-raw")),
        *((name, "float16") for name in ("mamba2-128", "kda-64", "kda-64-bounded")),
    ],
)
def test_standard(name, stored, rng, cupy):
    layer = LAYERS[name]
    gate = named_gate(name, layer, rng)
    device = StandardEngine(layer, 5, output_dtype="float32", gate=gate, state_dtype=stored)
    oracle = reference.StandardEngine(layer, 5, EngineOptions(state_dtype=stored))
    assert device.state.dtype == TYPES[stored]
    tokens = make_tokens(layer, 3, 12, "bfloat16", rng, gate=gate)
    got, want, _ = run_pair(device, oracle, layer, tokens, slot_table(3, 5, 12, rng), "bfloat16", gate)
    assert error(got, want) < TIPPED[stored]
    assert error(wide(device.state), oracle.state) < TIPPED[stored]


@pytest.mark.parametrize("stored", TYPES)
def test_standard_rounds_at_every_token(stored, rng, cupy):
    """Tokens of one call give the same as tokens of several, bit for bit."""
    layer = LAYERS["gdn"]
    tokens = make_tokens(layer, 3, 5, "bfloat16", rng)
    outs, states = [], []
    for parts in (range(1, 6), [5]):
        engine = StandardEngine(layer, 3, output_dtype="float32", state_dtype=stored)
        out, first = cupy.full(tokens.v.shape, np.nan, np.float32), 0
        for last in parts:
            some = tokens._replace(**{name: x[:, first:last] for name, x in tokens._asdict().items()})
            piece = cupy.full(some.v.shape, np.nan, np.float32)
            engine.step(tokens_to_device(some, "bfloat16"), cupy.arange(3), piece)
            out[:, first:last], first = piece, last
        outs.append(out.get())
        states.append(engine.state.get())
    assert np.array_equal(outs[0], outs[1])
    assert np.array_equal(states[0], states[1])


def test_numbers_beyond_fp16_become_infinite(rng, cupy):
    """Loaded, written by a token, and folded by a flush; as in the reference."""
    layer = Layer("mamba2", 2, 64, 64, 1)
    ends = np.array([65504, 65519.9, 65520, -65520, 1e6, -np.inf, 1e-7, 2**-25], np.float32)
    start = np.resize(ends, (1, *layer.state_shape))
    engines = (
        StandardEngine(layer, 1, state_dtype="float16"),
        reference.StandardEngine(layer, 1, EngineOptions(state_dtype="float16")),
    )
    with np.errstate(over="ignore"):
        engines[0].load_state(cupy.asarray(start), cupy.arange(1))
    engines[1].load_state(start.astype(np.float64), np.arange(1))
    assert np.array_equal(wide(engines[0].state), engines[1].state)
    tokens = make_tokens(layer, 1, 4, "bfloat16", rng, hard_gates=False)
    tokens.v[:, 1] *= 2.0**20
    for kind, settings in ((StandardEngine, ()), (ReplayEngine, (4,))):
        device = kind(layer, 1, *settings, output_dtype="float32", state_dtype="float16")
        oracle = getattr(reference, f"{'Replay' if settings else 'Standard'}Engine")(
            layer, 1, *settings, EngineOptions(state_dtype="float16")
        )
        run_pair(device, oracle, layer, tokens, np.zeros((4, 1), np.int64), "bfloat16")
        infinite = np.isinf(oracle.state)
        assert infinite.any() and not infinite.all()
        assert np.array_equal(np.isinf(device.state.get()), infinite)
        assert error(wide(device.state)[~infinite], oracle.state[~infinite]) < TIPPED["float16"]


@pytest.mark.parametrize(
    ("name", "window", "activation", "stored"),
    [
        ("mamba2", 16, "bfloat16", "bfloat16"),
        ("gdn", 16, "bfloat16", "bfloat16"),
        ("kda", 16, "bfloat16", "float16"),
        ("kda-raw", 16, "bfloat16", "bfloat16"),
        ("mamba2-80", 4, "float32", "float16"),
        ("gdn-96", 8, "float16", "float16"),
        ("kda-64", 32, "float32", "bfloat16"),
        ("mamba2-128", 32, "bfloat16", "float16"),
    ],
)
def test_replay(name, window, activation, stored, rng, cupy):
    layer, length = LAYERS[name], 2 * window + 5
    gate = named_gate(name, layer, rng)
    settings = {"activation_dtype": activation, "output_dtype": "float32", "gate": gate, "state_dtype": stored}
    device = poisoned(ReplayEngine(layer, 5, window, **settings))
    oracle = reference.ReplayEngine(layer, 5, window, EngineOptions(state_dtype=stored))
    tokens = make_tokens(layer, 4, length, activation, rng, gate=gate)
    got, want, where = run_pair(device, oracle, layer, tokens, slot_table(4, 5, length, rng), activation, gate)
    flushes = where == window - 1
    assert flushes.any()
    assert error(got[flushes], want[flushes]) < TIPPED[stored]
    assert error(got[~flushes], want[~flushes]) < TIPPED[stored]
    device.flush(cupy.arange(5))
    oracle.flush(np.arange(5))
    assert error(wide(device.state), oracle.state) < TIPPED[stored]


@pytest.mark.parametrize(
    ("name", "kind", "sketches", "stored"),
    [
        *((name, "ridge", "bfloat16", "bfloat16") for name in ("mamba2", "gdn", "kda")),
        *((name, "lowrank", "bfloat16", "float16") for name in ("mamba2", "gdn", "kda-raw")),
        ("mamba2-80", "ridge", "float32", "bfloat16"),
        ("gdn-96", "prior", "float32", "float16"),
        ("kda-64", "offline", "float32", "bfloat16"),
        ("mamba2-128", "prior", "bfloat16", "bfloat16"),
    ],
)
def test_sketch(name, kind, sketches, stored, rng, cupy):
    """Mixed ranks, full-state heads, padding, staggered windows; sketches are made of the rounded states."""
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng, map=kind, ridge=RIDGE[kind])
    check_sketch(plan, sketches, "bfloat16", rng, named_gate(name, layer, rng), state_dtype=stored)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layer", "kind", "window", "activation", "stored"),
    [
        (Layer("kda", 3, 64, 80, 3), "lowrank", 16, "bfloat16", "bfloat16"),
        (Layer("gdn", 4, 64, 80, 2), "ridge", 8, "float16", "float16"),
        (Layer("gdn", 2, 128, 128, 2), "lowrank", 32, "bfloat16", "float16"),
        (Layer("mamba2", 4, 128, 96, 2), "lowrank", 32, "float32", "bfloat16"),
        (Layer("mamba2", 6, 128, 64, 2), "ridge", 4, "bfloat16", "bfloat16"),
    ],
    ids=lambda x: f"{x.kind}-{x.value_dim}" if isinstance(x, Layer) else None,
)
@pytest.mark.parametrize("blocks", [None, 1])
def test_sketch_of_other_shapes(layer, kind, window, activation, stored, blocks, rng, cupy):
    """Shapes with other roles, groups and buffers in the flush; one block that computes all tiles in turn."""
    plan = make_plan(
        layer, np.resize([9, FULL_STATE, 33, 1], layer.heads), rng, map=kind, ridge=RIDGE[kind], window=window
    )
    check_sketch(plan, "bfloat16", activation, rng, blocks=blocks, state_dtype=stored)
