"""Where things lie: the record that kernels find their memory by, the pool of states, the ring, scratch memory.

Rows of K or V elements are padded with zeros to a multiple of `LANES`, so that no kernel needs a tail; for the
usual sizes (64, 80, 128) there is nothing to pad. Padding holds zeros unless a NaN comes in beside
it; loading and resetting a slot clear it. Every array starts on a cache line.
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
"""Heads that go through the stages of a read together (see `sketchssm.cpu.read`)."""


SIZES = (
    "kind", "slots", "heads", "key_heads", "group", "key_dim", "value_dim", "window", "keys", "values",
    "tokens", "workers", "key_row", "value_row", "gate_row", "gram_row",
)  # fmt: skip
"""A layer's sizes; `keys`, `values` and `tokens` are K, V and W padded to whole vectors, the rows a token's shares of
the ring (see `Memory`)."""

POINTERS = (
    "state", "served", "position", "scratch", "k", "v", "gate", "beta", "reach", "start", "gram", "packed", "master",
    "factors", "pending", "omega", "pi", "table",
)  # fmt: skip
"""Addresses; see `Memory` and `sketchssm.cpu.packed`."""

CALL = ["task", "in_q", "in_k", "in_v", "in_g", "in_beta", "out", "rows", "batch", "length", "token"]
"""One call: the task, addresses of its inputs, its output and its rows' slots, its sizes, the token at hand."""

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
"""Offsets of one worker's scratch areas, and the size of all. A key head's query and key lie next to one another in
``inputs``, as do the two vectors of ``x``, the scores and the coefficients that come of them."""

call_record = pointer_cast(from_dtype(CONTEXT))
areas_record = pointer_cast(from_dtype(AREAS))


def flat(size: int, dtype: Any = np.float32) -> Array:
    """Zeros that start on a cache line; memory is taken when it is first written."""
    item = np.dtype(dtype).itemsize
    memory = np.zeros(size * item + CACHE_LINE, dtype=np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + size * item].view(dtype)


class Memory:
    """What an engine owns: arrays, and the record of their addresses and of the layer's sizes.

    All hold float32. ``state (slots, heads, V, K)``; ``served`` is what reads between flushes see, the state itself
    unless an engine keeps another. Of the ring, the raw inputs ``k (slots, W, key_heads, K)``,
    ``v (slots, W, heads, V)``, ``beta (slots, W, heads)`` and ``gate (slots, W, heads)``, which holds g, or for kda
    ``exp g`` with K channels (the recurrence uses it in no other form, and the exponentials are costly): they are all
    that a flush uses. The rest is what reads can reuse from token to token: with t the newest token
    ``reach[s] = D_{s+1:t}`` ``(slots, heads, W)`` and ``start[s] = D_{1:s}`` ``(slots, W, heads)`` of scalar gates,
    and ``gram[j, s] = <D_{s+1:j} k_s, k_j>`` ``(slots, W, heads, W)``, the matrix A of `sketchssm.reference.window`.

    Tokens come before heads, so that a step appends and reads long contiguous runs: one core fetches runs of less
    than 16 KiB at a third of the bandwidth that it reaches on long ones. Where a head has more than one number a
    token, tokens are an odd number of heads apart: at a power of two, all of a head's tokens would compete for one set
    of the first cache.

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
            # 16 rows are read at once, also where the ring has fewer
            self.own("k", (num_slots * window + LANES) * key_row)
            self.own("v", tokens_apart * values)
            self.own("gate", tokens_apart * keys if layer.kind == "kda" else tokens_heads)
            self.own("beta", tokens_heads if layer.erases else 0)
            self.own("reach", rows * tokens if layer.kind != "kda" else 0)
            self.own("start", tokens_heads if layer.kind != "kda" else 0)
            self.own("gram", tokens_apart * tokens if layer.erases else 0)

    def own(self, name: str, size: int, dtype: Any = np.float32) -> Array:
        """Allocate zeros and record their address."""
        return self.share(name, flat(size, dtype))

    def share(self, name: str, array: Array) -> Array:
        """Keep an array alive and record its address."""
        self._arrays[name] = array
        self.context[name] = array.ctypes.data
        return array

    def clear_state(self, slots: npt.NDArray[np.int64]) -> None:
        """Zero some slots' states with their padding, which a NaN in the state has reached too."""
        self.padded_state[slots] = 0.0
        self.position[slots] = 0

    def clear(self, slots: npt.NDArray[np.int64], *names: str) -> None:
        """Overwrite some slots' shares of packed arrays with zeros, whatever they hold."""
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
        """Allocate scratch memory for some workers, and the record of its areas."""
        areas = scratch_areas(self.context[0], rank)
        self.set(columns=padded(rank))
        size = int(areas["size"][0])
        memory = self.own("scratch", workers * size).reshape(workers, size)
        memory[:, areas["ones"][0] : areas["decay"][0]] = 1.0
        self.areas, self.workers = areas, workers
        self.addresses = self.context.ctypes.data, areas.ctypes.data

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied: the record holds addresses, which would still be those of the original's arrays."""
        raise TypeError("a decode head on backend 'cpu' cannot be copied or pickled: it holds addresses of its memory")


def scratch_areas(sizes: Any, rank: int) -> Array:
    """Scratch areas for a layer's sizes and the largest rank in use."""
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
    """Zero a padding row's output for some heads; `place` counts heads over rows and tokens."""
    for c in range(place * m.value_dim, (place + heads) * m.value_dim):
        floats(m.out)[c] = np.float32(0.0)
