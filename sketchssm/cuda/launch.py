"""Launches kernels through the driver: with an attribute that CuPy does not offer, and in less time on the host.

The attribute lets a kernel start while the previous kernel of the stream still runs; the kernel itself waits
(``wait_for_previous_kernel`` in ``lib/ptx.cuh``). See docs/cuda-kernels.md.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from functools import cache
from typing import Any

import numpy as np

OVERLAP = 12030
"""First version of the driver in which graphs capture the attribute for overlap."""

OVERLAP_CAPABILITY = 90
OVERLAP_ATTRIBUTE = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
INVALID_CONTEXT = 201
CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE

SLOT = 8
"""Bytes of a launcher's buffer for each argument."""

SIZES = {"Q": 8, "q": 8, "i": 4}
"""Bytes of an argument that varies."""

CODES = {np.uint64: "Q", np.int64: "q", np.int32: "i4x", np.float32: "f4x"}
"""How an argument of a type is packed; an array is packed as its address."""


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: a value of 64 bytes."""

    _fields_ = [("id", ctypes.c_uint64), ("value", ctypes.c_int), ("unused", ctypes.c_char * 60)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


class Launcher:
    """Launches one kernel for one caller, on CuPy's current stream; not from two threads at once.

    The parameters of a kernel are: fixed ones (`before`), those that vary from launch to launch, and fixed ones again
    (`after`). Fixed arguments are packed once: CuPy arrays, which the launcher keeps alive, and NumPy scalars; uint64
    is an address. `varying` has a letter for each argument that varies: "Q" an address, "q" int64, "i" int32. `shared`
    are bytes of dynamic shared memory. With `overlaps`, the kernel may start before the previous kernel has ended, if
    device and driver support this: it must then wait before it uses global memory that other kernels write.
    """

    def __init__(
        self,
        kernel: Any,
        before: tuple[Any, ...],
        varying: str,
        after: tuple[Any, ...] = (),
        *,
        shared: int = 0,
        overlaps: bool = True,
    ) -> None:
        import cupy

        self._kernel, self._fixed, self._launch = kernel, (before, after), _driver()  # kernel and arrays must stay
        self._varying = varying
        self._function, self._stream = kernel.kernel.ptr, cupy.cuda.get_current_stream
        self._attribute = Attribute(OVERLAP_ATTRIBUTE, 1)
        early = overlaps and _can_overlap()
        config = Config((0, 1, 1), (0, 1, 1), shared, None, ctypes.pointer(self._attribute), int(early))
        self._config, self._grid, self._block = config, config.grid, config.block
        self._where = ctypes.addressof(config)
        count = len(before) + len(varying) + len(after)
        self._values = ctypes.create_string_buffer(SLOT * count)
        first = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * count)(*(first + SLOT * i for i in range(count)))
        self._pack = struct.Struct("<" + "".join("i4x" if code == "i" else code for code in varying)).pack_into
        self._offset = SLOT * len(before)
        for place, value in (*enumerate(before), *enumerate(after, len(before) + len(varying))):
            code = "Q" if isinstance(value, cupy.ndarray) else CODES[type(value)]
            plain = value.data.ptr if isinstance(value, cupy.ndarray) else value
            struct.pack_into("<" + code, self._values, SLOT * place, plain)

    def __call__(self, blocks: int, threads: int, *values: int) -> None:
        """Launch the kernel with these sizes and varying arguments; CUDADriverError if the driver refuses."""
        self._pack(self._values, self._offset, *values)
        self._grid[0], self._block[0] = blocks, threads
        self._config.stream = self._stream().ptr
        status = self._launch(self._where, self._function, self._pointers, None)
        if status:
            self._fail(status)

    def places(self, names: tuple[str, ...]) -> tuple[int, int, int, list[tuple[int, int, str]]]:
        """Describe the launch for C++ code that launches the kernel, with names for the arguments that vary.

        Returns the arguments of the driver's launch function (addresses of CUlaunchConfig, the function, and the
        arguments' addresses), and address, bytes and name of each argument that varies.
        """
        first = ctypes.addressof(self._values) + self._offset
        varying = zip(names, self._varying, strict=True)
        places = [(first + SLOT * i, SIZES[code], name) for i, (name, code) in enumerate(varying)]
        return self._where, self._function, ctypes.addressof(self._pointers), places

    def _fail(self, status: int) -> None:
        import cupy

        if status == INVALID_CONTEXT:  # a thread that has used the driver alone
            cupy.cuda.runtime.memGetInfo()
            status = self._launch(self._where, self._function, self._pointers, None)
        if status:
            raise self.error(status)

    def error(self, status: int) -> Exception:
        """The error of a launch that the driver refused with this status, with the launch's sizes."""
        import cupy

        error: Exception = cupy.cuda.driver.CUDADriverError(status)
        grid, block, shared = self._grid[0], self._block[0], self._config.shared
        error.add_note(f"{self._kernel.name}: {grid} blocks, {block} threads, {shared} bytes of shared memory")
        return error


@cache
def _library() -> Any:
    """The driver, which CuPy has loaded already."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@cache
def _driver() -> Any:
    """Launch function of the driver."""
    launch = _library().cuLaunchKernelEx
    launch.argtypes = (ctypes.c_void_p,) * 4
    return launch


def driver_addresses() -> tuple[int, ...]:
    """Addresses of the driver's functions that a direct step calls, in the order of `Driver` in ``_direct.cpp``."""
    functions = ("cuLaunchKernelEx", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuStreamIsCapturing")
    return tuple(ctypes.cast(_library()[name], ctypes.c_void_p).value or 0 for name in functions)


@cache
def _capture_info() -> Any:
    """Function of the driver that describes a capture."""
    info = _library().cuStreamGetCaptureInfo_v2
    info.argtypes = (ctypes.c_void_p,) * 6
    return info


def capture_of(stream: int) -> int:
    """Identifier of the capture that a stream takes part in; 0 for a stream outside of captures."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    error = _capture_info()(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    return number.value or 1 if not error and status.value == CAPTURING else 0


def _can_overlap() -> bool:
    """Whether the current device and its driver can start a kernel before the previous kernel has ended."""
    import cupy

    capable = int(cupy.cuda.Device().compute_capability) >= OVERLAP_CAPABILITY
    return capable and cupy.cuda.runtime.driverGetVersion() >= OVERLAP
