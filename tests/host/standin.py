"""The part of CuPy that the CUDA backend and its tests use, on NumPy arrays and host kernels.

`install` puts this module in CuPy's place, and `launch_kernel` in that of the driver's ``cuLaunchKernelEx``; the code
under test can't tell the difference. New memory holds NaN unless it was asked for as zeros.
"""

import contextlib
import ctypes
import struct
import sys
import time
import weakref
from types import SimpleNamespace
from typing import ClassVar

import numpy as np

from host.compiler import CompileError, compile_library

order = 0
"""Seed of the random order of threads and blocks, which changes with every launch; 0: one warp after another."""

sizes_only = False
"""Whether modules that are only asked for sizes are compiled as such. Otherwise they are the module with the kernel,
which most tests need anyway, so that g++ runs once."""

MULTIPROCESSORS = 3  # few, so that a persistent block processes several items


_arrays = {}  # by address: those that may be a kernel's arguments
_kernels = []  # by handle, less one


class ndarray(np.ndarray):
    """A NumPy array with `get` and construction over given memory, like CuPy's."""

    def __new__(cls, shape, dtype=float, memptr=None, strides=None):
        memory = getattr(memptr, "memory", memptr)
        return super().__new__(cls, shape, dtype, memory, strides=strides)

    @property
    def data(self):
        """Address; whoever asks for it may give it to a kernel, which then looks for the array."""
        address = self.ctypes.data
        _arrays[address] = weakref.ref(self)
        return SimpleNamespace(ptr=address, memset_async=lambda *a: None)

    device = property(lambda self: _Device())

    def get(self):
        """A copy."""
        return np.array(self, subok=False)


def asarray(x, dtype=None):
    """A copy, as an upload to the device would make."""
    return np.array(x, dtype=dtype, copy=True, order="C").view(ndarray)


def zeros(shape, dtype=float):
    return np.zeros(shape, dtype).view(ndarray)


def from_dlpack(x):
    """An array on the same memory, also if the other side says that the memory is on a device."""

    def exported(max_version=None, **options):
        return x.__dlpack__(max_version=max_version)  # older versions do not tell that memory may be written

    there = SimpleNamespace(__dlpack__=exported, __dlpack_device__=lambda: (1, 0))
    return np.from_dlpack(there).view(ndarray)


def full(shape, value, dtype=float):
    return np.full(shape, value, dtype).view(ndarray)


def empty(shape, dtype=float):
    fresh = np.empty(shape, dtype).view(ndarray)
    fresh.reshape(-1).view(np.uint8)[...] = 0xFF
    return fresh


def get_default_memory_pool():
    return SimpleNamespace(free_all_blocks=lambda: None)


def ascontiguousarray(x):
    return np.ascontiguousarray(x).view(ndarray)


def empty_like(x):
    return empty(x.shape, x.dtype)


def arange(*args, dtype=None):
    return np.arange(*args, dtype=dtype).view(ndarray)


class RawKernel:
    """One kernel, called as CuPy's, or by the driver's handle."""

    launches = 0

    def __init__(self, name, kernel, parameters):
        self.name, self._kernel, self.parameters = name, kernel, parameters
        self.max_dynamic_shared_size_bytes = 48 << 10
        _kernels.append(self)
        self.kernel = SimpleNamespace(ptr=len(_kernels))

    def __call__(self, grid, block, args, *, shared_mem=0):
        if Stream.recorded is not None:
            Stream.recorded.append((self, grid, block, args, shared_mem))
            return
        if shared_mem > self.max_dynamic_shared_size_bytes:
            raise ValueError(f"{shared_mem} bytes of shared memory, but {self.max_dynamic_shared_size_bytes} allowed")
        RawKernel.launches += 1
        seed = order and order + RawKernel.launches
        grid, block = ((*x, 1, 1)[:3] for x in (grid, block))
        self._kernel(grid, block, args, shared_mem, seed)

    def arguments(self, addresses):
        """Arguments from where the driver would take them: arrays and numbers, whose types the kernel checks."""
        if len(addresses) != len(self.parameters):
            raise TypeError(f"{self.name}: expected {len(self.parameters)} arguments, got {len(addresses)}")
        args = []
        for i, (address, text) in enumerate(zip(addresses, self.parameters, strict=True)):
            raw = ctypes.string_at(address, 8)
            qualifier, _, plain = text.rpartition(" ")
            size = int(plain[1:])
            if qualifier:
                args.append(_array_at(struct.unpack("<Q", raw)[0], plain))
            elif any(raw[size:]):
                raise TypeError(f"{self.name}: argument {i}: expected {text}, got a wider number")
            else:
                args.append(struct.unpack("<" + {"f4": "f", "i4": "i", "i8": "q"}[plain], raw[:size])[0])
        return args


def _array_at(address, kind):
    """The array that an address is in; memory of others is taken to hold what the kernel expects; 0 is null."""
    if not address:
        return 0
    array = _arrays[address]() if address in _arrays else None
    if array is not None:
        return array
    for known in list(_arrays.values()):
        array = known()
        if array is not None and array.flags.c_contiguous:
            offset = address - array.ctypes.data
            if 0 <= offset < array.nbytes:
                return array.reshape(-1).view(np.uint8)[offset:].view(array.dtype)
    dtype = np.dtype(np.uint8) if kind[0] == "V" else np.dtype(kind)
    return np.ctypeslib.as_array((ctypes.c_char * dtype.itemsize).from_address(address)).view(dtype)


def launch_kernel(config, function, pointers, extra):
    """Take ``cuLaunchKernelEx``'s place."""
    fields = struct.unpack("7I4xQQI4x", ctypes.string_at(config, 56))
    kernel = _kernels[function - 1]
    if isinstance(pointers, int):  # from C++
        pointers = (ctypes.c_void_p * len(kernel.parameters)).from_address(pointers)
    kernel(fields[:3], fields[3:6], kernel.arguments(pointers), shared_mem=fields[6])
    return 0


def install(monkeypatch):
    """Put this module in CuPy's place, and its launches in the driver's."""
    from sketchssm.cuda import arrays, call_arguments, launch, workspaces

    monkeypatch.setitem(sys.modules, "cupy", sys.modules[__name__])
    for module in (arrays, call_arguments, workspaces):
        monkeypatch.setattr(module, "capture_of", lambda stream: current_capture())
    monkeypatch.setattr(launch, "_driver", lambda: launch_kernel)
    monkeypatch.setitem(sys.modules, "sketchssm.cuda._direct", None)  # not built; see driver.py


class RawModule:
    """Kernels of a source, compiled by g++ with the ``-D`` options only."""

    def __init__(self, code, options=()):
        self._code = code
        left_out = () if sizes_only else ("-DSIZES_ONLY=1",)
        self._constants = [option for option in options if option.startswith("-D") and option not in left_out]
        self._module = None

    def compile(self):
        from sketchssm import _cuda_host

        if self._module is None:
            path = str(compile_library(self._code, self._constants))
            self._module, self._library = _cuda_host.Module(path), ctypes.CDLL(path)

    def get_function(self, name):
        self.compile()
        signature = self._library[f"signature_of_{name}"]
        signature.restype = ctypes.c_char_p
        return RawKernel(name, self._module.kernel(name), signature().decode().rstrip(";").split(";"))

    def get_global(self, name):
        self.compile()
        return self._module.variable(name)


class _Device:
    id = 0
    attributes: ClassVar = {"MultiProcessorCount": MULTIPROCESSORS, "MaxSharedMemoryPerBlockOptin": 227 << 10}
    compute_capability = "90"

    def __init__(self, number=0):
        assert number == 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def synchronize(self):
        pass


class MemoryPointer:
    def __init__(self, memory, offset):
        self.memory = (ctypes.c_char * memory.size).from_address(memory.ptr + offset)


class Stream(contextlib.nullcontext):
    """Kernels run at once and in order; captured kernels run when the graph is launched."""

    ptr = 0
    recorded = None
    captures = 0
    current: ClassVar = []
    from_external = classmethod(lambda cls, handle: cls())

    def __init__(self, non_blocking=False):
        super().__init__()

    def __enter__(self):
        Stream.current.append(self)

    def __exit__(self, *error):
        Stream.current.pop()

    def record(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        pass

    def begin_capture(self):
        Stream.recorded = []
        Stream.captures += 1

    def end_capture(self):
        calls, Stream.recorded = Stream.recorded, None

        def launch(stream):
            for kernel, grid, block, args, shared in calls:
                kernel(grid, block, args, shared_mem=shared)

        return SimpleNamespace(launch=launch, upload=lambda stream: None)

    def synchronize(self):
        pass


def current_capture():
    """Number of the capture; 0 outside of captures."""
    return 0 if Stream.recorded is None else Stream.captures


class Event:
    done = True
    stream = 0

    def __init__(self, disable_timing=False):
        pass

    def record(self, stream=None):
        self.time = time.perf_counter()
        self.stream = 0 if stream is None else stream.ptr

    def synchronize(self):
        pass


cuda = SimpleNamespace(
    Device=_Device,
    Event=Event,
    MemoryPointer=MemoryPointer,
    Stream=Stream,
    UnownedMemory=lambda ptr, size, owner, device: SimpleNamespace(ptr=ptr, size=size),
    get_current_stream=lambda: Stream.current[-1] if Stream.current else Stream(),
    get_elapsed_time=lambda start, stop: 1e3 * (stop.time - start.time),
    is_available=lambda: True,
    driver=SimpleNamespace(occupancyMaxActiveBlocksPerMultiprocessor=lambda function, threads, shared: 1),
    runtime=SimpleNamespace(
        driverGetVersion=lambda: 12030,
        memGetInfo=lambda: (1 << 30, 1 << 30),
        memsetAsync=lambda target, value, size, stream: ctypes.memset(target, value, size),
        memcpyAsync=lambda target, source, size, kind, stream: ctypes.memmove(target, source, size),
        getDeviceProperties=lambda device: {"name": b"host"},
    ),
    compiler=SimpleNamespace(CompileException=CompileError),
)
