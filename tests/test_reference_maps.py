"""Coefficient maps against their definitions, solved densely in float64."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from samples import relative

from sketchssm.layer.coefficients import RIDGE_FLOOR
from sketchssm.reference import maps
from sketchssm.reference.maps import PIVOT_TOLERANCE

# Sums and solves of at most a few dozen float64 terms, in systems whose condition number is below 1 / RIDGE_FLOOR
# times the metric's norm K: 2^-53 * 1e6 * 16 is 2e-9.
SOLVED = 1e-8
# The same without a solve.
FLOAT64 = 1e-13

RIDGES = (0.0, 1e-3, 0.1)


def rotation(rng, rows, columns):
    """Orthonormal columns."""
    return np.linalg.qr(rng.standard_normal((rows, columns)))[0]


def state_of(rng, key_dim, value_dim, rank=None):
    """A state ``(K, V)`` with falling singular values, of full rank or of the one given."""
    full = min(key_dim, value_dim)
    values = 0.6 ** np.arange(full)
    values[full if rank is None else rank :] = 0
    left, right = rotation(rng, key_dim, full), rotation(rng, value_dim, full)
    return (left * values) @ right.T * rng.uniform(0.1, 10)


def metric(state):
    """``H = S S^T / mu``."""
    return state @ state.T / maps.state_scale(state)


def pivot_part(state, sketch, pivots):
    """``B B^T``: the state metric seen through the span of the first sketch columns, by a projector."""
    first = sketch[:, : min(pivots, sketch.shape[1])]
    projector = first @ np.linalg.pinv(first, rcond=1e-10)
    return state @ projector @ state.T / maps.state_scale(state)


def spread_of_pivots(sketch, pivots):
    """Ratio of the first sketch columns' singular values, those of dependent columns aside."""
    values = np.linalg.svd(sketch[:, : min(pivots, sketch.shape[1])], compute_uv=False)
    return values[0] / values[values > 1e-10 * values[0]][-1]


def are_pivots_clear(sketch, pivots):
    """Whether each of the first columns adds clearly more than `PIVOT_TOLERANCE` to those before it, or nothing."""
    for i in range(1, min(pivots, sketch.shape[1])):
        before, column = sketch[:, :i], sketch[:, i]
        added = np.linalg.norm(column - before @ np.linalg.pinv(before, rcond=1e-10) @ column)
        if not (added > 2 * PIVOT_TOLERANCE * np.linalg.norm(column) or added < 1e-12 * np.linalg.norm(column)):
            return False
    return True


def is_solved_by(dense, h, phi, ridge, spread):
    """Whether a map is ``(Phi^T H Phi + ridge I)^-1 Phi^T H`` of an explicit metric, to what float64 can solve."""
    gram, right = phi.T @ h @ phi + max(ridge, RIDGE_FLOOR) * np.eye(phi.shape[1]), phi.T @ h
    # A few roundings of the metric's entries, as large as the pivots' span makes them; and what that does to the two
    # sides of the system, which may both be small beside the metric itself.
    length, size = np.linalg.norm(phi, 2), np.linalg.norm(h, 2)
    loss = length**2 * size / np.linalg.eigvalsh(gram)[0] + length * size / np.linalg.norm(right, 2)
    return relative(dense, np.linalg.solve(gram, right)) < 16 * 2.0**-53 * spread * loss


def every_map(omega, pivots=2, ridge=0.1):
    """Functions of a state."""
    return (
        lambda s: maps.ridge_map(s, omega, ridge),
        lambda s: maps.lowrank_factors(s, omega, pivots, ridge).dense(),
    )


@st.composite
def cases(draw):
    """Sizes, a ridge, a state of any rank, and random numbers."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    key_dim, value_dim = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    limit = min(key_dim, value_dim)
    rank, pivots = draw(st.integers(1, limit)), draw(st.integers(1, 6))
    state = state_of(rng, key_dim, value_dim, draw(st.none() | st.integers(1, limit)))
    return rng, state, rank, pivots, draw(st.sampled_from(RIDGES))


class TestLowrank:
    @given(cases())
    def test_is_the_solve_of_its_metric(self, case):
        """``H^ = B B^T + Phi Diag(d) Phi^T``; d is the part of H's diagonal that the pivots miss."""
        rng, state, rank, pivots, ridge = case
        phi = rotation(rng, state.shape[0], rank)
        seen = pivot_part(state, state.T @ phi, pivots)
        left = np.maximum(np.diag(phi.T @ (metric(state) - seen) @ phi), 0)
        approximate = seen + phi @ np.diag(left) @ phi.T
        assume(are_pivots_clear(state.T @ phi, pivots))
        spread = spread_of_pivots(state.T @ phi, pivots)
        factors = maps.lowrank_factors(state, phi, pivots, ridge)
        assert is_solved_by(factors.dense(), approximate, phi, ridge, spread)
        assert factors.omega is phi


class TestRidge:
    @given(cases())
    def test_minimises_the_regularised_error(self, case):
        """The gradient of ``|S^T (x - Phi c)|^2 / mu + ridge |c|^2`` vanishes at ``c = C x`` (*pivot-ridge*)."""
        rng, state, rank, _, ridge = case
        phi = rotation(rng, state.shape[0], rank)
        x = rng.standard_normal(state.shape[0])
        c = maps.ridge_map(state, phi, ridge) @ x
        h = metric(state)
        gradient = phi.T @ h @ (phi @ c - x) + max(ridge, RIDGE_FLOOR) * c
        assert np.linalg.norm(gradient) < SOLVED * np.linalg.norm(h) * np.linalg.norm(x)


class TestPivots:
    @given(cases())
    def test_are_orthonormal_or_zero_and_span_the_first_columns(self, case):
        rng, state, rank, pivots, _ = case
        sketch = state.T @ rotation(rng, state.shape[0], rank)
        q = maps.pivot_basis(sketch, pivots)
        assert q.shape == (state.shape[1], min(rank, pivots))
        present = np.square(q).sum(axis=0)
        assert np.all((np.abs(present - 1) < FLOAT64) | (present == 0))
        # done twice, Gram-Schmidt is orthogonal to rounding over the tolerance's share of the column
        assert np.abs(q.T @ q - np.diag(present)).max() < 1e-9
        first = sketch[:, :pivots]
        # what a dropped column had beside the others is below the tolerance
        lost = np.linalg.norm(first - q @ (q.T @ first), axis=0)
        assert np.all(lost <= 2 * maps.PIVOT_TOLERANCE * np.linalg.norm(first, axis=0))

    @pytest.mark.parametrize(("added", "kept"), [(2.5e-3, False), (3.5e-3, True)])
    def test_a_column_that_adds_less_than_the_tolerance_is_dropped(self, added, kept, rng):
        a, b = rotation(rng, 7, 2).T
        q = maps.pivot_basis(np.stack([a, a + added * b], axis=1), 2)
        assert np.any(q[:, 1] != 0) == kept

    def test_nearly_dependent_columns_are_orthogonal_to_rounding(self, rng):
        """Gram-Schmidt done once would divide its rounding by the 4e-3 that each column adds."""
        axes = rotation(rng, 7, 5)
        q = maps.pivot_basis(axes[:, :1] + 4e-3 * axes, 5)
        # sums of seven products, 2^-53 each
        np.testing.assert_allclose(q.T @ q, np.eye(5), atol=2e-15)

    def test_no_residual_is_negative(self, rng):
        """If the pivots hold the whole state, the residual is only rounding, of both signs."""
        states = np.stack([state_of(rng, 8, 5, 2) for _ in range(20)])
        assert (maps.lowrank_factors(states, rotation(rng, 8, 5), 4, 0.1).w >= 0).all()

    def test_dependent_columns_are_dropped(self, rng):
        a, b = rng.standard_normal((2, 7))
        sketch = np.stack([a, 2 * a, np.zeros(7), b, a + b], axis=1)
        q = maps.pivot_basis(sketch, 5)
        np.testing.assert_array_equal(np.any(q != 0, axis=0), [True, False, False, True, False])

    @given(cases())
    def test_are_nested(self, case):
        """A rank's pivots are the first ones of every larger rank's."""
        rng, state, rank, pivots, _ = case
        sketch = state.T @ rotation(rng, state.shape[0], rank)
        full = maps.pivot_basis(sketch, pivots)
        for smaller in range(1, rank + 1):
            some = maps.pivot_basis(sketch[:, :smaller], pivots)
            # NumPy may sum products of other shapes in another order; a column near the tolerance magnifies that
            np.testing.assert_allclose(some, full[:, : some.shape[1]], atol=1e-9)


@pytest.mark.parametrize("scale", [0.0, 1e-150, 1e-30, 1.0, 1e30, 1e150])
@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("pivots", [1, 4, 9])
def test_all_maps_are_finite_for_degenerate_states(scale, rank, pivots, rng):
    """Maps of zero, rank-1, rank-deficient, tiny and huge states are finite, and a zero state reads zero."""
    omega = rotation(rng, 8, rank)
    for state_rank in (1, 2, 5):
        state = state_of(rng, 8, 5, state_rank) * scale
        for ridge in RIDGES:
            for make in every_map(omega, pivots, ridge):
                c = make(state)
                assert c.shape == (rank, 8)
                assert np.isfinite(c).all()
                assert scale or not c.any()


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_maps_do_not_depend_on_the_state_scale(scale, rng):
    state, omega = state_of(rng, 8, 5), rotation(rng, 8, 3)
    for make in every_map(omega):
        assert relative(make(scale * state), make(state)) < SOLVED


def test_leading_axes_are_batches(rng):
    """Each state of a stack is treated as if alone: a NaN in one is no error, and in no other's map."""
    states, omega = np.stack([state_of(rng, 8, 5, r) for r in (1, 2, 3, 5)]), rotation(rng, 8, 3)
    states[1, 2, 4] = np.nan
    for make in every_map(omega):
        got = make(states)
        assert np.isnan(got[1]).any()
        for i in (0, 2, 3):
            assert relative(got[i], make(states[i])) < SOLVED
