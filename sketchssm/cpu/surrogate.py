"""The state that a sketch stands for, from which a refresh advances: `sketchssm.reference.refresh`."""

from __future__ import annotations

import numpy as np

from sketchssm.cpu.columns import COLUMN_LANES, columns_8
from sketchssm.cpu.jit import njit
from sketchssm.cpu.layout import Record
from sketchssm.cpu.maps import lanes_up
from sketchssm.cpu.packed import (
    BFLOAT,
    EXACT,
    FACTORS,
    FP8,
    INT8,
    LOWRANK,
    MAP,
    OMEGA,
    PI,
    PRIOR,
    RANK,
    RIDGE,
    ROWS,
    SKETCH,
    WIDE,
    field,
)
from sketchssm.cpu.simd import LANES, Pointer, bfloats, copy, e4m3s, floats, int4s, int8s, load, splat, store
from sketchssm.cpu.tiles import accumulate

__all__ = ["surrogate"]


@njit
def surrogate(m: Record, at: Record, buf: Pointer, slot: int, head: int) -> None:
    """Compute ``S^`` of a head's sketch, by rows of V, in ``state``: ``S^^T = U R``."""
    rank = field(m, head, RANK)
    own, scales = slot * m.packed_stride, slot * m.factors_stride + field(m, head, FACTORS)
    _unpack(m, buf, head, own + field(m, head, SKETCH), at.sketch, rank, m.values)
    _scale(m, buf, at.sketch, rank, m.values, scales)
    if m.map == EXACT or m.map == RIDGE:
        _unpack(m, buf, head, own + field(m, head, MAP), at.rows, rank, m.keys)
    else:
        copy(buf, at.rows, floats(m.pi), field(m, head, PI), rank * m.keys)
        if m.map == LOWRANK or m.map == PRIOR:
            _rows_of_factors(m, at, buf, slot, head)
    for c in range(at.state, at.state + m.values * m.keys, LANES):
        store(buf, c, splat(np.float32(0.0)))
    accumulate(buf, at.state, m.keys, m.values, m.keys, buf, at.ones, buf, at.sketch, m.values, 1,
               buf, at.rows, m.keys, rank)  # fmt: skip


@njit
def _unpack(m: Record, buf: Pointer, head: int, source: int, target: int, rows: int, width: int) -> None:
    """Load packed rows into scratch memory, codes without their scales."""
    wide = min(field(m, head, WIDE), rows) * width
    for c in range(0, rows * width, LANES):
        if m.sketch_type == BFLOAT:
            store(buf, target + c, load(bfloats(m.packed), source + c))
        elif m.sketch_type < INT8:
            store(buf, target + c, load(floats(m.packed), source + c))
        elif m.sketch_type == FP8:
            store(buf, target + c, load(e4m3s(m.packed), source + c))
        elif c < wide:
            store(buf, target + c, load(int8s(m.packed), source + c))
        else:
            store(buf, target + c, load(int4s(m.packed + source + wide), c - wide))


@njit
def _scale(m: Record, buf: Pointer, first: int, rows: int, width: int, scales: int) -> None:
    """Multiply rows of codes by their scales."""
    if m.sketch_type < INT8:
        return
    for i in range(rows):
        every = splat(floats(m.factors)[scales + i])
        for c in range(first + i * width, first + (i + 1) * width, LANES):
            store(buf, c, every * load(buf, c))


@njit
def _rows_of_factors(m: Record, at: Record, buf: Pointer, slot: int, head: int) -> None:
    """Add to ``Pi^T`` in ``rows`` what the factors of a map know: ``R = Pi^T + C (I - Omega Pi^T)``.

    With the stored rows ``T = (B - Pi Diag(w) L)^T`` the map is ``C = Diag(w) Pi^T + F T``. As ``Pi^T Omega = I``,
    ``R = Pi^T + F (T - (T Omega) Pi^T)``.
    """
    rank, rows, lanes = field(m, head, RANK), field(m, head, ROWS), m.columns
    factors, width = slot * m.factors_stride + field(m, head, FACTORS), lanes_up(rank, COLUMN_LANES)
    _unpack(m, buf, head, slot * m.packed_stride + field(m, head, MAP), at.state, rows, m.keys)
    if m.sketch_type >= INT8:
        _scale(m, buf, at.state, rows, m.keys, factors + rank)
        factors += rank + rows
    for i in range(0, rows, LANES):
        for g in range(0, rank, COLUMN_LANES):
            columns_8(buf, at.state + i * m.keys, m.keys, floats(m.omega), field(m, head, OMEGA) + g, width, m.keys,
                      buf, at.low + g * lanes + i, lanes)  # fmt: skip
    for c in range(at.low, at.low + rank * lanes, LANES):
        store(buf, c, splat(np.float32(-1.0)) * load(buf, c))
    accumulate(buf, at.state, m.keys, rows, m.keys, buf, at.ones, buf, at.low, lanes, 1,
               floats(m.pi), field(m, head, PI), m.keys, rank)  # fmt: skip
    accumulate(buf, at.rows, m.keys, rank, m.keys, buf, at.ones, floats(m.factors), factors + rank, rank, 1,
               buf, at.state, m.keys, rows)  # fmt: skip
