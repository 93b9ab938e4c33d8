"""16-bit states of the CUDA engines against the float64 reference, which rounds alike, on a device."""

import numpy as np
import pytest
from gpu.cuda_support import (
    LAYERS,
    REFRESHED,
    TIPPED,
    ReplayEngine,
    SketchEngine,
    StandardEngine,
    error,
    make_plan,
    make_tokens,
    named_gate,
    refreshed_plan,
    run_pair,
    slot_table,
    tokens_to_device,
    with_blocks,
)

from sketchssm.layer.recurrence import FULL_STATE
from sketchssm.reference import engines as reference

# engines without a warmup() compile at their first step
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:loading kernel:RuntimeWarning")]

# bf16 sketches and maps (8 bits): a few roundings of relative size 2^-9 in a row
SKETCHED = 1.2e-2


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("stored", TIPPED)
def test_standard(name, stored, rng, cupy):
    layer = LAYERS[name]
    gate = named_gate(name, layer, rng)
    device = StandardEngine(layer, 6, output_dtype="float32", gate=gate, state_dtype=stored)
    oracle = reference.StandardEngine(layer, 6, state_dtype=stored)
    tokens = make_tokens(layer, 4, 12, "bfloat16", rng, gate=gate)
    got, want, _ = run_pair(device, oracle, layer, tokens, slot_table(4, 6, 12, rng), "bfloat16", gate)
    assert error(got, want) < TIPPED[stored]
    assert error(device.state.get().astype(np.float64), oracle.state) < TIPPED[stored]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(  # how numbers of 16 bits are rounded does not depend on the window
    ("stored", "window", "activation"),
    [
        *(("bfloat16", window, "bfloat16") for window in (4, 16)),
        *(("float16", 8, "float16"), ("float16", 16, "bfloat16"), ("bfloat16", 32, "float32")),
    ],
)
def test_replay(name, stored, window, activation, rng, cupy):
    layer, length = LAYERS[name], 2 * window + 5
    gate = named_gate(name, layer, rng)
    settings = {"activation_dtype": activation, "output_dtype": "float32", "gate": gate, "state_dtype": stored}
    device = ReplayEngine(layer, 6, window, **settings)
    oracle = reference.ReplayEngine(layer, 6, window, state_dtype=stored)
    tokens = make_tokens(layer, 4, length, activation, rng, gate=gate)
    got, want, _ = run_pair(device, oracle, layer, tokens, slot_table(4, 6, length, rng), activation, gate)
    assert error(got, want) < TIPPED[stored]
    device.flush(cupy.arange(6))
    oracle.flush(np.arange(6))
    assert error(device.state.get().astype(np.float64), oracle.state) < TIPPED[stored]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", ["lowrank", "ridge"])
@pytest.mark.parametrize("stored", TIPPED)
def test_sketch(name, kind, stored, rng, cupy):
    """Flushes and states are exact but for the rounding; one block gives the same bits as many."""
    layer = LAYERS[name]
    gate = named_gate(name, layer, rng)
    plan = make_plan(layer, np.resize([7, 1, FULL_STATE, 16, 9], layer.heads), rng, map=kind)
    settings = {"output_dtype": "float32", "gate": gate, "state_dtype": stored}
    length = 2 * plan.window + 3
    start = rng.standard_normal((6, *layer.state_shape)).astype(np.float32)
    tokens = make_tokens(layer, 6, length, "bfloat16", rng, gate=gate)
    device, oracle = SketchEngine(plan, 6, **settings), reference.SketchEngine(plan, 6, state_dtype=stored)
    device.load_state(cupy.asarray(start), cupy.arange(6))
    oracle.load_state(start.astype(np.float64), np.arange(6))
    assert np.array_equal(device.state.get().astype(np.float64), oracle.state)
    table = np.tile(np.arange(6), (length, 1))
    got, want, where = run_pair(device, oracle, layer, tokens, table, "bfloat16", gate)
    exact = (where == plan.window - 1)[:, :, None] | (plan.ranks == FULL_STATE)
    assert error(got[exact], want[exact]) < TIPPED[stored]
    assert error(got[~exact], want[~exact]) < SKETCHED
    assert error(device.state.get().astype(np.float64), oracle.state) < TIPPED[stored]
    few = with_blocks(SketchEngine(plan, 6, **settings), 1)
    few.load_state(cupy.asarray(start), cupy.arange(6))
    out = cupy.full(got.shape, np.nan, dtype=np.float32)
    few.step(tokens_to_device(tokens, "bfloat16", gate), cupy.arange(6), out)
    assert np.array_equal(out.get(), got)
    assert np.array_equal(few.state.get(), device.state.get())


@pytest.mark.parametrize(
    ("name", "kind", "stored", "window", "windows", "activation"),
    [
        ("mamba2", "ridge", "bfloat16", 16, 4, "bfloat16"),
        ("gdn", "ridge", "bfloat16", 16, 4, "bfloat16"),
        ("gdn", "lowrank", "float16", 8, 3, "float16"),
        ("kda", "ridge", "bfloat16", 16, 4, "bfloat16"),
        ("kda-raw", "lowrank", "float16", 8, 8, "bfloat16"),
        ("mamba2-80", "offline", "bfloat16", 4, 8, "float32"),
    ],
)
def test_refreshes(name, kind, stored, window, windows, activation, rng, cupy):
    """A state is rounded once at a flush of several windows; one block gives the same bits as many."""
    layer = LAYERS[name]
    gate = named_gate(name, layer, rng)
    plan = refreshed_plan(layer, [7, 16, 3, 33], rng, kind, window, windows)
    settings = {"output_dtype": "float32", "gate": gate, "state_dtype": stored, "activation_dtype": activation}
    length = 2 * plan.flush_every + 3
    start = rng.standard_normal((6, *layer.state_shape)).astype(np.float32)
    tokens = make_tokens(layer, 6, length, activation, rng, gate=gate)
    device, oracle = SketchEngine(plan, 6, **settings), reference.SketchEngine(plan, 6, state_dtype=stored)
    device.load_state(cupy.asarray(start), cupy.arange(6))
    oracle.load_state(start.astype(np.float64), np.arange(6))
    assert np.array_equal(device.state.get().astype(np.float64), oracle.state)
    table = np.tile(np.arange(6), (length, 1))
    got, want, where = run_pair(device, oracle, layer, tokens, table, activation, gate)
    flushes = where == plan.flush_every - 1
    assert error(got[flushes], want[flushes]) < TIPPED[stored]
    # twice the host's bound, as in test_cuda_refresh.py
    assert error(got[~flushes], want[~flushes]) < 2 * REFRESHED["bfloat16"]
    device.flush(cupy.arange(6))
    oracle.flush(np.arange(6))
    assert error(device.state.get().astype(np.float64), oracle.state) < TIPPED[stored]
    few = with_blocks(SketchEngine(plan, 6, **settings), 1)
    few.load_state(cupy.asarray(start), cupy.arange(6))
    out = cupy.full(got.shape, np.nan, dtype=np.float32)
    few.step(tokens_to_device(tokens, activation, gate), cupy.arange(6), out)
    few.flush(cupy.arange(6))
    assert np.array_equal(out.get(), got)
    assert np.array_equal(few.state.get(), device.state.get())
