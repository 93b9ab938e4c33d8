"""Conversion of a caller's arrays for the CUDA kernels, and of results for the caller.

A kernel needs addresses and strides. Kernels use an array in place if it is on the device, has the right type, and its
tokens are contiguous and aligned. This takes no copy, no allocation and no wait. Any other array is converted on the
device, or checked and uploaded from the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.arrays import interop
from sketchssm.cuda.call_arguments import DEVICE, HOST, CallArguments, in_place
from sketchssm.cuda.call_layout import ALIGNMENT, ArrayLayout, CallLayout
from sketchssm.cuda.frameworks import Framework, export
from sketchssm.cuda.launch import capture_of
from sketchssm.cuda.pointer import COUNTED, WIDE, Pointer, Slots, StepInputs
from sketchssm.cuda.workspaces import stream_key
from sketchssm.layer.recurrence import PAD_SLOT, Layer, Tokens
from sketchssm.layer.slots import MAX_DRAFTS

__all__ = ["DeviceArrays"]

NUMBER_FLAGS = {"int64": WIDE, "int32": 0}
"""Integer types that the kernels take, with the flag that tells the type."""


class DeviceArrays(CallArguments):
    """The arrays of one engine's calls: implements both `sketchssm.heads.engine.Arrays` and `Call`.

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
    pad_slot : int, default -1
        Slot number that means padding.
    """

    def __init__(
        self,
        layer: Layer,
        activation_dtype: str | None = None,
        output_dtype: str | None = None,
        raw_gate: bool = False,
        state_dtype: str = "float32",
        pad_slot: int = PAD_SLOT,
    ) -> None:
        super().__init__("qkvg" if raw_gate else "qkv", activation_dtype is not None, pad_slot)
        self.own: list[tuple[int, int]] = []  # where the engine's memory starts and ends
        self._tails = layer.token_shapes()
        self._output_dtype = output_dtype
        self._activation_dtype = activation_dtype
        self._state_dtype = state_dtype
        self._layout: CallLayout | None = None  # of the last call
        self._stream: Any = None
        self.direct: Any = None  # see `sketchssm.heads.engine.Arrays`
        self._made: Any = None  # the array that the kernels write
        self._uploaded: tuple[Any, Any] = (None, None)
        self._all: Any = None

    @property
    def activation_dtype(self) -> str | None:
        """Type of q, k and v in the kernels; None until the first call or `warmup`."""
        return self._activation_dtype

    @property
    def output_dtype(self) -> str | None:
        """Type in which kernels write outputs, once it is settled."""
        return self._output_dtype or self._activation_dtype

    def type_of(self, name: str) -> str:
        """Type that an argument of a step has in the kernels, once types are settled."""
        return str(
            (self.output_dtype if name == "out" else self.activation_dtype)
            if name in (*self._activations, "out")
            else "float32"
        )

    def warmup(self, activation_dtype: str, capacity: int) -> None:
        """Fix the activations' type, and allocate the memory that slots of every kind need."""
        if self._activation_dtype not in (None, activation_dtype):
            raise ValueError(
                f"activation_dtype: expected {self._activation_dtype!r}, the head's type, got {activation_dtype!r}"
            )
        self._activation_dtype, self._layout = activation_dtype, None
        self.all_slots(capacity, capacity)
        self.device.synchronize()  # the next call may be on another stream

    def all_slots(self, count: int, capacity: int) -> Slots:
        """Slots 0, 1, ... of a call without slots. The array is never freed, because a captured graph may use it."""
        if self._all is None:
            self._all = self._cupy.arange(capacity, dtype=np.int32)
            self.device.synchronize()
        return Slots(self._all.data.ptr, (count,), 0)

    # One call

    def call(self, *arrays: Any) -> DeviceArrays:
        """See `sketchssm.heads.engine.Arrays`."""
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
        self._outer = None
        if self._stream is not None:
            self._outer = self._cupy.cuda.get_current_stream()
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
        """See `sketchssm.heads.engine.Arrays`."""
        with self.device:
            stream = self._framework.stream()
            if stream is not None and not capture_of(int(stream.ptr)):
                self._cupy.cuda.get_current_stream().wait_event(stream.record())
        return state

    def slots(self, slots: Any, batch: int | None, capacity: int, name: str = "slots", repeats: bool = False) -> Slots:
        """See `sketchssm.heads.engine.Call`."""
        if slots is not None:
            for of_type, flags in NUMBER_FLAGS.items():
                address = self._framework.address(slots, of_type)
                if address is not None:
                    shape = self._check_count(slots.shape, batch, name)
                    return Slots(address, shape, flags | COUNTED, (0, 0) if repeats else (0, shape[0]))
        found = None if slots is None else self._on_device(slots, name)
        if found is None:
            return self._host_slots(slots, batch, capacity, name, repeats)
        framework, array, dtype = found
        if not dtype.startswith(("int", "uint")) or dtype == "uint64":  # int64 cannot hold all values
            expected = "signed or smaller integers" if dtype == "uint64" else "integers"
            raise ValueError(f"{name}: expected {expected}, got dtype {dtype}")
        shape = self._check_count(array.shape, batch, name)
        address, flags = self._numbers(framework, array, name)
        return Slots(address, shape, flags | COUNTED, (0, 0) if repeats else (0, shape[0]))

    def lengths(self, lengths: Any, slots: Slots, tokens: int) -> Slots | None:
        """See `sketchssm.heads.engine.Call`; None stands for all tokens."""
        return None if lengths is None else self._counts("lengths", lengths, slots.shape[0], tokens)

    def _leave_out(self, shape: tuple[int, ...], several: bool) -> None:
        """Do not check tokens past the lengths of a draft's rows, which may hold anything, like padding."""
        if isinstance(self._live, slice):
            self._live = np.ones(shape[0], dtype=bool)
        counts = self._host_counts
        if counts is None:
            self._live = None
        elif self._live is not None:
            self._live = self._live & (counts > 0)
            if several:
                self._live = self._live[:, None] & (np.arange(shape[1]) < counts[:, None])

    def accepted(self, accepted: Any, slots: Slots, cursor: Any) -> Slots:
        """See `sketchssm.heads.engine.Call`; the kernel compares with the cursors."""
        return self._counts("accepted", accepted, slots.shape[0], MAX_DRAFTS)

    def _counts(self, name: str, counts: Any, batch: int, most: int) -> Slots:
        """Counts of tokens on the device. Counts on the host are checked."""
        found = self._on_device(counts, name)
        shape = tuple(np.shape(counts)) if found is None else tuple(counts.shape)
        if shape != (batch,):
            raise ValueError(f"{name}: expected shape ({batch},), got {shape}")
        self._host_counts = None
        if found is not None:
            framework, array, dtype = found
            if not dtype.startswith("int"):
                raise ValueError(f"{name}: expected signed integers, got dtype {dtype}")
            address, flags = self._numbers(framework, array, name)
        else:
            host = interop.to_host(counts, name)
            if host.dtype.kind not in "iu":
                raise ValueError(f"{name}: expected integers, got dtype {host.dtype}")
            live = host if self._live is None else host[self._live]
            if live.size and not 0 <= live.min() <= live.max() <= most:
                raise ValueError(f"{name}: expected 0 to {most}, got {live.min()} to {live.max()}")
            self.check_uncaptured(name, DEVICE, HOST)
            self._host_counts = host
            self._kept.append(self._cupy.asarray(host.astype(np.int32)))
            address, flags = int(self._kept[-1].data.ptr), 0
        return Slots(address, (batch,), flags)

    def _numbers(self, framework: Framework, array: Any, name: str) -> tuple[int, int]:
        """Address and flags of integers on the device."""
        for dtype, flags in NUMBER_FLAGS.items():
            address = framework.address(array, dtype)
            if address is not None:
                return address, flags
        self.check_lasting(framework, name, "contiguous int64 or int32 numbers", array)
        return self._copy(framework, array, name, "int64"), WIDE

    def inputs(
        self, given: Tokens, slots: Any, out: Any, several: bool, capacity: int, lengths: Slots | None = None
    ) -> tuple[StepInputs, Slots, Pointer]:
        """See `sketchssm.heads.engine.Call`."""
        shape = given.v.shape
        index = self.slots(slots, shape[0], capacity)
        if lengths is not None:
            self._leave_out(shape, several)
        activation = self._activation_dtype or self._narrowest(given)
        layout = self._layout
        if layout is None or shape != layout.v_shape or self._activation_dtype is None:
            layout = self._layout = self._lay_out(shape, several, activation)
        address_of = self._framework.address
        addresses, extents, strides = [0] * 5, layout.extents, (layout.rows, layout.steps)
        for i, one in enumerate(layout.inputs):
            array = given[i]
            address = address_of(array, one.dtype)
            if address is None or address % one.align:
                address, found = self._in_place(array, one)
                if found is not one.contiguous:
                    row, step, extent = found
                    strides = _replaced(strides[0], i, row), _replaced(strides[1], i, step)
                    extents = _replaced(extents, i, extent)
            addresses[i] = address
        self._activation_dtype = activation
        tokens = StepInputs(addresses, *strides)
        return tokens, index, self._target(out, layout, addresses, extents)

    def states(self, state: Any, slots: Any) -> Pointer:
        """See `sketchssm.heads.engine.Call`."""
        shape = tuple(state.shape)
        one = ArrayLayout("state", self._state_dtype, shape[0], 1, shape[1:], False)
        address = self._framework.address(state, self._state_dtype)
        row = one.contiguous[0]
        if address is None or address % ALIGNMENT:
            address, (row, _, _) = self._in_place(state, one)
        end = address + (shape[0] - 1) * row + one.contiguous[1]
        # of the head's own memory, the kernel would overwrite states before it has read them
        if any(address < last and first < end for first, last in self.own):
            framework, array, _ = self._on_device(state, "state") or (self._framework, state, "")
            self.check_lasting(framework, "state", "states apart from the head's memory", array)
            address, (row, _, _) = self._copy(framework, array, "state", self._state_dtype), one.contiguous
        return Pointer(address, shape, row)

    def host_slots(self, slots: Any, batch: int | None, capacity: int) -> npt.NDArray[np.int64]:
        """See `sketchssm.heads.engine.Call`; waits for the device."""
        found = None if slots is None else self._on_device(slots, "slots")
        return self._host.slots(slots if found is None else _to_host(found[1]), batch, capacity)

    def handed_out(self, array: Any) -> Any:
        """See `sketchssm.heads.engine.Call`."""
        if self._outer is not None:  # a caller who reads the array through CuPy knows only this stream
            self._outer.wait_event(self._cupy.cuda.get_current_stream().record())
        return array

    def fetch(self, array: Any, slots: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """See `sketchssm.heads.engine.Call`; waits for the device."""
        array = array.view(np.uint16) if array.dtype.name == "bfloat16" else array
        rows: npt.NDArray[Any] = array[self._cupy.asarray(slots)].get()
        return rows

    def store(self, array: Any, slots: npt.NDArray[np.int64], rows: npt.NDArray[Any]) -> None:
        """See `sketchssm.heads.engine.Call`."""
        array = array.view(np.uint16) if array.dtype.name == "bfloat16" else array
        array[self._cupy.asarray(slots)] = self._cupy.asarray(np.ascontiguousarray(rows).view(array.dtype))

    def result(self, written: Any, v: Any, out: Any) -> Any:
        """See `sketchssm.heads.engine.Call`."""
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
        _, array, name = found  # of the call's framework: without `out`, that of v
        if self.output_dtype != name:
            made = framework.converted(made, name)
        return made if array is v else export(made, v)

    def _lay_out(self, v_shape: Any, several: bool, activation: str) -> CallLayout:
        """Layout of a call whose v has this shape."""
        dtypes = {name: activation if name in self._activations else "float32" for name in self._tails}
        return CallLayout(v_shape, several, self._tails, dtypes, self._output_dtype or activation)

    def _target(self, out: Any, layout: CallLayout, addresses: list[int], extents: tuple[int, ...]) -> Pointer:
        """Find or make the array that the kernels write; it shares no memory with an input."""
        framework, one = self._framework, layout.out
        if out is not None:
            strides: tuple[int, int, int] | None = one.contiguous
            start = framework.address(out, one.dtype)
            if start is None and self._framework_of(out) is not None:
                self._on_device(out, "out")  # an error for another device
                there = framework.strided(out, one.dtype)
                if there is not None:
                    start, strides = there[0], one.strides(there[1])
            if start is not None and strides is not None and start % ALIGNMENT == 0:
                row, step, extent = strides
                end = start + extent
                for address, size in zip(addresses, extents, strict=True):
                    if address < end and start < address + size:
                        break
                else:
                    self._made = out
                    return Pointer(start, one.shape, row, step)
        self.check_lasting(framework, "out", f"{in_place(one.dtype)} that share no memory with an input", out)
        self._made = framework.empty(layout.v_shape, one.dtype)
        row, step, _ = one.contiguous
        return Pointer(_address(framework, self._made, one.dtype), one.shape, row, step)

    # Slots

    def _check_count(self, shape: Any, batch: int | None, name: str) -> tuple[int, ...]:
        """Shape of slots on the device; with a `batch` of None any number of slots, or one slot without an axis."""
        if len(shape) == 1 and (batch is None or shape[0] == batch):
            return tuple(shape)
        if batch is None and not shape:
            return (1,)
        raise ValueError(f"{name}: expected shape ({'count' if batch is None else batch},), got {tuple(shape)}")

    def _host_slots(self, slots: Any, batch: int | None, capacity: int, name: str, repeats: bool) -> Slots:
        """Check slots on the host and upload them, unless they are those of the previous call."""
        if slots is None and (batch is None or batch <= capacity):
            self._live = slice(None)
            return self.all_slots(capacity if batch is None else batch, capacity)
        index = self._host.slots(slots, batch, capacity, name, repeats)
        self.check_uncaptured(name, DEVICE, HOST)
        if name == "src":  # one of two arguments
            self._kept.append(self._cupy.asarray(index.astype(np.int32)))
            return Slots(int(self._kept[-1].data.ptr), index.shape, 0)
        self._live = index >= 0
        key = index.tobytes(), stream_key(int(self._cupy.cuda.get_current_stream().ptr))
        if self._uploaded[0] != key:
            self._uploaded = key, self._cupy.asarray(index.astype(np.int32))
        return Slots(self._uploaded[1].data.ptr, index.shape, 0)


def _replaced(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _address(framework: Framework, array: Any, dtype: str) -> int:
    """Address of an array from `Framework.empty` or `Framework.converted`."""
    address = framework.address(array, dtype)
    assert address is not None
    return address


def _to_host(made: Any) -> Any:
    """Copy an array of this module's to the host; waits for the device."""
    host = made.get() if hasattr(made, "get") else interop.to_host(made, "out")
    return host.astype(np.float32) if host.dtype.name == "bfloat16" else host  # PyTorch takes no bf16 from NumPy
