"""How arrays come to the CUDA engines and go back: without copies, host synchronisation or allocation where possible.

A kernel needs an address, so an array on the device is passed on as a CuPy array over the same memory. Such views know
nothing but address, shape and type: they are kept and used again whenever the same memory comes in, as it does in
every decode loop; so is what came of a whole call.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from sketchssm import interop
from sketchssm.cuda.calls import DeviceCall
from sketchssm.cuda.ports import KERNEL_TYPES, CupyPort, Port, TorchPort, is_foreign
from sketchssm.recurrence import Tokens

__all__ = ["DeviceArrays"]

VIEWS = 1024
"""Views that are kept at most."""


class DeviceArrays:
    """The arrays of one engine's calls.

    Parameters
    ----------
    activation : {"bfloat16", "float16", "float32"}, optional
        Type of q, k and v for the kernels; by default what the first call's need.
    output : str, optional
        Type in which kernels write outputs; the activations' by default.
    raw_gate : bool, default False
        Whether the argument g is an activation too.
    """

    def __init__(self, activation: str | None = None, output: str | None = None, raw_gate: bool = False) -> None:
        import cupy

        self.cupy = cupy
        self.device = cupy.cuda.Device()
        self.home = self.device.id
        self.activation = activation
        self.converts = activation is not None
        self.activations = "qkvg" if raw_gate else "qkv"  # arguments of that type
        self._output = output
        self.cupy_port = CupyPort()
        self._torch: TorchPort | None = None
        self._last: Port = self.cupy_port
        self._views: dict[tuple[int, tuple[int, ...], str], Any] = {}
        self.calls: dict[tuple[Any, ...], tuple[Tokens, Any, Any]] = {}
        self._pending: deque[tuple[Any, Any]] = deque()
        self._uploaded: tuple[Any, Any] = (None, None)
        self._all: Any = None
        self._wide: Any = None

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

    def check_device(self, device: int, name: str) -> None:
        """Refuse an array of another device."""
        if device != self.home:
            raise ValueError(
                f"{name}: expected an array on CUDA device {self.home}, as the head is, got one on {device}"
            )

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
                f"activation_dtype: expected {self.activation!r}, as the head has settled on, got {activation!r}"
            )
        self.activation = activation
        self.rows(capacity, capacity)
        self.widened(self.cupy.zeros(1, np.int32), capacity)
        self.device.synchronize()  # whoever comes next may use another stream

    def rows(self, count: int, capacity: int) -> Any:
        """Slots 0, 1, ... of a call that names none; a captured graph may hold their memory, so it stays."""
        if self._all is None:
            self._all = self.cupy.arange(capacity, dtype=np.int64)
            self.device.synchronize()
        return self._all[:count]

    def uploaded(self, slots: Any) -> Any:
        """Host slots on the device; those of the call before need no second upload."""
        key = slots.tobytes(), self.cupy.cuda.get_current_stream().ptr
        if self._uploaded[0] != key:
            self._uploaded = key, self.cupy.asarray(slots)
        return self._uploaded[1]

    def widened(self, slots: Any, capacity: int) -> Any:
        """int32 slots of the device as int64, in memory that stays unless there are more rows than slots."""
        if slots.shape[0] > capacity:
            return slots.astype(np.int64)
        if self._wide is None:
            self._wide = self.cupy.empty(capacity, np.int64)
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
