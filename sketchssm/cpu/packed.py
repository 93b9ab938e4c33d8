"""Packed sketches: each head takes memory for its own rank.

Each slot has these parts, head after head:

==========  =======================================================  ===============
part        contents                                                 type
==========  =======================================================  ===============
SKETCH      sketch U, G rows of V                                    sketch's format
MAP         rows of the coefficient map, of K                        sketch's format
MASTER      a master copy of U, for scalar gates and float32 states  float32
FACTORS     scales of codes; w and F of the map                      float32
PENDING     projected keys ``h_j = C D_{1:j} k_j``, token by token   float32
CODES       codes of the residual (`sketchssm.cpu.residual`)         bytes
SCALES      scales of its rows, then of its columns                  bfloat16
SHADOW      a full-state head's state for reads, rows of K           bfloat16
==========  =======================================================  ===============

All slots share OMEGA, the bases with their columns on lanes, and for `lowrank` PI, the bases by rows. Both are
float32. A table holds the place of every part of every head. A head with a residual has no PENDING: it reads one
effective query. Flushes advance the master copy (see `sketchssm.cpu.maps`). A full-state head has only a SHADOW, if
any (`sketchssm.layer.formats.SketchFormat.shadows`).

For `lowrank`, MAP holds the rows ``B - Pi Diag(w) L`` instead of B, so that L need not be stored. With z = Pi^T x,

    C x = w z + F (B^T x - L^T (w z)) = w z + F (B - Pi Diag(w) L)^T x.

**Codes** (`sketchssm.reference.codes`). SKETCH and MAP are bytes; K and V below are padded to multiples of 16. For
`ridge`, SKETCH holds Q and MAP holds B of the split form. With p rows of the map, a head's bytes are, in
this order:

=======================  ===========================  ==============================================
part                     bytes                        contents
=======================  ===========================  ==============================================
SKETCH                   ``G V``                      columns of U or Q
MAP                      ``p K``                      rows of the map
FACTORS                  ``4 G``                      scales of the columns; of Q and B, of their products
FACTORS, lowrank         ``4 p``, ``4 G``, ``4 G p``  scales of the rows, w, F
=======================  ===========================  ==============================================
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sketchssm.cpu.columns import COLUMN_LANES
from sketchssm.cpu.jit import njit
from sketchssm.cpu.layout import Memory, Record
from sketchssm.cpu.llvm import LANES
from sketchssm.cpu.parts import Array, Run, flat
from sketchssm.cpu.simd import integers, padded
from sketchssm.layer.coefficients import MAPS
from sketchssm.layer.formats import FORMATS
from sketchssm.layer.recurrence import FULL_STATE, Layer
from sketchssm.plans.plan import SketchPlan

RIDGE, LOWRANK, SUBSPACE = map(MAPS.index, ("ridge", "lowrank", "subspace"))

# Columns of the table: a head's rank, the number of its map's rows, its residual's bits, and where its parts begin.
RANK, ROWS, BITS, SKETCH, MAP, MASTER, FACTORS, PENDING, CODES, SCALES, SHADOW, OMEGA, PI = range(13)
COLUMNS = 13

SKETCH_TYPES = tuple(FORMATS)
BFLOAT, INT8 = (SKETCH_TYPES.index(name) for name in ("bfloat16", "int8"))
"""Types of stored sketches. Of INT8, sketches and map rows are codes."""


@njit
def field(c: Record, head: int, column: int) -> int:
    """Return an entry of the table."""
    return integers(c.table)[head * COLUMNS + column]


@dataclass(frozen=True)
class Packing:
    """Places of the parts of every head, and the arrays that all slots share."""

    table: Array  # (heads, COLUMNS)
    omega: Array  # float32 bases of all heads, and in `pi` by rows
    pi: Array
    runs: tuple[Run, ...]  # arrays of a slot
    settings: dict[str, float]  # fields of the record
    rank: int  # columns for which scratch memory has room: at least the largest rank
    residual: bool = False  # whether heads have residuals

    def attach(self, memory: Memory) -> None:
        """Record the settings and the addresses of the arrays that all slots share."""
        for name in ("table", "omega", "pi"):
            memory.share(name, getattr(self, name))
        memory.set(**self.settings)


def full_states(layer: Layer) -> Packing:
    """Return the packing of a layer all of whose heads read their full states."""
    table = flat(layer.heads * COLUMNS, np.int64).reshape(layer.heads, COLUMNS)
    table[:, RANK] = FULL_STATE
    return Packing(table, flat(0), flat(0), (), {}, 0)


def pack(plan: SketchPlan, dtype: str, tracked: bool, shadows: bool) -> Packing:
    """Place the parts of every head, with sketches and map rows stored in a format.

    `tracked` tells whether flushes advance a master copy of U, `shadows` whether full-state heads have shadows.
    """
    keys, values, kind = padded(plan.layer.key_dim), padded(plan.layer.value_dim), SKETCH_TYPES.index(dtype)
    table = full_states(plan.layer).table
    used = np.zeros(COLUMNS, dtype=np.int64)
    omega: list[Array] = []
    pi: list[Array] = []
    for head, rank in enumerate(plan.ranks):
        if rank == FULL_STATE:
            table[head, SHADOW] = used[SHADOW]
            used[SHADOW] += values * keys if shadows else 0
            continue
        rows, bits = int(plan.map.rows(rank)), int(plan.residual_bits[head])
        table[head] = used
        table[head, [RANK, ROWS, BITS]] = rank, rows, bits
        table[head, MAP] = used[SKETCH] + rank * values
        used[SKETCH] += rank * values + rows * keys
        used[MASTER] += rank * values if tracked else 0
        used[FACTORS] += int(plan.map.elements(rank, keys)) - rows * keys
        if kind == INT8:
            # scales; columns and rows of a split form share their scales
            used[FACTORS] += rank + (rows if plan.map.storage == "factors" else 0)
        used[PENDING] += rank if plan.layer.erases and not bits else 0
        used[CODES] += bits * values * keys // 8
        used[SCALES] += values + keys if bits else 0
        across = np.zeros((keys, padded(rank, COLUMN_LANES)), dtype=np.float32)
        across[: plan.layer.key_dim, :rank] = plan.omega[head, :, :rank]
        omega.append(across)
        used[OMEGA] += across.size
        if plan.map.storage != "dense":
            along = np.zeros((rank, keys), dtype=np.float32)
            along[:, : plan.layer.key_dim] = plan.omega[head, :, :rank].T
            pi.append(along)
            used[PI] += along.size
    sizes = {name: int(used[column]) for name, column in (("packed", SKETCH), ("master", MASTER))}
    # kernels load 16 numbers at once, even from a last row of fewer
    sizes |= {"factors": int(used[FACTORS]) + LANES, "pending": plan.window * int(used[PENDING]) + LANES}
    types = {"packed": (np.float32, np.uint16, np.uint8)[kind]}
    # what reads use comes first
    order = ("packed", "factors", "pending", "master")
    runs = tuple(Run(name, (sizes[name],), types.get(name, np.float32)) for name in order)
    if used[CODES]:
        runs = Run("codes", (int(used[CODES]),), np.uint8), Run("scales", (int(used[SCALES]),), np.uint16), *runs
    runs = runs if omega else ()
    if used[SHADOW]:
        runs = *runs, Run("shadow", (int(used[SHADOW]),), np.uint16)
    settings = {
        "map": MAPS.index(plan.map.name),
        "sketch_type": kind,
        "tracked": tracked,
        "ridge": plan.map.effective_ridge,
        "pending_share": int(used[PENDING]),
    }
    rank = max(int(plan.ranks.max()), 0)
    return Packing(table, _joined(omega), _joined(pi), runs, settings, rank, bool(used[CODES]))


def _joined(parts: list[Array]) -> Array:
    """Join arrays into one that starts on a cache line."""
    whole = flat(sum(part.size for part in parts))
    if parts:
        np.concatenate([part.reshape(-1) for part in parts], out=whole)
    return whole
