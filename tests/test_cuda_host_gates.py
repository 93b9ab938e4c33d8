"""Raw gates in CUDA kernels: inputs, rates and biases of any size."""

import numpy as np
import pytest
from gpu.cuda_pairs import StandardEngine, run_pair
from gpu.cuda_support import EXACT, LAYERS, make_tokens, named_gate, round_to
from host import fixtures
from samples import relative

from sketchssm.arrays.gates import GateInput
from sketchssm.cuda.modules import source_text
from sketchssm.layer.recurrence import Layer
from sketchssm.reference import engines as reference

cupy, machine, pytestmark = fixtures.of_host, fixtures.of_kernels, fixtures.cold

RAW_GATES = """
extern "C" __global__ void raw_gates(const float* packed, const float* given, float* log_decays, float* decays) {
    GateInput<1> gate;
    const int i = blockIdx.x * K + threadIdx.x;
    gate.load(packed, 0, threadIdx.x);
    log_decays[i] = gate.log_decay(given[i], 0);
    decays[i] = gate.quick_decay(given[i], 0);
}
"""


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
    got, want, _ = run_pair(device, oracle, tokens, np.tile(np.arange(4), (12, 1)), "bfloat16", gate)
    assert relative(got, want) < EXACT
    assert relative(device.state.get(), oracle.state) < EXACT


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("rate_log", [0.7, 6.0, 20.0, 40.0])
def test_log_decays_and_decays_of_kernels(rate_log, bound, machine):
    layer = Layer("kda", 1, 64, 64, 1)
    # these biases make the sums exact, so that the test measures errors of the formulas only
    bias = np.arange(64)[None] / 16 - 2
    gate = GateInput(np.array([rate_log]), bias, bound)
    given = np.concatenate([np.arange(-1920, 1920) / 64, [-np.inf, -1e38, -1e5, -90, 88, 1e5, 1e38, np.inf, np.nan]])
    # an odd number of inputs, so that each meets every bias
    given = np.resize(given, (given.size, 64)).astype(np.float32)
    engine = StandardEngine(layer, 1, gate=gate)
    module = machine.RawModule(code=source_text("standard") + RAW_GATES, options=engine.variants()[0].options)
    got, decays = (machine.zeros(given.shape, np.float32) for _ in range(2))
    module.get_function("raw_gates")((len(given),), (64,), (engine._gate, machine.asarray(given), got, decays))
    with np.errstate(invalid="ignore", over="ignore"):
        want = gate.log_decays(given[:, None].astype(np.float64))[:, 0].astype(np.float32).astype(np.float64)
    # a handful of roundings of 2^-24, and the device's 2^t to 2^-22; the bounded formula takes exp of a product of
    # up to 87, rounded; a softplus that float32 flushes is none
    np.testing.assert_allclose(
        got.get(), want, rtol=1e-6 if bound is None else 1e-5, atol=1e-37 * max(1, np.exp(rate_log))
    )
    # g exp(g) is at most 0.37 of what g is off by: 8e-6 of it, where the softplus is a polynomial
    np.testing.assert_allclose(decays.get(), np.exp(want), rtol=0, atol=5e-6)
