"""How a caller's arrays reach the CUDA kernels, and how results go back.

A kernel needs addresses. An array that the kernels can take as it is (on the device, contiguous, aligned, of the right
type) is asked for its address, and nothing else happens to it: no copy, no allocation, no wait. Any other array is
converted on the device, or checked and uploaded from the host.
"""

from __future__ import annotations

from collections import deque
from math import prod
from typing import Any

import numpy as np

from sketchssm import interop
from sketchssm.cuda.frameworks import CupyArrays, Framework, TorchArrays, export, host_type
from sketchssm.cuda.pointer import Pointer
from sketchssm.host_arrays import HostArrays
from sketchssm.recurrence import Layer, Tokens
from sketchssm.slots import MAX_DRAFTS

__all__ = ["DeviceArrays"]

ALIGNMENT = 16
"""Bytes: the kernels load 16 at a time."""

REAL = ("bfloat16", "float16", "float32", "float64")

HOST = HostArrays(np.float32)
"""Checks arrays on the host."""


class DeviceArrays:
    """The arrays of one engine's calls; see `sketchssm.backends.Arrays` and `Call`, which are one object here.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    activation_dtype : {"bfloat16", "float16", "float32"}, optional
        Type of q, k and v in the kernels; by default the narrowest that holds those of the first call.
    output_dtype : str, optional
        Type in which kernels write outputs; the activations' by default.
    raw_gate : bool, default False
        Whether the argument g is an activation too.
    state_dtype : str, default "float32"
        Type of states in memory.
    """

    def __init__(
        self,
        layer: Layer,
        activation_dtype: str | None = None,
        output_dtype: str | None = None,
        raw_gate: bool = False,
        state_dtype: str = "float32",
    ) -> None:
        import cupy

        self._cupy = cupy
        self.device = cupy.cuda.Device()
        self._home = self.device.id
        self._tails = layer.token_shapes()
        self._activations = "qkvg" if raw_gate else "qkv"
        self._converts = activation_dtype is not None  # else a wider array than expected is an error
        self._output_dtype = output_dtype
        self._activation_dtype = activation_dtype
        self._state_dtype, self._state_bytes = state_dtype, host_type(state_dtype).itemsize
        self._v_shape: Any = None  # of the last call, and names, shapes, row bytes and types of its inputs
        self._layout: list[tuple[str, tuple[int, ...], int, str]] = []
        self._out_layout: tuple[tuple[int, ...], int, str] = (), 0, ""
        self._cupy_arrays = CupyArrays(self._home)
        self._torch_arrays: TorchArrays | None = None
        self._framework: Framework = self._cupy_arrays  # of the last call
        self._stream: Any = None
        self.direct: Any = None  # see `sketchssm.backends.Arrays`
        self._kept: list[Any] = []  # converted arrays: freed memory may be another array's before the kernels run
        self._foreign: dict[int, tuple[Any, Any]] = {}  # other frameworks' arrays by id, and CuPy's views of them
        self._pending: deque[tuple[Any, Any]] = deque()
        self._live: Any = None  # rows that are no padding, where the host knows them
        self._made: Any = None  # the array behind the pointer that the kernels write
        self._uploaded: tuple[Any, Any] = (None, None)
        self._all: Any = None
        self._wide: Any = None

    @property
    def activation_dtype(self) -> str | None:
        """Type of q, k and v in the kernels, once it is settled."""
        return self._activation_dtype

    @property
    def output_dtype(self) -> str | None:
        """Type in which kernels write outputs, once it is settled."""
        return self._output_dtype or self._activation_dtype

    @property
    def torch(self) -> TorchArrays | None:
        """PyTorch, if the arrays of the present call are its tensors."""
        return self._torch_arrays if self._framework is self._torch_arrays else None

    def type_of(self, name: str) -> str:
        """Type that an argument of a step has in the kernels, once types are settled."""
        return str(
            (self.output_dtype if name == "out" else self.activation_dtype)
            if name in (*self._activations, "out")
            else "float32"
        )

    def warmup(self, activation_dtype: str, capacity: int) -> None:
        """Settle the activations' type, and allocate what slots of any kind need."""
        if self._activation_dtype not in (None, activation_dtype):
            raise ValueError(
                f"activation_dtype: expected {self._activation_dtype!r}, as the head has settled on, got "
                f"{activation_dtype!r}"
            )
        self._activation_dtype, self._v_shape = activation_dtype, None
        self.all_slots(capacity, capacity)
        self._widen(self._cupy.zeros(1, np.int32), capacity)  # compiles the conversion
        self.device.synchronize()  # whoever comes next may use another stream

    def all_slots(self, count: int, capacity: int) -> Pointer:
        """Slots 0, 1, ... of a call that names none; a captured graph may hold their memory, so it stays."""
        if self._all is None:
            self._all = self._cupy.arange(capacity, dtype=np.int64)
            self.device.synchronize()
        return Pointer(self._all.data.ptr, (count,), 8)

    # One call

    def call(self, *arrays: Any) -> DeviceArrays:
        """See `sketchssm.backends.Arrays`."""
        for array in arrays:
            framework = None if array is None else self._framework_of(array)
            if framework is not None:
                if framework is not self._framework:
                    self._framework, self.direct = framework, None
                break
        return self

    def __enter__(self) -> DeviceArrays:
        self.device.__enter__()
        self._stream = self._framework.stream()
        if self._stream is not None:
            self._stream.__enter__()
        self._live = None
        return self

    def __exit__(self, *error: Any) -> None:
        if self._foreign:
            self._keep_foreign()
        self._kept.clear()
        self._made = None
        if self._stream is not None:
            self._stream.__exit__(*error)
        self.device.__exit__(*error)

    def view(self, state: Any) -> Any:
        """See `sketchssm.backends.Arrays`."""
        return state

    def slots(self, slots: Any, batch: int | None, capacity: int) -> Pointer:
        """See `sketchssm.backends.Call`."""
        address = None if slots is None else self._framework.address(slots, "int64")
        if address is not None:
            return Pointer(address, self._check_count(slots.shape, batch), 8)
        found = None if slots is None else self._on_device(slots, "slots")
        if found is None:
            return self._host_slots(slots, batch, capacity)
        framework, array, dtype = found
        if not dtype.startswith(("int", "uint")) or dtype == "uint64":  # int64 can't hold all of that
            expected = "signed or smaller integers" if dtype == "uint64" else "integers"
            raise ValueError(f"slots: expected {expected}, got dtype {dtype}")
        shape = self._check_count(array.shape, batch)
        address = framework.address(array, "int64")
        if address is None and dtype == "int32" and shape[0] <= capacity:
            narrow = array.reshape(shape) if framework is self._cupy_arrays else self._int32_view(array, shape)
            address = None if narrow is None else self._widen(narrow, capacity)
        if address is None:
            address = self._copy(framework, array, "slots", "int64")
        return Pointer(address, shape, 8)

    def lengths(self, lengths: Any, slots: Pointer, tokens: int) -> Pointer | None:
        """See `sketchssm.backends.Call`; None stands for all tokens."""
        return None if lengths is None else self._counts("lengths", lengths, slots.shape[0], tokens)

    def accepted(self, accepted: Any, slots: Pointer, cursor: Any) -> Pointer:
        """See `sketchssm.backends.Call`; the kernel compares with the cursors."""
        return self._counts("accepted", accepted, slots.shape[0], MAX_DRAFTS)

    def _counts(self, name: str, counts: Any, batch: int, most: int) -> Pointer:
        """Counts of tokens as int64 on the device. Counts on the host are checked."""
        address = self._framework.address(counts, "int64")
        found = None if address is not None else self._on_device(counts, name)
        shape = tuple(np.shape(counts)) if found is None and address is None else tuple(counts.shape)
        if shape != (batch,):
            raise ValueError(f"{name}: expected shape ({batch},), got {shape}")
        if address is None and found is not None:
            framework, array, dtype = found
            if not dtype.startswith("int"):
                raise ValueError(f"{name}: expected signed integers, got dtype {dtype}")
            address = framework.address(array, "int64")
            if address is None:
                address = self._copy(framework, array, name, "int64")
        elif address is None:
            host = np.asarray(counts)
            if host.dtype.kind not in "iu":
                raise ValueError(f"{name}: expected integers, got dtype {host.dtype}")
            live = host if self._live is None else host[self._live]
            if live.size and not 0 <= live.min() <= live.max() <= most:
                raise ValueError(f"{name}: expected 0 to {most}, got {live.min()} to {live.max()}")
            self._kept.append(self._cupy.asarray(host.astype(np.int64)))
            address = int(self._kept[-1].data.ptr)
        return Pointer(address, (batch,), 8)

    def inputs(
        self, given: Tokens, slots: Any, out: Any, several: bool, capacity: int, lengths: Pointer | None = None
    ) -> tuple[Tokens, Pointer, Pointer]:
        """See `sketchssm.backends.Call`."""
        shape = given.v.shape
        index = self.slots(slots, shape[0], capacity)
        activation = self._activation_dtype or self._narrowest(given)
        if shape != self._v_shape or self._activation_dtype is None:
            self._lay_out(shape, several, activation)
        address_of = self._framework.address
        tokens: list[Pointer | None] = []  # their shapes the head has checked
        for array, (name, inner, row_bytes, want) in zip(given, self._layout, strict=False):
            address = address_of(array, want)
            if address is None or address % ALIGNMENT:
                address = self._converted(array, name, want)
            tokens.append(Pointer(address, inner, row_bytes))
        if given.beta is None:
            tokens.append(None)
        self._activation_dtype = activation
        return Tokens(*tokens), index, self._target(shape, out, tokens)

    def states(self, state: Any, slots: Any) -> Pointer:
        """See `sketchssm.backends.Call`."""
        address = self._framework.address(state, self._state_dtype)
        if address is None or address % ALIGNMENT:
            address = self._converted(state, "state", self._state_dtype)
        shape = tuple(state.shape)
        return Pointer(address, shape, self._state_bytes * prod(shape[1:]))

    def result(self, written: Any, v: Any, out: Any) -> Any:
        """See `sketchssm.backends.Call`."""
        made, framework = self._made, self._framework
        if made is out:
            return out
        if out is not None:
            if self._framework_of(out) is None:
                return interop.from_host(_to_host(made), like=v, out=out)
            framework.fill(out, made)
            return out
        if framework.address(v, str(self.output_dtype)) is not None:
            return made
        found = self._on_device(v, "v")
        if found is None:
            return interop.from_host(_to_host(made), like=v)
        _, array, name = found  # of the call's framework, which is v's where there is no `out`
        if self.output_dtype != name:
            made = framework.converted(made, name)
        return made if array is v else export(made, v)

    # One argument

    def _framework_of(self, array: Any) -> Framework | None:
        """Framework of an array on a device; None for anything on the host."""
        if self._cupy_arrays.owns(array):
            return self._cupy_arrays
        if interop.framework(array) == "torch":
            if not getattr(array, "is_cuda", False):
                return None
            if self._torch_arrays is None:
                self._torch_arrays = TorchArrays(self._home)
            return self._torch_arrays
        return self._cupy_arrays if interop.is_on_device(array) else None

    def _on_device(self, array: Any, name: str) -> tuple[Framework, Any, str] | None:
        """An argument with a framework that knows it, and the name of its type; None for an array on the host.

        The framework is the call's own; for an array that is foreign to it, CuPy's, after an import.
        """
        framework = self._framework
        if not framework.owns(array):
            if self._framework_of(array) is None:
                return None
            if id(array) not in self._foreign:
                self._foreign[id(array)] = array, self._cupy_arrays.imported(array)
            array, framework = self._foreign[id(array)][1], self._cupy_arrays
        device, dtype = framework.describe(array)
        if device < 0:
            return None
        if device != self._home:
            raise ValueError(
                f"{name}: expected an array on CUDA device {self._home}, as the head is, got one on {device}"
            )
        return framework, array, dtype

    def _converted(self, array: Any, name: str, want: str) -> int:
        """Address of an argument that the kernels can't take as it is, or not through the call's framework."""
        found = self._on_device(array, name)
        if found is None:
            return self._upload(array, name, want)
        framework, array, dtype = found
        if dtype != want:
            self._check_type(dtype, array, name, want)
        address = framework.address(array, want)
        if address is None or address % ALIGNMENT:
            address = self._copy(framework, array, name, want)
        return address

    def _copy(self, framework: Framework, array: Any, name: str, want: str) -> int:
        """Address of a contiguous copy in another type."""
        try:
            self._kept.append(framework.converted(array, want))
        except RuntimeError as error:  # a tensor without plain memory, such as a sparse one
            raise TypeError(f"{name}: expected an array, got {type(array).__name__} ({error})") from error
        address = framework.address(self._kept[-1], want)
        if address is None:
            raise TypeError(f"{name}: expected an array, got {type(array).__name__} without dense memory")
        return address

    def _upload(self, array: Any, name: str, want: str) -> int:
        """Address of a checked copy of an argument on the host."""
        host = interop.to_host(array, name)
        self._check_type(host.dtype.name, host, name, want)
        live = slice(0) if self._live is None else self._live  # slots on the device: padding is not known here
        wide = interop.to_type(host, host_type(want), name, live)
        if name not in self._activations:
            HOST.check(name, wide[live])
        self._kept.append(self._cupy.asarray(wide.view(np.uint16) if want == "bfloat16" else wide))
        return int(self._kept[-1].data.ptr)

    def _check_type(self, came: str, array: Any, name: str, want: str) -> None:
        if came not in REAL:
            raise TypeError(f"{name}: expected a real floating-point array, got dtype {array.dtype}")
        if name in self._activations and came != want != "float32" and not self._converts:
            raise TypeError(
                f"{name}: expected {want}, which the head's first call or warmup() settled on, got {came}; "
                f"make the head with activation_dtype={want!r} to have it rounded, or with "
                "activation_dtype='float32'"
            )

    def _narrowest(self, given: Tokens) -> str:
        """The narrowest type that holds all activations of a call."""
        names = set()
        for name in self._activations:
            array = getattr(given, name)
            found = self._on_device(array, name)
            names.add(interop.to_host(array, name).dtype.name if found is None else found[2])
        return names.pop() if len(names) == 1 and names <= {"bfloat16", "float16"} else "float32"

    def _lay_out(self, v_shape: Any, several: bool, activation: str) -> None:
        """Note what the inputs look like in a call whose v has this shape; the head has checked that they agree."""
        batch, length = v_shape[0], v_shape[1] if several else 1
        self._v_shape, self._layout = tuple(v_shape), []
        for name, tail in self._tails.items():
            want = activation if name in self._activations else "float32"
            row_bytes = length * prod(tail) * host_type(want).itemsize
            self._layout.append((name, (batch, length, *tail), row_bytes, want))
        dtype, shape = self._output_dtype or activation, (batch, length, *self._tails["v"])
        self._out_layout = shape, prod(shape[1:]) * host_type(dtype).itemsize, dtype

    def _target(self, shape: Any, out: Any, tokens: list[Pointer | None]) -> Pointer:
        """Find or make the array that the kernels write, which no input may share memory with."""
        framework, (inner, row_bytes, dtype) = self._framework, self._out_layout
        if out is not None:
            start = framework.address(out, dtype)
            if start is None and self._framework_of(out) is not None:
                self._on_device(out, "out")  # which refuses another device
            if start is not None and start % ALIGNMENT == 0:
                rows = inner[0]
                end = start + rows * row_bytes
                for x in tokens:
                    if x is not None and x.address < end and start < x.address + rows * x.row_bytes:
                        break
                else:
                    self._made = out
                    return Pointer(start, inner, row_bytes)
        self._made = framework.empty(tuple(shape), dtype)
        return Pointer(_address(framework, self._made, dtype), inner, row_bytes)

    # Slots

    def _check_count(self, shape: Any, batch: int | None) -> tuple[int, ...]:
        """Shape of slots on the device; a `batch` of None takes any number of them, and a single number."""
        if len(shape) == 1 and (batch is None or shape[0] == batch):
            return tuple(shape)
        if batch is None and not shape:
            return (1,)
        raise ValueError(f"slots: expected shape ({'count' if batch is None else batch},), got {tuple(shape)}")

    def _host_slots(self, slots: Any, batch: int | None, capacity: int) -> Pointer:
        """Check slots on the host and upload them; those of the call before need no second upload."""
        if slots is None and (batch is None or batch <= capacity):
            self._live = slice(None)
            return self.all_slots(capacity if batch is None else batch, capacity)
        index = HOST.slots(slots, batch, capacity)
        self._live = index >= 0
        key = index.tobytes(), self._cupy.cuda.get_current_stream().ptr
        if self._uploaded[0] != key:
            self._uploaded = key, self._cupy.asarray(index)
        return Pointer(self._uploaded[1].data.ptr, index.shape, 8)

    def _int32_view(self, array: Any, shape: tuple[int, ...]) -> Any:
        """CuPy's view of another framework's int32 slots; None if they are not contiguous, or none at all."""
        address = self._framework.address(array, "int32")
        if not address:
            return None
        memory = self._cupy.cuda.UnownedMemory(address, 4 * shape[0], None, self._home)
        return self._cupy.ndarray(shape, np.int32, self._cupy.cuda.MemoryPointer(memory, 0))

    def _widen(self, slots: Any, capacity: int) -> int:
        """Address of int32 slots as int64, in memory that stays, so that a graph can be captured."""
        if self._wide is None:
            self._wide = self._cupy.empty(capacity, np.int64)
        self._wide[: slots.shape[0]] = slots
        return int(self._wide.data.ptr)

    def _keep_foreign(self) -> None:
        """Hold on to other frameworks' arrays until the device is done with them: they don't know the stream."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record()
        self._pending.append((event, self._foreign))
        self._foreign = {}
        while self._pending[0][0].done and len(self._pending) > 1:
            self._pending.popleft()


def _address(framework: Framework, array: Any, dtype: str) -> int:
    """Address of an array that the framework made for us."""
    address = framework.address(array, dtype)
    assert address is not None
    return address


def _to_host(made: Any) -> Any:
    """A copy on the host of an array that we made; waits for it."""
    host = made.get() if hasattr(made, "get") else interop.to_host(made, "out")
    return host.astype(np.float32) if host.dtype.name == "bfloat16" else host  # PyTorch takes no bf16 from NumPy
