"""Packed sketches: each head takes memory for its own rank.

Each slot has these parts, head after head:

==========  ======================================================  =============
part        contents                                                type
==========  ======================================================  =============
SKETCH      sketch U, G rows of V                                   sketch's type
MAP         rows of the coefficient map, of K                       sketch's type
MASTER      a master copy of U, for scalar gates                    float32
FACTORS     w and F of the map                                      float32
PENDING     projected keys ``h_j = C D_{1:j} k_j``, token by token  float32
==========  ======================================================  =============

All slots share OMEGA, the bases with their columns on lanes, and PI, the projections by rows. Both are float32. A
table holds the place of every part of every head. Flushes advance the master copy (see `sketchssm.cpu.maps`).

For `lowrank` and `prior`, MAP holds the rows ``B - Pi Diag(w) L`` instead of B, so that L need not be stored. With
z = Pi^T x,

    C x = w z + F (B^T x - L^T (w z)) = w z + F (B - Pi Diag(w) L)^T x.
"""

from __future__ import annotations

import numpy as np

from sketchssm.coefficients import MAPS
from sketchssm.cpu.columns import COLUMN_LANES
from sketchssm.cpu.jit import njit
from sketchssm.cpu.layout import Array, Memory, Record, flat
from sketchssm.cpu.simd import LANES, integers, padded
from sketchssm.plan import SketchPlan
from sketchssm.recurrence import DENSE

__all__ = [
    "EXACT",
    "FACTORS",
    "LOWRANK",
    "MAP",
    "MASTER",
    "OMEGA",
    "PENDING",
    "PI",
    "PRIOR",
    "RANK",
    "RIDGE",
    "ROWS",
    "SKETCH",
    "field",
    "pack",
]

EXACT, RIDGE, LOWRANK, PRIOR = (MAPS.index(name) for name in ("exact", "ridge", "lowrank", "prior"))

# Columns of the table: a head's rank, the number of its map's rows, and where its parts begin.
RANK, ROWS, SKETCH, MAP, MASTER, FACTORS, PENDING, OMEGA, PI = range(9)
COLUMNS = 9


@njit
def field(c: Record, head: int, column: int) -> int:
    """Return an entry of the table."""
    return integers(c.table)[head * COLUMNS + column]


def pack(memory: Memory, plan: SketchPlan | None, dtype: str) -> int:
    """Allocate sketches of zeros for all slots and record where their parts are.

    Parameters
    ----------
    memory : Memory
        Memory of the engine.
    plan : SketchPlan or None
        Ranks, bases and settings; None makes every head dense.
    dtype : {"bfloat16", "float32"}
        Type in which sketches and map rows are stored.

    Returns
    -------
    int
        The largest rank in use.
    """
    sizes = memory.context[0]
    slots, heads, window = (int(sizes[name]) for name in ("slots", "heads", "window"))
    keys, values = int(sizes["keys"]), int(sizes["values"])
    table = memory.own("table", heads * COLUMNS, np.int64).reshape(heads, COLUMNS)
    table[:, RANK] = DENSE
    if plan is None:
        return 0
    tracked = plan.layer.kind != "kda"
    used = np.zeros(COLUMNS, dtype=np.int64)
    omega: list[Array] = []
    pi: list[Array] = []
    for head, rank in enumerate(plan.ranks):
        if rank == DENSE:
            continue
        rows = int(plan.map.rows(rank))
        table[head] = used
        table[head, [RANK, ROWS]] = rank, rows
        table[head, MAP] = used[SKETCH] + rank * values
        used[SKETCH] += rank * values + rows * keys
        used[MASTER] += rank * values if tracked else 0
        used[FACTORS] += int(plan.map.elements(rank, keys)) - rows * keys
        used[PENDING] += rank if plan.layer.erases else 0
        across = np.zeros((keys, padded(rank, COLUMN_LANES)), dtype=np.float32)
        across[: plan.layer.key_dim, :rank] = plan.omega[head, :, :rank]
        omega.append(across)
        used[OMEGA] += across.size
        if plan.map.storage != "dense":
            along = np.zeros((rank, keys), dtype=np.float32)
            along[:, : plan.layer.key_dim] = plan.projection[head, :, :rank].T
            pi.append(along)
            used[PI] += along.size
    memory.own("packed", slots * used[SKETCH], np.uint16 if dtype == "bfloat16" else np.float32)
    memory.own("master", slots * used[MASTER])
    # kernels load 16 numbers at once, even from a last row of fewer
    memory.own("factors", slots * used[FACTORS] + LANES)
    memory.own("pending", slots * window * used[PENDING] + LANES)
    memory.share("omega", _joined(omega))
    memory.share("pi", _joined(pi))
    memory.set(
        map=MAPS.index(plan.map.name),
        bfloat=dtype == "bfloat16",
        ridge=plan.map.effective_ridge,
        packed_stride=used[SKETCH],
        master_stride=used[MASTER],
        factors_stride=used[FACTORS],
        pending_stride=window * used[PENDING],
        pending_share=used[PENDING],
    )
    return int(max(plan.ranks.max(), 0))


def _joined(parts: list[Array]) -> Array:
    """Join arrays into one that starts on a cache line."""
    whole = flat(sum(part.size for part in parts))
    if parts:
        np.concatenate([part.reshape(-1) for part in parts], out=whole)
    return whole
