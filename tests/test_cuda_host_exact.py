"""Steps of few rows, which the CUDA backend decodes exactly: as `test_cuda_host.py`, without a GPU."""

import numpy as np
import pytest
from gpu.cuda_support import error, evaluated, make_plan, make_tokens, named_gate, run_mixed, tokens_to_device
from test_cuda_host import EXACT, LAYERS, RANKS, RIDGE, STORED, cupy, poisoned  # noqa: F401

from sketchssm.cuda import standard
from sketchssm.cuda.engines import SketchEngine
from sketchssm.recurrence import DENSE, Layer
from sketchssm.reference import engines as reference

pytestmark = pytest.mark.filterwarnings("ignore:loading kernel:RuntimeWarning")


@pytest.mark.parametrize(
    ("name", "window", "kind", "activation"),
    [
        ("mamba2", 16, "lowrank", "bfloat16"),
        ("mamba2-80", 4, "ridge", "float16"),
        ("gdn", 8, "prior", "bfloat16"),
        ("gdn-96", 32, "lowrank", "float32"),
        ("kda", 16, "ridge", "bfloat16"),
        ("kda-raw", 4, "lowrank", "bfloat16"),
        ("kda-raw", 8, "lowrank", "float16"),
        ("kda-64-bounded", 8, "lowrank", "float32"),
    ],
)
def test_small_steps_among_others(name, window, kind, activation, rng, cupy, monkeypatch):  # noqa: F811
    """Slots go from one way of decoding to the other at any place of their windows."""
    if window == 16:  # in blocks as many rows have them
        monkeypatch.setattr(standard, "MANY_WARPS", 1)
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng, map=kind, ridge=RIDGE[kind], window=window)
    gate = named_gate(name, layer, rng)
    device = SketchEngine(plan, 5, activation=activation, output="float32", gate=gate, exact_rows=2)
    oracle = reference.SketchEngine(evaluated(plan), 5, exact_rows=2)
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


def test_the_ring_of_an_exact_slot_changes_nothing(rng, cupy):  # noqa: F811
    """Flushes of states that all tokens are in, whatever infinite values the ring has held, leave them bit for bit."""
    layer = Layer("gdn", 4, 64, 64, 2)
    device = SketchEngine(make_plan(layer, [3, DENSE, 5, 2], rng, window=8), 2, output="float32", exact_rows=1)
    device.reset(cupy.arange(2))
    tokens = make_tokens(layer, 2, 4, "bfloat16", rng)
    tokens.v[:, 2] = np.inf
    tokens.g[:, 3] = -np.inf
    outs = [cupy.zeros((rows, 4, 4, 64), np.float32) for rows in (2, 1)]
    device.step(tokens_to_device(tokens, "bfloat16"), cupy.arange(2), outs[0])
    device.load_state(cupy.asarray(rng.standard_normal((2, *layer.state_shape)).astype(np.float32)), cupy.arange(2))
    last = make_tokens(layer, 1, 4, "bfloat16", rng)
    device.step(tokens_to_device(last, "bfloat16"), cupy.asarray([1]), outs[1])
    assert device.position.tolist() == [0, 8]
    before = device.state.get()
    device.flush(cupy.asarray([1]))
    assert device.position.tolist() == [0, 0]
    assert np.array_equal(device.state, before)


def test_no_tokens(rng, cupy):  # noqa: F811
    """Nothing is launched for them, and cursors stay."""
    layer = Layer("gdn", 4, 64, 64, 2)
    device = SketchEngine(make_plan(layer, [3, DENSE, 5, 2], rng, window=8), 2, output="float32", exact_rows=2)
    tokens = make_tokens(layer, 2, 0, "bfloat16", rng)
    device.step(tokens_to_device(tokens, "bfloat16"), cupy.arange(2), cupy.zeros((2, 0, 4, 64), np.float32))
    assert device.position.tolist() == [0, 0]
