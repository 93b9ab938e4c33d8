"""Sums of calibration on arrays of CuPy and PyTorch, which stay on the device."""

import numpy as np
import pytest
from gpu.cuda_support import LAYERS
from samples import relative, tokens_of

import sketchssm as ss
from sketchssm.arrays import interop
from sketchssm.plans.basis import SketchBasis

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_same_sums_as_on_the_host(name, library, rng):
    xp = pytest.importorskip(library)
    there = xp.asarray if library == "cupy" else lambda x: xp.from_numpy(x).cuda()
    layer = LAYERS[name]
    tokens = tokens_of(rng, layer, 3, 100)
    grad = rng.standard_normal(tokens.v.shape, np.float32)
    basis = SketchBasis.random(layer, 8)
    for make, first, more in (
        (lambda: ss.Moments(layer), "state_gram", {}),
        (lambda: ss.RankScores(basis), "paired", {"grad": grad}),
        (lambda: ss.JointScores(basis), "paired", {"grad": grad}),
    ):
        host, device = make(), make()
        carry = host.update(*tokens, **more)
        given = [None if x is None else there(x) for x in tokens]
        after = device.update(*given, **{key: there(x) for key, x in more.items()})
        assert interop.framework(after.state) == library
        assert interop.framework(vars(device)[first]) == library
        assert relative(interop.to_host(after.state, "state"), carry.state) < 1e-5
        # float32 products of two libraries; joint scores: codes at the edge of two levels
        assert relative(getattr(device, first), getattr(host, first)) < 3e-3
        assert np.array_equal(device.samples, host.samples)
