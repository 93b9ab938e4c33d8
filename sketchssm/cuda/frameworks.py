"""Functions of a framework (CuPy, PyTorch or any other) that the CUDA backend needs for arrays on the device.

The framework itself describes and allocates its arrays, so that its own rules hold for memory, streams and graphs.
"""

from __future__ import annotations

from typing import Any, Protocol

from sketchssm.arrays import interop

DTYPES = ("bfloat16", "float16", "float32", "float64", "int32", "int64")
"""Types of arguments and results, by name."""


class Framework(Protocol):
    """One framework."""

    def owns(self, array: Any) -> bool:
        """Tell whether an array is the framework's own, on the device or on the host."""

    def address(self, array: Any, dtype: str) -> int | None:
        """Address of an array that kernels can use in place; None for any other array.

        Such an array belongs to the framework, is on the head's device, contiguous and of the named type. The caller
        checks its alignment.
        """

    def strided(self, array: Any, dtype: str) -> tuple[int, tuple[int, ...]] | None:
        """Address and strides, in elements, of an array like those of `address` that need not be contiguous."""

    def describe(self, array: Any) -> tuple[int, str]:
        """Device of one of the framework's arrays (negative for the host), and the name of its type."""

    def stream(self) -> Any:
        """Context in which CuPy's current stream is the framework's; None if no context is needed."""

    def converted(self, array: Any, dtype: str) -> Any:
        """Contiguous copy of an array in another type."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """New array on the head's device."""

    def fill(self, out: Any, array: Any) -> None:
        """Copy one array into another of any type and layout."""


class CupyArrays:
    """CuPy's arrays, and through DLPack those of all frameworks that have no class here."""

    def __init__(self, device: int) -> None:
        import cupy

        self._cupy, self._kind, self._id = cupy, cupy.ndarray, device
        self._dtypes = {name: interop.host_type(name) for name in DTYPES}

    def owns(self, array: Any) -> bool:
        """See `Framework`."""
        return isinstance(array, self._kind)

    def address(self, array: Any, dtype: str) -> int | None:
        """See `Framework`."""
        if isinstance(array, self._kind) and array.dtype == self._dtypes[dtype] and array.flags.c_contiguous:
            return array.data.ptr if array.device.id == self._id else None
        return None

    def strided(self, array: Any, dtype: str) -> tuple[int, tuple[int, ...]] | None:
        """See `Framework`."""
        if not isinstance(array, self._kind) or array.dtype != self._dtypes[dtype] or array.device.id != self._id:
            return None
        item = array.itemsize
        if any(stride % item for stride in array.strides):
            return None
        return array.data.ptr, tuple(stride // item for stride in array.strides)

    def describe(self, array: Any) -> tuple[int, str]:
        """See `Framework`."""
        return array.device.id, array.dtype.name

    def stream(self) -> Any:
        """See `Framework`."""
        return None

    def converted(self, array: Any, dtype: str) -> Any:
        """See `Framework`."""
        return array.astype(interop.host_type(dtype), order="C", copy=True)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """See `Framework`."""
        return self._cupy.empty(shape, interop.host_type(dtype))

    def fill(self, out: Any, array: Any) -> None:
        """See `Framework`."""
        out[...] = array

    def imported(self, array: Any) -> Any:
        """Another framework's array as CuPy's, on the current stream, without a copy."""
        return self._cupy.from_dlpack(array.detach() if hasattr(array, "detach") else array)


class TorchArrays:
    """PyTorch's tensors on the head's device."""

    def __init__(self, device: int) -> None:
        import cupy
        import torch

        self._cupy, self._torch, self.kind, self._id = cupy, torch, torch.Tensor, device
        self.exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)  # not in all versions
        self.grad_enabled = torch.is_grad_enabled
        self.dlpack_device = interop.CUDA_DEVICES[0], device
        self._device = torch.device("cuda", device)
        self._dtypes = {name: getattr(torch, name) for name in DTYPES}
        self._streams: dict[int, Any] = {}

    def owns(self, array: Any) -> bool:
        """See `Framework`."""
        return isinstance(array, self.kind)

    def address(self, array: Any, dtype: str) -> int | None:
        """See `Framework`."""
        if (
            isinstance(array, self.kind)
            and array.dtype is self._dtypes[dtype]
            and array.get_device() == self._id
            and array.layout is self._torch.strided
            and array.is_contiguous()
        ):
            return array.data_ptr()
        return None

    def strided(self, array: Any, dtype: str) -> tuple[int, tuple[int, ...]] | None:
        """See `Framework`."""
        if (
            isinstance(array, self.kind)
            and array.dtype is self._dtypes[dtype]
            and array.get_device() == self._id
            and array.layout is self._torch.strided
        ):
            return array.data_ptr(), array.stride()
        return None

    def describe(self, array: Any) -> tuple[int, str]:
        """See `Framework`."""
        return array.get_device(), str(array.dtype).removeprefix("torch.")

    def stream(self) -> Any:
        """See `Framework`."""
        address = self.stream_address()
        stream = self._streams.get(address)
        if stream is None:
            stream = self._streams[address] = _stream(self._cupy, address, self._id)
        return stream

    def stream_address(self) -> int:
        """Address of PyTorch's current stream."""
        return int(self._torch.cuda.current_stream(self._device).cuda_stream)

    def converted(self, array: Any, dtype: str) -> Any:
        """See `Framework`."""
        return array.detach().to(self._dtypes[dtype], copy=True, memory_format=self._torch.contiguous_format)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """See `Framework`."""
        return self._torch.empty(shape, dtype=self._dtypes[dtype], device=self._device)

    def fill(self, out: Any, array: Any) -> None:
        """See `Framework`."""
        out.detach().copy_(array)


def export(array: Any, like: Any) -> Any:
    """Export a CuPy array to the framework of `like`; unchanged if that framework is unknown."""
    if type(like).__module__.partition(".")[0] in ("jax", "jaxlib"):
        import jax

        return jax.dlpack.from_dlpack(array)
    namespace = getattr(like, "__array_namespace__", None)
    return array if namespace is None else namespace().from_dlpack(array)


def _stream(cupy: Any, address: int, device: int) -> Any:
    """CuPy's view of a stream of another library."""
    if not hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.ExternalStream(address, device)

    class Handle:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, address

    return cupy.cuda.Stream.from_external(Handle())
