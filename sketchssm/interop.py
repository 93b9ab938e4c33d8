"""Arrays of any framework in, the caller's kind out.

The engines compute on host memory. `to_host` views an array there without a copy wherever the array already is on
the host: NumPy's own, PyTorch and JAX on the CPU, and whatever exports ``__dlpack__`` or ``__array__``. Arrays of
PyTorch, JAX and CuPy on a GPU are *copied* to the host, and results back. No framework is imported here before one
of its arrays has been handed in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["check_out", "from_host", "is_real", "to_host"]

_FRAMEWORKS = {"numpy": "numpy", "torch": "torch", "jax": "jax", "jaxlib": "jax", "cupy": "cupy"}


def to_host(array: Any, name: str) -> npt.NDArray[Any]:
    """View an array as a NumPy array, or copy it if it lives on a GPU.

    Parameters
    ----------
    array : array
        NumPy, PyTorch, JAX or CuPy array, or any object with ``__dlpack__`` or ``__array__``. Gradients are not
        followed. Integers and sequences of them are taken too: they can name slots.
    name : str
        What the caller calls it, for the message.

    Returns
    -------
    ndarray
        Same shape, values and dtype, bfloat16 as `ml_dtypes.bfloat16`. It may be read-only and may share the
        caller's memory: it is to be read, at once.

    Raises
    ------
    TypeError
        If it is not an array, or one that NumPy can't view.
    """
    if isinstance(array, np.ndarray):
        return array
    try:
        return _viewed(array)
    except Exception as error:  # whatever a framework raises, the caller must learn which argument it was
        raise TypeError(f"{name}: expected an array, got {_describe(array)} ({error})") from error


def _viewed(array: Any) -> npt.NDArray[Any]:
    framework = _framework(array)
    if framework == "torch":
        import torch

        tensor = array.detach()
        if tensor.dtype == torch.bfloat16:  # NumPy knows it only through ml_dtypes
            return np.asarray(tensor.view(torch.int16).numpy(force=True)).view(_bfloat16())
        return np.asarray(tensor.numpy(force=True))
    if framework == "cupy":
        return np.asarray(array.get())
    if framework in ("numpy", "jax"):
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


def is_real(dtype: np.dtype[Any]) -> bool:
    """Tell whether a host dtype is a real floating-point type of at most 64 bits, bfloat16 included.

    Parameters
    ----------
    dtype : dtype
        Type of an array from `to_host`.

    Returns
    -------
    bool
        False for integers, complex numbers, objects and records.
    """
    return (dtype.kind == "f" and dtype.itemsize <= 8) or dtype.name == "bfloat16"


def check_out(out: Any, shape: tuple[int, ...]) -> None:
    """Check, before anything is computed, that `from_host` will be able to fill an array.

    Parameters
    ----------
    out : array
        The caller's ``out=``.
    shape : tuple of int
        Shape of the result.

    Raises
    ------
    TypeError
        If it is no NumPy, PyTorch or CuPy array of a real floating-point type.
    ValueError
        If its shape is wrong, it is read-only, or several of its elements share memory.
    """
    framework = _framework(out)
    if framework == "jax":
        raise TypeError("out: expected a writable array, got a JAX array, which is immutable")
    if framework == "" or not hasattr(out, "shape"):
        raise TypeError(f"out: expected a NumPy, PyTorch or CuPy array, got {_describe(out)}")
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"out: expected shape {tuple(shape)}, got {tuple(out.shape)}")
    if framework == "torch":
        real, writable, strides = out.dtype.is_floating_point, True, out.stride()
    else:
        real = is_real(out.dtype)
        writable, strides = framework == "cupy" or getattr(out.flags, "writeable", False), out.strides
    if not real:
        raise TypeError(f"out: expected a real floating-point array, got dtype {out.dtype}")
    if not writable:
        raise ValueError("out: expected a writable array, got a read-only one")
    if any(size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=True)):
        raise ValueError("out: expected memory of its own for every element, got a broadcast array")


def from_host(array: npt.NDArray[Any], like: Any, out: Any = None) -> Any:
    """Hand a result to the caller as the kind of array that came in.

    Parameters
    ----------
    array : ndarray
        Result on the host, C-contiguous; its memory may become the caller's.
    like : array
        Argument whose kind, dtype and device the result takes. For kinds that can't be told from ``__dlpack__`` or
        ``__array__`` alone the result is a NumPy array.
    out : array, optional
        Array to fill instead; it has passed `check_out`.

    Returns
    -------
    array
        The result, or `out`. Without a change of dtype nothing is copied for NumPy and for PyTorch on the CPU.
    """
    if out is not None:
        return _filled(out, array)
    framework = _framework(like)
    if framework == "torch":
        import torch

        return torch.from_numpy(array).to(like.device, like.dtype)
    if framework == "cupy":
        with like.device:
            return _on_cupy(array, like.dtype)
    if framework == "jax":
        import jax

        return jax.device_put(array.astype(like.dtype, copy=False), like.sharding)
    result = array.astype(to_host(like, "like").dtype, copy=False)
    namespace = getattr(like, "__array_namespace__", None)
    return result if framework == "numpy" or namespace is None else namespace().from_dlpack(result)


def _filled(out: Any, array: npt.NDArray[Any]) -> Any:
    framework = _framework(out)
    if framework == "torch":
        import torch

        out.detach().copy_(torch.from_numpy(array))
    elif framework == "cupy":
        with out.device:
            out[...] = _on_cupy(array, out.dtype)
    else:
        np.copyto(out, array, casting="unsafe")  # check_out has seen that both are real
    return out


def _on_cupy(array: npt.NDArray[Any], dtype: Any) -> Any:
    import cupy

    return cupy.asarray(array.astype(dtype, copy=False))


def _framework(array: Any) -> str:
    """Framework that an array's type, or one it derives from, belongs to; "" if it is none of those known here."""
    for base in type(array).__mro__:
        name = _FRAMEWORKS.get(base.__module__.partition(".")[0])
        if name is not None:
            return name
    return ""


def _bfloat16() -> np.dtype[Any]:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def _describe(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
