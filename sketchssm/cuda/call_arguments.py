"""One argument of a call: in place on the device, as a converted copy, or uploaded from the host."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from sketchssm.arrays import interop
from sketchssm.arrays.host_arrays import HostArrays
from sketchssm.arrays.options import EngineOptions
from sketchssm.cuda.call_layout import ArrayLayout
from sketchssm.cuda.frameworks import CupyArrays, Framework, TorchArrays
from sketchssm.cuda.launch import capture_of
from sketchssm.layer.recurrence import Tokens

DEVICE, HOST = "an array on the device", "one on the host"

REAL = ("bfloat16", "float16", "float32", "float64")


class CallArguments:
    """Finds the framework and the address of arguments, and keeps copies alive until the call ends.

    `activations` names the arguments that have the activations' type; with `converts`, wider ones are rounded, else
    they are an error. `framework` is that of the present or the last call, `live` the rows or tokens without padding,
    if slots and lengths are on the host, and `kept` what lives until the kernels are launched.
    """

    def __init__(self, activations: str, converts: bool, pad_slot: int) -> None:
        import cupy

        self._cupy = cupy
        self.host = HostArrays(np.float32, EngineOptions(pad_slot=pad_slot))  # checks arrays on the host
        self.device = cupy.cuda.Device()
        self._home = self.device.id
        self.activations, self._converts = activations, converts
        self._cupy_arrays = CupyArrays(self._home)
        self._torch_arrays: TorchArrays | None = None
        self.framework: Framework = self._cupy_arrays
        self.kept: list[Any] = []
        self.live: Any = None
        self._foreign: dict[int, tuple[Any, Any]] = {}  # other frameworks' arrays by id, and CuPy's views of them
        self._pending: deque[tuple[Any, Any]] = deque()
        self._stream: Any = None  # context of the framework's stream
        self._outer: Any = None  # CuPy's stream around the call, if the call runs on another framework's stream

    # A call

    def begin(self) -> None:
        """Make the device and the framework's stream current."""
        self.device.__enter__()
        self._stream = self.framework.stream()
        self._outer = None
        if self._stream is not None:
            self._outer = self._cupy.cuda.get_current_stream()
            self._stream.__enter__()
        self.live = None

    def end(self, *error: Any) -> None:
        """Undo `begin`, and drop all copies."""
        if self._foreign:
            self._keep_foreign()
        self.kept.clear()
        if self._stream is not None:
            self._stream.__exit__(*error)
        self.device.__exit__(*error)

    def _keep_foreign(self) -> None:
        """Keep arrays of other frameworks alive until the device no longer uses them: they do not know the stream."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record()
        self._pending.append((event, self._foreign))
        self._foreign = {}
        while self._pending[0][0].done and len(self._pending) > 1:
            self._pending.popleft()

    def wait_outside(self) -> None:
        """Let CuPy's stream around the call wait for the call: a caller who uses CuPy knows only this stream."""
        if self._outer is not None:
            self._outer.wait_event(self._cupy.cuda.get_current_stream().record())

    # Frameworks

    @property
    def torch(self) -> TorchArrays | None:
        """PyTorch, if the arrays of the present call are its tensors."""
        return self._torch_arrays if self.framework is self._torch_arrays else None

    def framework_of(self, array: Any) -> Framework | None:
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

    def on_device(self, array: Any, name: str) -> tuple[Framework, Any, str] | None:
        """Framework, array and name of the type of an argument on the device; None for an array on the host.

        The framework is that of the call. An array of another framework is imported by CuPy.
        """
        framework = self.framework
        if not framework.owns(array):
            if self.framework_of(array) is None:
                return None
            if id(array) not in self._foreign:
                self.check_uncaptured(name, "an array of the framework of the call", type(array).__name__)
                self._foreign[id(array)] = array, self._imported(array)
            array, framework = self._foreign[id(array)][1], self._cupy_arrays
        device, dtype = framework.describe(array)
        if device < 0:
            return None
        if device != self._home:
            raise ValueError(
                f"{name}: expected an array on CUDA device {self._home}, the head's device, got one on {device}"
            )
        return framework, array, dtype

    def _imported(self, array: Any) -> Any:
        """Another framework's array as CuPy's; the call's stream waits for the stream on which the array was made."""
        if self._outer is None or not self._cupy_arrays.owns(array):
            return self._cupy_arrays.imported(array)
        self._cupy.cuda.get_current_stream().wait_event(self._outer.record())
        return array

    def check_uncaptured(self, name: str, expected: str, came: str) -> None:
        """Refuse new memory for an argument in a capture: a graph's replay would use the memory when it is freed."""
        if capture_of(int(self._cupy.cuda.get_current_stream().ptr)):
            raise ValueError(f"{name}: expected {expected} while a graph is captured, got {came}")

    def check_lasting(self, framework: Framework, name: str, expected: str, array: Any) -> None:
        """The same, if the framework frees memory that a graph uses. PyTorch keeps the memory of its graphs."""
        if framework is self._cupy_arrays:
            came = "None" if array is None else HOST
            if array is not None and self.framework_of(array) is not None:
                came = f"dtype {array.dtype} and strides {array.strides}"
            self.check_uncaptured(name, expected, came)

    # Addresses

    def find(self, array: Any, one: ArrayLayout) -> tuple[int, tuple[int, int, int]]:
        """Address and strides of an argument: in place if its strides allow, else of a copy.

        The strides have the form of `ArrayLayout.contiguous`, the strides of a copy.
        """
        found = self.on_device(array, one.name)
        if found is None:
            return self._upload(array, one.name, one.dtype), one.contiguous
        framework, array, dtype = found
        if dtype != one.dtype:
            self._check_type(dtype, array, one.name, one.dtype)
        there = framework.strided(array, one.dtype)
        if there is not None and there[0] % one.align == 0:
            strides = one.strides(there[1])
            if strides is not None:
                return there[0], strides
        self.check_lasting(framework, one.name, in_place(one.dtype), array)
        return self.copied(framework, array, one.name, one.dtype), one.contiguous

    def copied(self, framework: Framework, array: Any, name: str, want: str) -> int:
        """Address of a contiguous copy in another type."""
        try:
            self.kept.append(framework.converted(array, want))
        except RuntimeError as error:  # a tensor without plain memory, such as a sparse one
            raise TypeError(f"{name}: expected an array, got {type(array).__name__} ({error})") from error
        address = framework.address(self.kept[-1], want)
        if address is None:
            raise TypeError(f"{name}: expected an array, got {type(array).__name__} without dense memory")
        return address

    def uploaded(self, host: Any) -> int:
        """Address of a copy of a host's array, which lives until the kernels are launched."""
        self.kept.append(self._cupy.asarray(host))
        return int(self.kept[-1].data.ptr)

    def _upload(self, array: Any, name: str, want: str) -> int:
        """Address of a checked copy of an argument on the host."""
        self.check_uncaptured(name, DEVICE, HOST)
        host = interop.to_host(array, name)
        self._check_type(host.dtype.name, host, name, want)
        live = slice(0) if self.live is None else self.live  # slots on the device: padding is not known here
        wide = interop.to_type(host, interop.host_type(want), name, live)
        if name not in self.activations:
            self.host.check(name, wide[live])
        return self.uploaded(wide.view(np.uint16) if want == "bfloat16" else wide)

    def _check_type(self, came: str, array: Any, name: str, want: str) -> None:
        if came not in REAL:
            raise TypeError(f"{name}: expected a real floating-point array, got dtype {array.dtype}")
        if name in self.activations and came != want != "float32" and not self._converts:
            raise TypeError(
                f"{name}: expected {want}, which the head's first call or warmup() settled on, got {came}; "
                f"make the head with activation_dtype={want!r} to have it rounded, or with "
                "activation_dtype='float32'"
            )

    def narrowest(self, given: Tokens) -> str:
        """The narrowest type that holds all activations of a call."""
        names = set()
        for name in self.activations:
            array = getattr(given, name)
            found = self.on_device(array, name)
            names.add(interop.to_host(array, name).dtype.name if found is None else found[2])
        return names.pop() if len(names) == 1 and names <= {"bfloat16", "float16"} else "float32"


def in_place(dtype: str) -> str:
    """Name what kernels use in place, for messages."""
    return f"contiguous, aligned tokens of type {dtype}"
