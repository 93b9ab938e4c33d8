"""Integers of a call on the device: slots, lengths of drafts, and counts of accepted tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from sketchssm.arrays import interop
from sketchssm.cuda.call_arguments import DEVICE, HOST, CallArguments
from sketchssm.cuda.constants import COUNTED, WIDE
from sketchssm.cuda.frameworks import Framework
from sketchssm.cuda.pointer import Slots
from sketchssm.cuda.workspaces import stream_key

NUMBER_FLAGS = {"int64": WIDE, "int32": 0}
"""Integer types that the kernels take, with the flag that tells the type."""


class CallNumbers:
    """Checks and places the integers of a call.

    The `live` rows of the engine's other arguments follow from the slots and the lengths.
    """

    def __init__(self, arguments: CallArguments) -> None:
        import cupy

        self._cupy, self._arguments = cupy, arguments
        self._host_counts: Any = None  # lengths or accepted counts of the call, if they are on the host
        self._uploaded: tuple[Any, Any] = (None, None)
        self._all: Any = None

    def all_slots(self, count: int, capacity: int) -> Slots:
        """Slots 0, 1, ... of a call without slots. The array is never freed, because a captured graph may use it."""
        if self._all is None:
            self._all = self._cupy.arange(capacity, dtype=np.int32)
            self._arguments.device.synchronize()
        return Slots(self._all.data.ptr, (count,), 0)

    def slots(self, slots: Any, batch: int | None, capacity: int, name: str, repeats: bool) -> Slots:
        """See `sketchssm.heads.engine.Call`."""
        if slots is not None:
            for of_type, flags in NUMBER_FLAGS.items():
                address = self._arguments.framework.address(slots, of_type)
                if address is not None:
                    return _device_slots(address, flags, _counted(slots.shape, batch, name), repeats)
        found = None if slots is None else self._arguments.on_device(slots, name)
        if found is None:
            return self._host_slots(slots, batch, capacity, name, repeats)
        framework, array, dtype = found
        if not dtype.startswith(("int", "uint")) or dtype == "uint64":  # int64 cannot hold all values
            expected = "signed or smaller integers" if dtype == "uint64" else "integers"
            raise ValueError(f"{name}: expected {expected}, got dtype {dtype}")
        shape = _counted(array.shape, batch, name)
        return _device_slots(*self._placed(framework, array, name), shape, repeats)

    def _host_slots(self, slots: Any, batch: int | None, capacity: int, name: str, repeats: bool) -> Slots:
        """Check slots on the host and upload them, unless they are those of the previous call."""
        arguments = self._arguments
        if slots is None and (batch is None or batch <= capacity):
            arguments.live = slice(None)
            return self.all_slots(capacity if batch is None else batch, capacity)
        index = arguments.host.slots(slots, batch, capacity, name, repeats)
        arguments.check_uncaptured(name, DEVICE, HOST)
        if name == "src":  # one of two arguments
            return Slots(arguments.uploaded(index.astype(np.int32)), index.shape, 0)
        arguments.live = index >= 0
        key = index.tobytes(), stream_key(int(self._cupy.cuda.get_current_stream().ptr))
        if self._uploaded[0] != key:
            self._uploaded = key, self._cupy.asarray(index.astype(np.int32))
        return Slots(self._uploaded[1].data.ptr, index.shape, 0)

    def counts(self, name: str, counts: Any, batch: int, most: int) -> Slots:
        """Counts of tokens on the device. Counts on the host are checked."""
        arguments = self._arguments
        found = arguments.on_device(counts, name)
        shape = tuple(np.shape(counts)) if found is None else tuple(counts.shape)
        if shape != (batch,):
            raise ValueError(f"{name}: expected shape ({batch},), got {shape}")
        self._host_counts = None
        if found is not None:
            framework, array, dtype = found
            if not dtype.startswith("int"):
                raise ValueError(f"{name}: expected signed integers, got dtype {dtype}")
            address, flags = self._placed(framework, array, name)
            return Slots(address, (batch,), flags)
        host = interop.to_host(counts, name)
        if host.dtype.kind not in "iu":
            raise ValueError(f"{name}: expected integers, got dtype {host.dtype}")
        live = host if arguments.live is None else host[arguments.live]
        if live.size and not 0 <= live.min() <= live.max() <= most:
            raise ValueError(f"{name}: expected 0 to {most}, got {live.min()} to {live.max()}")
        arguments.check_uncaptured(name, DEVICE, HOST)
        self._host_counts = host
        return Slots(arguments.uploaded(host.astype(np.int32)), (batch,), 0)

    def leave_out(self, shape: tuple[int, ...], several: bool) -> None:
        """Do not check tokens past the lengths of a draft's rows, which may hold anything, like padding."""
        live, counts = self._arguments.live, self._host_counts
        if counts is None:
            live = None
        elif live is not None:
            live = (np.ones(shape[0], dtype=bool) if isinstance(live, slice) else live) & (counts > 0)
            if several:
                live = live[:, None] & (np.arange(shape[1]) < counts[:, None])
        self._arguments.live = live

    def _placed(self, framework: Framework, array: Any, name: str) -> tuple[int, int]:
        """Address and flags of integers on the device."""
        for dtype, flags in NUMBER_FLAGS.items():
            address = framework.address(array, dtype)
            if address is not None:
                return address, flags
        self._arguments.check_lasting(framework, name, "contiguous int64 or int32 numbers", array)
        return self._arguments.copied(framework, array, name, "int64"), WIDE


def _device_slots(address: int, flags: int, shape: tuple[int, ...], repeats: bool) -> Slots:
    """Slots that the kernels check."""
    return Slots(address, shape, flags | COUNTED, (0, 0) if repeats else (0, shape[0]))


def _counted(shape: Any, batch: int | None, name: str) -> tuple[int, ...]:
    """Shape of slots on the device; with a `batch` of None any number of slots, or one slot without an axis."""
    if len(shape) == 1 and (batch is None or shape[0] == batch):
        return tuple(shape)
    if batch is None and not shape:
        return (1,)
    raise ValueError(f"{name}: expected shape ({'count' if batch is None else batch},), got {tuple(shape)}")
