"""What the CUDA backend needs to know of a framework whose arrays live on the device: CuPy, PyTorch, any other.

A port looks at arrays and makes new ones through the framework itself, so that memory, streams and graph capture stay
under the framework's own rules.
"""

from __future__ import annotations

from typing import Any, Protocol

import ml_dtypes
import numpy as np

__all__ = ["KERNEL_TYPES", "CupyPort", "Port", "TorchPort", "export", "host_type", "is_foreign"]

KERNEL_TYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),  # as bits: not every CuPy has the type
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}
"""Types of the arrays that kernels get, by the name of what they hold."""

CUDA_DEVICES = (2, 13)
"""DLPack's numbers for device memory and managed memory."""


class Port(Protocol):
    """One framework."""

    def owns(self, array: Any) -> bool:
        """Whether an array is the framework's own, wherever it lives."""

    def describe(self, array: Any) -> tuple[int, str, int | None]:
        """Device of an array (negative for the host), name of its type, and address, None if it is not contiguous."""

    def stream(self) -> Any:
        """Context manager that makes the framework's current stream CuPy's, or None if it is that already."""

    def identity(self, array: Any) -> tuple[Any, ...] | None:
        """Address, type and shape of a contiguous array of this framework; None for any other."""

    def converted(self, array: Any, type_name: str) -> Any:
        """Contiguous copy of an array in another type."""

    def empty(self, shape: tuple[int, ...], type_name: str) -> Any:
        """New array on the head's device."""

    def fill(self, out: Any, array: Any) -> None:
        """Copy one array into another of any type and layout."""


class CupyPort:
    """CuPy's arrays, and through DLPack those of all frameworks that have no port of their own."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy

    def owns(self, array: Any) -> bool:
        """See `Port`."""
        return isinstance(array, self._cupy.ndarray)

    def describe(self, array: Any) -> tuple[int, str, int | None]:
        """See `Port`."""
        return array.device.id, array.dtype.name, array.data.ptr if array.flags.c_contiguous else None

    def stream(self) -> Any:
        """See `Port`."""
        return None

    def identity(self, array: Any) -> tuple[Any, ...] | None:
        """See `Port`."""
        if not isinstance(array, self._cupy.ndarray) or not array.flags.c_contiguous:
            return None
        return array.data.ptr, array.dtype, array.shape

    def converted(self, array: Any, type_name: str) -> Any:
        """See `Port`."""
        return array.astype(host_type(type_name), order="C", copy=True)

    def empty(self, shape: tuple[int, ...], type_name: str) -> Any:
        """See `Port`."""
        return self._cupy.empty(shape, host_type(type_name))

    def fill(self, out: Any, array: Any) -> None:
        """See `Port`."""
        out[...] = array

    def imported(self, array: Any) -> Any:
        """Another framework's array as CuPy's, on the current stream, without a copy."""
        return self._cupy.from_dlpack(array)


class TorchPort:
    """PyTorch's tensors.

    Parameters
    ----------
    device : int
        The head's device.
    """

    def __init__(self, device: int) -> None:
        import cupy
        import torch

        self._cupy, self._torch, self._id = cupy, torch, device
        self._device = torch.device("cuda", device)
        self._names: dict[Any, str] = {}
        self._streams: dict[int, Any] = {}

    def owns(self, array: Any) -> bool:
        """See `Port`."""
        return isinstance(array, self._torch.Tensor)

    def describe(self, array: Any) -> tuple[int, str, int | None]:
        """See `Port`."""
        name = self._names.get(array.dtype)
        if name is None:
            name = self._names[array.dtype] = str(array.dtype).removeprefix("torch.")
        if array.is_contiguous():
            return array.get_device(), name, array.data_ptr()
        if array.layout is not self._torch.strided:
            raise RuntimeError(f"its layout is {array.layout}")
        return array.get_device(), name, None

    def stream(self) -> Any:
        """See `Port`."""
        address = self._torch.cuda.current_stream(self._device).cuda_stream
        stream = self._streams.get(address)
        if stream is None:
            stream = self._streams[address] = _stream(self._cupy, address, self._id)
        return stream

    def identity(self, array: Any) -> tuple[Any, ...] | None:
        """See `Port`."""
        if not isinstance(array, self._torch.Tensor) or not array.is_contiguous():
            return None
        return array.data_ptr(), array.dtype, array.shape

    def converted(self, array: Any, type_name: str) -> Any:
        """See `Port`."""
        dtype = getattr(self._torch, type_name)
        return array.detach().to(dtype, copy=True, memory_format=self._torch.contiguous_format)

    def empty(self, shape: tuple[int, ...], type_name: str) -> Any:
        """See `Port`."""
        return self._torch.empty(shape, dtype=getattr(self._torch, type_name), device=self._device)

    def fill(self, out: Any, array: Any) -> None:
        """See `Port`."""
        out.detach().copy_(array)


def is_foreign(array: Any) -> bool:
    """Tell whether an array of a framework without a port lives on a device."""
    where = getattr(array, "__dlpack_device__", None)
    if where is None:
        return False
    try:
        return where()[0] in CUDA_DEVICES
    except Exception:  # such as an array without memory: the host's path says what is wrong with it
        return False


def export(array: Any, like: Any) -> Any:
    """Hand a CuPy array over as the kind of a foreign one; as it is if that kind can't be told."""
    if type(like).__module__.partition(".")[0] in ("jax", "jaxlib"):
        import jax

        return jax.dlpack.from_dlpack(array)
    namespace = getattr(like, "__array_namespace__", None)
    return array if namespace is None else namespace().from_dlpack(array)


def host_type(type_name: str) -> np.dtype[Any]:
    """NumPy's type of a name."""
    return np.dtype(ml_dtypes.bfloat16 if type_name == "bfloat16" else type_name)


def _stream(cupy: Any, address: int, device: int) -> Any:
    """CuPy's view of a stream of another library."""
    if not hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.ExternalStream(address, device)

    class Handle:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, address

    return cupy.cuda.Stream.from_external(Handle())
