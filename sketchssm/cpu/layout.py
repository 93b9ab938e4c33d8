"""The record of all addresses for the kernels, scratch memory, and the tasks of the kernels.

Rows of K or V elements are padded with zeros to a multiple of `LANES`, so that no kernel needs a loop for a remainder.
The usual sizes (64, 80, 128) need no padding. Padding holds zeros, unless a NaN spreads to the padding from its row.
Loading, adopting and resetting a slot clear its padding. Every array of an engine starts on a cache line.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from numba import from_dtype

from sketchssm.arrays.host_arrays import slot_memory
from sketchssm.arrays.options import EngineOptions
from sketchssm.cpu.jit import njit
from sketchssm.cpu.llvm import LANES
from sketchssm.cpu.parts import CACHE_LINE, STATE_TYPES, Array, Parts, flat, offsets, own_part, slot_parts
from sketchssm.cpu.simd import floats, padded, pointer_cast
from sketchssm.layer.recurrence import Layer
from sketchssm.layer.slots import DUE

Record = Any
"""In signatures of compiled functions: one record of `CONTEXT` (``m``) or `AREAS` (``at``)."""

HEADS_TOGETHER = 8
"""Heads that take each stage of a read together (see `sketchssm.cpu.read`)."""

STEP, DRAFT, FLUSH, REBUILD, COMMIT = range(5)
"""Tasks of the kernels."""

FLOAT32, BFLOAT16, FLOAT16 = range(3)
"""Types of stored states, in the order of `STATE_TYPES`."""

SIZES = (
    "erases", "channel_decays", "heads", "key_heads", "group", "key_dim", "value_dim", "window", "keys", "values",
    "tokens", "workers", "key_row", "value_row", "gate_row", "gram_row",
)  # fmt: skip
"""Sizes of a layer. `keys`, `values` and `tokens` are K, V and W padded to whole vectors. `key_row`, `value_row`,
`gate_row` and `gram_row` are the distances between two tokens in the arrays of the ring."""

RUNS = (
    "state", "served", "cursor", "k", "v", "gate", "start", "reach", "beta", "gram", "packed", "factors", "pending",
    "master", "codes", "scales", "shadow", "errors",
)  # fmt: skip
"""Arrays of a slot (see `sketchssm.cpu.parts`): their addresses in slot 0, and their distances between two slots in
elements."""

SHARED = ("scratch", "omega", "pi", "table", "clock")
"""Arrays of the engine."""

CALL = ("task", "in_q", "in_k", "in_v", "in_g", "in_beta", "out", "rows", "counts", "batch", "length", "token")
"""One call: its task, the addresses of its inputs, of its output, of its rows' slots and of their numbers of drafts,
its sizes, its current token."""

SETTINGS = ("clocked", "state_type", "tracked", "map", "sketch_type", "columns", "pending_share", "monitor")
"""Settings: whether the head has a clock; the type of stored states; whether flushes advance a master copy of U; the
coefficient map; the type of stored sketches; the largest rank padded; a token's share of `pending`; one flush of so
many is measured, or 0. Beside them, as a float, the tolerance: 0 for none."""

GRID = ("top", "shift")
"""Largest code and shift of the grid that `sketchssm.cpu.quantised` rounds to."""

STRIDES = tuple(f"{name}_stride" for name in RUNS)

CONTEXT = np.dtype(
    [(name, np.int64) for name in (*SIZES, *RUNS, *STRIDES, *SHARED, *CALL, *SETTINGS)]
    + [(name, np.float64) for name in ("ridge", "tolerance", *GRID)]
)

AREA_NAMES = (
    "inputs", "x", "scores", "open", "weights", "coefficients", "draft_reach",
    "output", "now", "ones", "decay", "reach", "start", "walk", "keys_across", "key_gram", "gram", "left",
    "write", "carried", "sketch", "key_sketch", "span", "rows", "low", "doubles", "residual", "state", "narrow",
    "size",
)  # fmt: skip
AREAS = np.dtype([(name, np.int64) for name in AREA_NAMES])
"""Offsets of one worker's scratch areas, and their total size. ``inputs`` holds the query and the key of a key head
side by side. ``x``, ``scores`` and ``coefficients`` hold what is computed from both in the same order. ``draft_reach``
holds the decays of drafts, ``residual`` what a sketch leaves of one head's state, then the scales of its codes, and
``state`` one head's state where memory has the state in 16 bits or must not change."""

call_record = pointer_cast(from_dtype(CONTEXT))
areas_record = pointer_cast(from_dtype(AREAS))


class Memory:
    """The arrays of an engine, and the record of their addresses and of the layer's sizes.

    `window` is 0 for no ring. `parts` holds the arrays of each part of a slot, and `arrays` the memory of each
    part, ``(num_slots, *shape)``; the options have the caller's memory for some parts, and where the clock starts.
    `cursor (num_slots,)` holds the cursor words; zeros if there is no ring.
    """

    def __init__(
        self,
        layer: Layer,
        num_slots: int,
        window: int,
        parts: Parts,
        options: EngineOptions,
    ) -> None:
        given, phase = options.memory or {}, options.phase
        self.layer = layer
        self.context = np.zeros(1, dtype=CONTEXT)
        self._shared: dict[str, Array] = {}
        dims = (layer.key_dim, layer.value_dim, window)
        keys, values, tokens = map(padded, dims)
        kind = layer.erases, layer.channel_decays
        sizes = (*kind, layer.heads, layer.key_heads, layer.group, *dims, keys, values, tokens)
        self.set(**dict(zip(SIZES, sizes, strict=False)))
        apart = layer.heads | 1
        self.set(key_row=(layer.key_heads | 1) * keys, value_row=apart * values)
        self.set(gate_row=apart * keys, gram_row=apart * tokens)
        self.state_size = layer.heads * values * keys
        self.parts = slot_parts(parts)
        own = {part.name: own_part(part, num_slots) for part in self.parts if part.name not in given}
        self.arrays = slot_memory(self.parts, num_slots, own | dict(given))
        for name, runs in parts.items():
            for run, offset in offsets(runs):
                if run.name not in RUNS:
                    continue
                stride = self.arrays[name].strides[0] // np.dtype(run.dtype).itemsize
                self.set(**{run.name: self.arrays[name].ctypes.data + offset, f"{run.name}_stride": stride})
        self.set(state_type=list(STATE_TYPES.values()).index(parts["state"][0].dtype))
        if not self.context["served"][0]:
            self.set(served=self.context["state"][0], served_stride=self.context["state_stride"][0])
        self.padded_state = self.arrays["state"]
        self.state = self.padded_state[:, :, : layer.value_dim, : layer.key_dim]
        self.clock = self.own("clock", CACHE_LINE // 4, np.int32)[:1]
        if phase is not None:
            self.set(clocked=1)
            self.clock[0] = phase | (DUE if phase == window - 1 else 0)
        self.cursor = self.arrays.get("cursor", np.zeros(num_slots, np.int32))
        self.cursor[...] = self.stroke

    @property
    def stroke(self) -> int:
        """The DUE bit of a new window: that of the clock."""
        return int(self.clock[0]) & DUE

    def own(self, name: str, size: int, dtype: Any = np.float32) -> Array:
        """Allocate an array of zeros and record its address."""
        return self.share(name, flat(size, dtype))

    def share(self, name: str, array: Array) -> Array:
        """Keep an array alive and record its address."""
        self._shared[name] = array
        self.context[name] = array.ctypes.data
        return array

    def begin(self, slots: npt.NDArray[np.int64]) -> None:
        """Begin windows with empty rings; clear the padding of rings and states, whose contents are arbitrary."""
        layer = self.layer
        self.padded_state[slots, :, layer.value_dim :] = 0
        self.padded_state[slots, :, :, layer.key_dim :] = 0
        for name, width in (("keys", layer.key_dim), ("values", layer.value_dim)):
            if name in self.arrays:
                self.arrays[name][slots, ..., width:] = 0
        if "errors" in self.arrays:
            self.arrays["errors"][slots] = 0
        self.cursor[slots] = self.stroke

    def set(self, **fields: float) -> None:
        """Set fields of the record."""
        for name, value in fields.items():
            self.context[name] = value

    def scratch(self, workers: int, rank: int = 0, drafts: int = 0, residual: bool = False) -> None:
        """Allocate the scratch memory of all workers and the record of its areas."""
        self.set(columns=padded(rank))
        areas = scratch_areas(self.context[0], rank, drafts, residual)
        size = int(areas["size"][0])
        memory = self.own("scratch", workers * size).reshape(workers, size)
        memory[:, areas["ones"][0] : areas["decay"][0]] = 1.0
        self.areas, self.workers = areas, workers
        self.addresses = self.context.ctypes.data, areas.ctypes.data

    def __reduce__(self) -> NoReturn:
        """Refuse to copy: the record of the copy would hold the addresses of the original's arrays."""
        raise TypeError("a decode head on backend 'cpu' cannot be copied or pickled: it holds addresses of its memory")


def scratch_areas(sizes: Any, rank: int, drafts: int = 0, residual: bool = False) -> Array:
    """Return the record of the scratch areas for a layer's sizes, the largest rank, and drafts of standard decode.

    `residual` says whether heads have residuals.
    """
    keys, values, tokens = (int(sizes[name]) for name in ("keys", "values", "tokens"))
    heads, key_heads = int(sizes["heads"]), int(sizes["key_heads"])
    columns = padded(rank)
    narrow = 0 if sizes["state_type"] == FLOAT32 else values * keys
    needs = {
        "inputs": 2 * key_heads * keys, "x": 2 * keys * (heads if sizes["channel_decays"] else 1),
        "scores": 2 * key_heads * tokens, "open": heads * tokens, "weights": heads * tokens,
        "coefficients": HEADS_TOGETHER * 4 * columns,
        "draft_reach": 0 if sizes["channel_decays"] else heads * tokens,
        "output": heads * values, "now": padded(heads) + LANES,
        **dict.fromkeys(("ones", "decay"), max(keys, values)), **dict.fromkeys(("reach", "start", "walk"), tokens),
        "keys_across": keys * tokens, "key_gram": tokens * tokens, "gram": tokens * tokens, "left": tokens * keys,
        "write": tokens * LANES, "carried": tokens * values,
        "sketch": columns * values, "key_sketch": columns * tokens, "span": columns * values,
        "rows": columns * keys, "low": columns * columns,
        "doubles": 2 * (columns**2 + 2 * columns),
        "residual": values * keys + values + keys if residual else 0,
        "state": values * keys if narrow or drafts else 0,
        "narrow": narrow // 2 if drafts else 0,
    }  # fmt: skip
    ends = np.cumsum([0, *(needs[name] for name in AREA_NAMES[:-1])])
    areas = np.zeros(1, dtype=AREAS)
    for name, end in zip(AREA_NAMES, ends, strict=True):
        areas[name] = end
    return areas


@njit
def blank(m: Record, place: int, heads: int) -> None:
    """Set the outputs of some heads in a padding row to zero; `place` counts heads over rows and tokens."""
    for c in range(place * m.value_dim, (place + heads) * m.value_dim):
        floats(m.out)[c] = np.float32(0.0)
