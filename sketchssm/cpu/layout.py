"""Memory layout: the states, the ring, scratch memory, and the record by which kernels find all of them.

Rows of K or V elements are padded with zeros to a multiple of `LANES`, so that no kernel needs a loop for a remainder.
The usual sizes (64, 80, 128) need no padding. Padding holds zeros, unless a NaN reaches the padding from the row
beside it. Loading and resetting a slot clear its padding. Every array starts on a cache line.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from numba import from_dtype

from sketchssm.cpu.jit import njit
from sketchssm.cpu.simd import LANES, floats, padded, pointer_cast
from sketchssm.recurrence import KINDS, Layer

__all__ = [
    "GDN",
    "HEADS_TOGETHER",
    "KDA",
    "MAMBA2",
    "Array",
    "Memory",
    "Record",
    "areas_record",
    "blank",
    "call_record",
    "flat",
    "scratch_areas",
]

MAMBA2, GDN, KDA = (KINDS.index(kind) for kind in ("mamba2", "gdn", "kda"))

Array = npt.NDArray[Any]

Record = Any
"""In signatures of compiled functions: one record of `CONTEXT` (``m``) or `AREAS` (``at``)."""

CACHE_LINE = 64

HEADS_TOGETHER = 8
"""Heads that take each stage of a read together (see `sketchssm.cpu.read`)."""

SIZES = (
    "kind", "slots", "heads", "key_heads", "group", "key_dim", "value_dim", "window", "keys", "values",
    "tokens", "workers", "key_row", "value_row", "gate_row", "gram_row",
)  # fmt: skip
"""Sizes of a layer. `keys`, `values` and `tokens` are K, V and W padded to whole vectors. `key_row`, `value_row`,
`gate_row` and `gram_row` are the distances between two tokens in the arrays of the ring (see `Memory`)."""

POINTERS = (
    "state", "served", "position", "scratch", "k", "v", "gate", "beta", "reach", "start", "gram", "packed", "master",
    "factors", "pending", "omega", "pi", "table",
)  # fmt: skip
"""Addresses; see `Memory` and `sketchssm.cpu.packed`."""

CALL = ["task", "in_q", "in_k", "in_v", "in_g", "in_beta", "out", "rows", "batch", "length", "token"]
"""One call: its task, the addresses of its inputs, of its output and of its rows' slots, its sizes, its current
token."""

SKETCH = [
    "map",
    "bfloat",
    "columns",
    "packed_stride",
    "master_stride",
    "factors_stride",
    "pending_stride",
    "pending_share",
]

GRIDS = ["top", "shift", "residual_top", "residual_shift"]
"""Largest codes and shifts of the grids that `sketchssm.cpu.quantised` rounds to."""

CONTEXT = np.dtype(
    [(name, np.int64) for name in (*SIZES, *POINTERS, *CALL, *SKETCH)]
    + [(name, np.float64) for name in ("ridge", *GRIDS)]
)

AREA_NAMES = (
    "inputs", "x", "scores", "open", "weights", "coefficients",
    "output", "now", "ones", "decay", "reach", "start", "walk", "keys_across", "key_gram", "gram", "left",
    "write", "carried", "sketch", "key_sketch", "span", "rows", "low", "doubles", "size",
)  # fmt: skip
AREAS = np.dtype([(name, np.int64) for name in AREA_NAMES])
"""Offsets of one worker's scratch areas, and their total size. ``inputs`` holds the query and the key of a key head
side by side. ``x``, ``scores`` and ``coefficients`` hold what is computed from both in the same order."""

call_record = pointer_cast(from_dtype(CONTEXT))
areas_record = pointer_cast(from_dtype(AREAS))


def flat(size: int, dtype: Any = np.float32) -> Array:
    """Return zeros that start on a cache line. The system gives the memory when it is first written."""
    item = np.dtype(dtype).itemsize
    memory = np.zeros(size * item + CACHE_LINE, dtype=np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + size * item].view(dtype)


class Memory:
    """The arrays of an engine, and the record of their addresses and of the layer's sizes.

    All arrays hold float32:

    ========  ===========================  ===========================================================================
    array     shape                        contents
    ========  ===========================  ===========================================================================
    state     (slots, heads, V, K)         states as of the last flush
    served    (slots, heads, V, K)         what reads between flushes use: the state, or an engine's own copy
    k         (slots, W, key_heads, K)     ring: keys
    v         (slots, W, heads, V)         ring: values
    beta      (slots, W, heads)            ring: write gates
    gate      (slots, W, heads)            ring: log-decays g; for kda ``exp g``, with K channels
    reach     (slots, heads, W)            ``D_{s+1:t}`` up to the newest token t, for scalar gates
    start     (slots, W, heads)            ``D_{1:s}``, for scalar gates
    gram      (slots, W, heads, W)         ``<D_{s+1:j} k_s, k_j>``, the matrix A of `sketchssm.reference.window`
    ========  ===========================  ===========================================================================

    A flush uses the raw inputs only: k, v, beta and gate. Reads reuse reach, start and gram from token to token. The
    gate of kda is kept as ``exp g`` because the recurrence uses no other form and exponentials are costly.

    Tokens come before heads, so that a step reads and writes long contiguous runs. One core reads runs of less than
    16 KiB at a third of the bandwidth of long runs. Where a head has several numbers per token, two tokens are an odd
    number of heads apart. At a power of two, all tokens of a head would compete for one set of the first cache.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    num_slots : int
        Number of state slots.
    window : int
        Tokens from one flush to the next; 0 for no ring.
    """

    def __init__(self, layer: Layer, num_slots: int, window: int = 0) -> None:
        self.layer = layer
        self.context = np.zeros(1, dtype=CONTEXT)
        self._arrays: dict[str, Array] = {}
        sizes = (KINDS.index(layer.kind), num_slots, layer.heads, layer.key_heads, layer.group)
        dims = (layer.key_dim, layer.value_dim, window)
        self.set(**dict(zip(SIZES, (*sizes, *dims, *map(padded, dims)), strict=False)))
        keys, values, tokens = map(padded, dims)
        rows = num_slots * layer.heads
        self.state_size = layer.heads * values * keys
        state = self.own("state", rows * values * keys).reshape(num_slots, layer.heads, values, keys)
        self.context["served"] = self.context["state"]
        self.state, self.padded_state = state[:, :, : layer.value_dim, : layer.key_dim], state
        self.position = self.own("position", num_slots, np.int32)
        if window:
            tokens_heads = num_slots * window * layer.heads
            apart, tokens_apart = layer.heads | 1, num_slots * window * (layer.heads | 1)
            key_row = (layer.key_heads | 1) * keys
            self.set(key_row=key_row, value_row=apart * values, gate_row=apart * keys, gram_row=apart * tokens)
            # kernels read 16 rows at once, even where the ring has fewer
            self.own("k", (num_slots * window + LANES) * key_row)
            self.own("v", tokens_apart * values)
            self.own("gate", tokens_apart * keys if layer.kind == "kda" else tokens_heads)
            self.own("beta", tokens_heads if layer.erases else 0)
            self.own("reach", rows * tokens if layer.kind != "kda" else 0)
            self.own("start", tokens_heads if layer.kind != "kda" else 0)
            self.own("gram", tokens_apart * tokens if layer.erases else 0)

    def own(self, name: str, size: int, dtype: Any = np.float32) -> Array:
        """Allocate an array of zeros and record its address."""
        return self.share(name, flat(size, dtype))

    def share(self, name: str, array: Array) -> Array:
        """Keep an array alive and record its address."""
        self._arrays[name] = array
        self.context[name] = array.ctypes.data
        return array

    def clear_state(self, slots: npt.NDArray[np.int64]) -> None:
        """Set the states of some slots and their padding to zero: a NaN in a state may have reached the padding."""
        self.padded_state[slots] = 0.0
        self.position[slots] = 0

    def clear(self, slots: npt.NDArray[np.int64], *names: str) -> None:
        """Overwrite the parts of some slots in packed arrays with zeros."""
        count = int(self.context["slots"][0])
        for name in names:
            stride = int(self.context[f"{name}_stride"][0])
            if stride:
                self._arrays[name][: count * stride].reshape(count, stride)[slots] = 0

    def set(self, **fields: float) -> None:
        """Set fields of the record."""
        for name, value in fields.items():
            self.context[name] = value

    def scratch(self, workers: int, rank: int = 0) -> None:
        """Allocate the scratch memory of all workers and the record of its areas."""
        areas = scratch_areas(self.context[0], rank)
        self.set(columns=padded(rank))
        size = int(areas["size"][0])
        memory = self.own("scratch", workers * size).reshape(workers, size)
        memory[:, areas["ones"][0] : areas["decay"][0]] = 1.0
        self.areas, self.workers = areas, workers
        self.addresses = self.context.ctypes.data, areas.ctypes.data

    def __reduce__(self) -> NoReturn:
        """Refuse a copy, whose record would hold the addresses of the original's arrays."""
        raise TypeError("a decode head on backend 'cpu' cannot be copied or pickled: it holds addresses of its memory")


def scratch_areas(sizes: Any, rank: int) -> Array:
    """Return the record of the scratch areas for a layer's sizes and the largest rank in use."""
    keys, values, tokens = (int(sizes[name]) for name in ("keys", "values", "tokens"))
    heads, key_heads = int(sizes["heads"]), int(sizes["key_heads"])
    columns = padded(rank)
    needs = {
        "inputs": 2 * key_heads * keys, "x": 2 * keys * (heads if sizes["kind"] == KDA else 1),
        "scores": 2 * key_heads * tokens, "open": heads * tokens, "weights": heads * tokens,
        "coefficients": HEADS_TOGETHER * 4 * columns,
        "output": heads * values, "now": padded(heads) + LANES,
        **dict.fromkeys(("ones", "decay"), max(keys, values)), **dict.fromkeys(("reach", "start", "walk"), tokens),
        "keys_across": keys * tokens, "key_gram": tokens * tokens, "gram": tokens * tokens, "left": tokens * keys,
        "write": tokens * LANES, "carried": tokens * values,
        "sketch": columns * values, "key_sketch": columns * tokens, "span": columns * values,
        "rows": columns * keys, "low": columns * columns,
        "doubles": 2 * (columns**2 + 2 * columns),
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
