"""Arrays of every framework come to the host and go back without needless copies or imports."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from array_kinds import REAL, TORCH, Convertible, Elsewhere, Exporter, Standard
from samples import refused

from sketchssm.arrays.interop import check_out, from_host, is_real, to_host


def address(array):
    return array.__array_interface__["data"][0]


class TestToHost:
    def test_masks_are_refused(self):
        """They would be ignored."""
        refused("slots: expected an array without a mask, got a", to_host, np.ma.array([0, 3], mask=[0, 1]), "slots")

    @pytest.mark.parametrize("dtype", REAL)
    def test_numpy_is_itself(self, dtype):
        array = np.ones((3, 4), dtype)
        assert to_host(array, "v") is array

    @pytest.mark.parametrize("dtype", TORCH)
    @pytest.mark.parametrize("grad", [False, True])
    def test_torch_on_the_cpu_is_viewed(self, torch, dtype, grad):
        whole = torch.arange(24.0).reshape(4, 6)
        for index in (np.s_[:], np.s_[1:, ::2]):  # strided, too
            tensor = whole[index].T.to(getattr(torch, dtype)).requires_grad_(grad)
            host = to_host(tensor, "v")
            assert host.dtype.name == dtype
            assert address(host) == tensor.data_ptr()
            np.testing.assert_array_equal(host.astype(float), whole[index].T)

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
            (Elsewhere(np.ones(3)), "array_kinds.Elsewhere"),
        ],
    )
    def test_refuses_what_is_no_array(self, value, came):
        refused(f"v: expected an array, got {came} ", to_host, value, "v")

    def test_refuses_tensors_that_numpy_cannot_hold(self, torch, jax):
        refused(r"k: expected an array, got torch.Tensor \(.*Sparse", to_host, torch.eye(3).to_sparse(), "k")
        refused("k: expected an array, got torch.nn.modules.*Linear ", to_host, torch.nn.Linear(2, 2), "k")
        refused("k: expected an array, got jax.*Tracer", jax.jit(lambda x: to_host(x, "k")), jax.numpy.ones(3))


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
        refused("out: expected a writable array, got a JAX array, which", check_out, jax.numpy.zeros((3, 4)), (3, 4))

    def test_torch_refusals(self, torch):
        refused(r"out: expected shape \(3, 4\), got \(4, 3\)", check_out, torch.zeros(4, 3), (3, 4))
        refused("out: expected a real floating-point array,", check_out, torch.zeros(3, 4, dtype=torch.int64), (3, 4))
        refused("out: expected a real floating-point", check_out, torch.zeros(3, 4, dtype=torch.complex64), (3, 4))
        for overlapping in (torch.zeros(4).expand(3, 4), torch.zeros(9).as_strided((3, 4), (2, 1))):
            refused("out: expected separate memory for every element", check_out, overlapping, (3, 4))
        for bad, came in (
            (torch.zeros(3, 4, device="meta"), "a tensor on the meta device"),
            (torch.zeros(3, 4).to_sparse(), "layout torch.sparse_coo"),
        ):
            refused(f"out: expected a tensor with dense memory, got {came}", check_out, bad, (3, 4))

    @pytest.mark.parametrize(
        ("out", "error", "message"),
        [
            (np.zeros((4, 3)), ValueError, r"expected shape \(3, 4\), got \(4, 3\)"),
            (np.zeros((3, 4), int), TypeError, "expected a real floating-point array, got dtype int64"),
            (np.zeros((3, 4), object), TypeError, "expected a real floating-point array, got dtype object"),
            (np.broadcast_to(0.0, (3, 4)), ValueError, "expected a writable array, got a read-only one"),
            (Exporter(np.zeros((3, 4))), TypeError, "expected a NumPy, PyTorch or CuPy array, got array_kinds"),
            ([0.0], TypeError, "expected a NumPy, PyTorch or CuPy array, got list"),
        ],
    )
    def test_refusals(self, out, error, message):
        with pytest.raises(error, match=f"^out: {message}"):
            check_out(out, (3, 4))

    @pytest.mark.parametrize("strides", [(0, 8), (8, 8), (16, 8), (24, 8), (8, 4), (30, 8)])
    def test_elements_that_share_memory_are_refused(self, strides):
        out = np.lib.stride_tricks.as_strided(np.zeros(20), (3, 4), strides)
        refused("out: expected separate memory for every element", check_out, out, (3, 4))

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
