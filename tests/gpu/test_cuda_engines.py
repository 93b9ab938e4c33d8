"""The CUDA engines against the float64 reference, on a device."""

import math

import numpy as np
import pytest
from gpu.cuda_support import (
    EXACT,
    LAYERS,
    RANKS,
    STORED,
    ReplayEngine,
    SketchEngine,
    StandardEngine,
    error,
    make_plan,
    make_tokens,
    named_gate,
    run_pair,
    slot_table,
    tokens_to_device,
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
