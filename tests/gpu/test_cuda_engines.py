"""The CUDA engines against the float64 reference, on a device."""

import math

import numpy as np
import pytest
from gpu.cuda_pairs import ReplayEngine, SketchEngine, StandardEngine, run_pair
from gpu.cuda_support import EXACT, LAYERS, STORED, make_plan, make_tokens, named_gate, tokens_to_device
from samples import relative

from sketchssm.layer.recurrence import FULL_STATE
from sketchssm.reference import engines as reference

# engines without a warmup() compile at their first step
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:loading kernel:RuntimeWarning")]


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
    got, want, _ = run_pair(device, oracle, tokens, np.tile(np.arange(3), (4, 1)), "bfloat16")
    assert relative(got, want) < 1e-3 if dependent else relative(got, want) < STORED["float32"]


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_slot_offsets_beyond_32_bits(name, rng, cupy):
    """Six slots of a pool, almost 2 GiB from slot to slot: element offsets pass 2^31 at the last."""
    layer, slots = LAYERS[name], 6
    stride = (1 << 29) - 64  # elements; more bytes from slot to slot are refused
    pool = cupy.full((slots - 1) * stride + math.prod(layer.state_shape), np.nan, dtype=np.float32)
    shape = (slots, *layer.state_shape)
    strides = (4 * stride, 4 * layer.value_dim * layer.key_dim, 4 * layer.key_dim, 4)
    plan = make_plan(layer, [7] * layer.heads, rng)
    for kind, of, source in (
        (StandardEngine, reference.StandardEngine, layer),
        (SketchEngine, reference.SketchEngine, plan),
    ):
        state = cupy.ndarray(shape, np.float32, pool.data, strides=strides)
        state[...] = 0
        device = kind(source, slots, memory={"state": state}, output_dtype="float32")
        oracle = of(source, slots)
        tokens = make_tokens(layer, 2, 17, "bfloat16", rng)
        table = np.tile(np.array([slots - 1, 0]), (17, 1))
        run_pair(device, oracle, tokens, table, "bfloat16")
        assert relative(device.state.get(), oracle.state) < EXACT


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
            assert relative(out.get()[:, at], want[:, at]) < EXACT
            assert relative(out.get(), want) < EXACT
            assert relative(engine.state.get(), state) < EXACT
