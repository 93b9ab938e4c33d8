"""Flushes beside the kernels of later layers, in a captured graph: the bits of one kernel after the other."""

import contextlib

import ml_dtypes
import numpy as np
import pytest
from gpu.cuda_support import LAYERS, error, make_plan, make_tokens, tokens_to_device

import sketchssm as ss
from sketchssm.layer.recurrence import Tokens

pytestmark = pytest.mark.gpu

BATCH, SLOTS, STEPS, REPLAYS = 64, 80, 3, 60


def make_heads(kind):
    layer = LAYERS[kind]
    plan = make_plan(layer, np.resize([7, 3, 16, 2], layer.heads), np.random.default_rng(1))
    heads = [ss.SketchHead(plan, SLOTS, "cuda", deferred=True) for _ in range(4)]
    for head in heads:
        head.warmup()
    return heads


@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_order(torch, kind, rng):
    """Four layers, each of which feeds on the outputs of the one before; several steps and a load in one graph.

    The first scope of a graph has one step of every layer, so that the second scope follows its joins at once.
    """
    layer = LAYERS[kind]
    tokens = make_tokens(layer, BATCH, STEPS, "bfloat16", rng, hard_gates=False)
    kinds = [torch.bfloat16] * 3 + [torch.float32] * 2
    moved = [None if x is None else torch.from_numpy(x).cuda().to(y) for x, y in zip(tokens, kinds, strict=True)]
    given = [[None if x is None else x[:, t].contiguous() for x in moved] for t in range(STEPS)]
    slots, loaded = torch.arange(BATCH, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    start = torch.from_numpy(rng.standard_normal((1, *layer.state_shape)).astype(np.float32)).cuda()

    def work(heads, values, log, scope):
        def step(t):
            for head in heads:
                q, k, v, *rest = given[t]
                head.step(q, k, torch.add(v, values, alpha=0.5), *rest, slots=slots, out=values)
            log[t].copy_(values)

        with scope():
            step(0)
        with scope():
            for t in range(1, STEPS):
                step(t)
            for head in heads:
                head.load_state(start, slots=loaded)

    own, twins = (make_heads(kind) for _ in range(2))
    values = [torch.zeros(BATCH, layer.heads, layer.value_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    logs = [torch.zeros(STEPS, *values[0].shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work(own, values[0], logs[0], ss.overlap_flushes)
    for t in range(REPLAYS):
        if t % 4 == 0:  # rows fall out of step
            slots.copy_(torch.from_numpy(rng.permutation(SLOTS)[:BATCH]))
        loaded.fill_(int(rng.integers(SLOTS)))
        graph.replay()
        work(twins, values[1], logs[1], contextlib.nullcontext)
        assert torch.equal(logs[0].view(torch.int16), logs[1].view(torch.int16))
    torch.cuda.synchronize()
    assert len(np.unique(own[0].position.get())) > 3
    for head, twin in zip(own, twins, strict=True):
        for name in ("state", "sketch", "cursor"):
            one, other = (x._engine.memory[name].view(np.uint8).get() for x in (head, twin))
            assert np.array_equal(one, other)


def test_two_captures_at_a_time(cupy, rng):
    """The first capture takes the head's side stream, so the flush of the second capture runs in order."""
    head, twin, *_ = make_heads("gdn")
    tokens = tokens_to_device(make_tokens(LAYERS["gdn"], 8, 1, "bfloat16", rng), "bfloat16")
    token = Tokens(*(x[:, 0].view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x[:, 0] for x in tokens))
    slots, outs = cupy.arange(8), [cupy.empty_like(token.v) for _ in range(2)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    for stream in streams:
        stream.begin_capture()
    for stream in streams:
        with stream, ss.overlap_flushes():
            head.step(*token, slots=slots, out=outs[0])
    graphs = [stream.end_capture() for stream in streams]
    for t in range(40):
        graphs[t % 2].launch(streams[0])
        twin.step(*token, slots=slots, out=outs[1])
        cupy.cuda.Device().synchronize()
        assert cupy.array_equal(*(out.view(np.uint16) for out in outs))
    assert cupy.array_equal(head.state, twin.state)


@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_against_the_reference(torch, kind, rng):
    """Rows out of step, in order and in a graph; bf16 outputs and sketches, float32 states."""
    layer = LAYERS[kind]
    head, *_ = make_heads(kind)
    oracle = ss.SketchHead(head.plan, SLOTS, "reference", sketch_dtype="float32", deferred=True)
    token = make_tokens(layer, 8, 1, "bfloat16", rng)
    token = Tokens(*(None if x is None else x[:, 0] for x in token))
    given = [
        None if x is None else torch.from_numpy(x.astype(np.float32)).cuda().to(kind)
        for x, kind in zip(token, [torch.bfloat16] * 3 + [torch.float32] * 2, strict=True)
    ]
    slots, out = torch.arange(8, device="cuda"), torch.zeros_like(given[2])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), ss.overlap_flushes():
        head.step(*given, slots=slots, out=out)
    for t in range(40):
        numbers = rng.permutation(12)[:8]
        slots.copy_(torch.from_numpy(numbers))
        if t % 2:
            graph.replay()
        else:
            head.step(*given, slots=slots, out=out)
        want = oracle.step(*token, slots=numbers)
        assert error(out.float().cpu().numpy(), want) < 2e-2
    assert np.array_equal(head.position.get(), oracle.position)
    assert error(head.state.get(), oracle.state) < 2e-6
