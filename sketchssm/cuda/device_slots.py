"""The slots of one engine on the device: their memory, and what all engines do with slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sketchssm.arrays.options import EngineOptions
from sketchssm.cuda.layout import PackedPlan
from sketchssm.cuda.memory import RING, allocate, check_places, slot_parts
from sketchssm.cuda.pointer import Pointer, Slots
from sketchssm.cuda.slots import Committer, Copier, SlotWriter
from sketchssm.cuda.workspaces import Workspaces
from sketchssm.layer.recurrence import Layer
from sketchssm.layer.slots import DUE, POSITION, SlotPart


class DeviceSlots:
    """Memory of all slots, and the kernels that load, reset, copy, commit and rejoin slots.

    A slot has a ring for a window of more than one token, and for drafts; `packed` places its sketches. `memory` has
    each part by name, ``(slots, *shape)``; `ring` has keys, values, gates and betas, and is empty as long as the
    activations' type is not known. `clock` is the cursor word of a row that takes part in every call, or address 0.
    `limits` are the last arguments of most kernels: the slot that means padding, all slots, and the count of rows left
    out.
    """

    def __init__(
        self,
        layer: Layer,
        num_slots: int,
        options: EngineOptions,
        window: int = 1,
        packed: PackedPlan | None = None,
    ) -> None:
        import cupy

        self._cupy, self._synchronize = cupy, cupy.cuda.Device().synchronize
        self._layer, self._num_slots, self._window = layer, num_slots, window
        self._packed, self._options = packed, options
        self._parts: tuple[SlotPart, ...] = ()
        self.memory: dict[str, Any] = {}
        self.ring: tuple[Any, ...] = ()
        self._extents: list[tuple[int, int]] = []
        ring = window > 1 or options.drafts > 0
        settled = not ring or options.activation_dtype is not None
        if not settled and (given := set(RING) & set(options.memory or {})):
            raise ValueError(f"activation_dtype: expected a type with memory for {min(given)!r}, got None")
        self._allocate(dict(options.memory or {}), settled)
        self.state = self.memory["state"]
        self.cursor = self.memory["cursor"] if ring else cupy.zeros(num_slots, dtype=np.int32)
        phase = options.phase
        stroke = DUE if phase is not None and phase == window - 1 else 0
        self.cursor[...] = stroke
        self.clock = np.uint64(0) if phase is None else cupy.full(1, phase | stroke, dtype=np.int32)
        self._left_out = cupy.zeros(1, dtype=np.int32)
        self.limits = np.int32(options.pad_slot), np.int32(num_slots), self._left_out
        self._workspaces = Workspaces()
        shared = self.cursor, self.limits, self.clock
        self._write_state = SlotWriter(self.state, *shared)
        self._write_sketch, self._write_errors = (
            SlotWriter(self.memory[name], *shared) if name in self.memory else None for name in ("sketch", "errors")
        )
        if self._write_errors is not None:
            self.memory["errors"][...] = 0
        self._copier: Copier | None = None
        self._committer: Committer | None = None
        self._synchronize()  # the first call may come on another stream

    def _allocate(self, given: dict[str, Any], settled: bool) -> None:
        """Take the parts that have no memory yet from `given`, or make them; the ring if its type is settled."""
        parts = slot_parts(self._layer, self._options, self._window, self._packed)
        wanted = [part for part in parts if part.name not in self.memory and (settled or part.name not in RING)]
        made = self.memory | allocate(wanted, self._num_slots, given)
        self.memory.clear()
        self.memory.update((part.name, made[part.name]) for part in parts if part.name in made)
        if given:
            raise ValueError(f"memory: expected only {', '.join(self.memory)}, got {next(iter(given))!r}")
        check_places(self.memory)
        self._extents = [_extent(array) for array in self.memory.values()]
        if settled:
            self._parts = parts
            nothing = self._cupy.zeros(1, dtype=np.float32)  # of a layer without betas
            self.ring = tuple(self.memory.get(name, nothing) for name in RING) if "keys" in self.memory else ()

    def settle(self, activation_dtype: str) -> None:
        """Allocate the ring in the activations' type, unless it is there."""
        if not self._parts:
            self._options = replace(self._options, activation_dtype=activation_dtype)
            self._allocate({}, True)
            self._synchronize()  # the next call may come on another stream

    @property
    def parts(self) -> tuple[SlotPart, ...]:
        """See `sketchssm.heads.engine.ExactEngine`."""
        if not self._parts:
            raise ValueError("activation_dtype: expected a type, or warmup() before the ring's memory is described")
        return self._parts

    @property
    def position(self) -> Any:
        """See `sketchssm.heads.engine.Engine`."""
        return self.cursor & POSITION

    def overlaps(self, start: int, end: int) -> bool:
        """Whether any part has memory in this range of addresses."""
        return any(start < last and first < end for first, last in self._extents)

    def workspace(self) -> tuple[Any, bool]:
        """The workspace of the current stream, and whether it belongs to a captured graph; see `Workspaces.get`."""
        return self._workspaces.get()

    def load(self, state: Pointer, slots: Slots) -> None:
        """Overwrite states, and start the slots' windows anew."""
        self._write_state(state, slots)

    def reset(self, slots: Slots) -> None:
        """Clear states and sketches, and start the slots' windows anew."""
        self._write_state(None, slots)
        if self._write_sketch is not None:
            self._write_sketch(None, slots.again())
        self.clear_errors(slots)

    def clear_errors(self, slots: Slots) -> None:
        """Clear the errors of slots whose windows begin with another request."""
        if self._write_errors is not None:
            self._write_errors(None, slots.again())

    def begin(self, slots: Slots) -> None:
        """Start the slots' windows anew."""
        self._write_state.begin(slots)

    def commit(self, accepted: Slots | None, slots: Slots) -> None:
        """Keep the first `accepted` drafts of each row in its window; None, for windows of 1, drops all drafts."""
        self.load_commit()(accepted, slots)

    def copy(self, src: Slots, dst: Slots) -> None:
        """See `sketchssm.heads.engine.ExactEngine`."""
        self.load_copy().copy(src, dst, self.workspace()[0].data.ptr)

    def rejoin(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.ExactEngine`."""
        self.load_copy().rejoin(slots)

    def left_out(self) -> int:
        """See `sketchssm.heads.engine.ExactEngine`."""
        self._synchronize()
        count = int(self._left_out.get()[0])
        if count:
            self._left_out -= count
            self._synchronize()  # rows may be counted on any stream
        return count

    def load_commit(self) -> Committer:
        """The kernel of commits; the first call loads it."""
        if self._committer is None:
            self._committer = Committer(self.cursor, self.clock, self._window, self.limits)
        return self._committer

    def load_copy(self) -> Copier:
        """The kernels of copies, once all memory is allocated; the first call loads them."""
        if self._copier is None:
            memory = {part.name: self.memory[part.name] for part in self.parts} | {"cursor": self.cursor}
            self._copier = Copier(memory, self.clock, self.limits)
        return self._copier


def _extent(array: Any) -> tuple[int, int]:
    """Where an array starts and ends; its elements lie in between."""
    start, strides = int(array.data.ptr), zip(array.shape, array.strides, strict=True)
    return start, start + sum((size - 1) * stride for size, stride in strides) + array.itemsize
