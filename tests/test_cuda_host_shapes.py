"""Shapes of layers that the CUDA kernels take: all that ship, and any others within the limits."""

import numpy as np
import pytest
from gpu.cuda_pairs import ReplayEngine, SketchEngine, load_same, poisoned, run_pair
from gpu.cuda_support import EXACT, full_reads, make_tokens
from host import fixtures
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import plan_of, relative

from sketchssm.cuda import limits
from sketchssm.layer.checks import UnsupportedError
from sketchssm.layer.recurrence import FULL_STATE, KINDS, Layer
from sketchssm.reference import engines as reference
from sketchssm.study import bench

cupy, pytestmark = fixtures.of_host, [fixtures.cold, pytest.mark.thorough]

SYSTEMS = "replay", "ridge", "lowrank", "subspace"


TILES = {(layer.kind, layer.key_dim, layer.value_dim): layer for layer in bench.SHAPES.values()}
"""A shipped layer of each kind, K and V. Sizes in shared memory do not depend on the number of heads."""


@pytest.mark.parametrize("tile", TILES)
def test_every_shipped_layer_fits(tile, cupy):
    limits.check_layer(TILES[tile])
    plan = plan_of(np.random.default_rng(0), Layer(*tile[:1], 2, *tile[1:], 1), 16, "subspace", residual_bits=3)
    limits.check_shared(*SketchEngine(plan, 1, "int8").variants()[:2])


layers = st.builds(
    lambda kind, key_dim, blocks, group, key_heads: Layer(kind, group * key_heads, key_dim, 16 * blocks, key_heads),
    st.sampled_from(sorted(KINDS)), st.sampled_from(limits.KEY_DIMS), st.integers(1, 16), st.integers(1, 5),
    st.integers(1, 2),
)  # fmt: skip


# An example takes 3 to 10 seconds: its kernels are compiled.
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layer=layers,
    system=st.sampled_from(SYSTEMS),
    activation=st.sampled_from(["bfloat16", "float32"]),
    window=st.sampled_from([4, 16]),
    data=st.data(),
)
def test_any_shape(cupy, layer, system, activation, window, data):
    """States, outputs at flushes and reads in replay are exact; reads of shadows and sketches have their errors."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    options = {"activation_dtype": activation, "output_dtype": "float32"}
    ranks = np.resize([3, FULL_STATE, 11], layer.heads)
    try:
        if system == "replay":
            device, oracle = ReplayEngine(layer, 2, window, **options), reference.ReplayEngine(layer, 2, window)
        else:
            bits = np.where(ranks > 0, 2, 0) if system == "subspace" else 0
            plan = plan_of(rng, layer, ranks, system, window=window, residual_bits=bits)
            device, oracle = SketchEngine(plan, 2, **options), reference.SketchEngine(plan, 2)
        poisoned(device)
        load_same(device, oracle, rng)
    except UnsupportedError as refused:
        wide = layer.channel_decays and layer.key_dim > limits.MAX_CHANNELS
        large = layer.key_dim * layer.value_dim >= 128 * 256  # two thirds of a block's shared memory
        assert ("key_dim:" in str(refused) and wide) or ("shared memory" in str(refused) and large)
        return
    length = 2 * window + 3
    tokens = make_tokens(layer, 2, length, activation, rng)
    table = np.tile(np.arange(2), (length, 1))
    got, want, where = run_pair(device, oracle, tokens, table, activation)
    exact = np.broadcast_to((where == window - 1)[..., None], (*where.shape, layer.heads)).copy()
    exact |= system == "replay"
    full = (ranks == FULL_STATE) & ~exact
    assert relative(got[exact], want[exact]) < EXACT
    assert relative(got[full], want[full]) < full_reads()
    exact |= full
    # Numbers of a basis and a map that are rounded to bf16; of codes of 2 bits each engine has another basis, and the
    # states are random: a third of the reads is an error.
    assert exact.all() or relative(got[~exact], want[~exact]) < (0.5 if system == "subspace" else 1.2e-2)
    assert relative(device.state.get(), oracle.state) < EXACT
