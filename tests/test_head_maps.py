"""Sketch heads with every coefficient map, on both of the host's backends."""

import numpy as np
import pytest
from samples import plan_of, relative, reset_after_nan, states_of, tokens_of

import sketchssm as ss
from sketchssm.coefficients import MAPS
from sketchssm.recurrence import DENSE, Layer
from sketchssm.reference import maps
from sketchssm.reference.recurrence import per_head, run
from sketchssm.reference.window import Ring, effective_query

WINDOW, SLOTS = 4, 5
RANKS = np.array([DENSE, 2, 3, DENSE])


class TestMaps:
    """Every coefficient map, on both backends."""

    def test_a_full_rank_sketch_reads_exactly(self, layer, rng):
        """With V columns the exact map is exact at every token."""
        plan = plan_of(rng, layer, layer.value_dim, window=WINDOW, map="exact")
        head = ss.SketchHead(plan, 2, "reference")
        tokens, start = tokens_of(rng, layer, 2, 2 * WINDOW, np.float64), states_of(rng, layer, 2)
        head.load_state(start)
        # the pseudo-inverse amplifies 2^-53 by the sketch's condition number, at most 1e7 (its cut)
        assert relative(head.step(*tokens), run(layer, *tokens, state=start)[0]) < 1e-9

    @pytest.mark.parametrize("name", MAPS)
    @pytest.mark.parametrize("count", [1, WINDOW, WINDOW + 2])
    def test_reset_after_nan(self, backend, name, count, layer, rng):
        plan = plan_of(rng, layer, RANKS, window=WINDOW, map=name)
        head, twin = (ss.SketchHead(plan, SLOTS, backend) for _ in range(2))
        reset_after_nan(head, twin, layer, WINDOW, count, rng)

    @pytest.mark.parametrize("name", MAPS)
    @pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-22, 1e-19, 1e-15, 1e15])
    def test_states_of_any_size(self, backend, name, scale, layer, rng):
        """After harsh decays squares of the state underflow float32. Reads must stay finite and bounded.

        Outputs are at most a few times the norms of what they are made of, sketched or not.
        """
        head = ss.SketchHead(plan_of(rng, layer, RANKS, window=8, map=name), 3, backend)
        tokens, start = tokens_of(rng, layer, 3, 7, np.float64), scale * states_of(rng, layer, 3, np.float64)
        start[1, :, :, 1:] *= 1e-9  # one large direction, as after a window with the same key
        head.load_state(start)
        output = head.step(*tokens._replace(v=scale * tokens.v))
        assert np.isfinite(output).all()
        assert np.linalg.norm(output) <= 4 * (np.linalg.norm(start) + scale * np.linalg.norm(tokens.v))

    @pytest.mark.parametrize("name", MAPS)
    def test_a_read_goes_through_the_map(self, name, layer, rng):
        """Between flushes outputs have ``U C x`` in place of the state's part ``S0^T x``; the rest is exact."""
        plan = plan_of(rng, layer, RANKS, window=8, map=name, pivots=2)
        head = ss.SketchHead(plan, 1, "reference")
        tokens, start = tokens_of(rng, layer, 1, 7, np.float64), states_of(rng, layer, 1, np.float64)
        head.load_state(start)
        output, want = head.step(*tokens), run(layer, *tokens, state=start)[0]
        q, k, v, g, beta = per_head(layer, tokens)
        for t in range(7):
            for h in np.flatnonzero(RANKS != DENSE):
                ring = Ring(*(x[0, : t + 1, h] for x in (k, v, g)), None if beta is None else beta[0, : t + 1, h])
                x, state = effective_query(q[0, t, h], ring), start[0, h].T
                want[0, t, h] += self.sketched(plan, h, state) @ x - state.T @ x
        # the exact map inverts singular values down to 1e-7 of the largest
        assert relative(output, want) < (1e-8 if name == "exact" else 1e-11)

    def sketched(self, plan, head, state):
        """``U C`` as a matrix (V, K)."""
        omega, pi = (x[head, :, : plan.ranks[head]].astype(np.float64) for x in (plan.omega, plan.projection))
        pivots, ridge = plan.map.pivots, plan.map.ridge
        dense = {
            "exact": lambda: maps.exact_map(state, omega),
            "ridge": lambda: maps.ridge_map(state, omega, ridge),
            "lowrank": lambda: maps.lowrank_factors(state, omega, pivots, ridge).dense(),
            "prior": lambda: maps.prior_factors(state, omega, pi, pivots, ridge).dense(),
            "offline": lambda: pi.T,
        }
        return state.T @ omega @ dense[plan.map.name]()

    @pytest.mark.parametrize("name", MAPS)
    # Of the state read's two factors, each stored number is off by 2^-9 at most in bfloat16 and by 2^-24 in float32,
    # where what the solve adds matters too: a condition number of up to 1e3 here (1 over the least ridge).
    @pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2.0**-8), ("float32", 1e-4)])
    def test_cpu_reads_as_the_reference(self, name, dtype, tolerance, layer, rng):
        plan = plan_of(rng, layer, [DENSE, 2, 3, 1], window=8, map=name)
        tokens, start = tokens_of(rng, layer, 4, 20, np.float64), states_of(rng, layer, 4)
        heads = [ss.SketchHead(plan, 4, backend, sketch_dtype=dtype) for backend in ("reference", "cpu")]
        for head in heads:
            head.load_state(start)
        want, got = (head.step(*tokens) for head in heads)
        assert relative(got, want) < tolerance

    def test_thousands_of_tokens_on_the_cpu(self, layer, rng):
        """4096 tokens with a memory of some thousand: float32 rounding errors do not build up.

        Errors leave the state as tokens do, so that the last tokens are as good as the first. Of 2^-24 a rounding a
        random walk over a thousand tokens makes 2e-6, and the ridge map's solve may add as much: 1e-5 holds for both.
        """
        layer = Layer(layer.kind, heads=2, key_dim=24, value_dim=16, key_heads=1)
        tokens, start = tokens_of(rng, layer, 1, 4096, np.float64), states_of(rng, layer, 1)
        tokens.g[...] = (tokens.g * 0.02).astype(np.float32)
        plan = plan_of(rng, layer, [DENSE, 8], window=16)
        heads = [ss.SketchHead(plan, 1, backend, sketch_dtype="float32") for backend in ("reference", "cpu")]
        for head in heads:
            head.load_state(start)
        want, got = (head.step(*tokens) for head in heads)
        assert relative(got, want) < 1e-5
        assert relative(got[:, -256:], want[:, -256:]) < 1e-5
        exact, state = run(layer, *tokens, state=start)
        assert relative(got[:, :, 0], exact[:, :, 0]) < 1e-5
        assert relative(heads[1].state, state) < 1e-5

    @pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2.0**-8), ("float32", 1e-5)])
    def test_no_ridge_and_a_sketch_of_rank_one(self, dtype, tolerance, rng):
        """A state in one direction of the basis: rounding errors of its Gram matrix are below the floor."""
        layer = Layer("kda", 8, 128, 64, 8)
        plan = plan_of(rng, layer, 32, window=8, map="ridge", ridge=0.0)
        keys = np.einsum("bhg,hkg->bhk", rng.standard_normal((4, 8, 32)), plan.omega)
        start = np.einsum("bhv,bhk->bhvk", rng.standard_normal((4, 8, 64)), keys)
        tokens = tokens_of(rng, layer, 4, 7, np.float64)
        heads = [ss.SketchHead(plan, 4, backend, sketch_dtype=dtype) for backend in ("reference", "cpu")]
        for head in heads:
            head.load_state(start)
        want, got = (head.step(*tokens) for head in heads)
        assert relative(got, want) < tolerance  # as above; `relative` refuses NaN
