"""As much of CuPy as sketchssm's CUDA backend and its tests use, on NumPy arrays and host kernels.

A fixture of the tests puts this module in CuPy's place; the code under test can't tell the difference.
New memory holds NaN unless it was asked for as zeros.
"""

import contextlib
import ctypes
import time
from types import SimpleNamespace

import numpy as np

from host.compiler import CompileError, compile_library

order = 0
"""Seed of the order in which threads and blocks run, another one at every launch; 0: one warp after another."""

MULTIPROCESSORS = 3  # few, so that a persistent block has several items of work


class ndarray(np.ndarray):
    """A NumPy array that goes to the host as a CuPy array does, and can be made over memory of others."""

    def __new__(cls, shape, dtype=float, memptr=None, strides=None):
        memory = getattr(memptr, "memory", memptr)
        return super().__new__(cls, shape, dtype, memory, strides=strides)

    data = property(lambda self: SimpleNamespace(ptr=self.ctypes.data, memset_async=lambda *a: None))
    device = property(lambda self: _Device())

    def get(self):
        """A copy that the caller may keep."""
        return np.array(self, subok=False)


def asarray(x, dtype=None):
    """A copy, as memory of the device would be."""
    return np.array(x, dtype=dtype, copy=True, order="C").view(ndarray)


def zeros(shape, dtype=float):
    return np.zeros(shape, dtype).view(ndarray)


def from_dlpack(x):
    """The same memory, which the other side may say is on a device."""
    there = SimpleNamespace(__dlpack__=lambda **options: x.__dlpack__(), __dlpack_device__=lambda: (1, 0))
    return np.from_dlpack(there).view(ndarray)


def full(shape, value, dtype=float):
    return np.full(shape, value, dtype).view(ndarray)


def empty(shape, dtype=float):
    fresh = np.empty(shape, dtype).view(ndarray)
    fresh.reshape(-1).view(np.uint8)[...] = 0xFF
    return fresh


def get_default_memory_pool():
    return SimpleNamespace(free_all_blocks=lambda: None)


def empty_like(x):
    return empty(x.shape, x.dtype)


def arange(*args, dtype=None):
    return np.arange(*args, dtype=dtype).view(ndarray)


class RawKernel:
    """One kernel, called as CuPy's."""

    launches = 0

    def __init__(self, kernel):
        self._kernel = kernel
        self.max_dynamic_shared_size_bytes = 48 << 10
        self.kernel = SimpleNamespace(ptr=0)

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


class RawModule:
    """Kernels of one source, compiled by g++ with the ``-D`` options alone."""

    def __init__(self, code, options=()):
        self._code = code
        self._constants = [option for option in options if option.startswith("-D")]
        self._module = None

    def compile(self):
        from sketchssm import _cuda_host

        if self._module is None:
            self._module = _cuda_host.Module(str(compile_library(self._code, self._constants)))

    def get_function(self, name):
        self.compile()
        return RawKernel(self._module.kernel(name))

    def get_global(self, name):
        self.compile()
        return self._module.variable(name)


class _Device:
    id = 0
    attributes = {"MultiProcessorCount": MULTIPROCESSORS, "MaxSharedMemoryPerBlockOptin": 227 << 10}  # noqa: RUF012
    compute_capability = "90"

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
    """Everything happens at once, in order, but what is captured happens at a graph's launch."""

    ptr = 0
    recorded = None
    from_external = classmethod(lambda cls, handle: cls())

    def __init__(self, non_blocking=False):
        super().__init__()

    def begin_capture(self):
        Stream.recorded = []

    def end_capture(self):
        calls, Stream.recorded = Stream.recorded, None

        def launch(stream):
            for kernel, grid, block, args, shared in calls:
                kernel(grid, block, args, shared_mem=shared)

        return SimpleNamespace(launch=launch, upload=lambda stream: None)

    def synchronize(self):
        pass


class Event:
    done = True

    def __init__(self, disable_timing=False):
        pass

    def record(self, stream=None):
        self.time = time.perf_counter()

    def synchronize(self):
        pass


cuda = SimpleNamespace(
    Device=_Device,
    Event=Event,
    MemoryPointer=MemoryPointer,
    Stream=Stream,
    UnownedMemory=lambda ptr, size, owner, device: SimpleNamespace(ptr=ptr, size=size),
    get_current_stream=Stream,
    get_elapsed_time=lambda start, stop: 1e3 * (stop.time - start.time),
    is_available=lambda: True,
    driver=SimpleNamespace(occupancyMaxActiveBlocksPerMultiprocessor=lambda function, threads, shared: 1),
    runtime=SimpleNamespace(
        driverGetVersion=lambda: 0,  # too old for launches that go past CuPy
        memGetInfo=lambda: (1 << 30, 1 << 30),
        memcpyAsync=lambda target, source, size, kind, stream: ctypes.memmove(target, source, size),
        getDeviceProperties=lambda device: {"name": b"host"},
    ),
    compiler=SimpleNamespace(CompileException=CompileError),
)
