"""Sketch heads with every coefficient map, on both of the host's backends."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from samples import plan_of, relative, states_of, tokens_of

import sketchssm as ss
from sketchssm.cpu.maps import cholesky
from sketchssm.cpu.sketch import SketchEngine
from sketchssm.layer.coefficients import MAPS, RIDGE_FLOOR
from sketchssm.layer.recurrence import FULL_STATE, Layer
from sketchssm.reference import maps
from sketchssm.reference.recurrence import per_head, run
from sketchssm.reference.window import Ring, effective_query

WINDOW, SLOTS = 4, 5
RANKS = np.array([FULL_STATE, 2, 3, FULL_STATE])


def decoded(backend, plan, start, tokens, dtype="float32"):
    """A head and its outputs from the given states on."""
    head = ss.SketchHead(plan, len(start), backend, sketch_dtype=dtype)
    head.load_state(start)
    return head, head.step(*tokens)


class TestMaps:
    """Every coefficient map, on both backends."""

    @pytest.mark.parametrize("name", MAPS)
    @pytest.mark.parametrize("scale", [0.0, 1e-37, 1e-30, 1e-22, 1e-19, 1e-15, 1e15, 1e21, 1e35])
    def test_states_of_any_size(self, backend, name, scale, layer, rng):
        """After harsh decays squares of the state underflow float32. Reads must stay finite and bounded. Outputs are
        at most a few times the norms of their terms, with and without sketches.
        """
        plan = plan_of(rng, layer, RANKS, window=8, map=name)
        tokens, start = tokens_of(rng, layer, 3, 7, np.float64), scale * states_of(rng, layer, 3, np.float64)
        start[1, :, :, 1:] *= 1e-9  # one large direction, as after a window with the same key
        _, output = decoded(backend, plan, start, tokens._replace(v=scale * tokens.v), dtype=None)
        assert np.isfinite(output).all()
        size = np.linalg.norm(start) + scale * np.linalg.norm(tokens.v)
        assert np.linalg.norm(output.astype(np.float64)) <= 4 * size

    @pytest.mark.parametrize("name", MAPS)
    @pytest.mark.parametrize(("backend", "dtype"), [("reference", "float32"), ("cpu", "float32"), ("cpu", "bfloat16")])
    def test_scaling_a_state_scales_its_reads(self, backend, name, dtype, layer, rng):
        """Also where float32 cannot hold the squares of states (2^64 and more) or loses them (2^-64 and less)."""
        plan = plan_of(rng, layer, RANKS, window=8, map=name)
        head = ss.SketchHead(plan, 3, backend, sketch_dtype=dtype)
        tokens, start = tokens_of(rng, layer, 3, 20), states_of(rng, layer, 3)

        def run(exponent):
            head.load_state(np.ldexp(start, exponent))
            output = head.step(*tokens._replace(v=np.ldexp(tokens.v, exponent)))
            return np.ldexp(output.astype(np.float64), -exponent)

        want = run(0)

        @given(st.integers(-95, 115))  # states of up to about 2^10 times this, and digits of 2^-24
        @settings(max_examples=5)
        @example(-66)
        @example(66)
        def check(exponent):
            # A power of two changes no digit of a product or a sum, but norms may round differently: 2^-24 times a
            # condition number of 1e3, and another last digit of numbers in bf16.
            assert relative(run(exponent), want) < (2.0**-8 if dtype == "bfloat16" else 1e-4)

        check()

    @pytest.mark.parametrize("exponent", [-58, -52, -30, 40, 54, 58])
    def test_columns_far_smaller_or_larger_than_the_state(self, exponent, rng):
        """The squares of a sketch column leave float32's range before those of the state do. The second direction of
        the state has 2^-14 of the norm of the first, on value channels of its own, which are compared apart.
        """
        layer = Layer("mamba2", 4, 32, 48, 1)
        plan = plan_of(rng, layer, 2, window=8, map="lowrank", pivots=2, ridge=0.0)
        values, keys = np.zeros((2, 3, 4, 48)), plan.omega.astype(np.float64)
        values[0, ..., :24], values[1, ..., 24:] = (
            rng.standard_normal((2, 3, 4, 24)) * np.array([1, 2.0**-14])[:, None, None, None]
        )
        start = np.einsum("gbhv,hkg->bhvk", values, keys).astype(np.float32)
        head = ss.SketchHead(plan, 3, "cpu", sketch_dtype="float32")
        tokens = tokens_of(rng, layer, 3, 7, np.float64)
        tokens.v[...] = 0
        head.load_state(start)
        want = head.step(*tokens)
        head.load_state(np.ldexp(start, exponent))
        got = np.ldexp(head.step(*tokens), -exponent)
        # a power of two changes no digit, but norms may round differently
        assert relative(got[..., :24], want[..., :24]) < 1e-5
        assert relative(got[..., 24:], want[..., 24:]) < 1e-5

    @pytest.mark.parametrize("name", ["ridge", "lowrank"])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    @pytest.mark.parametrize("rank", [1, 2])
    def test_a_sketch_of_more_columns_than_the_state_has_directions(self, backend, name, dtype, rank, layer, rng):
        """Float32 noise is all that the other directions hold, and no map enlarges it. The state is in the span of the
        basis, so reads are compared with exact reads. Numbers in bf16 are off by 2^-9, and the ridge's floor takes at
        most K times itself of a direction with the metric's mean diagonal.
        """
        layer = Layer(layer.kind, 4, 48, 32, 2)
        plan = plan_of(rng, layer, 8, window=8, map=name, ridge=0.0)
        mixed = rng.standard_normal((3, 4, layer.value_dim, rank)) @ rng.standard_normal((3, 4, rank, 8))
        start = np.einsum("bhvg,hkg->bhvk", mixed, plan.omega).astype(np.float32)
        tokens = tokens_of(rng, layer, 3, 7, np.float64)
        tokens.v[...] = 0
        _, got = decoded(backend, plan, start, tokens, dtype)
        want, _ = run(layer, *tokens, state=start)
        assert relative(got, want) < (2.0**-7 if dtype == "bfloat16" else layer.key_dim * RIDGE_FLOOR)

    @pytest.mark.parametrize("name", MAPS)
    def test_a_read_goes_through_the_map(self, name, layer, rng):
        """Between flushes outputs have ``U C x`` in place of the state's part ``S0^T x``; the rest is exact."""
        plan = plan_of(rng, layer, RANKS, window=8, map=name, pivots=2)
        tokens, start = tokens_of(rng, layer, 1, 7, np.float64), states_of(rng, layer, 1, np.float64)
        (_, output), want = decoded("reference", plan, start, tokens), run(layer, *tokens, state=start)[0]
        q, k, v, g, beta = per_head(layer, tokens)
        for t in range(7):
            for h in np.flatnonzero(RANKS != FULL_STATE):
                ring = Ring(*(x[0, : t + 1, h] for x in (k, v, g)), None if beta is None else beta[0, : t + 1, h])
                x, state = effective_query(q[0, t, h], ring), start[0, h].T
                want[0, t, h] += self.sketched(plan, h, state) @ x - state.T @ x
        assert relative(output, want) < 1e-11  # 2^-53 times a condition number of at most K over the floor

    def sketched(self, plan, head, state):
        """``U C`` as a matrix (V, K)."""
        omega, ridge = plan.omega[head, :, : plan.ranks[head]].astype(np.float64), plan.map.ridge
        if plan.map.name == "subspace":
            basis = maps.subspace(state, omega)
            return state.T @ basis @ basis.T
        if plan.map.name == "ridge":
            return state.T @ omega @ maps.ridge_map(state, omega, ridge)
        return state.T @ omega @ maps.lowrank_factors(state, omega, plan.map.pivots, ridge).dense()

    @pytest.mark.parametrize("name", MAPS)
    # Of the state read's two factors, each stored number is off by 2^-9 at most in bfloat16 and by 2^-24 in float32,
    # where what the solve adds matters too: a condition number of up to 1e3 here (1 over the least ridge).
    @pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2.0**-8), ("float32", 1e-4)])
    def test_cpu_reads_as_the_reference(self, name, dtype, tolerance, layer, rng):
        plan = plan_of(rng, layer, [FULL_STATE, 2, 3, 1], window=8, map=name)
        tokens, start = tokens_of(rng, layer, 4, 20, np.float64), states_of(rng, layer, 4)
        (_, want), (_, got) = (decoded(backend, plan, start, tokens, dtype) for backend in ("reference", "cpu"))
        assert relative(got, want) < tolerance

    def test_pivots_that_almost_depend_on_each_other(self, rng):
        """Columns of which each adds 5e-3 of its norm to those before it: pivots stay orthogonal in float32. One pass
        of Gram-Schmidt loses 2^-24 over 5e-3 a column, and more with every column: 0.2 in this read. Eight pivots span
        all of the sketch, so that the reference's pivots are the same but for their order.
        """
        layer = Layer("mamba2", 4, 32, 48, 1)
        plan = plan_of(rng, layer, 8, window=8, map="lowrank", pivots=8, ridge=0.1)
        start = np.empty((4, *layer.state_shape), np.float32)
        for row, h in np.ndindex(4, layer.heads):
            q = np.linalg.qr(rng.standard_normal((layer.value_dim, 10)))[0]
            columns = 0.5 * np.triu(rng.standard_normal((10, 8)), 1)
            columns[0], columns[np.arange(1, 8), np.arange(1, 8)] = 1, 0.0065
            omega = plan.omega[h].astype(np.float64)
            outside = np.eye(layer.key_dim) - omega @ np.linalg.pinv(omega)
            start[row, h] = q @ (columns @ np.linalg.pinv(omega) + 0.3 * rng.standard_normal((10, 32)) @ outside)
        tokens = tokens_of(rng, layer, 4, 7, np.float64)
        tokens.v[...] = 0
        (_, want), (_, got) = (decoded(backend, plan, start, tokens) for backend in ("reference", "cpu"))
        assert relative(got, want) < 1e-5  # 2^-24 over a ridge of 0.1 times a metric of up to K

    def test_no_residual_is_negative(self, rng):
        """If the pivots hold the whole state, the residual is only rounding, of both signs."""
        layer, slots = Layer("mamba2", 4, 128, 64, 1), 64
        plan = plan_of(rng, layer, 32, window=8, map="lowrank", pivots=4, ridge=0.0)
        keys = np.einsum("bhg,hkg->bhk", rng.standard_normal((slots, 4, 32)), plan.omega)
        start = np.einsum("bhv,bhk->bhvk", rng.standard_normal((slots, 4, 64)), keys).astype(np.float32)
        engine = SketchEngine(plan, slots, "float32")
        engine.load_state(start, np.arange(slots))
        memory = engine._memory.arrays["sketch"]
        first = int(engine._memory.context["factors"][0]) - memory.ctypes.data
        raw = np.ascontiguousarray(memory).view(np.uint8).reshape(slots, -1)[:, first : first + 4 * 4 * 32 * 5]
        factors = np.ascontiguousarray(raw).view(np.float32).reshape(slots, 4, 5, 32)  # w, then F by columns
        shares = factors[:, :, 0]
        assert shares.min() == 0
        # float32 rounds a metric of up to K = 128 to 8e-6, and to less than 5e-5 in the sum of a few: half the floor
        assert shares.max() < 1 / 2

    @pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2.0**-8), ("float32", 1e-5)])
    def test_no_ridge_and_a_sketch_of_rank_one(self, dtype, tolerance, rng):
        """A state in one direction of the basis: rounding errors of its Gram matrix are below the floor."""
        layer = Layer("kda", 8, 128, 64, 8)
        plan = plan_of(rng, layer, 32, window=8, map="ridge", ridge=0.0)
        keys = np.einsum("bhg,hkg->bhk", rng.standard_normal((4, 8, 32)), plan.omega)
        start = np.einsum("bhv,bhk->bhvk", rng.standard_normal((4, 8, 64)), keys)
        tokens = tokens_of(rng, layer, 4, 7, np.float64)
        (_, want), (_, got) = (decoded(backend, plan, start, tokens, dtype) for backend in ("reference", "cpu"))
        assert relative(got, want) < tolerance  # as above; `relative` refuses NaN


def test_a_pivot_that_rounding_lost_is_at_its_bound():
    """A Gram matrix of equal columns whose second pivot, ``1 + r - 1 / (1 + r)``, rounding has taken below zero."""
    ridge = 1e-4
    factor = np.array([1.0, 0.0, 1.0 + ridge, 1.0])
    cholesky.py_func(factor, 2, ridge)
    np.testing.assert_allclose(factor, [1, 0, 1 + ridge, 1 / np.sqrt(ridge)], rtol=1e-15)
