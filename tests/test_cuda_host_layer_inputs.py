"""The kernels between a model's layer and a head, on the host build of the kernels, against NumPy in float64."""

import ml_dtypes
import numpy as np
import pytest
from host import fixtures, standin

from sketchssm.cuda.layer_kernels import LayerInputs

cupy = fixtures.of_heads

ROWS = 3
TYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
# float32: a few roundings, and the softplus's 3e-7; bf16: one rounding
TOLERANCE = {"bfloat16": 2**-8, "float32": 2e-6}


def wide(rng, kind, gap, *shape):
    """An array ``(ROWS, *shape)`` with `gap` elements between rows."""
    memory = standin.asarray(rng.standard_normal((ROWS, int(np.prod(shape)) + gap)).astype(TYPES[kind]))
    return memory[:, : int(np.prod(shape))].reshape(ROWS, *shape, copy=False)


def strided(x):
    return x.data.ptr, x.strides[0] // x.itemsize


def float64(*arrays):
    return [np.asarray(x).astype(np.float64) for x in arrays]


def close(got, want, kind):
    np.testing.assert_allclose(*float64(got), want, rtol=TOLERANCE[kind], atol=TOLERANCE[kind] * 1e-3)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("heads", "dim"), [(10, 80), (3, 128), (5, 36)])
@pytest.mark.parametrize("gap", [5, 8])  # 8: rows begin at multiples of the widest access
class TestLayerInputs:
    @pytest.fixture
    def kernels(self, kind, heads, dim):
        return LayerInputs(heads, dim, (kind, kind, "float32", kind))

    def test_mamba2(self, kernels, kind, gap, heads, dim, rng):
        x, dt = wide(rng, kind, gap, heads, dim), wide(rng, kind, gap, heads)
        dt *= 10  # softplus far from zero on both sides
        rate = standin.asarray(-rng.random(heads).astype(np.float32))
        bias = standin.asarray(rng.standard_normal(heads).astype(TYPES[kind]))
        v, g = standin.empty((ROWS, heads, dim), TYPES[kind]), standin.empty((ROWS, heads), np.float32)
        kernels.mamba_inputs(ROWS, *strided(x), *strided(dt), *(y.data.ptr for y in (rate, bias, v, g)))
        values, raw, rates, biases = float64(x, dt, rate, bias)
        step = np.logaddexp(0, raw + biases)
        close(v, step[..., None] * values, kind)
        close(g, rates * step, "float32")

    def test_skip(self, kernels, kind, gap, heads, dim, rng):
        out, x = wide(rng, kind, gap, heads, dim), wide(rng, kind, gap, heads, dim)
        skip = standin.asarray(rng.standard_normal(heads).astype(np.float32))
        before, values, factor = float64(out, x, skip)
        kernels.add_skip(ROWS, *strided(out), *strided(x), skip.data.ptr)
        # sums of both signs: relative to the larger
        away = np.abs(float64(out)[0] - (before + factor[:, None] * values))
        assert (away <= TOLERANCE[kind] * (np.abs(before) + np.abs(factor[:, None] * values))).all()

    def test_norms(self, kernels, kind, gap, heads, dim, rng):
        q, k = wide(rng, kind, gap, heads, dim), wide(rng, kind, gap, heads, dim)
        k[0, 0] = 0  # stays zero
        units = [standin.empty((ROWS, heads, dim), TYPES[kind]) for _ in range(2)]
        kernels.normalised(ROWS, *strided(q), *strided(k), *(x.data.ptr for x in units))
        query, key = (x / np.sqrt(np.square(x).sum(-1, keepdims=True) + 1e-6) for x in float64(q, k))
        close(units[0], query * dim**-0.5, kind)
        close(units[1], key, kind)

    def test_gdn(self, kernels, kind, gap, heads, dim, rng):
        a, b = wide(rng, kind, gap, heads), wide(rng, kind, gap, heads)
        a *= 10
        rate = standin.asarray(rng.standard_normal(heads).astype(np.float32))
        bias = standin.asarray(rng.standard_normal(heads).astype(TYPES[kind]))
        g, beta = (standin.empty((ROWS, heads), np.float32) for _ in range(2))
        kernels.delta_inputs(ROWS, *strided(a), *strided(b), *(y.data.ptr for y in (rate, bias, g, beta)))
        raw, write, rates, biases = float64(a, b, rate, bias)
        close(g, -np.exp(rates) * np.logaddexp(0, raw + biases), "float32")
        close(beta, 1 / (1 + np.exp(-write)), "float32")

    @pytest.mark.parametrize("betas", [False, True])
    def test_tape(self, kernels, kind, gap, heads, dim, rng, betas):
        """Rows go to their places, and no place else is written."""
        shapes = [(2, 24), (2, 24), (heads, dim), (heads, 3), *([(heads,)] if betas else [])]
        tokens = [wide(rng, "float32" if i == 4 else kind, gap, *shape) for i, shape in enumerate(shapes)]
        kinds = (TYPES[kind] if i < 3 else np.float32 for i in range(5))
        tape = [standin.zeros((5, *shape), each) for each, shape in zip(kinds, shapes, strict=False)]
        index = [standin.asarray(np.array(x)) for x in ([2, 0, 1], [3, 4, 0])]
        arrays = [number for x, to in zip(tokens, tape, strict=True) for number in (*strided(x), to.data.ptr)]
        arrays += [0] * (15 - len(arrays))
        kernels.write_tape(3, 48, 3 * heads, betas * heads, *(x.data.ptr for x in index), 4, *arrays)
        for x, to in zip(float64(*tokens), float64(*tape), strict=True):
            assert np.array_equal(to[[3, 0]], x[[2, 1]])
            assert not to[[1, 2, 4]].any()


def test_no_rows():
    """Nothing is launched."""
    kernels = LayerInputs(3, 128, ("bfloat16", "bfloat16", "float32", "bfloat16"))
    kernels.delta_inputs(0, *[0] * 8)
    kernels.normalised(0, *[0] * 6)
