"""How arrays come to the CUDA engines and go back: without copies, host synchronisation or allocation where possible.

A kernel needs an address, so an array on the device is passed on as a CuPy array over the same memory. Such views know
nothing but address, shape and type: they are kept and used again whenever the same memory comes in, as it does in
every decode loop.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from sketchssm import interop
from sketchssm.cuda.ports import KERNEL_TYPES, CupyPort, Port, TorchPort, export, host_type, is_foreign
from sketchssm.recurrence import Tokens

__all__ = ["DeviceArrays"]

ALIGNMENT = 16
"""Bytes: the kernels load 16 at a time."""

VIEWS = 1024
"""Views that are kept at most."""

REAL = ("bfloat16", "float16", "float32", "float64")

HOST = interop.HostArrays(np.float32)
"""Checks what stands on the host."""


class DeviceArrays:
    """The arrays of one engine's calls.

    Parameters
    ----------
    activation : {"bfloat16", "float16", "float32"}, optional
        Type of q, k and v for the kernels; by default what the first call's need.
    output : str, optional
        Type in which kernels write outputs; the activations' by default.
    """

    def __init__(self, activation: str | None = None, output: str | None = None) -> None:
        import cupy

        self.cupy = cupy
        self.device = cupy.cuda.Device()
        self.home = self.device.id
        self.activation = activation
        self.converts = activation is not None
        self._output = output
        self.cupy_port = CupyPort()
        self._torch: TorchPort | None = None
        self._last: Port = self.cupy_port
        self._views: dict[tuple[int, tuple[int, ...], str], Any] = {}
        self._pending: deque[tuple[Any, Any]] = deque()
        self._uploaded: tuple[Any, Any] = (None, None)
        self._all = self._wide = cupy.zeros(0, np.int64)

    @property
    def output(self) -> str | None:
        """Type in which kernels write outputs, once it is settled."""
        return self._output or self.activation

    def call(self, *arrays: Any) -> DeviceCall:
        """See `sketchssm.backends.Arrays`."""
        for array in arrays:
            port = None if array is None else self.port(array)
            if port is not None:
                self._last = port
                break
        return DeviceCall(self, self._last)

    def view(self, state: Any) -> Any:
        """See `sketchssm.backends.Arrays`."""
        return state

    def port(self, array: Any) -> Port | None:
        """Port of an array on a device; None for what lives on the host, or is no array."""
        if interop.framework(array) == "torch":
            if not getattr(array, "is_cuda", False):
                return None
            if self._torch is None:
                self._torch = TorchPort(self.home)
            return self._torch
        return self.cupy_port if self.cupy_port.owns(array) or is_foreign(array) else None

    def wrap(self, address: int, shape: tuple[int, ...], type_name: str) -> Any:
        """CuPy's view of memory that belongs to somebody else."""
        key = (address, shape, type_name)
        view = self._views.get(key)
        if view is None:
            dtype, cuda = KERNEL_TYPES[type_name], self.cupy.cuda
            size = int(np.prod(shape)) * dtype.itemsize
            if size == 0:
                return self.cupy.zeros(shape, dtype)
            if len(self._views) == VIEWS:
                self._views.clear()
            memory = cuda.UnownedMemory(address, size, None, self.home)
            view = self._views[key] = self.cupy.ndarray(shape, dtype, cuda.MemoryPointer(memory, 0))
        return view

    def warmup(self, activation: str, capacity: int) -> None:
        """Settle the activations' type, and make ready for slots of every kind."""
        if self.activation not in (None, activation):
            raise ValueError(
                f"activation: expected {self.activation!r}, as the head has settled on, got {activation!r}"
            )
        self.activation = activation
        self.rows(capacity)
        self.widened(self.cupy.zeros(1, np.int32), capacity)
        self.device.synchronize()  # whoever comes next may use another stream

    def rows(self, count: int) -> Any:
        """Slots 0, 1, ... of a call that names none."""
        if self._all.shape[0] < count:
            self._all = self.cupy.arange(count, dtype=np.int64)
            self.device.synchronize()
        return self._all[:count]

    def uploaded(self, slots: Any) -> Any:
        """Host slots on the device; those of the call before need no second upload."""
        key = slots.tobytes(), self.cupy.cuda.get_current_stream().ptr
        if self._uploaded[0] != key:
            self._uploaded = key, self.cupy.asarray(slots)
        return self._uploaded[1]

    def widened(self, slots: Any, capacity: int) -> Any:
        """int32 slots of the device as int64, in memory that is kept for it."""
        if self._wide.shape[0] < max(slots.shape[0], capacity):
            self._wide = self.cupy.empty(max(slots.shape[0], capacity), np.int64)
        wide = self._wide[: slots.shape[0]]
        wide[...] = slots
        return wide

    def keep(self, foreign: Any) -> None:
        """Hold on to other frameworks' arrays until the device is done with them: they don't know our stream."""
        event = self.cupy.cuda.Event(disable_timing=True)
        event.record()
        self._pending.append((event, foreign))
        while self._pending[0][0].done and len(self._pending) > 1:
            self._pending.popleft()


class DeviceCall:
    """One call: see `sketchssm.backends.Call`.

    Parameters
    ----------
    arrays : DeviceArrays
        The engine's.
    port : Port
        Framework whose current stream the call runs on.
    """

    def __init__(self, arrays: DeviceArrays, port: Port) -> None:
        self._arrays, self._port = arrays, port
        self._stream: Any = None
        self._temporary: list[Any] = []  # freed memory may be given to the next array before our kernels run
        self._foreign: dict[int, tuple[Any, Any]] = {}  # others' arrays by id, and CuPy's views of them
        self._live: Any = None  # which rows are no padding, where the host knows it
        self._made: Any = None  # the caller's array behind the target

    def __enter__(self) -> DeviceCall:
        self._arrays.device.__enter__()
        self._stream = self._port.stream()
        if self._stream is not None:
            self._stream.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._foreign:
            self._arrays.keep(self._foreign)
        if self._stream is not None:
            self._stream.__exit__(*error)
        self._arrays.device.__exit__(*error)

    def slots(self, slots: Any, batch: int | None, capacity: int) -> Any:
        """See `sketchssm.backends.Call`."""
        arrays = self._arrays
        found = None if slots is None else self._local(slots, "slots")
        if found is None:
            index = HOST.slots(slots, batch, capacity)
            self._live = index >= 0
            return arrays.rows(index.shape[0]) if slots is None else arrays.uploaded(index)
        port, array, name, address = found
        shape = tuple(array.shape)
        if not name.startswith(("int", "uint")):
            raise ValueError(f"slots: expected integers, got dtype {name}")
        inner = (1,) if batch is None and not shape else shape
        if len(inner) != 1 or (batch is not None and inner[0] != batch):
            raise ValueError(f"slots: expected shape ({'count' if batch is None else batch},), got {shape}")
        if address is None or name not in ("int64", "int32"):
            array, name = port.converted(array, "int64"), "int64"
            self._temporary.append(array)
            address = _own_address(port, array)
        index = arrays.wrap(address, inner, name)
        return index if name == "int64" else arrays.widened(index, capacity)

    def tokens(self, given: Tokens, slots: Any, several: bool) -> Tokens:
        """See `sketchssm.backends.Call`."""
        activation = self._arrays.activation
        if activation is None:
            names = {self._type_name(x, name) for name, x in zip("qkv", given[:3], strict=True)}
            activation = names.pop() if len(names) == 1 and names <= {"bfloat16", "float16"} else "float32"
        q, k, v = (self._take(x, name, activation, several) for name, x in zip("qkv", given[:3], strict=True))
        g = self._take(given.g, "g", "float32", several)
        beta = None if given.beta is None else self._take(given.beta, "beta", "float32", several)
        self._arrays.activation = activation
        return Tokens(q, k, v, g, beta)

    def states(self, state: Any, slots: Any) -> Any:
        """See `sketchssm.backends.Call`."""
        return self._take(state, "state", "float32", True)

    def target(self, v: Any, out: Any, several: bool) -> Any:
        """See `sketchssm.backends.Call`."""
        arrays, name = self._arrays, str(self._arrays.output)
        inner = _with_tokens(v.shape, several)
        if out is not None and arrays.port(out) is self._port:
            device, came, address = self._port.describe(out)
            self._check_device(device, "out")
            if came == name and address is not None and address % ALIGNMENT == 0:
                self._made = out
                return arrays.wrap(address, inner, name)
        self._made = self._port.empty(tuple(v.shape), name)
        return arrays.wrap(_own_address(self._port, self._made), inner, name)

    def result(self, target: Any, v: Any, out: Any) -> Any:
        """See `sketchssm.backends.Call`."""
        made, port = self._made, self._port
        if out is not None:
            if self._arrays.port(out) is None:
                return interop.from_host(_to_host(made), like=v, out=out)
            if made is not out:
                port.fill(out, made)
            return out
        found = self._local(v, "v")
        if found is None:
            return interop.from_host(_to_host(made), like=v)
        _, array, name, _ = found  # of the call's port, which is v's where there is no `out`
        if port.describe(made)[1] != name:
            made = port.converted(made, name)
        return made if array is v else export(made, v)

    def _take(self, array: Any, name: str, want: str, several: bool) -> Any:
        """A kernel's view of one argument, with a tokens axis."""
        found = self._local(array, name)
        if found is None:
            return self._upload(array, name, want, several)
        port, array, came, address = found
        if came != want:
            self._check_type(came, array, name, want)
        if came != want or address is None or address % ALIGNMENT:
            array = port.converted(array, want)
            self._temporary.append(array)
            address = _own_address(port, array)
        return self._arrays.wrap(address, _with_tokens(array.shape, several), want)

    def _upload(self, array: Any, name: str, want: str, several: bool) -> Any:
        host = interop.to_host(array, name)
        self._check_type(host.dtype.name, host, name, want)
        wide = np.ascontiguousarray(host, dtype=host_type(want))
        if self._live is not None:
            HOST.check(name, wide[self._live])
        return self._arrays.cupy.asarray(wide.reshape(_with_tokens(wide.shape, several)).view(KERNEL_TYPES[want]))

    def _check_type(self, came: str, array: Any, name: str, want: str) -> None:
        if came not in REAL:
            raise TypeError(f"{name}: expected a real floating-point array, got dtype {array.dtype}")
        if came != want != "float32" and not self._arrays.converts:
            raise TypeError(
                f"{name}: expected {want}, which the head's first call or warmup() settled on, got {came}; "
                f"make the head with activation={want!r} to have it rounded, or with activation='float32'"
            )

    def _type_name(self, array: Any, name: str) -> str:
        found = self._local(array, name)
        return str(interop.to_host(array, name).dtype.name) if found is None else found[2]

    def _local(self, array: Any, name: str) -> tuple[Port, Any, str, int | None] | None:
        """An argument with the port that knows it, its type and address; None on the host.

        The port is the call's own, or for what is foreign to it CuPy's, after an import.
        """
        port = self._port
        if not port.owns(array):
            if self._arrays.port(array) is None:
                return None
            array, port = self._import(array), self._arrays.cupy_port
        try:
            device, came, address = port.describe(array)
        except RuntimeError as error:  # a tensor without plain memory, such as a sparse one
            raise TypeError(f"{name}: expected an array, got {type(array).__name__} ({error})") from error
        if device < 0:
            return None
        self._check_device(device, name)
        return port, array, came, address

    def _check_device(self, device: int, name: str) -> None:
        if device != self._arrays.home:
            want = self._arrays.home
            raise ValueError(f"{name}: expected an array on CUDA device {want}, as the head is, got one on {device}")

    def _import(self, array: Any) -> Any:
        """CuPy's view of another framework's array."""
        if id(array) not in self._foreign:
            plain = array.detach() if hasattr(array, "detach") else array
            self._foreign[id(array)] = array, self._arrays.cupy_port.imported(plain)
        return self._foreign[id(array)][1]


def _with_tokens(shape: Any, several: bool) -> tuple[int, ...]:
    """A shape with a tokens axis."""
    return tuple(shape) if several else (shape[0], 1, *shape[1:])


def _own_address(port: Port, array: Any) -> int:
    """Where an array starts that was made contiguous."""
    _, _, address = port.describe(array)
    assert address is not None
    return address


def _to_host(made: Any) -> Any:
    """A copy on the host of an array that we made; waits for it."""
    host = made.get() if hasattr(made, "get") else interop.to_host(made, "out")
    return host.astype(np.float32) if host.dtype.name == "bfloat16" else host  # PyTorch takes no bf16 from NumPy
