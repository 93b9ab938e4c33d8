"""Kernels that start before the preceding one has ended read and overwrite nothing too early."""

import threading

import ml_dtypes
import numpy as np
import pytest
from gpu.cuda_support import LAYERS, make_plan, make_tokens

import sketchssm as ss
from sketchssm.cuda import launch
from sketchssm.layer.recurrence import FULL_STATE

pytestmark = pytest.mark.gpu

STEPS, REPLAYS = 70, 30
"""Steps of a graph (no multiple of the window, so that replays flush at different steps) and its replays."""

SKETCHES = {
    "full-state-heads": ("gdn", [7, FULL_STATE, 16, 2]),
    "shadows": ("gdn", [FULL_STATE] * 4),
    "tolerance": ("gdn", [7, 3, 16, 2]),
    "gdn": ("gdn", [7, 3, 16, 2]),
    "kda": ("kda", [7, 16, 2]),
}
"""Kind and ranks. Flushes leave before a read has ended only where no head reads its full state."""


def make_head(system, slots, rng, monkeypatch, overlaps):
    """A warm head, whose kernels overlap as the library sets them, or never."""
    kind, ranks = SKETCHES.get(system, ("gdn", None))
    layer = LAYERS[kind]
    with monkeypatch.context() as patch:
        if not overlaps:
            patch.setattr(launch, "OVERLAP", 1 << 30)
        if system == "standard":
            head = ss.StandardHead(layer, slots, "cuda")
        elif system == "replay":
            head = ss.ReplayHead(layer, slots, "cuda")
        else:
            options = {"monitor": 1, "tolerance": 0.4} if system == "tolerance" else {}
            head = ss.SketchHead(make_plan(layer, ranks, rng), slots, "cuda", **options)
        head.warmup()
    return head


@pytest.mark.parametrize("system", ["standard", "replay", *SKETCHES])
@pytest.mark.parametrize("batch", [1, 64])
def test_order(torch, system, batch, rng, monkeypatch):
    """Thousands of steps that feed on each other's outputs through kernels of PyTorch: the bits of one at a time. A
    kernel changes the slots as well, between steps that follow at once.
    """
    layer = LAYERS[SKETCHES[system][0] if system in SKETCHES else "gdn"]
    tokens = make_tokens(layer, batch, STEPS, "bfloat16", rng, hard_gates=False)
    moved = [torch.from_numpy(x).cuda().to(torch.bfloat16 if i < 3 else torch.float32) for i, x in enumerate(tokens)]
    given = [[x[:, t].contiguous() for x in moved] for t in range(STEPS)]
    heads = [
        make_head(system, 2 * batch, np.random.default_rng(1), monkeypatch, overlaps) for overlaps in (True, False)
    ]
    outputs = [torch.zeros(layer.heads * batch * layer.value_dim, device="cuda", dtype=torch.bfloat16) for _ in heads]
    outputs = [x.view(batch, layer.heads, layer.value_dim) for x in outputs]
    values = [torch.empty_like(x) for x in outputs]
    slots = [torch.arange(batch, device="cuda") for _ in heads]
    orders = [torch.from_numpy(rng.permutation(2 * batch)[:batch]).cuda() for _ in range(STEPS)]

    def step(which, t):
        q, k, v, g, beta = given[t]
        if t % 3 == 0:  # other steps follow each other directly
            torch.mul(outputs[which], 0.5, out=values[which])
            v = values[which].add_(v)
        if t % 4 == 0:
            slots[which].copy_(orders[t])
        heads[which].step(q, k, v, g, beta, slots=slots[which], out=outputs[which])

    for which in (0, 1):  # once before the capture
        for t in range(STEPS):
            step(which, t)
            torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for t in range(STEPS):
            step(0, t)
    for _ in range(REPLAYS):
        graph.replay()
        for t in range(STEPS):
            step(1, t)
            torch.cuda.synchronize()
        assert torch.equal(outputs[0], outputs[1])
    assert bool(torch.isfinite(outputs[0]).all())
    assert bool(outputs[0].any())
    heads[0].flush()
    heads[1].flush()
    assert np.array_equal(heads[0].state.get(), heads[1].state.get())
    if system == "tolerance":
        found, want = (head.errors() for head in heads)
        assert np.array_equal(found.error, want.error)
        assert np.array_equal(found.exact, want.exact)
        assert batch == 1 or 0 < found.exact.mean() < 1


def test_a_thread_that_never_used_the_device(cupy, rng):
    """A new thread has no driver context until it asks for one."""
    layer = LAYERS["gdn"]
    head = ss.ReplayHead(layer, 2, "cuda")
    head.warmup()
    tokens = make_tokens(layer, 2, 1, "bfloat16", rng)
    given = [cupy.asarray(x[:, 0].astype(ml_dtypes.bfloat16) if i < 3 else x[:, 0]) for i, x in enumerate(tokens)]
    outputs, errors = [head.step(*given)], []
    head.reset()
    cupy.cuda.Device().synchronize()

    def work():
        try:
            outputs.append(head.step(*given))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    assert cupy.array_equal(outputs[0].view(np.uint16), outputs[1].view(np.uint16))
