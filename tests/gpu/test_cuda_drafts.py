"""Drafts on a device: captured graphs with slots, lengths and accepted counts that change between replays."""

import numpy as np
import pytest
from gpu.cuda_support import LAYERS, RANKS, REFRESHED, make_plan, refreshed_plan
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


@pytest.mark.parametrize(
    ("name", "kind", "stored", "window", "windows", "phase", "state"),
    [
        ("mamba2", "ridge", "bfloat16", 8, 4, None, "float32"),
        ("gdn", "ridge", "bfloat16", 16, 4, 60, "float32"),
        ("kda", "lowrank", "bfloat16", 8, 4, None, "float32"),
        ("gdn", "ridge", "int8", 8, 4, 3, "bfloat16"),
        ("kda-64", "offline", "fp8", 8, 3, None, "float16"),
        ("mamba2-80", "prior", "float32", 16, 2, None, "float32"),
    ],
)
def test_graph_with_refreshes(name, kind, stored, window, windows, phase, state, rng, cupy):
    """Drafts that begin at the next window of the ring, or after a flush."""
    plan = refreshed_plan(LAYERS[name], [7, 16, 3, 33], rng, kind, window, windows, stored)
    settings = {"phase": phase, "state_dtype": state, "sketch_dtype": stored}
    head = ss.SketchHead(plan, SLOTS, "cuda", output_dtype="float32", **settings)
    head.warmup(drafts=True)
    coded = settings | {"sketch_dtype": "float32" if stored == "bfloat16" else stored}
    twin = ss.SketchHead(plan, SLOTS, "reference", **coded)
    # twice the host's bound, as in test_cuda_refresh.py
    check_graph(cupy, head, twin, rng, 120, 2 * REFRESHED[stored])
