"""The CUDA engines against the float64 reference, on a device."""

import math

import numpy as np
import pytest
from gpu.cuda_support import (
    EXACT,
    LAYERS,
    RANKS,
    SINGLE_HEADS,
    STORED,
    ReplayEngine,
    SketchEngine,
    StandardEngine,
    check_raw_gates,
    error,
    make_plan,
    make_tokens,
    named_gate,
    run_pair,
    slot_table,
    tokens_to_device,
    with_blocks,
)

from sketchssm.layer.recurrence import FULL_STATE
from sketchssm.reference import engines as reference

# engines without a warmup() compile at their first step
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:loading kernel:RuntimeWarning")]


@pytest.fixture(autouse=True)
def poison(cupy):
    """Fresh device memory holds NaN."""
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    blocks = [cupy.full(1 << 20, np.nan, dtype=np.float32) for _ in range(8)]
    del blocks
    yield


def poison_rings(engine):
    for ring in engine.ring:
        ring.view(np.uint8)[...] = 0xFF


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("activation", ["bfloat16", "float32"])
def test_standard(name, activation, rng, cupy):
    layer = LAYERS[name]
    gate = named_gate(name, layer, rng)
    device = StandardEngine(layer, 6, activation_dtype=activation, output_dtype="float32", gate=gate)
    oracle = reference.StandardEngine(layer, 6)
    tokens = make_tokens(layer, 4, 60, activation, rng, gate=gate)
    got, want, _ = run_pair(device, oracle, layer, tokens, slot_table(4, 6, 60, rng), activation, gate)
    assert error(got, want) < EXACT
    assert error(device.state.get(), oracle.state) < EXACT
    several = StandardEngine(layer, 6, activation_dtype=activation, output_dtype="float32", gate=gate)
    out = cupy.full(got.shape, np.nan, dtype=np.float32)
    several.step(tokens_to_device(tokens, activation, gate), cupy.arange(4), out)
    single = StandardEngine(layer, 6, activation_dtype=activation, output_dtype="float32", gate=gate)
    alone, _, _ = run_pair(
        single, reference.StandardEngine(layer, 6), layer, tokens, np.tile(np.arange(4), (60, 1)), activation, gate
    )
    assert np.array_equal(out.get(), alone)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(  # every window with one type, the longest with the widest, every type with one window
    ("activation", "window"),
    [*(("bfloat16", window) for window in (4, 8, 16, 32)), ("float16", 16), ("float32", 16), ("float32", 32)],
)
def test_replay(name, activation, window, rng, cupy):
    layer = LAYERS[name]
    gate = named_gate(name, layer, rng)
    device = ReplayEngine(layer, 6, window, activation_dtype=activation, output_dtype="float32", gate=gate)
    poison_rings(device)
    oracle = reference.ReplayEngine(layer, 6, window)
    tokens = make_tokens(layer, 4, 5 * window, activation, rng, gate=gate)
    table = slot_table(4, 6, 5 * window, rng)
    got, want, where = run_pair(device, oracle, layer, tokens, table, activation, gate)
    flushes = where == window - 1
    assert flushes.any()
    assert error(got[flushes], want[flushes]) < EXACT
    assert error(got[~flushes], want[~flushes]) < EXACT
    assert np.array_equal(device.position.get(), oracle.position)
    device.flush(cupy.arange(6))
    oracle.flush(np.arange(6))
    assert error(device.state.get(), oracle.state) < EXACT


# Kernels for `lowrank` and `prior` differ in the residual only, those for `ridge` and `exact` in nothing: each pair
# meets both formats.
@pytest.mark.parametrize("name", [*LAYERS, *SINGLE_HEADS])
@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        *((kind, "bfloat16") for kind in ("lowrank", "offline", "ridge")),
        *((kind, "float32") for kind in ("prior", "offline", "exact")),
    ],
)
def test_sketch(name, kind, stored, rng, cupy):
    layer = (LAYERS | SINGLE_HEADS)[name]
    ranks = np.resize(RANKS[layer.kind], layer.heads)
    ridge = {"lowrank": 0.1, "prior": 0.01, "ridge": 0.001}.get(kind, 0.0)
    plan = make_plan(layer, ranks, rng, map=kind, ridge=ridge)
    activation = "bfloat16"
    gate = named_gate(name, layer, rng)
    device = SketchEngine(plan, 6, stored, activation_dtype=activation, output_dtype="float32", gate=gate)
    poison_rings(device)
    device.sketch.view(np.uint8)[...] = 0xFF
    device.reset(cupy.arange(6))
    oracle = reference.SketchEngine(plan, 6)
    start = rng.standard_normal((6, *layer.state_shape)).astype(np.float32)
    device.load_state(cupy.asarray(start), cupy.arange(6))
    oracle.load_state(start.astype(np.float64), np.arange(6))
    length = 40
    tokens = make_tokens(layer, 4, length, activation, rng, gate=gate)
    got, want, where = run_pair(device, oracle, layer, tokens, slot_table(4, 6, length, rng), activation, gate)
    flushes = where == plan.window - 1
    assert flushes.any()
    assert error(got[flushes], want[flushes]) < EXACT
    assert error(device.state.get(), oracle.state) < EXACT
    full_state = ranks == FULL_STATE
    reads = ~flushes
    if full_state.any():
        assert error(got[reads][:, full_state], want[reads][:, full_state]) < EXACT
    assert error(got[reads][:, ~full_state], want[reads][:, ~full_state]) < STORED[stored]


@pytest.mark.parametrize("kind", ["lowrank", "ridge"])
@pytest.mark.parametrize(
    ("name", "activation", "window"),
    [(name, "bfloat16", 16) for name in ("mamba2", "gdn", "kda", "kda-64")]
    + [("mamba2", "float16", 8), ("gdn", "float32", 16), ("gdn", "bfloat16", 32), ("kda", "bfloat16", 32)],
)
def test_claims_of_a_flush_do_not_matter(name, activation, window, kind, rng, cupy):
    """Bitwise equal results with three blocks for all tiles and with at most one tile per block."""
    layer, batch = LAYERS[name], 50
    ranks = np.resize([*RANKS[layer.kind], FULL_STATE], layer.heads)
    plan = make_plan(layer, ranks, rng, map=kind, ridge=0.01, window=window)
    tokens = tokens_to_device(make_tokens(layer, batch, 33, activation, rng), activation)
    start = cupy.asarray(rng.standard_normal((batch, *layer.state_shape)).astype(np.float32))
    results = []
    for blocks in (3, 1000):
        engine = with_blocks(SketchEngine(plan, batch, activation_dtype=activation, output_dtype="float32"), blocks)
        out = cupy.full((batch, 33, layer.heads, layer.value_dim), np.nan, np.float32)
        engine.load_state(start, cupy.arange(batch))
        engine.step(tokens, cupy.arange(batch)[::-1].copy(), out)
        engine.flush(cupy.arange(batch))
        results.append([x.get() for x in (out, engine.state, engine.sketch, engine.position)])
    assert all(np.array_equal(*pair) for pair in zip(*results, strict=True))
    assert all(np.isfinite(x).all() for x in results[0][:2])


@pytest.mark.parametrize("pivots", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dependent", [False, True])
def test_pivot_counts(pivots, dependent, rng, cupy):
    """Any pivot count; states of rank 3 make all further sketch columns depend on the first ones."""
    layer = LAYERS["gdn"]
    plan = make_plan(layer, [12, 3, 9, FULL_STATE], rng, pivots=pivots)
    device, oracle = SketchEngine(plan, 3, "float32", output_dtype="float32"), reference.SketchEngine(plan, 3)
    start = rng.standard_normal((3, *layer.state_shape))
    if dependent:
        start = rng.standard_normal((3, layer.heads, 128, 3)) @ rng.standard_normal((3, layer.heads, 3, 128))
        start[0] = 0
    start = start.astype(np.float32)
    device.load_state(cupy.asarray(start), cupy.arange(3))
    oracle.load_state(start.astype(np.float64), np.arange(3))
    tokens = make_tokens(layer, 3, 4, "bfloat16", rng, hard_gates=False)
    got, want, _ = run_pair(device, oracle, layer, tokens, np.tile(np.arange(3), (4, 1)), "bfloat16")
    assert error(got, want) < 1e-3 if dependent else error(got, want) < STORED["float32"]


def test_outputs_of_padding_are_zero(rng, cupy):
    layer = LAYERS["gdn"]
    device = SketchEngine(make_plan(layer, [7, FULL_STATE, 16, 2], rng), 4, output_dtype="float32")
    tokens = tokens_to_device(make_tokens(layer, 3, 1, "bfloat16", rng), "bfloat16")
    out = cupy.full((3, 1, 4, 128), np.nan, dtype=np.float32)
    device.step(tokens, cupy.asarray([2, -1, 0]), out)
    host = out.get()
    assert np.all(host[1] == 0)
    assert np.isfinite(host).all()
    assert device.position.get().tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda", "kda-raw"])
def test_graph_replay_with_changing_slots(name, rng, cupy):
    """One captured step is replayed thousands of times, with slots and inputs changed in place."""
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng)
    gate = named_gate(name, layer, rng)
    eager, captured = (SketchEngine(plan, 6, output_dtype="float32", gate=gate) for _ in range(2))
    tokens = make_tokens(layer, 4, 1200, "bfloat16", rng, gate=gate)
    table = slot_table(4, 6, 1200, rng)
    first = tokens_to_device(type(tokens)(*(x if x is None else x[:, :1] for x in tokens)), "bfloat16", gate)
    slots = cupy.full(4, -1, dtype=np.int64)
    out = cupy.empty((4, 1, layer.heads, layer.value_dim), dtype=np.float32)
    captured.warmup()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        captured.step(first, slots, out)
        graph = stream.end_capture()
    cupy.cuda.Device().synchronize()
    for t in range(1200):
        now = tokens_to_device(type(tokens)(*(x if x is None else x[:, t : t + 1] for x in tokens)), "bfloat16", gate)
        expected = cupy.empty_like(out)
        eager.step(now, cupy.asarray(table[t]), expected)
        for old, new in zip(first, now, strict=True):
            if old is not None:
                old[...] = new
        slots[...] = cupy.asarray(table[t])
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        if t % 97 == 0 or t > 1180:
            assert np.array_equal(out.get(), expected.get())
    assert np.array_equal(captured.state.get(), eager.state.get())


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda", "kda-raw"])
def test_rows_do_not_depend_on_their_batch(name, rng, cupy):
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng)
    gate = named_gate(name, layer, rng)
    alone, together = (SketchEngine(plan, 64, output_dtype="float32", gate=gate) for _ in range(2))
    tokens = make_tokens(layer, 64, 40, "bfloat16", rng, gate=gate)
    for t in range(40):
        step = type(tokens)(*(x if x is None else x[:, t : t + 1] for x in tokens))
        now = tokens_to_device(step, "bfloat16", gate)
        one = tokens_to_device(type(tokens)(*(x if x is None else x[37:38] for x in step)), "bfloat16", gate)
        out, single = (
            cupy.empty((64, 1, layer.heads, layer.value_dim), np.float32),
            cupy.empty((1, 1, layer.heads, layer.value_dim), np.float32),
        )
        together.step(now, cupy.arange(64), out)
        alone.step(one, cupy.asarray([5]), single)
        assert np.array_equal(out.get()[37], single.get()[0])
    assert np.array_equal(together.state.get()[37], alone.state.get()[5])


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda-raw"])
def test_rows_of_standard_decode_do_not_depend_on_their_batch(name, rng, cupy):
    from sketchssm.cuda.standard import MANY_WARPS

    layer, batch = LAYERS[name], 300
    gate = named_gate(name, layer, rng)
    alone, together = (StandardEngine(layer, batch, output_dtype="float32", gate=gate) for _ in range(2))
    assert batch * layer.heads * layer.value_dim // together.value_rows >= MANY_WARPS  # of another size, then
    tokens = make_tokens(layer, batch, 8, "bfloat16", rng, gate=gate)
    one = type(tokens)(*(x if x is None else x[137:138] for x in tokens))
    out, single = (cupy.empty((n, 8, layer.heads, layer.value_dim), np.float32) for n in (batch, 1))
    together.step(tokens_to_device(tokens, "bfloat16", gate), cupy.arange(batch), out)
    alone.step(tokens_to_device(one, "bfloat16", gate), cupy.asarray([5]), single)
    assert np.array_equal(out.get()[137], single.get()[0])
    assert np.array_equal(together.state.get()[137], alone.state.get()[5])


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_slot_offsets_beyond_32_bits(name, rng, cupy):
    """Six slots of a pool, almost 2 GiB from slot to slot: element offsets pass 2^31 at the last."""
    layer, slots = LAYERS[name], 6
    stride = (1 << 29) - 64  # elements; more bytes from slot to slot are refused
    pool = cupy.full((slots - 1) * stride + math.prod(layer.state_shape), np.nan, dtype=np.float32)
    shape = (slots, *layer.state_shape)
    strides = (4 * stride, 4 * layer.value_dim * layer.key_dim, 4 * layer.key_dim, 4)
    for build, oracle_type in (
        (lambda state: StandardEngine(layer, slots, memory={"state": state}, output_dtype="float32"), "standard"),
        (
            lambda state: SketchEngine(
                make_plan(layer, [7] * layer.heads, rng), slots, memory={"state": state}, output_dtype="float32"
            ),
            "sketch",
        ),
    ):
        state = cupy.ndarray(shape, np.float32, pool.data, strides=strides)
        state[...] = 0
        device = build(state)
        oracle = (
            reference.StandardEngine(layer, slots)
            if oracle_type == "standard"
            else reference.SketchEngine(device.plan, slots)
        )
        tokens = make_tokens(layer, 2, 17, "bfloat16", rng)
        table = np.tile(np.array([slots - 1, 0]), (17, 1))
        run_pair(device, oracle, layer, tokens, table, "bfloat16")
        assert error(device.state.get(), oracle.state) < EXACT


def test_long_runs_stay_exact(rng, cupy):
    """4096 tokens of slow decay: flush outputs and states hold float32 accuracy."""
    from sketchssm.reference.recurrence import run

    for name in ("mamba2", "gdn", "kda", "kda-raw", "kda-64-bounded"):
        layer = LAYERS[name]
        gate = named_gate(name, layer, rng)
        tokens = make_tokens(layer, 2, 4096, "bfloat16", rng, hard_gates=False, gate=gate)
        want, state = run(layer, *(tokens if gate is None else tokens._replace(g=gate.log_decays(tokens.g))))
        options = {"output_dtype": "float32", "gate": gate}
        for engine in (StandardEngine(layer, 2, **options), ReplayEngine(layer, 2, 16, **options)):
            out = cupy.empty((2, 4096, layer.heads, layer.value_dim), dtype=np.float32)
            engine.step(tokens_to_device(tokens, "bfloat16", gate), cupy.arange(2), out)
            at = slice(15, None, 16)
            figures = error(out.get()[:, at], want[:, at]), error(out.get(), want), error(engine.state.get(), state)
            print(
                name,
                type(engine).__name__,
                "errors of flush outputs, all outputs, state:",
                *map("{:.2e}".format, figures),
            )
            assert max(figures) < EXACT


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("rate_log", [0.7, 6.0, 20.0, 40.0])
def test_what_raw_gates_make(rate_log, bound, cupy):
    check_raw_gates(cupy, rate_log, bound)
