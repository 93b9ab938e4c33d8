"""Residuals in few bits: the codes, reads through them on the reference and the CPU backend, and plans with them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import plan_of, relative, states_of, tokens_of

import sketchssm as ss
from sketchssm.layer.recurrence import FULL_STATE, Layer
from sketchssm.layer.residual import STEPS, residual_bytes
from sketchssm.plans import traffic
from sketchssm.reference import maps
from sketchssm.reference.residual import encode_residual

LAYERS = {
    "mamba2": Layer("mamba2", 4, 128, 64, 2),
    "gdn": Layer("gdn", 4, 64, 80, 2),
    "kda": Layer("kda", 4, 48, 24, 4),  # K and V are no multiples of a vector
}
RANKS, BITS = [2, 3, FULL_STATE, 8], [1, 2, 0, 3]


def residual_plan(rng, kind, **settings):
    settings = {"map": "subspace", "window": 4, "residual_bits": BITS} | settings
    return plan_of(rng, LAYERS[kind], RANKS, **settings)


@given(bits=st.sampled_from(list(STEPS)), seed=st.integers(0, 99), low=st.floats(0, 8))
def test_codes_keep_what_the_rate_of_a_normal_distribution_allows(bits, seed, low):
    # D / (1 - D) with the squared error D of a standard normal number (Max's table I); rows and columns of any size
    # have it in proportion
    error = {1: 0.571, 2: 0.1348, 3: 0.0389}[bits]
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((64, 128)) * np.exp(rng.uniform(-low, low, (64, 1))) * np.exp(rng.uniform(-2, 2, 128))
    coded = encode_residual(x, bits)
    assert -(2 ** (bits - 1)) <= coded.codes.min() <= coded.codes.max() < 2 ** (bits - 1)
    shares = np.square(coded.matrix - x).sum(1) / np.square(x).sum(1)
    # 128 numbers a row scatter; the row and column scales fit the numbers better than the known deviation would
    assert 0.6 * error < shares.mean() < 1.15 * error
    assert abs((coded.matrix * x / np.square(x).sum(1)[:, None]).sum(1).mean() - 1) < 0.05  # right on average


@pytest.mark.parametrize("bits", STEPS)
def test_codes_of_rows_and_columns_of_zeros_and_of_states_that_are_not_finite(bits):
    x = np.random.default_rng(0).standard_normal((8, 16))
    x[3], x[:, 5] = 0, 0
    coded = encode_residual(x, bits)
    assert (coded.matrix[3] == 0).all()
    assert (coded.matrix[:, 5] == 0).all()
    assert np.array_equal(encode_residual(2.0**20 * x, bits).matrix, 2.0**20 * coded.matrix)
    x[2, 1] = np.nan
    assert np.isnan(encode_residual(x, bits).matrix[2]).all()


def test_subspace_is_near_the_best_approximation_and_drops_what_depends():
    rng = np.random.default_rng(1)
    state = states_of(rng, LAYERS["gdn"], 1, np.float64)[0, 0].T  # (K, V)
    omega = np.linalg.qr(rng.standard_normal((64, 6)))[0]
    basis = maps.subspace(state, omega)
    np.testing.assert_allclose(basis.T @ basis, np.eye(6), atol=1e-12)
    best = np.sqrt(np.square(np.linalg.svd(state)[1][6:]).sum())
    left, without = (np.linalg.norm(state - x @ (x.T @ state)) for x in (basis, omega))
    assert left < 1.2 * best  # measured: 1.09
    assert without > 3 * best
    basis = maps.subspace(state[:, :1] @ state[:, :1].T, omega)  # of rank 1
    assert np.linalg.norm(basis, axis=0) == pytest.approx([1, 0, 0, 0, 0, 0], abs=1e-12)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kind", LAYERS)
def test_cpu_reads_what_the_reference_reads(kind, form):
    rng = np.random.default_rng(2)
    layer, plan = LAYERS[kind], residual_plan(rng, kind, sketch_dtype=form)
    reference, cpu = ss.SketchHead(plan, 4, "reference"), ss.SketchHead(plan, 4, "cpu")
    state, tokens, slots = states_of(rng, layer, 2), tokens_of(rng, layer, 2, 11), [3, 0]
    for head in (reference, cpu):
        head.load_state(state, slots=slots)
    want, got = reference.step(*tokens, slots=slots), cpu.step(*tokens, slots=slots)
    # Codes at the edge between two levels differ with the rounding of the sketch: next to none of float32, more of
    # bfloat16, which moves the residual by up to 2^-9 of the sketch. Measured: 3e-3 and 3e-2.
    assert relative(got, want) < (5e-2 if form == "bfloat16" else 1e-2)
    # the full-state head; numbers of its shadow are rounded by at most 2^-9, and measured 1.4e-3 together
    assert relative(got[:, :, 2], want[:, :, 2]) < (2e-6 if form == "float32" else 2.0**-9)
    exact = ss.StandardHead(layer, 2, "reference")
    exact.load_state(state)
    truth = exact.step(*tokens)
    for head in (0, 1, 3):  # each at its own bits
        error = relative(want[:, :, head], truth[:, :, head])
        assert relative(got[:, :, head], truth[:, :, head]) == pytest.approx(error, rel=0.05)


def check_size(make, layer, tokens, factor):
    """A state's reads are as large as the state: a power of two changes no rounding."""
    outputs, state = [], states_of(np.random.default_rng(6), layer, 1)
    for size in (1, factor):
        head = make()
        head.load_state(np.float32(size) * state, slots=[0])
        outputs.append(np.asarray(head.step(*tokens._replace(v=0 * tokens.v), slots=[0])) / size)
    assert relative(outputs[1], outputs[0]) < 1e-6


@pytest.mark.parametrize("factor", [2.0**-83, 2.0**60])
def test_states_of_extreme_size(factor):
    rng = np.random.default_rng(6)
    layer, plan = LAYERS["kda"], residual_plan(rng, "kda")
    check_size(lambda: ss.SketchHead(plan, 1, "cpu"), layer, tokens_of(rng, layer, 1, 3), factor)


class TestPlans:
    def test_files_and_shards(self, tmp_path):
        plan = residual_plan(np.random.default_rng(7), "gdn")
        plan.save(tmp_path / "plan.safetensors")
        loaded = ss.SketchPlan.load(tmp_path / "plan.safetensors")
        assert loaded.residual_bits.tolist() == BITS
        assert loaded.fingerprint == plan.fingerprint
        assert [plan.shard(rank, 2).residual_bits.tolist() for rank in (0, 1)] == [BITS[:2], BITS[2:]]
        assert "residual_bits=1/2/3" in repr(plan)

    def test_one_number_is_for_all_sketched_heads(self):
        plan = residual_plan(np.random.default_rng(8), "gdn", residual_bits=2)
        assert plan.residual_bits.tolist() == [2, 2, 0, 2]

    def test_bytes(self):
        plan = residual_plan(np.random.default_rng(9), "mamba2", window=16, residual_bits=2)
        layer = plan.layer
        whole = residual_bytes(2, layer.key_dim, layer.value_dim)
        assert whole == 128 * 64 / 4 + 2 * (128 + 64)
        shape = layer.kind, layer.key_dim, layer.value_dim
        reads = traffic.sketch_read(*shape, RANKS, map="subspace", residual_bits=plan.residual_bits)
        bare = traffic.sketch_read(*shape, RANKS, map="subspace")
        np.testing.assert_array_equal(reads - bare, [whole, whole, 0, whole])
        standard = traffic.standard(layer.key_dim, layer.value_dim)
        assert plan.reduction == pytest.approx(standard / ((15 * reads + standard) / 16).mean())

    @pytest.mark.parametrize(
        ("bits", "map", "message"),
        [
            (4, "subspace", r"residual_bits: expected \(0, 1, 2, 3\), got 4"),
            ([1, 2], "subspace", r"residual_bits: expected one integer or 4, got shape \(2,\)"),
            (1.5, "subspace", "residual_bits: expected one integer or 4, got shape"),
            ([1, 2, 1, 3], "subspace", "residual_bits: expected 0 for a full-state head, got 1"),
            (2, "ridge", "residual_bits: expected 0 with the map 'ridge', got 2: use map='subspace'"),
        ],
    )
    def test_bad_bits(self, bits, map, message):
        with pytest.raises(ValueError, match=message):
            residual_plan(np.random.default_rng(0), "gdn", residual_bits=bits, map=map)
