"""Shards of a plan on the CUDA backend without a GPU: the heads of each process as the whole layer has them."""

import numpy as np
import pytest
from gpu.cuda_support import make_plan, make_tokens
from host import fixtures
from host.heads import narrow
from samples import states_of

import sketchssm as ss
from sketchssm.layer.recurrence import Layer

cupy = fixtures.of_heads

LAYER = Layer("gdn", 4, 64, 80, 2)
WINDOW = 4


@pytest.mark.parametrize("map", ["lowrank", "ridge"])
def test_shards(map, rng):
    """States and outputs are equal to the last bit."""
    plan = make_plan(LAYER, [16, 3, 5, 9], rng, map=map, window=WINDOW)
    tokens, start = narrow(make_tokens(LAYER, 3, 3 * WINDOW + 1, "bfloat16", rng)), states_of(rng, LAYER, 3)
    whole = ss.SketchHead(plan, 3, "cuda")
    whole.warmup()
    whole.load_state(start)
    outputs = whole.step(*tokens)
    whole.flush()
    for rank in range(2):
        values, keys = LAYER.shard_heads(rank, 2)
        own = [np.ascontiguousarray(x[:, :, i]) for x, i in zip(tokens, (keys, keys, *[values] * 3), strict=True)]
        head = ss.SketchHead(plan.shard(rank, 2), 3, "cuda")
        head.warmup()
        head.load_state(np.ascontiguousarray(start[:, values]))
        np.testing.assert_array_equal(head.step(*own), outputs[:, :, values])
        head.flush()
        np.testing.assert_array_equal(head.state.get(), whole.state.get()[:, values])
