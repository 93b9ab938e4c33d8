"""Conversion of a caller's arrays for the CUDA kernels, and of results for the caller.

A kernel needs addresses and strides. Kernels use an array in place if it is on the device, has the right type, and its
tokens are contiguous and aligned. This takes no copy, no allocation and no wait. Any other array is converted on the
device, or checked and uploaded from the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.arrays import interop
from sketchssm.arrays.options import EngineOptions
from sketchssm.cuda.call_arguments import CallArguments, in_place
from sketchssm.cuda.call_layout import ArrayLayout, CallLayout
from sketchssm.cuda.call_numbers import CallNumbers
from sketchssm.cuda.constants import ACCESS
from sketchssm.cuda.frameworks import TorchArrays, export
from sketchssm.cuda.launch import capture_of
from sketchssm.cuda.pointer import Pointer, Slots, StepInputs
from sketchssm.layer.recurrence import Layer, Tokens
from sketchssm.layer.slots import MAX_DRAFTS


class DeviceArrays:
    """The arrays of one engine's calls: implements both `sketchssm.heads.engine.Arrays` and `Call`.

    `overlaps` tells whether a range of addresses meets the engine's memory.
    """

    def __init__(self, layer: Layer, options: EngineOptions, overlaps: Callable[[int, int], bool]) -> None:
        import cupy

        activations = "qkv" if options.gate is None else "qkvg"
        self._cupy = cupy
        self._arguments = CallArguments(activations, options.activation_dtype is not None, options.pad_slot)
        self._numbers = CallNumbers(self._arguments)
        self.device = self._arguments.device
        self.all_slots = self._numbers.all_slots
        self._overlaps = overlaps
        self._tails = layer.token_shapes()
        self._activations = activations
        self._output_dtype, self._state_dtype = options.output_dtype, options.state_dtype
        self.activation_dtype = options.activation_dtype
        """Type of q, k and v in the kernels; None until the first call or `warmup`."""
        self._layout: CallLayout | None = None  # of the last call
        self._made: Any = None  # the array that the kernels write
        self.direct: Any = None  # see `sketchssm.heads.engine.Arrays`

    @property
    def output_dtype(self) -> str | None:
        """Type in which kernels write outputs, once it is settled."""
        return self._output_dtype or self.activation_dtype

    @property
    def torch(self) -> TorchArrays | None:
        """PyTorch, if the arrays of the present call are its tensors."""
        return self._arguments.torch

    def type_of(self, name: str) -> str:
        """Type that an argument of a step has in the kernels, once types are settled."""
        if name == "out":
            return str(self.output_dtype)
        return str(self.activation_dtype) if name in self._activations else "float32"

    def warmup(self, activation_dtype: str, capacity: int) -> None:
        """Fix the activations' type, and allocate the memory that slots of every kind need."""
        if self.activation_dtype not in (None, activation_dtype):
            raise ValueError(
                f"activation_dtype: expected {self.activation_dtype!r}, the head's type, got {activation_dtype!r}"
            )
        self.activation_dtype, self._layout = activation_dtype, None
        self.all_slots(capacity, capacity)
        self.device.synchronize()  # the next call may be on another stream

    # One call

    def call(self, *arrays: Any) -> DeviceArrays:
        """See `sketchssm.heads.engine.Arrays`."""
        for array in arrays:
            framework = None if array is None else self._arguments.framework_of(array)
            if framework is not None:
                if framework is not self._arguments.framework:
                    self._arguments.framework, self.direct = framework, None
                break
        return self

    def __enter__(self) -> DeviceArrays:
        self._arguments.begin()
        return self

    def __exit__(self, *error: Any) -> None:
        self._made = None
        self._arguments.end(*error)

    def view(self, state: Any) -> Any:
        """See `sketchssm.heads.engine.Arrays`."""
        with self.device:
            stream = self._arguments.framework.stream()
            if stream is not None and not capture_of(int(stream.ptr)):
                self._cupy.cuda.get_current_stream().wait_event(stream.record())
        return state

    def slots(self, slots: Any, batch: int | None, capacity: int, name: str = "slots", repeats: bool = False) -> Slots:
        """See `sketchssm.heads.engine.Call`."""
        return self._numbers.slots(slots, batch, capacity, name, repeats)

    def lengths(self, lengths: Any, slots: Slots, tokens: int) -> Slots | None:
        """See `sketchssm.heads.engine.Call`; None stands for all tokens."""
        return None if lengths is None else self._numbers.counts("lengths", lengths, slots.shape[0], tokens)

    def accepted(self, accepted: Any, slots: Slots, cursor: Any) -> Slots:
        """See `sketchssm.heads.engine.Call`; the kernel compares with the cursors."""
        return self._numbers.counts("accepted", accepted, slots.shape[0], MAX_DRAFTS)

    def inputs(
        self, given: Tokens, slots: Any, out: Any, several: bool, capacity: int, lengths: Slots | None = None
    ) -> tuple[StepInputs, Slots, Pointer]:
        """See `sketchssm.heads.engine.Call`."""
        shape, arguments = given.v.shape, self._arguments
        index = self._numbers.slots(slots, shape[0], capacity, "slots", False)
        if lengths is not None:
            self._numbers.leave_out(shape, several)
        activation = self.activation_dtype or arguments.narrowest(given)
        layout = self._layout
        if layout is None or shape != layout.v_shape or self.activation_dtype is None:
            dtypes = {name: activation if name in self._activations else "float32" for name in self._tails}
            layout = CallLayout(shape, several, self._tails, dtypes, self._output_dtype or activation)
            self._layout = layout
        address_of = arguments.framework.address
        addresses, extents, strides = [0] * 5, layout.extents, (layout.rows, layout.steps)
        for i, one in enumerate(layout.inputs):
            array = given[i]
            address = address_of(array, one.dtype)
            if address is None or address % one.align:
                address, found = arguments.find(array, one)
                if found is not one.contiguous:
                    row, step, extent = found
                    strides = _replaced(strides[0], i, row), _replaced(strides[1], i, step)
                    extents = _replaced(extents, i, extent)
            addresses[i] = address
        self.activation_dtype = activation
        tokens = StepInputs(addresses, *strides)
        return tokens, index, self._target(out, layout, addresses, extents)

    def _target(self, out: Any, layout: CallLayout, addresses: list[int], extents: tuple[int, ...]) -> Pointer:
        """Find or make the array that the kernels write; it shares no memory with an input."""
        arguments, one = self._arguments, layout.out
        framework = arguments.framework
        if out is not None:
            strides: tuple[int, int, int] | None = one.contiguous
            start = framework.address(out, one.dtype)
            if start is None and arguments.framework_of(out) is not None:
                arguments.on_device(out, "out")  # an error for another device
                there = framework.strided(out, one.dtype)
                if there is not None:
                    start, strides = there[0], one.strides(there[1])
            if start is not None and strides is not None and start % ACCESS == 0:
                row, step, extent = strides
                end = start + extent
                for address, size in zip(addresses, extents, strict=True):
                    if address < end and start < address + size:
                        break
                else:
                    self._made = out
                    return Pointer(start, one.shape, row, step)
        arguments.check_lasting(framework, "out", f"{in_place(one.dtype)} that share no memory with an input", out)
        self._made = framework.empty(layout.v_shape, one.dtype)
        start = framework.address(self._made, one.dtype)
        assert start is not None
        row, step, _ = one.contiguous
        return Pointer(start, one.shape, row, step)

    def states(self, state: Any, slots: Any) -> Pointer:
        """See `sketchssm.heads.engine.Call`."""
        shape, arguments = tuple(state.shape), self._arguments
        one = ArrayLayout("state", self._state_dtype, shape[0], 1, shape[1:], False)
        address = arguments.framework.address(state, self._state_dtype)
        row = one.contiguous[0]
        if address is None or address % ACCESS:
            address, (row, _, _) = arguments.find(state, one)
        # of the head's own memory, the kernel would overwrite states before it has read them
        if self._overlaps(address, address + (shape[0] - 1) * row + one.contiguous[1]):
            framework, array, _ = arguments.on_device(state, "state") or (arguments.framework, state, "")
            arguments.check_lasting(framework, "state", "states apart from the head's memory", array)
            address = arguments.copied(framework, array, "state", self._state_dtype)
            row = one.contiguous[0]
        return Pointer(address, shape, row)

    def host_slots(self, slots: Any, batch: int | None, capacity: int) -> npt.NDArray[np.int64]:
        """See `sketchssm.heads.engine.Call`; waits for the device."""
        found = None if slots is None else self._arguments.on_device(slots, "slots")
        return self._arguments.host.slots(slots if found is None else _to_host(found[1]), batch, capacity)

    def handed_out(self, array: Any) -> Any:
        """See `sketchssm.heads.engine.Call`."""
        self._arguments.wait_outside()
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
        made, framework = self._made, self._arguments.framework
        if made is out:
            return out
        if out is not None:
            if self._arguments.framework_of(out) is None:
                return interop.from_host(_to_host(made), like=v, out=out)
            framework.fill(out, made)
            return out
        if framework.address(v, str(self.output_dtype)) is not None:
            return made
        found = self._arguments.on_device(v, "v")
        if found is None:
            return interop.from_host(_to_host(made), like=v)
        _, array, name = found  # of the call's framework: without `out`, that of v
        if self.output_dtype != name:
            made = framework.converted(made, name)
        return made if array is v else export(made, v)


def _replaced(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _to_host(made: Any) -> Any:
    """Copy an array of this module's to the host; waits for the device."""
    host = made.get() if hasattr(made, "get") else interop.to_host(made, "out")
    return host.astype(np.float32) if host.dtype.name == "bfloat16" else host  # PyTorch takes no bf16 from NumPy
