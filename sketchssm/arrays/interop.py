"""Converts arrays of any framework to NumPy arrays, and results to the caller's framework.

`to_host` views an array without a copy if the array is on the host: arrays of NumPy, of PyTorch and JAX on the CPU,
and any object with ``__dlpack__`` or ``__array__``. Arrays of PyTorch, JAX and CuPy on a GPU are *copied* to the host,
and results are copied back. A framework is imported only after a caller has passed one of its arrays.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

CUDA_DEVICES = (2, 13)
"""DLPack's numbers for memory of a CUDA device, and for managed memory."""

_FRAMEWORKS = {"numpy": "numpy", "torch": "torch", "jax": "jax", "jaxlib": "jax", "cupy": "cupy"}


@cache
def host_type(name: str) -> np.dtype[Any]:
    """NumPy's type of a name such as "float32" or "bfloat16", which is `ml_dtypes.bfloat16`."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def to_host(array: Any, name: str) -> npt.NDArray[Any]:
    """View an array as a NumPy array, or copy it if it lives on a GPU; TypeError if it is no array.

    Takes NumPy, PyTorch, JAX and CuPy arrays, any object with ``__dlpack__`` or ``__array__``, and, for slots,
    integers and sequences of them. Gradients are not followed. The result may be read-only and may share the caller's
    memory: read it at once, and do not write it. `name` is the argument's name, for the message.
    """
    if type(array) is np.ndarray:
        return array
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected an array without a mask, got a MaskedArray")
    if isinstance(array, np.ndarray):
        return array
    try:
        return _viewed(array)
    except Exception as error:  # frameworks raise many types; the message must name the argument
        raise TypeError(f"{name}: expected an array, got {_describe(array)} ({error})") from error


def memory_of(array: Any, name: str) -> npt.NDArray[Any]:
    """View an array's own memory as a NumPy array, to write the array; TypeError if NumPy can only copy it."""
    host = to_host(array, name)
    if not isinstance(array, np.ndarray):
        again = to_host(array, name)
        if host.__array_interface__["data"] != again.__array_interface__["data"]:  # two copies
            raise TypeError(f"{name}: expected memory that NumPy can view, got {_describe(array)}, which NumPy copies")
    return host


def _viewed(array: Any) -> npt.NDArray[Any]:
    kind = framework(array)
    if kind == "torch":
        import torch

        tensor = array.detach()
        if tensor.dtype == torch.bfloat16:  # NumPy knows it only through ml_dtypes
            return np.asarray(tensor.view(torch.int16).numpy(force=True)).view(host_type("bfloat16"))
        return np.asarray(tensor.numpy(force=True))
    if kind == "cupy":
        return np.asarray(array.get())
    if kind in ("numpy", "jax"):
        return np.asarray(array)
    if isinstance(array, int | list | tuple | range):
        numbers = np.asarray(array)
        if numbers.dtype.kind not in "iu" and numbers.size:
            raise TypeError("only integers may come in a list")
        return numbers
    if hasattr(array, "__dlpack__"):
        try:
            return np.from_dlpack(array)
        except Exception:  # such as bfloat16, which NumPy's DLPack does not know
            if not hasattr(array, "__array__"):
                raise
    if hasattr(array, "__array__"):
        return np.asarray(array)
    raise TypeError("it has neither __dlpack__ nor __array__")


def is_on_device(array: Any) -> bool:
    """Whether an array's memory is on a device; False for objects that do not name the device of their memory."""
    kind = framework(array)
    if kind == "torch":
        return getattr(getattr(array, "device", None), "type", "cpu") not in ("cpu", "meta")
    if kind in ("numpy", "cupy"):
        return kind == "cupy"
    try:
        return array.__dlpack_device__()[0] in CUDA_DEVICES
    except Exception:  # an object without the protocol or without memory: `to_host` names it
        return False


@cache
def is_real(dtype: np.dtype[Any]) -> bool:
    """Tell whether a host dtype is a real floating-point type of at most 64 bits, bfloat16 included."""
    return (dtype.kind == "f" and dtype.itemsize <= 8) or dtype.name == "bfloat16"


def to_type(host: npt.NDArray[Any], dtype: np.dtype[Any], name: str, live: Any = slice(None)) -> npt.NDArray[Any]:
    """Make a host array contiguous and of a type, without a copy if it is so already.

    ValueError if a finite number of the rows `live` (all but padding) is beyond the type's range. A log-decay `g` may
    be beyond: it becomes -inf, and both clear the state.
    """
    if host.dtype == dtype:
        return np.ascontiguousarray(host)
    with np.errstate(over="ignore", invalid="ignore"):  # of padding rows
        converted = np.ascontiguousarray(host, dtype=dtype)
    if name != "g" and host.itemsize >= dtype.itemsize:  # else the range can only grow
        lost = np.isinf(converted[live]) & np.isfinite(host[live])
        if lost.any():
            raise ValueError(f"{name}: expected numbers that {dtype.name} can hold, got {host[live][lost][0]}")
    return converted


def check_out(out: Any, shape: tuple[int, ...]) -> None:
    """Check, before anything is computed, that `from_host` will be able to fill the caller's ``out=``.

    TypeError unless it is a NumPy, PyTorch or CuPy array of a real floating-point type, with dense memory. ValueError
    if its shape is wrong, it is read-only, or two of its elements share memory.
    """
    kind = framework(out)
    if kind == "jax":
        raise TypeError("out: expected a writable array, got a JAX array, which is immutable")
    if kind == "" or not hasattr(out, "shape"):
        raise TypeError(f"out: expected a NumPy, PyTorch or CuPy array, got {_describe(out)}")
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"out: expected shape {tuple(shape)}, got {tuple(out.shape)}")
    if kind == "torch":
        real, writable = out.dtype.is_floating_point, True
        if out.is_meta or out.layout is not sys.modules["torch"].strided:
            came = "a tensor on the meta device" if out.is_meta else f"layout {out.layout}"
            raise TypeError(f"out: expected a tensor with dense memory, got {came}")
        contiguous = out.is_contiguous()
    else:
        real = is_real(out.dtype)
        writable = kind == "cupy" or getattr(out.flags, "writeable", False)
        contiguous = out.flags.c_contiguous
    if not real:
        raise TypeError(f"out: expected a real floating-point array, got dtype {out.dtype}")
    if not writable:
        raise ValueError("out: expected a writable array, got a read-only one")
    if not contiguous:
        strides, item = (out.stride(), 1) if kind == "torch" else (out.strides, out.itemsize)
        if _elements_overlap(shape, strides, item):
            raise ValueError(f"out: expected separate memory for every element, got strides {tuple(strides)}")


def gradients_enabled() -> bool:
    """Whether PyTorch is in use and records gradients; cheap enough for every call."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.is_grad_enabled()


def check_gradients(**arrays: Any) -> None:
    """Refuse PyTorch tensors that require gradients; heads have no backward pass."""
    for name, array in arrays.items():
        if getattr(array, "requires_grad", False) and framework(array) == "torch":
            raise ValueError(
                f"{name}: expected a tensor without gradients, as heads have no backward pass, got "
                f"requires_grad=True; decode under torch.no_grad(), or pass {name}.detach()"
            )


def _elements_overlap(shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> bool:
    """Whether two elements of a strided array share memory; strides and `item` in the same unit."""
    axes = sorted((abs(stride), size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    reach = item  # of all axes so far
    for stride, size in axes:
        if stride < reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    if min(shape) == 0:
        return False
    if any(stride == 0 for stride, _ in axes):
        return True
    offsets = np.zeros(1, dtype=np.int64)  # axes that interleave: compare the addresses themselves
    for stride, size in axes:
        offsets = np.add.outer(offsets, stride * np.arange(size)).reshape(-1)
    return bool((np.diff(np.sort(offsets)) < item).any())


def from_host(array: npt.NDArray[Any], like: Any, out: Any = None) -> Any:
    """Return a result as an array with framework, dtype and device of the argument `like`, or in `out`.

    If the framework is not known, the result is a NumPy array. The memory of `array`, which is C-contiguous, may
    become the caller's: without a change of dtype nothing is copied for NumPy and for PyTorch on the CPU.
    """
    if out is not None:
        return _filled(out, array)
    kind = framework(like)
    if kind in ("torch", "cupy", "jax"):
        return to_kind(array, like, like.dtype)
    result = array.astype(to_host(like, "like").dtype, copy=False)
    namespace = getattr(like, "__array_namespace__", None)
    return result if kind == "numpy" or namespace is None else namespace().from_dlpack(result)


def to_kind(array: npt.NDArray[Any], like: Any, dtype: Any = None) -> Any:
    """Return an array with framework and device of `like`; its memory may become the caller's.

    The dtype is one of that framework, by default the array's own.
    """
    kind = framework(like)
    if kind == "torch":
        import torch

        return torch.from_numpy(array).to(like.device, dtype=dtype, non_blocking=True)  # a device is not waited for
    if kind == "cupy":
        with like.device:
            return _on_cupy(array, dtype or array.dtype)
    if kind == "jax":
        import jax

        return jax.device_put(array.astype(dtype or array.dtype, copy=False), like.sharding)
    return array


def _filled(out: Any, array: npt.NDArray[Any]) -> Any:
    kind = framework(out)
    if kind == "torch":
        import torch

        out.detach().copy_(torch.from_numpy(array))
    elif kind == "cupy":
        with out.device:
            out[...] = _on_cupy(array, out.dtype)
    else:
        np.copyto(out, array, casting="unsafe")  # check_out has seen that both are real
    return out


def _on_cupy(array: npt.NDArray[Any], dtype: Any) -> Any:
    import cupy

    return cupy.asarray(array.astype(dtype, copy=False))


def framework(array: Any) -> str:
    """Name the framework of an array's type, or of one it derives from: "numpy", "torch", "jax", "cupy", or ""."""
    kind = type(array)
    name = _known.get(kind)
    if name is None:
        homes = (_FRAMEWORKS.get(base.__module__.partition(".")[0]) for base in kind.__mro__)
        name = _known[kind] = next(filter(None, homes), "")
    return name


_known: dict[type, str] = {}  # looked up several times a step


def _describe(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
