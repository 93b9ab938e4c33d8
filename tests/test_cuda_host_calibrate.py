"""The kernels of calibration: errors of stored states against NumPy's path and the reference."""

import numpy as np
import pytest
from host import fixtures
from samples import relative

import sketchssm as ss
from sketchssm.arrays.interop import to_host
from sketchssm.arrays.space import Space
from sketchssm.calibrate.prefixes import orthogonaliser
from sketchssm.cuda import calibrate
from sketchssm.plans.basis import SketchBasis
from sketchssm.reference.residual import encode_residual

cupy = fixtures.of_kernels

RANKS, BITS = (1, 4, 6), (1, 2, 3)


def sketched(rng, values, channels, tokens, slopes):
    """States of six decades, one of zeros and one with rows and columns of zeros; their sketches, queries, slopes."""
    layer = ss.Layer("gdn", 2, channels, values)
    states = rng.standard_normal((1, 2, 4, values, channels)).astype(np.float32)
    states *= np.float32(10.0) ** np.arange(-4, 4).reshape(1, 2, 4, 1, 1)
    states[0, 1, 1] = states[0, 0, 3, 2:5] = states[0, 0, 3, :, 1:4] = 0
    scores = ss.JointScores(SketchBasis.random(layer, 6), ranks=RANKS, bits=BITS)
    arrays = (states, *scores._sketches(Space(), states, slice(None), "float32"))
    x = rng.standard_normal((*states.shape[:3], tokens, channels)).astype(np.float32)
    slope = rng.standard_normal((*states.shape[:3], tokens, slopes)).astype(np.float32) if slopes else None
    return scores, (*arrays, x), slope


@pytest.mark.parametrize(
    ("values", "channels", "tokens", "slopes"),
    [
        (16, 16, 16, 16), (48, 80, 16, 1), (80, 128, 16, 80), (256, 32, 8, 0), (32, 256, 17, 32), (96, 192, 4, 1),
        (15, 33, 5, 15),
    ],
)  # fmt: skip
def test_joint_sums(cupy, values, channels, tokens, slopes, rng):
    scores, arrays, slope = sketched(rng, values, channels, tokens, slopes)
    want = scores._measured(Space(), *arrays, slope, "float32")
    given = [None if x is None else cupy.asarray(x) for x in (*arrays, slope)]
    got = to_host(calibrate.joint_sums(Space(given[0]), *given, RANKS, BITS), "got")
    assert not got[0, 1, 1].any()
    away = np.abs(got - want) / np.where(want > 0, want, 1)
    # a number at the edge of two levels may get another code, with an error of the same size
    assert np.quantile(away, 0.95) < 1e-5 and away.max() < 0.1
    left = arrays[0] - arrays[1].swapaxes(-1, -2).astype(np.float64) @ arrays[2]
    for i, bits in enumerate(BITS):
        coded = np.square(encode_residual(left, bits).matrix - left).sum((-1, -2))
        np.testing.assert_allclose(got[..., -1, i, 1], coded, rtol=2e-3)


def test_no_room(cupy, rng):
    """Nothing is launched, and the caller takes another path."""
    for values, channels in ((256, 256), (257, 8)):
        given = [cupy.asarray(x) for x in sketched(rng, values, channels, 1, 0)[1]]
        assert calibrate.joint_sums(Space(given[0]), *given, None, RANKS, BITS) is None


@pytest.mark.parametrize("size", [1, 7, 16])
def test_orthogonaliser(cupy, size, rng):
    sketch = rng.standard_normal((3, 2, 24, size)) * 10.0 ** rng.integers(-3, 3, size)
    sketch[0, 0, :, size // 2] = sketch[0, 1] = 0  # a dependent column, and zeros alone
    gram = sketch.swapaxes(-1, -2) @ sketch
    gram /= np.maximum(np.sqrt(np.einsum("...ii,...jj->...ij", gram, gram)), 1e-300)
    given, want = cupy.asarray(gram), orthogonaliser(Space(), gram, 1e-12)
    got = to_host(calibrate.orthogonaliser(Space(given), given, 1e-12), "got")
    assert relative(got, want) < 1e-12
    np.testing.assert_array_equal(got == 0, want == 0)
