"""How sketches are packed: each head takes the room of its own rank.

A slot holds, head after head, the sketch U (G rows of V) and the rows of the map (rows of K) in the sketch's type.
Other arrays hold float32 numbers: the factors w and F, the projected keys ``h_j = C D_{1:j} k_j`` (token after token,
like the ring), and for scalar gates the master, a float32 copy of U that flushes advance by itself (see
`sketchssm.cpu.maps`). A table says where each head's parts begin. All slots share Omega, with its columns on lanes,
and Pi, by rows, both in float32.

For `lowrank` and `prior` the rows are ``B - Pi Diag(w) L`` instead of B, which spares L. With z = Pi^T x,

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

# Columns of the table: a head's rank and its map's rows, then where its parts begin, in a slot or in what all share.
RANK, ROWS, SKETCH, MAP, MASTER, FACTORS, PENDING, OMEGA, PI = range(9)
COLUMNS = 9


@njit
def field(c: Record, head: int, column: int) -> int:
    """One entry of the table."""
    return integers(c.table)[head * COLUMNS + column]


def pack(memory: Memory, plan: SketchPlan | None, dtype: str) -> int:
    """Allocate zero sketches for all slots and record where they are.

    Parameters
    ----------
    memory : Memory
        Where to.
    plan : SketchPlan or None
        Ranks, bases and settings; None makes every head dense.
    dtype : {"bfloat16", "float32"}
        How sketches and map rows are stored.

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
    # 16 numbers are loaded at once, also from the last row of fewer
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
    """Arrays one after the other, on a cache line."""
    whole = flat(sum(part.size for part in parts))
    if parts:
        np.concatenate([part.reshape(-1) for part in parts], out=whole)
    return whole
