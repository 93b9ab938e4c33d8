"""Memory of a slot: its parts, and its cursor word.

A cursor word (int32) has these bits:

=======  ==========================================================================================
0 to 6   `POSITION`: tokens that the slot has buffered since its last flush
7        `DUE`: the next plain token flushes the slot, whatever its position
8 to 11  drafted: tokens of the slot's last draft, until `commit` or any other call that uses the slot
12       `EXACT`: every plain token flushes the slot, until the slot's next request
=======  ==========================================================================================

A head with a clock has one more cursor word, of a virtual row. The virtual row takes part in every step and keeps
every draft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

POSITION = 127
"""Bits of a cursor word that hold the position."""

DUE = 128
"""Bit of a cursor word: flush with the next plain token."""

EXACT = 4096
"""Bit of a cursor word: the request's error is above the head's tolerance."""

LEAST_SAMPLES = 4
"""Measured flushes of a request before its error is compared with a tolerance."""

DRAFTED_SHIFT = 8
"""First bit of the number of drafted tokens."""

MAX_DRAFTS = 8
"""Most tokens of a draft."""

MAX_SLOTS = (1 << 31) - 1
"""Most slots of a head: kernels take their numbers as integers of 32 bits."""


def drafted(words: Any) -> Any:
    """Numbers of drafted tokens of cursor words."""
    return words >> DRAFTED_SHIFT & 15


@dataclass(frozen=True)
class SlotPart:
    """One part of a slot's memory.

    The parts are all memory of a slot, and they hold no addresses: a copy of their bytes to another slot of the same
    head is a copy of the slot.

    Parameters
    ----------
    name : {"state", "keys", "values", "gates", "betas", "sketch", "errors", "cursor"}
        Name of the contents. Keys, values, gates and betas are the raw inputs of the buffered tokens; errors are the
        sums of a monitor.
    shape : tuple of int
        Shape of one slot; the memory of all slots is ``(num_slots, *shape)``.
    dtype : str
        Element type, such as "float32" or "bfloat16". bfloat16 memory may be an array of uint16.
    alignment : int
        A slot's address must be a multiple of this number of bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    alignment: int

    @property
    def bytes(self) -> int:
        """Bytes of one slot."""
        return prod(self.shape) * (2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize)


PartsOf = Callable[..., tuple[SlotPart, ...]]
"""Describes the parts of an engine's slots from the arguments of its constructor without the number of slots."""


def check_memory(name: str, array: Any, address: int, part: SlotPart, num_slots: int) -> None:
    """Check that an array of NumPy or CuPy at an address can hold a part of all slots.

    TypeError if the type is not the part's; ValueError if shape, strides or alignment do not fit.
    """
    native = array.dtype.isnative
    if not native or (array.dtype.name != part.dtype and not (part.dtype == "bfloat16" and array.dtype == np.uint16)):
        raise TypeError(f"{name}: expected {part.dtype}, got {array.dtype if native else array.dtype.str}")
    shape = num_slots, *part.shape
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")
    apart = num_slots == 1 or array.strides[0] >= part.bytes
    if not (apart and array[0].flags.c_contiguous):
        raise ValueError(f"{name}: expected slots of {part.bytes} contiguous bytes, got strides {array.strides}")
    stride = array.strides[0] if num_slots > 1 else 0
    if address % part.alignment or stride % part.alignment:
        raise ValueError(f"{name}: expected slots aligned to {part.alignment} bytes, got strides {array.strides}")


def check_separate(blocks: Mapping[str, tuple[int, int, int]], num_slots: int) -> None:
    """Check that no two parts share memory, in any slots; ValueError names two that overlap.

    `blocks` has for each part the address of slot 0, the bytes from slot to slot, and the bytes of a slot, at least 1.
    """
    first, stride, size = (np.array(x, np.int64)[:, None] for x in zip(*blocks.values(), strict=True))
    starts = first + stride * np.arange(num_slots)
    order = np.argsort(starts, axis=None)
    start, end = starts.ravel()[order], (starts + size).ravel()[order]
    # if a block overlaps any later one, it overlaps the next
    for i in np.flatnonzero(start[1:] < end[:-1])[:1]:
        one, other = (list(blocks)[part] for part in sorted(order[i : i + 2] // num_slots))
        raise ValueError(f"memory: expected separate memory for every part, but {one!r} and {other!r} overlap")
