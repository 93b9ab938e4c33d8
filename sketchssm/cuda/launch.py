"""Launches kernels through the driver: with an attribute that CuPy has no word for, and in less time on the host.

The attribute lets a kernel of ours start while the one before it in the stream still runs, as far as its own wait
(``wait_for_kernel_before`` in ``ptx.cuh``): see docs/cuda.md.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from functools import cache
from typing import Any

import numpy as np

__all__ = ["Launcher", "launcher"]

DRIVER, OVERLAP = 12000, 12030
"""Versions of the driver from which on there is a launch with attributes, and graphs capture the one for overlap."""

OVERLAP_CAPABILITY = 90
OVERLAP_ATTRIBUTE = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
INVALID_CONTEXT = 201

SLOT = 8
"""Bytes of a launcher's buffer for each argument."""

CODES = {np.uint64: "Q", np.int64: "q", np.int32: "i4x", np.float32: "f4x"}
"""How an argument of a type is packed; an array is packed as its address."""


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: a value of 64 bytes."""

    _fields_ = [("id", ctypes.c_uint64), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


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
    """Launches one kernel for one caller, on CuPy's current stream.

    Parameters
    ----------
    kernel : cupy.RawKernel
        The kernel. The first launch settles the types of its arguments.
    launch : callable
        The driver's ``cuLaunchKernelEx``.
    overlaps : bool
        Whether the kernel may start before the one ahead of it has ended. It must then wait before it relies on
        global memory that anybody writes.
    """

    def __init__(self, kernel: Any, launch: Any, overlaps: bool) -> None:
        import cupy

        self._kernel, self._launch = kernel, launch  # whose module must stay
        self._function = kernel.kernel.ptr
        self._array, self._stream = cupy.ndarray, cupy.cuda.get_current_stream
        self._attribute = Attribute(OVERLAP_ATTRIBUTE, 1)
        config = self._config = Config((0, 1, 1), (0, 1, 1), 0, None, ctypes.pointer(self._attribute), int(overlaps))
        self._grid, self._block = config.grid, config.block
        self._where = ctypes.addressof(config)
        self._pack: Any = None

    def __call__(self, blocks: int, threads: int, args: tuple[Any, ...], shared: int = 0) -> None:
        """Launch the kernel; not from two threads at once.

        Parameters
        ----------
        blocks, threads : int
            Size of the grid and of a block.
        args : tuple
            CuPy arrays and NumPy scalars, always of the same types; uint64 is an address.
        shared : int, default 0
            Bytes of dynamic shared memory.

        Raises
        ------
        cupy.cuda.driver.CUDADriverError
            If the driver refuses.
        """
        if self._pack is None:
            self._settle(args)
        array, config = self._array, self._config
        self._pack(self._values, 0, *[x.data.ptr if isinstance(x, array) else x for x in args])
        self._grid[0], self._block[0], config.shared = blocks, threads, shared
        config.stream = self._stream().ptr
        status = self._launch(self._where, self._function, self._pointers, None)
        if status:
            self._fail(status)

    def _settle(self, args: tuple[Any, ...]) -> None:
        codes = ["Q" if isinstance(x, self._array) else CODES[type(x)] for x in args]
        self._values = ctypes.create_string_buffer(SLOT * len(args))
        first = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * len(args))(*(first + SLOT * i for i in range(len(args))))
        self._pack = struct.Struct("<" + "".join(codes)).pack_into

    def _fail(self, status: int) -> None:
        import cupy

        if status == INVALID_CONTEXT:  # a thread that has used the driver alone
            cupy.cuda.runtime.memGetInfo()
            status = self._launch(self._where, self._function, self._pointers, None)
        if status:
            error = cupy.cuda.driver.CUDADriverError(status)
            grid, block, shared = self._grid[0], self._block[0], self._config.shared
            error.add_note(f"{self._kernel.name}: {grid} blocks, {block} threads, {shared} bytes of shared memory")
            raise error


@cache
def _driver() -> Any:
    """Launch function of the driver, which CuPy has loaded already."""
    launch = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1").cuLaunchKernelEx
    launch.argtypes = (ctypes.c_void_p,) * 4
    return launch


def launcher(kernel: Any) -> Any:
    """Find a way to launch a kernel that waits, as `Launcher` wants it, on the current device.

    Parameters
    ----------
    kernel : cupy.RawKernel
        The kernel.

    Returns
    -------
    callable
        Takes blocks, threads, arguments and bytes of shared memory, as a `Launcher` does.
    """
    import cupy

    version = cupy.cuda.runtime.driverGetVersion()
    if version < DRIVER:
        return lambda blocks, threads, args, shared=0: kernel((blocks,), (threads,), args, shared_mem=shared)
    capable = int(cupy.cuda.Device().compute_capability) >= OVERLAP_CAPABILITY
    return Launcher(kernel, _driver(), capable and version >= OVERLAP)
