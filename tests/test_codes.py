"""Sketches in few bits in float64: codes, the split form, and the reads of the reference."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from samples import relative

from sketchssm.layer.coefficients import MAPS, RIDGE_FLOOR, CoefficientMap
from sketchssm.layer.formats import FORMATS, SketchFormat
from sketchssm.reference import maps
from sketchssm.reference.codes import encode, sketched_read, split_form

TOP = 127.0

VECTORS = arrays.arrays(
    np.float64,
    st.tuples(st.integers(1, 4), st.integers(1, 19)),
    elements=st.one_of(st.just(0.0), st.floats(-1, 1, width=32, allow_subnormal=False)),
)


def decoded(x):
    codes, scale = encode(x, TOP)
    return codes * scale[..., None]


class TestCodes:
    @given(x=VECTORS, exponent=st.integers(-60, 63))
    def test_codes_are_codes(self, x, exponent):
        """At magnitudes of 1e-18 to 1e19."""
        codes, scale = encode(np.ldexp(x, exponent), TOP)
        assert (np.abs(codes) <= TOP).all()
        assert (scale >= 0).all()
        assert (scale[(x == 0).all(axis=-1)] == 0).all()
        np.testing.assert_array_equal(codes, np.rint(codes))

    @given(x=VECTORS, exponent=st.integers(-60, 63))
    def test_error_of_an_element(self, x, exponent):
        """Half a step of the scale, and the digits of float64."""
        x = np.ldexp(x, exponent)
        largest = np.abs(x).max(axis=-1, keepdims=True)
        assert (np.abs(decoded(x) - x) <= (1 / 254 + 1e-12) * largest).all()

    @given(x=VECTORS, exponent=st.integers(-60, 60))
    def test_powers_of_two(self, x, exponent):
        """Scaling changes the scale alone."""
        codes, scale = encode(x, TOP)
        more = encode(np.ldexp(x, exponent), TOP)
        np.testing.assert_array_equal(more.codes, codes)
        np.testing.assert_array_equal(more.scale, np.ldexp(scale, exponent))

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_not_finite(self, bad, rng):
        """Only this vector becomes NaN."""
        x = rng.standard_normal((3, 8))
        want = decoded(x)
        x[1, 5] = bad
        got = decoded(x)
        assert np.isnan(got[1]).all()
        np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])

    def test_ties_to_even(self):
        codes, scale = encode(np.array([127.0, 0.5, 1.5, 2.5, -0.5, -1.5]), TOP)
        assert scale == 1
        assert codes.tolist() == [127, 0, 2, 2, 0, -2]


class TestSplitForm:
    @pytest.mark.parametrize("scale", [1e-18, 1.0, 1e19])
    @pytest.mark.parametrize("ridge", [RIDGE_FLOOR, 1e-3, 0.1])
    def test_the_product_is_the_map_s(self, scale, ridge, rng):
        """2^-53 times a condition number of at most K over the ridge."""
        omega = np.linalg.qr(rng.standard_normal((48, 7)))[0]
        state = scale * rng.standard_normal((3, 2, 48, 33)) * 0.7 ** np.arange(48)[:, None]
        q, b = split_form(state, omega, ridge)
        want = state.swapaxes(-1, -2) @ omega @ maps.ridge_map(state, omega, ridge)
        assert relative(q @ b, want) < 48 / ridge * 2.0**-52

    def test_columns_are_nearly_orthogonal(self, rng):
        """``Q^T Q = mu (I - ridge (L^T L)^-1)``."""
        omega = np.linalg.qr(rng.standard_normal((48, 7)))[0]
        state = rng.standard_normal((48, 33))
        q, _ = split_form(state, omega, 1e-3)
        mu = maps.state_scale(state)
        sketch = state.T @ omega
        lower = np.linalg.cholesky(sketch.T @ sketch / mu + 1e-3 * np.eye(7))
        np.testing.assert_allclose(q.T @ q / mu, np.eye(7) - 1e-3 * np.linalg.inv(lower.T @ lower), atol=1e-12)

    def test_a_zero_state(self):
        q, b = split_form(np.zeros((2, 6, 5)), np.eye(6)[:, :3], 1e-3)
        assert not q.any()
        assert not b.any()

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_a_state_that_is_not_finite(self, bad, rng):
        state = rng.standard_normal((2, 6, 5))
        state[1, 2, 3] = bad
        with np.errstate(invalid="ignore"):
            q, b = split_form(state, np.eye(6)[:, :3], 1e-3)
        assert np.isfinite(q[0] @ b[0]).all()
        assert np.isnan(q[1] @ b[1]).all()


class TestReads:
    """`sketched_read` and reference heads."""

    @given(
        name=st.sampled_from(list(FORMATS)),
        map=st.sampled_from(MAPS),
        shape=st.tuples(st.integers(1, 11), st.integers(1, 11)),
        exponent=st.integers(-60, 63),
        seed=st.integers(0, 99),
        data=st.data(),
    )
    def test_any_shape_and_size(self, name, map, shape, exponent, seed, data):
        """A power of two goes through every format, also where the state has zero columns and rows."""
        form, map = SketchFormat.of(name), CoefficientMap(map)
        rank = data.draw(st.integers(1, min(shape)))
        rng = np.random.default_rng(seed)
        omega = np.linalg.qr(rng.standard_normal((shape[0], rank)))[0]
        state = rng.standard_normal((2, *shape)) * (rng.random((2, shape[0], 1)) < 0.8)
        state *= rng.random((2, 1, shape[1])) < 0.8
        read = sketched_read(form, map, state, omega)
        assert read.shape == (2, shape[1], shape[0])
        assert np.isfinite(read).all()
        much = sketched_read(form, map, np.ldexp(state, exponent), omega)
        # float64 rounds norms differently, which may move a code of a tie by one; float32 scales round alike
        np.testing.assert_allclose(np.ldexp(much, -exponent), read, atol=0.2 * np.abs(read).max(initial=0) + 1e-30)
