"""Heads on a device: arrays of every framework, streams, captured graphs, states in given memory."""

import ml_dtypes
import numpy as np
import pytest
from decode_systems import head_of
from gpu.cuda_support import EXACT, LAYERS, RANKS, ROUNDED, STORED, make_plan, make_tokens, named_gate, slot_table
from samples import relative

from sketchssm.layer.recurrence import Tokens

pytestmark = pytest.mark.gpu

SYSTEMS = ("standard", "replay", "sketch")


def heads_of(system, layer, slots, rng, gate=None, **device):
    """A head on the device and its float64 twin."""
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng)
    head = head_of(system, plan, slots, "cuda", gate=gate, **device)
    head.warmup()
    return head, head_of(system, plan, slots, "reference", gate=gate)


def each(tokens, convert, activation=None, gate=None):
    """Tokens as another framework's arrays; q, k, v and raw gate inputs in the activations' type."""
    narrow = 3 if gate is None else 4
    return Tokens(
        *(None if x is None else convert(x, activation if i < narrow else None) for i, x in enumerate(tokens))
    )


def on_torch(torch, device="cuda"):
    def convert(x, activation):
        tensor = torch.from_numpy(np.ascontiguousarray(x)).to(device)
        return tensor if activation is None else tensor.to(getattr(torch, activation))

    return convert


def on_jax(jax):
    device = jax.devices("gpu")[0]

    def convert(x, activation):
        array = jax.device_put(np.ascontiguousarray(x), device)
        return array if activation is None else array.astype(activation)

    return convert


def on_cupy(cupy):
    def convert(x, activation):
        dtype = ml_dtypes.bfloat16 if activation == "bfloat16" else activation
        return cupy.asarray(np.ascontiguousarray(x)).astype(dtype or x.dtype)

    return convert


def on_numpy(x, activation):
    return x.astype(ml_dtypes.bfloat16 if activation == "bfloat16" else activation or x.dtype)


def wide(x):
    """Outputs of any framework, as float64 on the host."""
    if hasattr(x, "cpu"):
        x = x.float().cpu().numpy()
    return np.asarray(x.get() if hasattr(x, "get") else x).astype(np.float64)


@pytest.fixture(params=["torch", "jax", "cupy", "numpy"])
def convert(request, cupy):
    if request.param == "numpy":
        return on_numpy
    module = cupy if request.param == "cupy" else request.getfixturevalue(request.param)
    if request.param == "jax":
        with cupy.cuda.Device():  # JAX leaves the last device current when it starts
            sees_gpu = any(device.platform == "gpu" for device in module.devices())
        if not sees_gpu:
            pytest.skip("JAX sees no GPU")
    return {"torch": on_torch, "jax": on_jax, "cupy": on_cupy}[request.param](module)


class TestFrameworks:
    @pytest.mark.parametrize("system", SYSTEMS)
    @pytest.mark.parametrize("name", ["mamba2", "gdn", "kda", "kda-raw"])
    def test_outputs_and_states(self, convert, system, name, rng):
        """bf16 inputs and outputs, padding, changing slots, several tokens per call: as the reference, rounded."""
        layer = LAYERS[name]
        gate = named_gate(name, layer, rng)
        head, twin = heads_of(system, layer, 6, rng, gate)
        tokens = make_tokens(layer, 4, 40, "bfloat16", rng, gate=gate)
        start = rng.standard_normal((6, *layer.state_shape))
        start = start.astype(np.float32)
        head.load_state(convert(start, None))
        twin.load_state(start)
        table = slot_table(4, 6, 36, rng)
        for t in range(36):
            given = each(tokens.at(np.s_[:, t]), convert, "bfloat16", gate)
            output = head.step(*given, slots=convert(table[t], None))
            want = twin.step(*tokens.at(np.s_[:, t]), slots=table[t])
            assert type(output) is type(given.v)
            assert output.dtype == given.v.dtype
            assert relative(wide(output), want) < (STORED["bfloat16"] if system == "sketch" else ROUNDED)
            assert not wide(output)[table[t] < 0].any()
        several = head.step(*each(tokens.at(np.s_[:, 36:]), convert, "bfloat16", gate))
        want = twin.step(*tokens.at(np.s_[:, 36:]))
        assert relative(wide(several), want) < (STORED["bfloat16"] if system == "sketch" else ROUNDED)
        head.flush(convert(np.array([0, -1, 2]), None))
        twin.flush([0, -1, 2])
        np.testing.assert_array_equal(head.position.get(), twin.position)
        head.reset(convert(np.array([1, -1]), None))
        twin.reset([1, -1])
        head.flush()
        twin.flush()
        assert relative(head.state.get(), twin.state) < EXACT


class TestTorch:
    def test_current_stream(self, torch, rng):
        """A step waits for inputs that a slow stream still computes, and its outputs are in order on this stream."""
        layer = LAYERS["gdn"]
        head, twin = heads_of("replay", layer, 4, rng)
        tokens = make_tokens(layer, 4, 20, "bfloat16", rng)
        given = each(tokens, on_torch(torch), "bfloat16")
        stream, late = torch.cuda.Stream(), torch.full_like(given.v[:, 0], float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            outputs = []
            for t in range(20):
                torch.cuda._sleep(2_000_000)  # about a millisecond
                late.copy_(given.v[:, t])
                token = given.at(np.s_[:, t])
                outputs.append(head.step(*token._replace(v=late)))
                late.fill_(float("nan"))
            stacked = torch.stack(outputs, 1)
        stream.synchronize()
        assert relative(wide(stacked), twin.step(*tokens)) < ROUNDED

    def test_graph_of_load_flush_and_reset(self, torch, rng):
        layer = LAYERS["kda"]
        head, twin = heads_of("sketch", layer, 4, rng)
        start = rng.standard_normal((2, *layer.state_shape)).astype(np.float32)
        tokens = make_tokens(layer, 4, 5, "bfloat16", rng)
        state, loaded = torch.zeros(2, *layer.state_shape, device="cuda"), torch.full((2,), -1, device="cuda")
        flushed, cleared = (torch.full((2,), -1, device="cuda", dtype=torch.int64) for _ in range(2))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            head.flush(flushed)
            head.reset(cleared)
            head.load_state(state, slots=loaded)
        given = each(tokens, on_torch(torch), "bfloat16")
        head.step(*given)
        twin.step(*tokens)
        state.copy_(torch.from_numpy(start))
        for which, values in ((flushed, [3, 0]), (cleared, [1, -1]), (loaded, [-1, 2])):
            which.copy_(torch.tensor(values))
        graph.replay()
        torch.cuda.synchronize()
        twin.flush([3, 0])
        twin.reset([1])
        twin.load_state(start[1:], slots=[2])
        assert relative(head.state.get(), twin.state) < EXACT
        assert head.position.get().tolist() == twin.position.tolist() == [0, 0, 0, 0]
        assert relative(wide(head.step(*given)), twin.step(*tokens)) < STORED["bfloat16"]
