"""Drafts on a device: captured graphs with slots, lengths and accepted counts that change between replays."""

import numpy as np
import pytest
from gpu.cuda_support import LAYERS, RANKS, make_plan
from gpu.draft_graphs import SLOTS, check_graph

import sketchssm as ss

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("phase", [None, 3])
@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda", "mamba2-80", "kda-64"])
def test_graph(name, phase, rng, cupy):
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng)
    head = ss.SketchHead(plan, SLOTS, "cuda", output_dtype="float32", phase=phase)
    head.warmup(drafts=True)
    check_graph(cupy, head, ss.SketchHead(plan, SLOTS, "reference", phase=phase), rng, 1000)


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_graph_of_replay(name, rng, cupy):
    head = ss.ReplayHead(LAYERS[name], SLOTS, backend="cuda", output_dtype="float32")
    head.warmup(drafts=True)
    check_graph(cupy, head, ss.ReplayHead(LAYERS[name], SLOTS, backend="reference"), rng, 1000)
