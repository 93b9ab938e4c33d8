"""Heads take and return arrays of every framework."""

import numpy as np
import pytest
from array_kinds import BFLOAT16, REAL, TORCH, Convertible, Elsewhere, Exporter
from samples import LAYERS, plan_of, refused, states_of, tokens_of

import sketchssm as ss
from sketchssm.arrays.interop import is_on_device, to_type
from sketchssm.layer.recurrence import Tokens

LAYER = LAYERS["gdn"]


def each(tokens, convert):
    return Tokens(*(None if x is None else convert(x) for x in tokens))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
class TestHeads:
    """A head gives the same results for arrays of every framework."""

    def pair(self, backend, rng):
        plan = plan_of(rng, LAYER, window=4)
        return ss.SketchHead(plan, 3, backend), ss.SketchHead(plan, 3, backend)

    @pytest.mark.parametrize("dtype", TORCH)
    def test_torch(self, torch, backend, dtype, rng):
        """bfloat16 activations with float32 gates among them, slots as a tensor, a state from a prefill."""
        head, plain = self.pair(backend, rng)
        tokens, start = tokens_of(rng, LAYER, 2, 5), states_of(rng, LAYER, 2)
        q, k, v = (torch.from_numpy(x).to(getattr(torch, dtype)).requires_grad_() for x in tokens[:3])
        g, beta = (torch.from_numpy(x) for x in tokens[3:])
        slots = torch.tensor([2, 0])
        head.load_state(torch.from_numpy(start), slots=slots)
        plain.load_state(start, slots=[2, 0])
        with torch.no_grad():
            output = head.step(q, k, v, g, beta, slots=slots)
        want = plain.step(*(x.detach().double().numpy() for x in (q, k, v, g, beta)), slots=[2, 0])
        assert output.dtype == v.dtype
        assert output.device == v.device
        assert torch.equal(output, torch.from_numpy(want).to(v.dtype))

    @pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "out", "state"])
    def test_torch_gradients_are_refused(self, torch, backend, name, rng):
        """A head has no backward pass: without an error, PyTorch would train with gradients of zero."""
        head, twin = self.pair(backend, rng)
        tokens = each(tokens_of(rng, LAYER, 2, 1), torch.from_numpy)._asdict()
        given = tokens | {"out": torch.zeros_like(tokens["v"]), "state": torch.from_numpy(states_of(rng, LAYER, 2))}

        def call(state, **others):
            twin.load_state(state)
            return twin.step(**others)

        refused(f"{name}: expected a tensor without", call, **given | {name: given[name].requires_grad_()})
        twin.reset()
        with torch.no_grad():
            got = call(**given)
        given[name].requires_grad_(False)
        head.load_state(given["state"])
        assert torch.equal(got, head.step(**tokens).to(got.dtype))

    def test_frameworks_may_be_mixed(self, torch, jax, backend, rng):
        head, plain = self.pair(backend, rng)
        tokens = tokens_of(rng, LAYER, 2, 5)
        q, k, v, g, beta = tokens
        output = head.step(torch.from_numpy(q), jax.numpy.asarray(k), v, Exporter(g), Convertible(beta))
        assert type(output) is np.ndarray
        np.testing.assert_array_equal(output, plain.step(*tokens))


class OnDevice(Elsewhere):
    """A device array that can copy itself to the host."""

    def __array__(self, dtype=None, copy=None):
        return self.array


class TestCopiesFromADevice:
    """A host head warns once that it copies device arrays, and says why it computes on the host."""

    @pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
    def test_steps(self, backend, rng, monkeypatch):
        monkeypatch.setattr("sketchssm.cuda.missing", lambda: "CuPy is not installed")
        head, tokens = ss.StandardHead(LAYER, 2, backend), tokens_of(rng, LAYER, 2, 1)
        why = "CuPy is not installed" if backend == "auto" else f"the head was made with backend='{backend}'"
        with pytest.warns(RuntimeWarning, match=rf"^v: arrays on a device are copied to the host.*: {why}$") as said:
            head.step(*each(tokens, OnDevice))
            head.step(*each(tokens, OnDevice))
        assert len(said) == 1
        assert said[0].filename == __file__

    def test_states(self, rng):
        head, state = ss.StandardHead(LAYER, 2, "reference"), states_of(rng, LAYER, 2)
        with pytest.warns(RuntimeWarning, match=r"^state: arrays on a device are copied") as said:
            head.load_state(OnDevice(state))
            head.load_state(OnDevice(state))
        assert [w.filename for w in said] == [__file__]

    def test_arrays_on_the_host_are_silent(self, torch, jax, rng):
        tokens = tokens_of(rng, LAYER, 2, 1)
        for convert in (np.asarray, torch.from_numpy, jax.numpy.asarray, Exporter, Convertible):
            assert not is_on_device(convert(tokens.v))
            ss.StandardHead(LAYER, 2, "reference").step(*each(tokens, convert))

    def test_where_an_array_is(self, torch):
        assert is_on_device(OnDevice(np.ones(3)))
        assert not is_on_device(torch.ones(3, device="meta"))  # `meta` tensors are refused
        assert not is_on_device([1.0])


class TestRange:
    """float64 values beyond float32's range are refused, not converted to infinity."""

    @pytest.mark.parametrize("name", ["q", "k", "v", "beta"])
    def test_inputs(self, name, rng):
        head, tokens = ss.StandardHead(LAYER, 3, "cpu"), tokens_of(rng, LAYER, 3, 2)
        wide = getattr(tokens, name).astype(np.float64)
        wide[1, 0] = -1e39
        given = tokens._replace(**{name: wide})
        refused(rf"{name}: expected numbers that float32 can hold, got -1e\+39", head.step, *given)
        assert not head.state.any()
        head.step(*given, slots=[0, -1, 2])  # a padding row may hold any value
        ss.StandardHead(LAYER, 3, "reference").step(*each(given, np.float64))  # the reference computes in float64

    def test_states(self, rng):
        head, state = ss.StandardHead(LAYER, 3, "cpu"), states_of(rng, LAYER, 2).astype(np.float64)
        state[1, 0, 0, 0] = 1e39
        refused(r"state: expected numbers that float32 can hold, got 1e\+39", head.load_state, state)
        assert not head.state.any()
        head.load_state(state, slots=[2, -1])

    def test_log_decays_are_full_forgets(self, rng):
        """exp(-1e39) is 0 in any arithmetic."""
        heads, tokens = [ss.StandardHead(LAYER, 3, "cpu") for _ in range(2)], tokens_of(rng, LAYER, 3, 2)
        wide = tokens.g.astype(np.float64)
        for head, value in zip(heads, (-1e39, -np.inf), strict=True):
            wide[1, 1] = value
            head.step(*tokens._replace(g=wide))
        np.testing.assert_array_equal(heads[0].state, heads[1].state)

    @pytest.mark.parametrize(
        ("source", "target", "value"),
        [(np.float64, BFLOAT16, 1e39), (np.float32, np.float16, 7e4), (BFLOAT16, np.float16, 7e4)],
    )
    def test_other_types(self, source, target, value):
        refused("v: expected numbers that", to_type, np.array([1.0, value], source), np.dtype(target), "v")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:v. arrays on a device are copied:RuntimeWarning")
class TestGpu:
    """Arrays on a GPU are copied to the host, and results are copied back to their device."""

    def arrays(self, rng):
        return (
            tokens_of(rng, LAYER, 2, 5),
            ss.StandardHead(LAYER, 2, "reference"),
            ss.StandardHead(LAYER, 2, "reference"),
        )

    @pytest.mark.parametrize("dtype", REAL)
    def test_cupy(self, cupy, dtype, rng):
        tokens, head, plain = self.arrays(rng)
        v = tokens.v.astype(dtype)
        given = each(tokens._replace(v=v), cupy.asarray)
        output = head.step(*given, slots=cupy.asarray([1, 0]))
        want = plain.step(*tokens._replace(v=v), slots=[1, 0])
        assert isinstance(output, cupy.ndarray)
        assert (output.dtype, output.device) == (dtype, given.v.device)
        np.testing.assert_array_equal(output.get(), want)
        out = cupy.empty((*v.shape, 2), dtype)[..., 0]
        head.reset()
        assert head.step(*given, slots=[1, 0], out=out) is out
        np.testing.assert_array_equal(out.get(), want)

    @pytest.mark.parametrize("dtype", TORCH)
    def test_torch(self, torch, dtype, rng):
        tokens, head, plain = self.arrays(rng)
        given = each(tokens, lambda x: torch.from_numpy(x).cuda())
        v = given.v.to(getattr(torch, dtype)).requires_grad_()
        with torch.no_grad():
            output = head.step(*given._replace(v=v), slots=torch.tensor([1, 0]).cuda())
        want = torch.from_numpy(plain.step(*tokens._replace(v=v.detach().double().cpu().numpy()), slots=[1, 0]))
        assert (output.dtype, output.device) == (v.dtype, v.device)
        assert torch.equal(output.cpu(), want.to(v.dtype))
        head.reset()
        out = torch.empty_like(v, requires_grad=False)
        assert head.step(*given._replace(v=v.detach()), slots=[1, 0], out=out) is out
        assert torch.equal(out, output)
