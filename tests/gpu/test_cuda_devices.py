"""Heads on two devices in one process: each works on its own device, whichever is current at a call."""

import threading

import numpy as np
import pytest
from decode_systems import head_of
from gpu.cuda_support import EXACT, LAYERS, STORED, make_plan, make_tokens
from gpu.test_cuda_heads import each, on_torch, wide
from samples import refused, relative

pytestmark = pytest.mark.gpu

LAYER = LAYERS["gdn"]
RANKS = [7, 3, 16, 2]
WINDOW = 4


@pytest.fixture
def devices(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two CUDA devices")
    return [cupy.cuda.Device(i) for i in range(2)]


@pytest.fixture(params=["standard", "replay", "sketch"])
def heads(request, devices, rng):
    """The same head on each device, and its float64 twin."""
    plan = make_plan(LAYER, RANKS, rng, window=WINDOW)
    made = []
    for device in devices:
        with device:
            made.append(head_of(request.param, plan, 6, "cuda"))
    for head in made:  # the current device is neither head's concern
        head.warmup()
    return made, head_of(request.param, plan, 6, "reference")


def on(tokens, t, device, torch):
    """One token's inputs on a device."""
    return each(tokens.at(np.s_[:, t]), on_torch(torch, f"cuda:{device}"), "bfloat16")


def test_calls_in_turns(heads, torch, cupy, rng):
    """Steps, loads and flushes on both devices, while either is current: bitwise the same results on both."""
    (first, second), twin = heads
    tokens = make_tokens(LAYER, 4, 3 * WINDOW + 2, "bfloat16", rng)
    start = rng.standard_normal((4, *LAYER.state_shape)).astype(np.float32)
    slots = np.array([3, -1, 0, 5])
    for i, head in enumerate((first, second)):
        assert head.state.device.id == i
        head.load_state(torch.from_numpy(start).to(f"cuda:{i}"), slots=torch.tensor(slots, device=f"cuda:{i}"))
    twin.load_state(start, slots=slots)
    for t in range(3 * WINDOW + 2):
        current = t % 2
        with torch.cuda.device(current):
            outputs = [
                head.step(*on(tokens, t, i, torch), slots=torch.tensor(slots, device=f"cuda:{i}"))
                for i, head in enumerate((first, second))
            ]
            assert cupy.cuda.Device().id == torch.cuda.current_device() == current
        assert [x.get_device() for x in outputs] == [0, 1]
        np.testing.assert_array_equal(wide(outputs[0]), wide(outputs[1]))
        want = twin.step(*tokens.at(np.s_[:, t]), slots=slots)
        assert relative(wide(outputs[0]), want) < STORED["bfloat16"]
    for head in (first, second, twin):
        head.flush()
    np.testing.assert_array_equal(first.state.get(), second.state.get())
    assert relative(first.state.get(), twin.state) < EXACT


def test_graphs(heads, torch, rng):
    """A step captured on each device; the replays run side by side."""
    both, twin = heads
    tokens = make_tokens(LAYER, 4, WINDOW, "bfloat16", rng)
    graphs, inputs, outputs = [], [], []
    for i, head in enumerate(both):
        with torch.cuda.device(i):
            inputs.append(on(tokens, 0, i, torch))
            outputs.append(torch.empty_like(inputs[i].v))
            slots, graph = torch.arange(4, device=f"cuda:{i}"), torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            # PyTorch's default stream of captures is on the device of the process's first capture
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                head.step(*inputs[i], slots=slots, out=outputs[i])
            graphs.append(graph)
            inputs[i] = (inputs[i], slots)  # the graph reads their memory
    for t in range(2 * WINDOW):
        for i, graph in enumerate(graphs):
            with torch.cuda.device(i):
                for x, new in zip(inputs[i][0], on(tokens, t % WINDOW, i, torch), strict=True):
                    x.copy_(new)
                graph.replay()
        want = twin.step(*(x[:, t % WINDOW] for x in tokens))
        np.testing.assert_array_equal(wide(outputs[0]), wide(outputs[1]))
        assert relative(wide(outputs[0]), want) < STORED["bfloat16"]


def test_threads(heads, torch, rng):
    """A thread per device, each with its device current."""
    both, twin = heads
    tokens = make_tokens(LAYER, 4, 40, "bfloat16", rng)
    results = [None, None]

    def decode(i):
        with torch.cuda.device(i):
            results[i] = [wide(both[i].step(*on(tokens, t, i, torch))) for t in range(40)]

    threads = [threading.Thread(target=decode, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = np.stack(results, axis=2)  # (tokens, batch, device, heads, V)
    np.testing.assert_array_equal(got[:, :, 0], got[:, :, 1])
    assert relative(got[:, :, 0].swapaxes(0, 1), twin.step(*tokens)) < STORED["bfloat16"]


def test_arrays_on_the_other_device(heads, torch, rng):
    """They are refused, by name, before anything is written."""
    (first, second), _ = heads
    tokens = make_tokens(LAYER, 4, 1, "bfloat16", rng)
    token = on(tokens, 0, 0, torch)
    expected = r"^q: expected an array on CUDA device 1, the head's device, got one on 0"
    with pytest.raises(ValueError, match=expected):
        second.step(*token)
    refused("slots: expected an array", second.step, *on(tokens, 0, 1, torch), slots=torch.arange(4, device="cuda:0"))
    refused("state: expected an array on CUDA", first.load_state, torch.zeros(4, *LAYER.state_shape, device="cuda:1"))
    refused("out: expected an array on CUDA", second.step, *on(tokens, 0, 1, torch), out=torch.empty_like(token.v))
    assert not first.position.get().any()
    assert not second.position.get().any()
