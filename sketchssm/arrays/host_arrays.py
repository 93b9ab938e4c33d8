"""Conversion of a call's arrays for an engine on the host, and of its results for the caller."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.array_utils import byte_bounds

from sketchssm.arrays.interop import from_host, host_type, is_on_device, is_real, memory_of, to_host, to_type
from sketchssm.arrays.options import DEFAULTS, EngineOptions
from sketchssm.layer.calls import check_gates, check_slots
from sketchssm.layer.checks import no_memory
from sketchssm.layer.recurrence import Tokens
from sketchssm.layer.slots import SlotPart, check_memory, check_separate, drafted


class HostArrays:
    """Converts a call's arrays for an engine that computes on the host, and the engine's results for the caller.

    `dtype` is the type of the engine's inputs, outputs and states. Of the engine's options, the gate converts the
    argument g, the slot number for padding becomes -1, and the type of stored states limits what may be loaded.
    Arguments that share the engine's memory `own` are copied before the engine reads them.
    """

    direct = None

    def __init__(self, dtype: Any, options: EngineOptions = DEFAULTS, own: Iterable[npt.NDArray[Any]] = ()) -> None:
        self.dtype, self._own = np.dtype(dtype), tuple(own)
        self._log_decays = None if options.gate is None else options.gate.log_decays
        self._why, self._warned, self._pad_slot = options.why, False, int(options.pad_slot)
        self._stored = None if options.state_dtype == "float32" else host_type(options.state_dtype)
        bounds = [byte_bounds(array) for array in self._own]
        self._own_bounds = min((low for low, _ in bounds), default=0), max((high for _, high in bounds), default=0)

    def call(self, *arrays: Any) -> HostArrays:
        """See `sketchssm.heads.engine.Arrays`."""
        return self

    def __enter__(self) -> HostArrays:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def slots(
        self, slots: Any, batch: int | None, capacity: int, name: str = "slots", repeats: bool = False
    ) -> npt.NDArray[np.int64]:
        """See `sketchssm.heads.engine.Call`."""
        host = None if slots is None else to_host(slots, name)
        if batch is None:
            every = np.arange(capacity)
            host = every[every != self._pad_slot] if host is None else np.atleast_1d(host)
            batch = host.shape[0]
        return check_slots(host, batch, capacity, self._pad_slot, name, repeats)

    def lengths(self, lengths: Any, slots: npt.NDArray[np.int64], tokens: int) -> npt.NDArray[np.int64]:
        """See `sketchssm.heads.engine.Call`."""
        live = slots >= 0
        if lengths is None:
            return np.where(live, tokens, 0)
        counts = np.where(live, _counts("lengths", lengths, slots.shape[0]), 0)
        wrong = (counts < 0) | (counts > tokens)
        if wrong.any():
            raise ValueError(f"lengths: expected 0 to {tokens}, got {counts[wrong][0]}")
        return counts

    def accepted(
        self, accepted: Any, slots: npt.NDArray[np.int64], cursor: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int64]:
        """See `sketchssm.heads.engine.Call`."""
        live = slots >= 0
        counts = np.where(live, _counts("accepted", accepted, slots.shape[0]), 0)
        most = np.where(live, drafted(cursor[slots]), 0)
        for row in np.flatnonzero((counts < 0) | (counts > most)):
            raise ValueError(
                f"accepted: expected 0 to {most[row]}, the drafted tokens of slot {slots[row]}, got {counts[row]}"
            )
        return counts

    def inputs(
        self,
        given: Tokens,
        slots: Any,
        out: Any,
        several: bool,
        capacity: int,
        lengths: npt.NDArray[np.int64] | None = None,
    ) -> tuple[Tokens, npt.NDArray[np.int64], npt.NDArray[Any]]:
        """See `sketchssm.heads.engine.Call`."""
        index = self.slots(slots, given.v.shape[0], capacity)
        self._note_device("v", given.v)
        live: Any = index >= 0 if (index < 0).any() else slice(None)
        if lengths is not None:  # tokens past a row's length may hold anything, like padding
            live = np.arange(given.v.shape[1]) < lengths[:, None] if several else lengths > 0
        if out is not None and not is_on_device(out) and self._owns(to_host(out, "out")):
            raise ValueError("out: expected memory apart from the head's, got an array that overlaps it")
        host = (None if x is None else self._take(x, name, live) for name, x in given._asdict().items())
        tokens = Tokens(*(x if x is None or several else x[:, None] for x in host))
        for name in ("beta",) if self._log_decays is not None else ("g", "beta"):
            if getattr(tokens, name) is not None:
                self.check(name, getattr(tokens, name)[live])
        shape = tokens.v.shape
        return tokens, index, out.reshape(shape) if self._fits(out, tokens) else np.empty(shape, dtype=self.dtype)

    def states(self, state: Any, slots: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """See `sketchssm.heads.engine.Call`."""
        self._note_device("state", state)
        live = slots >= 0
        host = self._take(state, "state", live)
        self.check("state", host[live])
        if self._stored is not None:
            to_type(host, self._stored, "state", live)  # an error for numbers that would become infinite
        return host

    def host_slots(self, slots: Any, batch: int | None, capacity: int) -> npt.NDArray[np.int64]:
        """See `sketchssm.heads.engine.Call`."""
        return self.slots(slots, batch, capacity)

    def handed_out(self, array: Any) -> Any:
        """See `sketchssm.heads.engine.Call`."""
        return array

    def fetch(self, array: npt.NDArray[Any], slots: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """See `sketchssm.heads.engine.Call`."""
        rows = array[slots]
        return rows.view(np.uint16) if rows.dtype.name == "bfloat16" else rows

    def store(self, array: npt.NDArray[Any], slots: npt.NDArray[np.int64], rows: npt.NDArray[Any]) -> None:
        """See `sketchssm.heads.engine.Call`."""
        array[slots] = rows.view(array.dtype)

    def result(self, written: npt.NDArray[Any], v: Any, out: Any) -> Any:
        """See `sketchssm.heads.engine.Call`."""
        if type(out) is np.ndarray and np.may_share_memory(written, out):
            return out
        return from_host(written.reshape(v.shape), like=v, out=out)

    def check(self, name: str, values: npt.NDArray[Any]) -> None:
        """Check the values of one argument, without padding rows: log-decays <= 0, write gates and states finite."""
        check_gates(values if name == "g" else None, values if name == "beta" else None)
        if name == "state" and not np.isfinite(values).all():
            raise ValueError("state: expected finite numbers, got NaN or infinity")

    def view(self, state: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """See `sketchssm.heads.engine.Arrays`."""
        view = state.view()
        view.flags.writeable = False
        return view

    def _note_device(self, name: str, array: Any) -> None:
        """Warn, once, that arrays on a device are copied."""
        if type(array) is np.ndarray or self._warned or not is_on_device(array):
            return
        self._warned = True
        warnings.warn(
            f"{name}: arrays on a device are copied to the host at every call, and results back, as the head computes "
            f"on the host: {self._why}",
            RuntimeWarning,
            stacklevel=4,  # the caller of a head's method
        )

    def _fits(self, out: Any, tokens: Tokens) -> bool:
        """Tell whether an engine can write the caller's array in place; it must share no memory with an input."""
        return (
            type(out) is np.ndarray
            and out.dtype == self.dtype
            and out.flags.carray
            and not any(x is not None and np.may_share_memory(out, x) for x in tokens)
        )

    def _take(self, array: Any, name: str, live: Any) -> npt.NDArray[Any]:
        """The caller's array on the host, contiguous and in the engine's type; no copy where none is needed."""
        host = to_host(array, name)
        if not is_real(host.dtype):
            raise TypeError(f"{name}: expected a real floating-point array, got dtype {host.dtype}")
        if name == "g" and self._log_decays is not None:
            with np.errstate(all="ignore"):  # of padding rows, and of numbers beyond the type's range
                return self._log_decays(host).astype(self.dtype)
        taken = to_type(host, self.dtype, name, live)
        return taken.copy() if self._owns(taken) else taken

    def _owns(self, array: npt.NDArray[Any]) -> bool:
        """Whether an array may share memory with the engine."""
        if array.flags.c_contiguous:  # nearly always, and nearly always below or above all of the engine's memory
            start: int = array.__array_interface__["data"][0]
            if start >= self._own_bounds[1] or start + array.nbytes <= self._own_bounds[0]:
                return False
        return any(np.may_share_memory(array, own) for own in self._own)


def _counts(name: str, counts: Any, batch: int) -> npt.NDArray[np.int64]:
    """A call's counts of tokens, one for each row."""
    host = to_host(counts, name)
    if host.dtype.kind not in "iu" and host.size:
        raise ValueError(f"{name}: expected integers, got dtype {host.dtype}")
    if host.shape != (batch,):
        raise ValueError(f"{name}: expected shape ({batch},), got {host.shape}")
    return host.astype(np.int64)


def slot_memory(
    parts: Iterable[SlotPart], num_slots: int, given: Mapping[str, Any] | None
) -> dict[str, npt.NDArray[Any]]:
    """Memory ``(num_slots, *shape)`` of all parts: the caller's arrays on the host, and new zeros for the others.

    Cursors and errors in the caller's memory are set to 0. TypeError if memory is on a device or of a wrong type,
    ValueError if it does not fit its part or there is no part of a name.
    """
    shapes, unused, memory = {part.name: part for part in parts}, dict(given or {}), {}
    for name, part in shapes.items():
        if name not in unused:
            try:
                memory[name] = np.zeros((num_slots, *part.shape), host_type(part.dtype))
            except (MemoryError, ValueError) as error:
                raise no_memory(part, num_slots) from error
            continue
        array = unused.pop(name)
        if not hasattr(array, "shape") or is_on_device(array):
            raise TypeError(f"memory[{name!r}]: expected an array on the host, got {type(array).__name__}")
        host = memory_of(array, f"memory[{name!r}]")
        check_memory(f"memory[{name!r}]", host, host.__array_interface__["data"][0], part, num_slots)
        if not host.flags.writeable:
            raise ValueError(f"memory[{name!r}]: expected writable memory, got a read-only array")
        memory[name] = host.view(host_type(part.dtype))
    if unused:
        raise ValueError(f"memory: expected names of {', '.join(shapes)}, got {next(iter(unused))!r}")
    blocks = {
        name: (array.__array_interface__["data"][0], array.strides[0], shapes[name].bytes)
        for name, array in memory.items()
    }
    check_separate(blocks, num_slots)
    for name in {"cursor", "errors"} & set(memory):
        memory[name][...] = 0
    return memory
