"""Heads take and return arrays of every framework, without needless copies or imports."""

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from samples import LAYERS, at, plan_of, states_of, tokens_of

import sketchssm as ss
from sketchssm.interop import check_out, from_host, is_on_device, is_real, to_host, to_type
from sketchssm.recurrence import Tokens

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
REAL = (np.float16, np.float32, np.float64, BFLOAT16)
TORCH = ("float16", "float32", "float64", "bfloat16")
LAYER = LAYERS["gdn"]


class Exporter:
    """An array of an unknown framework: it has DLPack and a shape only."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Elsewhere(Exporter):
    """An array in memory that the host cannot read."""

    def __dlpack__(self, **options):
        raise BufferError("the memory is on a GPU")

    def __dlpack_device__(self):
        return (2, 0)


class Convertible:
    """An array with ``__array__`` only."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __array__(self, dtype=None, copy=None):
        return self.array


class Standard(Exporter):
    """An array with the array API's namespace."""

    def __array_namespace__(self, api_version=None):
        class Namespace:
            @staticmethod
            def from_dlpack(array):
                return Standard(np.from_dlpack(array))

        return Namespace


def address(array):
    return array.__array_interface__["data"][0]


class TestToHost:
    @pytest.mark.parametrize("dtype", REAL)
    def test_numpy_is_itself(self, dtype):
        array = np.ones((3, 4), dtype)
        assert to_host(array, "v") is array

    @pytest.mark.parametrize("dtype", TORCH)
    @pytest.mark.parametrize("grad", [False, True])
    def test_torch_on_the_cpu_is_viewed(self, torch, dtype, grad):
        tensor = torch.arange(12.0).reshape(3, 4).to(getattr(torch, dtype)).requires_grad_(grad)
        host = to_host(tensor, "v")
        assert host.dtype.name == dtype
        assert address(host) == tensor.data_ptr()
        np.testing.assert_array_equal(host.astype(float), np.arange(12.0).reshape(3, 4))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_strided_torch_is_viewed(self, torch, dtype):
        tensor = torch.arange(24.0).reshape(4, 6).to(getattr(torch, dtype))[1:, ::2].T
        host = to_host(tensor, "v")
        assert address(host) == tensor.data_ptr()
        assert host.shape == (3, 3)
        np.testing.assert_array_equal(host.astype(float), np.arange(24.0).reshape(4, 6)[1:, ::2].T)

    def test_a_parameter_is_a_tensor(self, torch):
        parameter = torch.nn.Parameter(torch.ones(3))
        assert address(to_host(parameter, "v")) == parameter.data_ptr()

    @pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
    def test_jax_on_the_cpu_is_viewed(self, jax, dtype):
        array = jax.device_put(jax.numpy.arange(12.0, dtype=dtype).reshape(3, 4), jax.devices("cpu")[0])
        host = to_host(array, "v")
        assert host.dtype.name == dtype
        assert address(host) == array.unsafe_buffer_pointer()
        np.testing.assert_array_equal(host.astype(float), np.arange(12.0).reshape(3, 4))

    @pytest.mark.parametrize("kind", [Exporter, Convertible, Standard])
    def test_protocols_are_viewed(self, kind):
        array = np.arange(12.0).reshape(3, 4)
        host = to_host(kind(array), "v")
        assert address(host) == address(array)
        np.testing.assert_array_equal(host, array)

    @pytest.mark.parametrize("slots", [[2, -1], (2, -1), range(2), 3, np.int64(3), []])
    def test_integers_may_come_as_they_are(self, slots):
        np.testing.assert_array_equal(to_host(slots, "slots"), np.asarray(slots))

    def test_integer_tensors(self, torch, jax):
        for slots in (torch.tensor([2, -1]), torch.tensor([2, -1], dtype=torch.int32), jax.numpy.asarray([2, -1])):
            np.testing.assert_array_equal(to_host(slots, "slots"), [2, -1])

    @pytest.mark.parametrize(
        ("value", "came"),
        [
            (None, "NoneType"),
            ("abc", "str"),
            ({"a": 1}, "dict"),
            (1.5, "float"),
            ([1.5], "list"),
            ([[1], [2, 3]], "list"),
            (True, "bool"),
            (object(), "object"),
            (Elsewhere(np.ones(3)), "test_interop.Elsewhere"),
        ],
    )
    def test_refuses_what_is_no_array(self, value, came):
        with pytest.raises(TypeError, match=f"^v: expected an array, got {came} "):
            to_host(value, "v")

    def test_refuses_tensors_that_numpy_cannot_hold(self, torch, jax):
        with pytest.raises(TypeError, match=r"^k: expected an array, got torch.Tensor \(.*Sparse"):
            to_host(torch.eye(3).to_sparse(), "k")
        with pytest.raises(TypeError, match=r"^k: expected an array, got torch.nn.modules.*Linear "):
            to_host(torch.nn.Linear(2, 2), "k")
        with pytest.raises(TypeError, match=r"^k: expected an array, got jax.*Tracer"):
            jax.jit(lambda x: to_host(x, "k"))(jax.numpy.ones(3))


class TestFromHost:
    @pytest.mark.parametrize("dtype", REAL)
    def test_numpy(self, dtype, rng):
        result = rng.standard_normal((3, 4))
        back = from_host(result, like=np.ones(1, dtype))
        assert back.dtype == dtype
        np.testing.assert_array_equal(back, result.astype(dtype))
        assert (back is result) == (dtype == np.float64)

    @pytest.mark.parametrize("dtype", TORCH)
    def test_torch(self, torch, dtype, rng):
        result = rng.standard_normal((3, 4)).astype(np.float32)
        like = torch.ones(1, dtype=getattr(torch, dtype), requires_grad=True)
        back = from_host(result, like=like)
        assert back.dtype == like.dtype
        assert not back.requires_grad
        assert torch.equal(back, torch.tensor(result).to(like.dtype))
        assert (back.data_ptr() == address(result)) == (dtype == "float32")

    @pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
    def test_jax(self, jax, dtype, rng):
        result = rng.standard_normal((3, 4)).astype(np.float32)
        like = jax.numpy.ones(1, dtype)
        back = from_host(result, like=like)
        assert isinstance(back, jax.Array)
        assert (back.dtype, back.devices()) == (like.dtype, like.devices())
        np.testing.assert_array_equal(np.asarray(back), result.astype(like.dtype))

    def test_array_api(self, rng):
        result = rng.standard_normal((3, 4))
        back = from_host(result, like=Standard(np.ones(1, np.float32)))
        assert isinstance(back, Standard)
        np.testing.assert_array_equal(back.array, result.astype(np.float32))
        same = from_host(result, like=Standard(np.ones(1)))
        assert address(same.array) == address(result)

    @pytest.mark.parametrize("kind", [Exporter, Convertible])
    def test_kinds_that_cannot_be_made_give_numpy(self, kind, rng):
        result = rng.standard_normal((3, 4))
        back = from_host(result, like=kind(np.ones(1, np.float32)))
        assert type(back) is np.ndarray
        assert back.dtype == np.float32


class TestOut:
    @pytest.mark.parametrize("dtype", REAL)
    def test_numpy(self, dtype, rng):
        result, out = rng.standard_normal((3, 4)), np.empty((4, 3), dtype).T
        check_out(out, result.shape)
        assert from_host(result, like=np.ones(1), out=out) is out
        np.testing.assert_array_equal(out, result.astype(dtype))

    @pytest.mark.parametrize("dtype", TORCH)
    @pytest.mark.parametrize("grad", [False, True])
    def test_torch(self, torch, dtype, grad, rng):
        result, out = (
            rng.standard_normal((3, 4)),
            torch.empty(4, 3, dtype=getattr(torch, dtype)).T.requires_grad_(grad),
        )
        check_out(out, result.shape)
        assert from_host(result, like=np.ones(1), out=out) is out
        assert torch.equal(out, torch.tensor(result).to(out.dtype))

    def test_jax_is_refused(self, jax):
        with pytest.raises(TypeError, match=r"^out: expected a writable array, got a JAX array, which is immutable"):
            check_out(jax.numpy.zeros((3, 4)), (3, 4))

    def test_torch_refusals(self, torch):
        with pytest.raises(ValueError, match=r"^out: expected shape \(3, 4\), got \(4, 3\)"):
            check_out(torch.zeros(4, 3), (3, 4))
        with pytest.raises(TypeError, match=r"^out: expected a real floating-point array, got dtype torch.int64"):
            check_out(torch.zeros(3, 4, dtype=torch.int64), (3, 4))
        with pytest.raises(TypeError, match=r"^out: expected a real floating-point array, got dtype torch.complex64"):
            check_out(torch.zeros(3, 4, dtype=torch.complex64), (3, 4))
        for overlapping in (torch.zeros(4).expand(3, 4), torch.zeros(9).as_strided((3, 4), (2, 1))):
            with pytest.raises(ValueError, match=r"^out: expected memory of its own for every element"):
                check_out(overlapping, (3, 4))
        for bad, came in (
            (torch.zeros(3, 4, device="meta"), "a tensor on the meta device"),
            (torch.zeros(3, 4).to_sparse(), "layout torch.sparse_coo"),
        ):
            with pytest.raises(TypeError, match=rf"^out: expected a tensor with dense memory, got {came}"):
                check_out(bad, (3, 4))

    @pytest.mark.parametrize(
        ("out", "error", "message"),
        [
            (np.zeros((4, 3)), ValueError, r"expected shape \(3, 4\), got \(4, 3\)"),
            (np.zeros((3, 4), int), TypeError, "expected a real floating-point array, got dtype int64"),
            (np.zeros((3, 4), object), TypeError, "expected a real floating-point array, got dtype object"),
            (np.broadcast_to(0.0, (3, 4)), ValueError, "expected a writable array, got a read-only one"),
            (Exporter(np.zeros((3, 4))), TypeError, "expected a NumPy, PyTorch or CuPy array, got test_interop"),
            ([0.0], TypeError, "expected a NumPy, PyTorch or CuPy array, got list"),
        ],
    )
    def test_refusals(self, out, error, message):
        with pytest.raises(error, match=f"^out: {message}"):
            check_out(out, (3, 4))

    @pytest.mark.parametrize("strides", [(0, 8), (8, 8), (16, 8), (24, 8), (8, 4), (30, 8)])
    def test_elements_that_share_memory_are_refused(self, strides):
        out = np.lib.stride_tricks.as_strided(np.zeros(20), (3, 4), strides)
        with pytest.raises(ValueError, match=r"^out: expected memory of its own for every element"):
            check_out(out, (3, 4))

    @pytest.mark.parametrize("strides", [(8, 24), (40, 8), (64, 16), (-32, 8), (32, -8), (8, 32), (16, 24), (24, 32)])
    def test_any_other_strides_are_taken(self, strides):
        """The strides of the last two axes interleave, but no two elements share memory."""
        out = np.lib.stride_tricks.as_strided(np.zeros(40)[20:], (3, 4), strides)
        check_out(out, (3, 4))

    def test_of_no_elements(self):
        check_out(np.lib.stride_tricks.as_strided(np.zeros(4), (3, 0), (0, 8)), (3, 0))


@pytest.mark.parametrize("dtype", [*REAL, int, bool, complex, object, np.longdouble, "V4", "U3", "M8[s]", "f4,f4"])
def test_is_real(dtype):
    assert is_real(np.dtype(dtype)) == (dtype in REAL)


def each(tokens, convert):
    return Tokens(*(None if x is None else convert(x) for x in tokens))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
class TestHeads:
    """A head gives the same results for arrays of every framework."""

    def pair(self, backend, rng):
        plan = plan_of(rng, LAYER, window=4)
        return ss.SketchHead(plan, 3, backend), ss.SketchHead(plan, 3, backend)

    @pytest.mark.parametrize("dtype", REAL)
    def test_numpy(self, backend, dtype, rng):
        head, plain = self.pair(backend, rng)
        tokens = tokens_of(rng, LAYER, 3, 5)
        rounded = tokens._replace(**{x: getattr(tokens, x).astype(dtype) for x in "qkv"})
        output = head.step(*rounded)
        assert output.dtype == dtype
        wide = plain.step(*(x.astype(np.float64) for x in rounded))
        np.testing.assert_array_equal(output, wide.astype(dtype))

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
        output = head.step(q, k, v, g, beta, slots=slots)
        want = plain.step(*(x.detach().double().numpy() for x in (q, k, v, g, beta)), slots=[2, 0])
        assert output.dtype == v.dtype
        assert output.device == v.device
        assert torch.equal(output, torch.from_numpy(want).to(v.dtype))

    def test_torch_out(self, torch, backend, rng):
        head, plain = self.pair(backend, rng)
        tokens = tokens_of(rng, LAYER, 2, 5)
        out = torch.empty(tokens.v.shape, dtype=torch.bfloat16)
        assert head.step(*each(tokens, torch.from_numpy), out=out) is out
        assert torch.equal(out, torch.from_numpy(plain.step(*each(tokens, np.float64))).to(torch.bfloat16))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_jax(self, jax, backend, dtype, rng):
        head, plain = self.pair(backend, rng)
        tokens, start = tokens_of(rng, LAYER, 2, 5), states_of(rng, LAYER, 2)
        arrays = each(tokens, jax.numpy.asarray)
        arrays = arrays._replace(**{x: getattr(arrays, x).astype(dtype) for x in "qkv"})
        head.load_state(jax.numpy.asarray(start), slots=jax.numpy.asarray([2, 0]))
        plain.load_state(start, slots=[2, 0])
        output = head.step(*arrays, slots=jax.numpy.asarray([2, 0]))
        want = plain.step(*(np.asarray(x).astype(np.float64) for x in arrays), slots=[2, 0])
        assert isinstance(output, jax.Array)
        assert output.dtype == arrays.v.dtype
        np.testing.assert_array_equal(np.asarray(output), want.astype(arrays.v.dtype))

    def test_jax_out_is_refused_before_anything_happens(self, jax, backend, rng):
        head, twin = self.pair(backend, rng)
        tokens = tokens_of(rng, LAYER, 2, 3)
        with pytest.raises(TypeError, match=r"^out: .* JAX array, which is immutable"):
            head.step(*tokens, out=jax.numpy.zeros(tokens.v.shape))
        np.testing.assert_array_equal(head.position, 0)
        np.testing.assert_array_equal(head.step(*tokens), twin.step(*tokens))

    @pytest.mark.parametrize("kind", [Exporter, Convertible])
    def test_protocols(self, backend, kind, rng):
        head, plain = self.pair(backend, rng)
        tokens = tokens_of(rng, LAYER, 2, 5)
        output = head.step(*each(tokens, kind))
        assert type(output) is np.ndarray
        np.testing.assert_array_equal(output, plain.step(*tokens))

    def test_frameworks_may_be_mixed(self, torch, jax, backend, rng):
        head, plain = self.pair(backend, rng)
        tokens = tokens_of(rng, LAYER, 2, 5)
        q, k, v, g, beta = tokens
        output = head.step(torch.from_numpy(q), jax.numpy.asarray(k), v, Exporter(g), Convertible(beta))
        assert type(output) is np.ndarray
        np.testing.assert_array_equal(output, plain.step(*tokens))

    def test_overlapping_out_is_refused_before_anything_happens(self, backend, rng):
        head, twin = self.pair(backend, rng)
        tokens = at(tokens_of(rng, LAYER, 2, 1), np.s_[:, 0])
        out = np.lib.stride_tricks.as_strided(np.zeros(100, np.float32), tokens.v.shape, (12, 8, 4))
        with pytest.raises(ValueError, match=r"^out: expected memory of its own for every element"):
            head.step(*tokens, out=out)
        np.testing.assert_array_equal(head.position, 0)
        np.testing.assert_array_equal(head.step(*tokens), twin.step(*tokens))

    def test_an_unusable_argument_is_named(self, torch, backend, rng):
        head, _ = self.pair(backend, rng)
        tokens = at(each(tokens_of(rng, LAYER, 2, 1), torch.from_numpy), np.s_[:, 0])
        with pytest.raises(TypeError, match=r"^k: expected a real floating-point array, got dtype int32"):
            head.step(*tokens._replace(k=tokens.k.int()))
        with pytest.raises(TypeError, match=r"^q: expected an array, got torch.Tensor"):
            head.step(*tokens._replace(q=tokens.q.to(torch.float8_e4m3fn)))


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
        with pytest.raises(ValueError, match=rf"^{name}: expected numbers that float32 can hold, got -1e\+39"):
            head.step(*given)
        assert not head.state.any()
        head.step(*given, slots=[0, -1, 2])  # a padding row may hold any value
        ss.StandardHead(LAYER, 3, "reference").step(*each(given, np.float64))  # the reference computes in float64

    def test_states(self, rng):
        head, state = ss.StandardHead(LAYER, 3, "cpu"), states_of(rng, LAYER, 2).astype(np.float64)
        state[1, 0, 0, 0] = 1e39
        with pytest.raises(ValueError, match=r"^state: expected numbers that float32 can hold, got 1e\+39"):
            head.load_state(state)
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

    def test_infinity_stays_what_it_is(self):
        np.testing.assert_array_equal(to_type(np.array([np.inf, 1.0]), np.dtype(np.float32), "q"), [np.inf, 1.0])

    @pytest.mark.parametrize(
        ("source", "target", "value"),
        [(np.float64, BFLOAT16, 1e39), (np.float32, np.float16, 7e4), (BFLOAT16, np.float16, 7e4)],
    )
    def test_other_types(self, source, target, value):
        with pytest.raises(ValueError, match=rf"^v: expected numbers that {np.dtype(target).name} can hold, got"):
            to_type(np.array([1.0, value], source), np.dtype(target), "v")


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
        output = head.step(*given._replace(v=v), slots=torch.tensor([1, 0]).cuda())
        want = torch.from_numpy(plain.step(*tokens._replace(v=v.detach().double().cpu().numpy()), slots=[1, 0]))
        assert (output.dtype, output.device) == (v.dtype, v.device)
        assert torch.equal(output.cpu(), want.to(v.dtype))
        head.reset()
        out = torch.empty_like(v, requires_grad=False)
        assert head.step(*given._replace(v=v), slots=[1, 0], out=out) is out
        assert torch.equal(out, output)

    def test_jax(self, jax, rng):
        tokens, head, plain = self.arrays(rng)
        given = each(tokens, jax.numpy.asarray)
        output = head.step(*given, slots=jax.numpy.asarray([1, 0]))
        assert output.devices() == given.v.devices()
        np.testing.assert_array_equal(np.asarray(output), plain.step(*tokens, slots=[1, 0]))


IMPORT = """
import sys, time
start = time.perf_counter()
import sketchssm
took = time.perf_counter() - start
heavy = {"torch", "jax", "cupy", "numba", "scipy", "matplotlib"}
print(took, *sorted(heavy & set(sys.modules)))
sketchssm.Layer, sketchssm.SketchPlan, sketchssm.SketchHead, sketchssm.StandardHead
print(0, *sorted((heavy - {"scipy"}) & set(sys.modules)))
"""


def test_import_is_light():
    """The import and its common names load no framework and no compiler."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
    )
    (took, *heavy), (_, *later) = (line.split() for line in done.stdout.splitlines())
    assert heavy == []
    assert later == []
    # NumPy alone takes 0.1 to 0.2 s from a cold disk; torch would take seconds
    assert float(took) < 0.5
