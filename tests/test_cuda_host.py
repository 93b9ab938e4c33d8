"""CUDA kernels, on the host (see tests/host/README.md) and on a device, against the float64 reference."""

import ml_dtypes
import numpy as np
import pytest
from gpu.cuda_pairs import (
    ReplayEngine,
    SketchEngine,
    StandardEngine,
    check_sketch,
    compare_window,
    load_same,
    poisoned,
    run_mixed,
    run_pair,
)
from gpu.cuda_support import (
    EXACT,
    LAYERS,
    RANKS,
    RIDGE,
    STORED,
    TIPPED,
    full_reads,
    make_plan,
    make_tokens,
    named_gate,
    round_to,
    slot_table,
    thorough,
    tokens_to_device,
)
from host import fixtures
from samples import relative

from sketchssm.arrays.options import EngineOptions
from sketchssm.cuda import modules
from sketchssm.layer.recurrence import FULL_STATE, Layer
from sketchssm.reference import engines as reference

cupy, host, pytestmark = fixtures.of_kernels, fixtures.of_host, fixtures.cold

ACTIVATIONS = "bfloat16", "float16", "float32"
OTHER_RANKS = [9, FULL_STATE, 13, 1, 16]
KINDS = "mamba2", "gdn", "kda", "kda-raw"
STATES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def check_states(device, oracle, state_dtype):
    assert device.state.dtype == STATES[state_dtype]
    assert relative(device.state.get().astype(np.float64), oracle.state) < TIPPED.get(state_dtype, EXACT)


# Types differ in how a number is converted, shapes in which numbers a thread has: every kind meets all types, and
# every shape one of them. So also below.
@pytest.mark.parametrize(
    ("activation", "state_dtype", "name"),
    [
        *((activation, "float32", name) for activation in ACTIVATIONS for name in ("mamba2", "gdn", "kda-raw")),
        *(("float32", "float32", name) for name in ("mamba2-80", "kda-64-bounded")),
        *(("bfloat16", "float32", name) for name in ("mamba2-128", "kda", "olmo-hybrid", "falcon-h1", "gla")),
        *(("float16", "float32", name) for name in ("gdn-96", "kda-64")),
        *(("bfloat16", "bfloat16", name) for name in ("mamba2", "kda", "kda-raw")),
        *(("bfloat16", "float16", name) for name in ("gdn", "kda-64-bounded")),
        *thorough(
            *(("bfloat16", "bfloat16", name) for name in ("gdn", "mamba2-80", "gdn-96")),
            *(("bfloat16", "float16", name) for name in ("mamba2", "kda", "mamba2-128", "kda-64")),
        ),
    ],
)
def test_standard(name, activation, state_dtype, rng, cupy):
    layer = LAYERS[name]
    gate = named_gate(name, layer, rng)
    options = {"activation_dtype": activation, "output_dtype": "float32", "gate": gate, "state_dtype": state_dtype}
    device = StandardEngine(layer, 5, **options)
    oracle = reference.StandardEngine(layer, 5, EngineOptions(state_dtype=state_dtype))
    tokens = make_tokens(layer, 3, 12, activation, rng, gate=gate)
    got, want, _ = run_pair(device, oracle, tokens, slot_table(3, 5, 12, rng), activation, gate)
    assert relative(got, want) < TIPPED.get(state_dtype, EXACT)
    check_states(device, oracle, state_dtype)


@pytest.mark.parametrize(
    ("name", "window", "activation", "state_dtype"),
    [
        *((name, 16, "bfloat16", "float32") for name in ("mamba2", "gdn", "kda", "kda-raw")),
        *(("mamba2-80", 4, "float32", "float32"), ("gdn-96", 8, "float16", "float32")),
        *(("kda-64", 32, "float32", "float32"), ("mamba2-80", 32, "float16", "float32")),
        *(("kda-64-bounded", 4, "bfloat16", "float32"), ("gdn", 16, "bfloat16", "bfloat16")),
        *(("kda", 16, "bfloat16", "float16"), ("mamba2-80", 4, "float32", "float16")),
        *((name, 16, "bfloat16", "float32") for name in ("olmo-hybrid", "falcon-h1", "gla")),
        *(("olmo-hybrid", 4, "float32", "float32"), ("gla-raw", 32, "float16", "float32")),
        *thorough(
            *(("mamba2-128", 16, "bfloat16", "float32"), ("gdn-96", 32, "float32", "float32")),
            *(("kda-64", 4, "bfloat16", "float32"), ("kda-raw", 8, "float16", "float32")),
            ("mamba2", 16, "bfloat16", "bfloat16"),
            *(("kda-raw", 32, "float32", "float32"), ("kda-64-bounded", 32, "float32", "float32")),
            *(("kda-raw", 16, "bfloat16", "bfloat16"), ("kda-64", 32, "float32", "bfloat16")),
            *(("gdn-96", 8, "float16", "float16"), ("mamba2-128", 32, "bfloat16", "float16")),
        ),
    ],
)
def test_replay(name, window, activation, state_dtype, rng, cupy):
    layer, length, exact = LAYERS[name], 2 * window + 5, TIPPED.get(state_dtype, EXACT)
    gate = named_gate(name, layer, rng)
    options = {"activation_dtype": activation, "output_dtype": "float32", "gate": gate, "state_dtype": state_dtype}
    device = poisoned(ReplayEngine(layer, 5, window, **options))
    oracle = reference.ReplayEngine(layer, 5, window, EngineOptions(state_dtype=state_dtype))
    tokens = make_tokens(layer, 4, length, activation, rng, gate=gate)
    got, want, where = run_pair(device, oracle, tokens, slot_table(4, 5, length, rng), activation, gate)
    assert np.unique(where[:, -1]).size > 1  # the rows are at different tokens of their windows
    flushes = where == window - 1
    assert flushes.any()
    assert relative(got[flushes], want[flushes]) < exact
    assert relative(got[~flushes], want[~flushes]) < exact
    assert np.array_equal(device.position.get(), oracle.position)
    device.flush(cupy.arange(5))
    oracle.flush(np.arange(5))
    check_states(device, oracle, state_dtype)


@pytest.mark.parametrize(
    ("name", "kind", "stored", "state_dtype"),
    [
        *((name, kind, "bfloat16", "float32") for name in KINDS for kind in ("lowrank", "ridge")),
        *(("mamba2-80", "lowrank", "float32", "float32"), ("gdn-96", "ridge", "float32", "float32")),
        *(("kda-64", "ridge", "float32", "float32"), ("kda-64-bounded", "lowrank", "float32", "float32")),
        *((name, "ridge", "bfloat16", "bfloat16") for name in ("mamba2", "kda")),
        ("gdn", "lowrank", "bfloat16", "float16"),
        *(("olmo-hybrid", "ridge", "bfloat16", "float32"), ("olmo-hybrid", "lowrank", "int8", "float32")),
        *(("falcon-h1", "ridge", "int8", "float32"), ("nemotron-h-56b", "lowrank", "int8", "bfloat16")),
        *(("gla", "ridge", "bfloat16", "float32"), ("gla-raw", "lowrank", "float32", "float32")),
        *thorough(
            *(("mamba2-80", "ridge", "float32", "float32"), ("gdn-96", "lowrank", "float32", "float32")),
            *(("kda-64", "lowrank", "float32", "float32"), ("mamba2-128", "lowrank", "bfloat16", "float32")),
            *(("gdn", "ridge", "bfloat16", "bfloat16"), ("mamba2", "lowrank", "bfloat16", "float16")),
            ("kda-raw", "lowrank", "bfloat16", "float16"),
            *(("mamba2-80", "ridge", "float32", "bfloat16"), ("gdn-96", "lowrank", "float32", "float16")),
            *(("kda-64", "ridge", "float32", "bfloat16"), ("mamba2-128", "lowrank", "bfloat16", "bfloat16")),
        ),
    ],
)
def test_sketch(name, kind, stored, state_dtype, rng, cupy):
    """Mixed ranks, full-state heads, padding, staggered windows; gates of 0, -50 and -inf among the rest. Sketches are
    made of the rounded states.
    """
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng, map=kind, ridge=RIDGE[kind])
    check_sketch(plan, stored, "bfloat16", rng, named_gate(name, layer, rng), state_dtype=state_dtype)


@pytest.mark.parametrize(
    ("name", "window", "kind", "activation", "stored"),
    [
        ("mamba2-80", 4, "ridge", "float16", "float32"),
        ("gdn", 8, "lowrank", "bfloat16", "bfloat16"),
        ("kda-64", 8, "lowrank", "bfloat16", "float16"),
        ("kda-raw", 4, "lowrank", "bfloat16", "float32"),
        *thorough(
            ("gdn", 8, "lowrank", "bfloat16", "float32"),
            ("kda-64-bounded", 8, "lowrank", "float32", "float32"),
        ),
    ],
)
def test_steps_of_mixed_sizes(name, window, kind, activation, stored, rng, cupy):
    """Steps of any number of rows and tokens, windows that end inside a step, and flushes ahead of time."""
    layer, exact = LAYERS[name], TIPPED.get(stored, EXACT)
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng, map=kind, ridge=RIDGE[kind], window=window)
    gate = named_gate(name, layer, rng)
    options = {"activation_dtype": activation, "output_dtype": "float32", "gate": gate, "state_dtype": stored}
    device = SketchEngine(plan, 5, **options)
    oracle = reference.SketchEngine(plan, 5, options=EngineOptions(state_dtype=stored))
    poisoned(device).sketch.view(np.uint8)[...] = 0xFF
    device.reset(cupy.arange(5))
    load_same(device, oracle, rng)
    got, want, ends = run_mixed(device, oracle, layer, 3 * window + 20, activation, rng, gate)
    full_state = plan.ranks == FULL_STATE
    assert ends.any()
    assert not ends.all()
    assert relative(got[ends], want[ends]) < exact
    assert relative(got[~ends][:, ~full_state], want[~ends][:, ~full_state]) < STORED["bfloat16"]
    full = full_reads("bfloat16", stored)
    assert not full_state.any() or relative(got[~ends][:, full_state], want[~ends][:, full_state]) < full
    device.flush(cupy.arange(5))
    oracle.flush(np.arange(5))
    check_states(device, oracle, stored)


class GivenReads(reference.SketchEngine):
    """Reads through given maps ``(heads, G, K)`` and sketches whose columns ``(heads, G)`` are constant over V."""

    def _read(self, slot, queries):
        return np.einsum("hg,hgk,hk->h", self.columns, self.maps, queries)[:, None].repeat(self.layer.value_dim, 1)


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda", "kda-64"])
def test_reads_of_what_bf16_holds(name, rng, cupy):
    """bf16 represents these sketches and maps: the error is what two slices of weights and queries leave out."""
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize([9, 16, 3], layer.heads), rng, map="ridge")
    device, oracle = poisoned(SketchEngine(plan, 3, output_dtype="float32")), GivenReads(plan, 3)
    oracle.columns = round_to(rng.standard_normal((layer.heads, 16)), "bfloat16")
    oracle.maps = round_to(rng.standard_normal((layer.heads, 16, layer.key_dim)), "bfloat16")
    load = device.load_state

    def given(state, slots):
        load(state, slots)
        stored = device.sketch.view(ml_dtypes.bfloat16) if device.sketch.dtype == np.uint16 else device.sketch
        for head, (rank, offset, _, _) in enumerate(device._heads.get()):
            oracle.columns[head, rank:] = 0
            column, row = np.repeat(oracle.columns[head, :rank], layer.value_dim), oracle.maps[head, :rank].reshape(-1)
            both = np.concatenate([column, row])
            stored[:, offset : offset + both.size] = cupy.asarray(both.astype(ml_dtypes.bfloat16))

    device.load_state = given
    start = rng.standard_normal((3, *layer.state_shape)).astype(np.float32)
    assert compare_window(device, oracle, start, "bfloat16", rng, cupy) < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layer", "kind", "window", "activation", "state_dtype", "blocks"),
    [
        (Layer("kda", 3, 64, 80, 3), "lowrank", 16, "bfloat16", "float32", None),
        (Layer("kda", 2, 128, 96, 1), "ridge", 8, "bfloat16", "float32", None),
        (Layer("kda", 2, 128, 128, 2), "ridge", 32, "bfloat16", "float32", None),
        (Layer("kda", 2, 64, 80, 2), "ridge", 4, "float32", "float32", None),
        (Layer("gdn", 4, 64, 80, 2), "ridge", 16, "float16", "float32", None),
        (Layer("gdn", 2, 128, 128, 2), "lowrank", 32, "bfloat16", "float32", None),
        (Layer("mamba2", 4, 128, 96, 2), "lowrank", 32, "float32", "float32", None),
        (Layer("mamba2", 6, 128, 64, 2), "ridge", 4, "bfloat16", "float32", None),
        (Layer("mamba2", 4, 64, 96, 4), "lowrank", 8, "bfloat16", "float32", None),
        (Layer("gdn", 3, 128, 128, 1), "lowrank", 16, "bfloat16", "float32", None),
        (Layer("gdn", 4, 64, 80, 2), "lowrank", 16, "bfloat16", "float32", None),
        (Layer("mamba2", 4, 64, 96, 2), "ridge", 8, "bfloat16", "float32", None),
        *(
            (*shape, blocks)  # 1: one block computes all tiles in turn
            for blocks in (None, 1)
            for shape in (
                (Layer("kda", 3, 64, 80, 3), "lowrank", 16, "bfloat16", "bfloat16"),
                (Layer("gdn", 4, 64, 80, 2), "ridge", 8, "float16", "float16"),
                (Layer("gdn", 2, 128, 128, 2), "lowrank", 32, "bfloat16", "float16"),
                (Layer("mamba2", 4, 128, 96, 2), "lowrank", 32, "float32", "bfloat16"),
                (Layer("mamba2", 6, 128, 64, 2), "ridge", 4, "bfloat16", "bfloat16"),
            )
        ),
    ],
    ids=lambda x: f"{x.kind}-{x.value_dim}" if isinstance(x, Layer) else None,
)
def test_sketch_of_other_shapes(layer, kind, window, activation, state_dtype, blocks, rng, cupy):
    """Shapes with other roles, groups, places and buffers in the flush, and reads with one head per tile."""
    plan = make_plan(layer, np.resize(OTHER_RANKS, layer.heads), rng, map=kind, ridge=RIDGE[kind], window=window)
    check_sketch(plan, "bfloat16", activation, rng, blocks=blocks, state_dtype=state_dtype)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layer", "kind", "window", "stored", "output"),  # whose outputs in float32 other tests compute too
    [
        (LAYERS["mamba2-80"], "lowrank", 16, "float32", "bfloat16"),
        (LAYERS["mamba2-128"], "lowrank", 16, "bfloat16", "float16"),
        (LAYERS["gdn-96"], "lowrank", 16, "float32", "float16"),
        (LAYERS["kda-64"], "lowrank", 16, "float32", "bfloat16"),
        (Layer("kda", 3, 64, 80, 3), "lowrank", 16, "bfloat16", "float16"),
        (Layer("mamba2", 4, 64, 96, 2), "ridge", 8, "bfloat16", "float16"),
    ],
    ids=lambda x: f"{x.kind}-{x.value_dim}" if isinstance(x, Layer) else None,
)
def test_output_types(layer, kind, window, stored, output, rng, cupy):
    """Outputs of 16 bits are those in float32, rounded: reads gather them in other pieces."""
    ranks = RANKS[layer.kind] if layer in LAYERS.values() else OTHER_RANKS
    plan = make_plan(layer, np.resize(ranks, layer.heads), rng, map=kind, ridge=RIDGE[kind], window=window)
    tokens = tokens_to_device(make_tokens(layer, 3, window + 1, "bfloat16", rng), "bfloat16")
    start = cupy.asarray(rng.standard_normal((3, *layer.state_shape)).astype(np.float32))
    outs = []
    for type_ in ("float32", output):
        engine = poisoned(SketchEngine(plan, 3, stored, output_dtype=type_))
        engine.load_state(start, cupy.arange(3))
        shape = (3, window + 1, layer.heads, layer.value_dim)
        outs.append(cupy.empty(shape, ml_dtypes.bfloat16 if type_ == "bfloat16" else type_))
        engine.step(tokens, cupy.arange(3), outs[-1])
    assert np.array_equal(outs[1].get(), outs[0].get().astype(outs[1].dtype))


@pytest.mark.parametrize("neighbour", [FULL_STATE, 4])
def test_an_infinite_value_stays_in_its_tile(neighbour, rng, cupy):
    """It makes a part of both heads not finite that share matrix products; a full-state head shares none."""
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
    want[0, 1:, 0] = 1 if neighbour == FULL_STATE else 2  # every 16th channel of 32
    want[0, 1:, 1] = 0 if neighbour == FULL_STATE else 2
    assert np.array_equal(spoilt, want)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layer", "kind", "window", "activation"),
    [
        (Layer("kda", 3, 128, 128, 3), "ridge", 16, "bfloat16"),
        (Layer("kda", 3, 128, 128, 3), "lowrank", 16, "bfloat16"),
        (Layer("kda", 3, 64, 80, 3), "lowrank", 16, "bfloat16"),
        (Layer("kda", 3, 128, 128, 3), "lowrank", 32, "bfloat16"),
        (Layer("gdn", 3, 128, 64, 1), "ridge", 8, "float16"),
    ],
    ids=lambda x: x.kind if isinstance(x, Layer) else None,
)
def test_epilogue_warps_in_turn(layer, kind, window, activation, rng, cupy):
    """Ranks up to 16, with room for sums and columns of two tiles; one block computes all tiles in turn."""
    plan = make_plan(layer, [9, FULL_STATE, 16], rng, map=kind, ridge=RIDGE[kind], window=window)
    check_sketch(plan, "bfloat16", activation, rng, blocks=1)


@pytest.mark.parametrize(
    ("kind", "state_dtype"), [("lowrank", "float32"), ("ridge", "float32"), *thorough(("lowrank", "float16"))]
)
def test_sketch_in_little_shared_memory(kind, state_dtype, rng, host, monkeypatch):
    """One place for the state and one buffer of prepared keys, as on sm_80."""
    monkeypatch.setenv("SKETCHSSM_CUDA_OPTIONS", "-DHOST_MOST_SHARED=166912")
    monkeypatch.setattr(modules, "_modules", {})
    plan = make_plan(LAYERS["kda"], np.array([9, FULL_STATE, 3]), rng, map=kind, ridge=RIDGE[kind])
    check_sketch(plan, "bfloat16", "bfloat16", rng, state_dtype=state_dtype)
