"""Parts of a slot and their arrays.

Each part (`sketchssm.layer.slots.SlotPart`) holds one array or several arrays; each array begins on a cache line:

======  =======  ========================  ======================================================================
part    array    shape                     contents
======  =======  ========================  ======================================================================
state   state    (heads, V, K)             state as of the last flush, in the head's ``state_dtype``
keys    k        (W, key_heads, K)         ring: keys
values  v        (W, heads, V)             ring: values
gates   gate     (W, heads)                ring: log-decays g; with a decay per channel ``exp g``, K of them
gates   start    (W, heads)                ``D_{1:s}``, for scalar gates
gates   reach    (heads, W)                ``D_{s+1:t}`` up to the newest token t, for scalar gates
betas   beta     (W, heads)                ring: write gates
betas   gram     (W, heads, W)             ``<D_{s+1:j} k_s, k_j>``, the matrix A of `sketchssm.reference.window`
sketch  packed   see `packed`              sketches and map rows, and the other arrays of `sketchssm.cpu.packed`
sketch  served   (heads, V, K)             the copy for reads of `sketchssm.cpu.quantised.CopyEngine`
errors  errors   (heads, 1, 3)             sums of a monitor: `sketchssm.cpu.errors`
cursor  cursor   ()                        cursor word
======  =======  ========================  ======================================================================

All arrays but packed sketches, 16-bit states and cursors hold float32. K, V and, in keys, reach and gram, W are padded
to whole vectors. A flush uses the raw inputs only: k, v, beta and gate. Reads reuse start, reach and gram from token
to token. A decay per channel is kept as ``exp g``: the recurrence uses no other form, and exponentials are costly.

Tokens come before heads, so that a step reads and writes long contiguous runs. One core reads runs of less than 16 KiB
at a third of the bandwidth of long runs. If a head has several numbers per token, the distance between two tokens is
an odd number of heads. With a power of two, all tokens of a head would compete for one set of the first-level cache.

Standard decode has a state, and for drafts the raw inputs of the last draft call, token by token and without padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sketchssm.cpu.simd import padded
from sketchssm.layer.checks import no_memory
from sketchssm.layer.recurrence import Layer
from sketchssm.layer.slots import SlotPart

Array = npt.NDArray[Any]

CACHE_LINE = 64

ALIGNMENT = 4
"""The addresses of a caller's parts must be multiples of this. Kernels run fastest on whole cache lines."""


STATE_TYPES = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}
"""Types of arrays of stored states."""


class Run(NamedTuple):
    """One array of a slot inside a part."""

    name: str  # in the record of `sketchssm.cpu.layout`
    shape: tuple[int, ...]  # in one slot
    dtype: Any = np.float32  # uint16 stands for bfloat16

    @property
    def bytes(self) -> int:
        """Bytes of one slot."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


Parts = dict[str, tuple[Run, ...]]


def standard_parts(layer: Layer, state_dtype: str, drafts: int) -> Parts:
    """Return the part of the states and, for standard decode with drafts, those of a ring of raw inputs."""
    shape = layer.heads, padded(layer.value_dim), padded(layer.key_dim)
    parts: Parts = {"state": (Run("state", shape, STATE_TYPES[state_dtype]),)}
    if drafts:
        shapes = layer.token_shapes()
        for name, argument in (("keys", "k"), ("values", "v"), ("gates", "g"), ("betas", "beta")):
            if argument in shapes:
                parts[name] = (Run(f"draft_{argument}", (drafts, *shapes[argument])),)
        parts["cursor"] = (Run("cursor", (), np.int32),)
    return parts


def window_parts(
    layer: Layer, window: int, state_dtype: str = "float32", sketch: tuple[Run, ...] = (), monitor: int = 0
) -> Parts:
    """Return the parts of the states, of a ring, of sketches and a monitor if there are any, and of the cursor."""
    keys, values, tokens = map(padded, (layer.key_dim, layer.value_dim, window))
    # an odd number of heads apart
    heads, key_heads = layer.heads | 1, layer.key_heads | 1
    # kernels read 16 keys at once, even where the window has fewer
    parts = standard_parts(layer, state_dtype, 0)
    parts |= {
        "keys": (Run("k", (tokens, key_heads, keys)),),
        "values": (Run("v", (window, heads, values)),),
    }
    if layer.channel_decays:
        parts["gates"] = (Run("gate", (window, heads, keys)),)
    else:
        each = Run("gate", (window, layer.heads)), Run("start", (window, layer.heads))
        parts["gates"] = *each, Run("reach", (layer.heads, tokens))
    if layer.erases:
        parts["betas"] = Run("beta", (window, layer.heads)), Run("gram", (window, heads, tokens))
    if any(run.bytes for run in sketch):
        parts["sketch"] = sketch
    if monitor:
        parts["errors"] = (Run("errors", (layer.heads, 1, 3)),)
    return parts | {"cursor": (Run("cursor", (), np.int32),)}


def slot_part(name: str, runs: tuple[Run, ...]) -> SlotPart:
    """Describe a part: one array as it is, several as the bytes or the float32 numbers that hold them all."""
    types = {np.dtype(run.dtype) for run in runs}
    if len(runs) == 1:
        dtype = types.pop().name
        return SlotPart(name, runs[0].shape, "bfloat16" if dtype == "uint16" else dtype, ALIGNMENT)
    size = sum(padded(run.bytes, CACHE_LINE) for run in runs)
    if types == {np.dtype(np.float32)}:
        return SlotPart(name, (size // 4,), "float32", ALIGNMENT)
    return SlotPart(name, (size,), "uint8", ALIGNMENT)


def slot_parts(parts: Parts) -> tuple[SlotPart, ...]:
    """Describe all parts."""
    return tuple(slot_part(name, runs) for name, runs in parts.items())


def offsets(runs: tuple[Run, ...]) -> Iterator[tuple[Run, int]]:
    """Yield the arrays of a part and their first bytes."""
    offset = 0
    for run in runs:
        yield run, offset
        offset += padded(run.bytes, CACHE_LINE)


def flat(size: int, dtype: Any = np.float32) -> Array:
    """Return zeros that start on a cache line. The system gives the memory when it is first written."""
    item = np.dtype(dtype).itemsize
    memory = np.zeros(size * item + CACHE_LINE, dtype=np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + size * item].view(dtype)


def own_part(part: SlotPart, num_slots: int) -> Array:
    """Allocate zeros for a part of all slots."""
    dtype = np.dtype(np.uint16 if part.dtype == "bfloat16" else part.dtype)
    try:
        return flat(num_slots * prod(part.shape), dtype).reshape(num_slots, *part.shape)
    except (MemoryError, ValueError) as error:
        raise no_memory(part, num_slots) from error
