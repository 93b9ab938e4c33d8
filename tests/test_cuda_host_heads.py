"""Heads on the CUDA backend without a GPU: the arrays of a call, on the host and on the stand-in for CuPy."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from gpu.cuda_support import EXACT, STORED
from host import driver, fixtures, standin
from host.heads import BFLOAT16, LAYER, OnDevice, head_with, narrow, sketch, tokens_of
from samples import refused, relative

import sketchssm as ss
from sketchssm.cuda import workspaces

cupy = fixtures.of_heads


class TestHosts:
    """Arrays on the host are uploaded, and outputs come back."""

    def test_numpy(self, rng):
        head, twin = sketch(), sketch("reference")
        tokens, start = tokens_of(rng), rng.standard_normal((3, *LAYER.state_shape)).astype(np.float32)
        slots = [2, -1, 0]
        for each in (head, twin):
            each.load_state(start, slots=slots)
        output = head.step(*narrow(tokens), slots=slots)
        assert type(output) is np.ndarray
        assert output.dtype == BFLOAT16
        assert relative(output, twin.step(*tokens, slots=slots)) < STORED["bfloat16"]
        np.testing.assert_array_equal(head.position, twin.position)
        for each in (head, twin):
            each.flush([2, -1])
            each.reset([0, -1])
        np.testing.assert_array_equal(head.position, twin.position)
        assert relative(head.state, twin.state) < EXACT
        assert not head.state[0].any()

    def test_torch(self, torch, rng):
        head, twin = sketch(), sketch("reference")
        tokens = tokens_of(rng)
        given = [torch.from_numpy(x).to(torch.bfloat16 if i < 3 else torch.float32) for i, x in enumerate(tokens)]
        output = head.step(*given, slots=torch.tensor([3, 1, 0]))
        assert output.dtype == torch.bfloat16
        assert relative(output.float().numpy(), twin.step(*tokens, slots=[3, 1, 0])) < STORED["bfloat16"]
        out = torch.empty(output.shape, dtype=torch.float64)
        head.reset()
        assert head.step(*given, slots=torch.tensor([3, 1, 0]), out=out) is out
        assert torch.equal(out, output.double())

    @pytest.mark.parametrize("system", ["standard", "replay", "sketch"])
    def test_an_empty_batch(self, system, rng):
        head = head_with(system)
        tokens = narrow(tokens_of(rng, batch=0, length=2))
        assert head.step(*tokens, slots=[]).shape == tokens.v.shape
        assert not head.position.any()

    def test_refusals(self, rng):
        head = sketch()
        tokens = narrow(tokens_of(rng, length=2))
        bad_gate, nothing = tokens.g.copy(), tokens.g.copy()
        bad_gate[0] = 1e-3
        nothing[1] = np.nan
        for change, kind, message in (
            ({"g": bad_gate}, ValueError, "g: expected log-decays <= 0"),
            ({"slots": [0, 0, 1]}, ValueError, "slots: expected each slot at most once"),
            ({"slots": [0, 1, 4]}, ValueError, "slots: expected -1 (padding) or 0 to 3"),
            ({"k": tokens.k.astype(int)}, TypeError, "k: expected a real floating-point array, got dtype int64"),
            ({"v": tokens.v.astype(np.float32)}, TypeError, "v: expected bfloat16, which the head's first call"),
            ({"out": np.zeros(3)}, ValueError, "out: expected shape"),
        ):
            with pytest.raises(kind, match=r"^" + re.escape(message)):
                head.step(**(tokens._asdict() | change))
        refused("state: expected finite numbers", head.load_state, np.full((1, *LAYER.state_shape), np.nan))
        assert not head.position.any()
        assert not head.state.any()
        head.step(*tokens._replace(g=nothing), slots=[0, -1, 1])  # values of a padding row are not checked


class TestDevice:
    """Arrays on the device stay there."""

    def test_memory_is_used_as_it_is(self, rng, monkeypatch):
        """No array is allocated or copied after the first step with the same memory."""
        head, twin = sketch(), sketch("reference")
        tokens = narrow(tokens_of(rng).at(np.s_[:, 0]), standin.asarray)
        out, slots = standin.empty(tokens.v.shape, BFLOAT16), standin.asarray(np.array([1, -1, 3]))
        for index in (slots, slots.astype(np.int32)):
            head.reset()
            twin.reset()
            head.step(*tokens, slots=index, out=out)
            with monkeypatch.context() as patch:
                for name in ("asarray", "empty", "zeros", "arange", "ndarray"):
                    patch.setattr(standin, name, None)
                patch.setattr(standin, "ndarray", type(out))
                patch.setattr(type(out), "__new__", None)
                assert head.step(*tokens, slots=index, out=out) is out
            for _ in range(2):
                want = twin.step(*(x.astype(np.float64) for x in tokens), slots=[1, -1, 3])
            assert relative(out.get().astype(float), want) < STORED["bfloat16"]
            assert not out[1].any()

    @pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
    def test_out_of_another_type(self, dtype, rng):
        head, twin = sketch(), sketch("reference")
        tokens = tokens_of(rng)
        out = standin.empty((*tokens.v.shape, 2), dtype)[..., 1]
        assert head.step(*narrow(tokens, standin.asarray), out=out) is out
        assert relative(out.get(), twin.step(*tokens)) < STORED["bfloat16"]

    @pytest.mark.parametrize("place", ["values", "queries"])
    def test_out_in_an_input_s_place(self, place, rng):
        """The head protects inputs that overlap the output, as kernels read some inputs after they write outputs."""
        head, apart = sketch(), sketch()
        for _ in range(2):
            q, k, v, g, beta = narrow(tokens_of(rng), standin.asarray)
            want = apart.step(q, k, v, g, beta)
            memory = standin.empty(q.size + v.size, v.dtype)  # q, then v
            q_place, v_place = memory[: q.size].reshape(q.shape), memory[q.size :].reshape(v.shape)
            q_place[...], v_place[...] = q, v
            out = v_place if place == "values" else memory[: v.size].reshape(v.shape)
            assert head.step(q_place, k, v_place, g, beta, out=out) is out
            assert np.array_equal(out, want)
        assert np.array_equal(head.state, apart.state)

    def test_batches_beyond_a_launch_s_rows(self, rng, monkeypatch):
        """Rows of several launches: bit for bit those of one."""
        head, twin = sketch(), sketch()
        start, tokens = rng.standard_normal((4, *LAYER.state_shape)).astype(np.float32), tokens_of(rng, batch=4)
        given, slots = narrow(tokens, standin.asarray), standin.asarray(np.array([3, -1, 0, 1]))
        for each, rows in ((head, 3), (twin, 512)):
            monkeypatch.setattr(workspaces, "MAX_ROWS", rows)
            each.load_state(standin.asarray(start), slots=slots)
            each.flush(slots)
        monkeypatch.setattr(workspaces, "MAX_ROWS", 3)
        output = head.step(*given, slots=slots)
        monkeypatch.setattr(workspaces, "MAX_ROWS", 512)
        np.testing.assert_array_equal(output, twin.step(*given, slots=slots))
        np.testing.assert_array_equal(head.state, twin.state)
        np.testing.assert_array_equal(head.position, [2, 2, 0, 2])

    def test_a_framework_that_nobody_knows(self, rng):
        head, twin = sketch(activation="float32"), sketch("reference")
        tokens = tokens_of(rng, activation="float32")
        output = head.step(*(OnDevice(x) for x in tokens), slots=OnDevice(np.array([3, 0, 1])))
        assert isinstance(output, standin.ndarray)
        assert relative(output.get(), twin.step(*tokens, slots=[3, 0, 1])) < STORED["bfloat16"]

    def test_refusals(self, rng):
        head = sketch()
        tokens = narrow(tokens_of(rng, length=2), standin.asarray)
        for change, kind, message in (
            ({"slots": standin.zeros(2, np.int64)}, ValueError, "slots: expected shape (3,), got (2,)"),
            ({"slots": standin.zeros(3)}, ValueError, "slots: expected integers, got dtype float64"),
            (
                {"slots": standin.full(3, 2**64 - 1, np.uint64)},
                ValueError,
                "slots: expected signed or smaller integers, got dtype uint64",
            ),
            ({"q": tokens.q.astype(np.float32)}, TypeError, "q: expected bfloat16, which the head's first call"),
            ({"beta": tokens.beta > 0}, TypeError, "beta: expected a real floating-point array, got dtype bool"),
        ):
            with pytest.raises(kind, match=r"^" + re.escape(message)):
                head.step(**(tokens._asdict() | change))
        refused(r"slots: expected shape \(count,\), got \(1, 1\)", head.flush, standin.zeros((1, 1), np.int64))
        assert not head.position.any()

    def test_another_device(self, rng, monkeypatch):
        head = sketch()
        tokens = narrow(tokens_of(rng, length=2), standin.asarray)
        monkeypatch.setattr(standin.ndarray, "device", SimpleNamespace(id=1))
        refused("q: expected .* CUDA device 0, the head's device, got one on 1", head.step, *tokens, slots=[0, 1, 2])


class TestTorchOnDevice:
    """PyTorch's port on host tensors that claim to be on the device."""

    @pytest.fixture
    def torch(self, torch, monkeypatch):
        driver.install(monkeypatch, torch, None)
        return torch

    def test_memory_is_used_as_it_is(self, torch, rng):
        head, twin = sketch(), sketch("reference")
        tokens = tokens_of(rng)
        given = [torch.from_numpy(x).to(torch.bfloat16 if i < 3 else torch.float32) for i, x in enumerate(tokens)]
        output = head.step(*given, slots=torch.tensor([3, -1, 0]))
        want = twin.step(*tokens, slots=[3, -1, 0])
        assert isinstance(output, torch.Tensor)
        assert output.dtype == torch.bfloat16
        assert relative(output.float().numpy(), want) < STORED["bfloat16"]
        out = torch.empty_like(output)
        head.reset(torch.tensor([3, 0]))
        assert head.step(*given, slots=torch.tensor([3, -1, 0], dtype=torch.int32), out=out) is out
        assert torch.equal(out, output)

    def test_copies_live_until_the_kernels_have_run(self, torch, rng):
        """PyTorch makes the copies and would reuse their memory for its next tensor if no reference were kept."""
        head, twin = sketch(), sketch("reference")
        tokens = tokens_of(rng)
        given = [torch.from_numpy(x).to(torch.bfloat16 if i < 3 else torch.float64) for i, x in enumerate(tokens)]
        given = [torch.stack([x, x], -1)[..., 0].requires_grad_() for x in given]
        out = torch.empty(tokens.v.shape, dtype=torch.float64)
        with torch.no_grad():
            assert head.step(*given, slots=torch.tensor([[1, 0], [2, 0], [3, 0]])[:, 0], out=out) is out
        assert relative(out.numpy(), twin.step(*tokens, slots=[1, 2, 3])) < STORED["bfloat16"]


class TestPools:
    def test_refusals(self):
        shape = (4, *LAYER.state_shape)
        strided = standin.zeros((*shape[:-1], 2 * shape[-1]), np.float32)[..., ::2]
        shifted = standin.zeros((4, np.prod(shape[1:]) + 1), np.float32)[:, 1:].reshape(shape, copy=False)
        for pool, kind, message in (
            (np.zeros(shape, np.float32), TypeError, "expected a writable array on the CUDA device, got ndarray"),
            (standin.zeros(shape), TypeError, "expected float32, got float64"),
            (standin.zeros((5, *shape[1:]), np.float32), ValueError, "expected shape"),
            (standin.zeros(shape, np.float32).swapaxes(2, 3).copy().swapaxes(2, 3), ValueError, "expected slots of"),
            (strided, ValueError, "expected slots of"),
            (shifted, ValueError, "expected slots aligned to 16 bytes"),
        ):
            with pytest.raises(kind, match=r"^memory\['state'\]: " + message):
                ss.StandardHead(LAYER, 4, "cuda", memory={"state": pool})
