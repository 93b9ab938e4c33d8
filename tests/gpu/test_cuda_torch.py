"""PyTorch's operators on a device: eager steps, compiled models, captured graphs, and graphs in pieces."""

import numpy as np
import pytest
from gpu.cuda_support import LAYERS, RANKS, make_plan

import sketchssm as ss
from sketchssm.cuda import arrays

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of PyTorch's own modules, at their import
    pytest.mark.filterwarnings("ignore:.*TensorFloat32.*:UserWarning"),
]

SLOTS, BATCH, WINDOW, STEPS = 12, 5, 4, 40


@pytest.fixture(autouse=True)
def _inference():
    torch.compiler.reset()
    with torch.inference_mode():
        yield


@pytest.fixture(params=["mamba2", "gdn", "kda"])
def pair(request, rng):
    """A layer, its head as a module, and a twin whose steps all go through Python."""
    layer = LAYERS[request.param]
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng, window=WINDOW)
    head, twin = (ss.SketchHead(plan, SLOTS, "cuda") for _ in range(2))
    head.warmup()
    twin.warmup()
    return layer, ss.torch.DecodeLayer(head), twin


def token_of(layer, batch):
    """Inputs of one token of each row, and the rows' slots."""
    made = [torch.randn(batch, *shape, device="cuda") for shape in layer.token_shapes().values()]
    q, k, v = (torch.nn.functional.normalize(x, dim=-1).bfloat16() for x in made[:3])
    gates = [-made[3].square() / 50, *(x.sigmoid() for x in made[4:])]
    slots = torch.randperm(SLOTS, device="cuda")[:batch]
    return [q, k, v, *gates, *([None] if len(gates) == 1 else [])], slots


def through_python(twin, token, slots):
    twin._arrays.direct = None
    return twin.step(*token, slots=slots)


def same_states(layered, twin):
    torch.cuda.synchronize()
    for each in (layered.head, twin):
        each.flush()
    np.testing.assert_array_equal(layered.head.position.get(), twin.position.get())
    np.testing.assert_array_equal(layered.head.state.get(), twin.state.get())


def test_direct_steps(pair, monkeypatch):
    """On two streams in turn, with other slots and rows at every step, and with the same bits as through Python."""
    pytest.importorskip("sketchssm.cuda._direct")
    layer, layered, twin = pair
    slow = []
    python = arrays.DeviceArrays.inputs
    monkeypatch.setattr(arrays.DeviceArrays, "inputs", lambda self, *given: slow.append(self) or python(self, *given))
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for i in range(STEPS):
        token, slots = token_of(layer, BATCH - i // 2 % 2)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[i % 2]):
            out = torch.empty_like(token[2]) if i % 3 else None
            got = layered.head.step(*token, slots=slots, out=out)
        torch.cuda.synchronize()
        assert torch.equal(got, through_python(twin, token, slots))
    assert 1 <= slow.count(layered.head._arrays) <= 4  # by rows and stream
    assert slow.count(twin._arrays) == STEPS
    same_states(layered, twin)


# with reduce-overhead PyTorch captures an empty graph of its own first, to take its pool of memory
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled(pair, mode):
    """A function around two steps, as one compiled graph, and captured by the compiler."""
    layer, layered, twin = pair

    def model(one, two, slots):
        a = layered(*one, slots)
        layered.flush(slots[:1])
        return a, layered(*two, slots) * 2

    run = torch.compile(model, fullgraph=True, mode=mode)
    slots = None
    for _ in range(STEPS):
        one, slots = token_of(layer, BATCH)
        two, _ = token_of(layer, BATCH)
        a, b = (x.clone() for x in run(one, two, slots))
        assert torch.equal(a, through_python(twin, one, slots))
        twin.flush(slots[:1])
        assert torch.equal(b, through_python(twin, two, slots) * 2)
    same_states(layered, twin)


def test_graphs_in_pieces(pair):
    """An engine captures what is before and behind a step, and calls the step itself in between."""
    layer, layered, twin = pair
    given, slots = token_of(layer, BATCH)
    token = [None if x is None else torch.empty_like(x) for x in given]
    out, result = torch.empty_like(token[2]), torch.empty_like(token[2])
    before, behind = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(before):
        for x, y in zip(token, given, strict=True):
            if x is not None:
                x.copy_(y)
    with torch.cuda.graph(behind):
        torch.add(out, 1, out=result)
    for _ in range(STEPS):
        fresh, rows = token_of(layer, BATCH)
        for x, y in zip([*given, slots], [*fresh, rows], strict=True):
            if x is not None:
                x.copy_(y)
        before.replay()
        layered(*token, slots, out=out)
        behind.replay()
        assert torch.equal(result, through_python(twin, fresh, rows) + 1)
    same_states(layered, twin)


def test_positions_and_slots_of_cupy_beside_a_stream_of_pytorch(pair, cupy):
    """A step waits for the slots, which a busy stream of CuPy writes; this stream then waits for the positions."""
    layer, layered, twin = pair
    head, stream, busy = layered.head, torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    slots = cupy.full(BATCH, -1, np.int64)
    table = cupy.asarray(np.stack([np.random.default_rng(i).permutation(SLOTS)[:BATCH] for i in range(STEPS)]))
    for some in table:
        token, _ = token_of(layer, BATCH)
        torch.cuda.synchronize()
        for each in (stream, torch.cuda.ExternalStream(busy.ptr)):
            with torch.cuda.stream(each):
                torch.cuda._sleep(1_000_000)  # about half a millisecond
        with busy:
            slots[...] = some
            with torch.cuda.stream(stream):
                got = head.step(*token, slots=slots)
                position = head.position
            copied = position.get()
        assert torch.equal(got, through_python(twin, token, torch.from_dlpack(some)))
        np.testing.assert_array_equal(copied, twin.position.get())
    same_states(layered, twin)
