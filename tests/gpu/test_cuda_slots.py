"""Slots, streams and captured graphs of heads that a server drives, on a device."""

import numpy as np
import pytest
from gpu.cuda_support import LAYERS, make_plan, make_tokens

import sketchssm as ss
from sketchssm.layer.recurrence import Layer, Tokens

pytestmark = pytest.mark.gpu

BATCH, STEPS = 64, 120


def make_head(kind, slots):
    layer = LAYERS[kind]
    plan = make_plan(layer, np.resize([7, 3, 16, 2], layer.heads), np.random.default_rng(1))
    head = ss.SketchHead(plan, slots, "cuda")
    head.warmup()
    return head


def on_device(torch, layer, rng, rows=BATCH):
    tokens = make_tokens(layer, rows, 1, "bfloat16", rng, hard_gates=False)
    types = [torch.bfloat16] * 3 + [torch.float32] * 2
    return [
        None if x is None else torch.from_numpy(x[:, 0].copy()).cuda().to(kind)
        for x, kind in zip(tokens, types, strict=True)
    ]


@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_loads_beside_steps(torch, kind, rng):
    """Half of the slots decode on one stream while others are loaded on another: the bits of one after the other."""
    layer, results = LAYERS[kind], []
    start = torch.from_numpy(rng.standard_normal((BATCH, *layer.state_shape)).astype(np.float32)).cuda()
    given = on_device(torch, layer, rng)
    torch.cuda.synchronize()
    for streams in ([torch.cuda.Stream(), torch.cuda.Stream()], [torch.cuda.current_stream()] * 2):
        head = make_head(kind, 2 * BATCH)
        decoding, loading = (torch.arange(BATCH, device="cuda") + x for x in (0, BATCH))
        head.load_state(start, slots=decoding)
        torch.cuda.synchronize()
        outputs = []
        for t in range(STEPS):
            with torch.cuda.stream(streams[0]):
                outputs.append(head.step(*given, slots=decoding))
            if t % 2:
                with torch.cuda.stream(streams[1]):
                    head.load_state(start, slots=loading)
        torch.cuda.synchronize()
        parts = [head._engine.memory[name].view(np.uint8).get() for name in ("state", "sketch", "cursor")]
        results.append([torch.stack(outputs).float().cpu().numpy(), *parts])
    for of_two, of_one in zip(*results, strict=True):
        np.testing.assert_array_equal(of_two, of_one)


def test_many_blocks(cupy, rng):
    """4096 rows of 64 heads; the first rows decode like those of a small head."""
    layer = Layer("gdn", 64, 64, 64, 64)
    heads = [ss.ReplayHead(layer, rows, "cuda", window=4, activation_dtype="bfloat16") for rows in (4096, 8)]
    tokens = make_tokens(layer, 4096, 6, "bfloat16", rng)
    accepted = np.arange(4096) % 3
    outputs = []
    for head in heads:
        head.warmup(drafts=True)
        own = Tokens(*(cupy.asarray(x[: head.num_slots]) for x in tokens))
        first = head.step(*(x[:, :4] for x in own))
        drafts = head.step(*(x[:, 4:] for x in own), draft=True)
        head.commit(accepted[: head.num_slots])
        for start in range(0, head.num_slots, 512):
            head.copy(np.arange(start, start + 8), np.arange(start, start + 8)[::-1].copy())
        head.flush()
        outputs.append([x[:8].get() for x in (first, drafts)])
    for of_many, of_few in zip(*outputs, strict=True):
        np.testing.assert_array_equal(of_many, of_few)
    np.testing.assert_array_equal(heads[0].state[:8].get(), heads[1].state.get())


@pytest.mark.parametrize("batch", [1, 5])
def test_a_column_of_a_table_names_the_slots(torch, batch, rng):
    """An int32 column of a table of 17 columns, whose numbers change between a graph's replays."""
    layer = LAYERS["gdn"]
    head, twin = (make_head("gdn", 12) for _ in range(2))
    table = torch.zeros(batch, 17, dtype=torch.int32, device="cuda")
    given = on_device(torch, layer, rng, batch)
    for each in (head, twin):
        each.step(*given, slots=torch.arange(batch, device="cuda"))
        each.reset()
    graph = torch.cuda.CUDAGraph()
    table[:, 3] = torch.arange(batch, device="cuda")
    with torch.cuda.graph(graph):
        output = head.step(*given, slots=table[:, 3])
    for t in range(20):
        table[:, 3] = torch.randperm(12, device="cuda")[:batch]
        graph.replay()
        want = twin.step(*given, slots=table[:, 3].contiguous())
        torch.cuda.synchronize()
        assert torch.equal(output, want), t
    assert head.left_out() == 0
