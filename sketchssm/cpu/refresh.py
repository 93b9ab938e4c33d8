"""Refresh a sketch between flushes, without the state: `sketchssm.reference.refresh`.

The surrogate ``S^^T = U R`` of rank G advances through the W tokens of a window as a product of its columns, by rows
of V, and of its rows: ``S'^T = Y X`` with ``Y = [U, w]`` and ``X = [R D; l^T]``. No matrix ``(V, K)`` is formed,
unless float32 cannot hold the squares of S'.
"""

from __future__ import annotations

import numpy as np

from sketchssm.cpu.columns import COLUMN_LANES, columns_8, columns_16
from sketchssm.cpu.fold import fold_block, prepare_fold, prepare_keys
from sketchssm.cpu.jit import njit
from sketchssm.cpu.layout import KDA, MAMBA2, Record
from sketchssm.cpu.maps import (
    LEAST_SQUARES,
    MOST_SQUARES,
    begin_map,
    end_map,
    lanes_up,
    multiply,
    project_block,
    store_sketch,
)
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
from sketchssm.cpu.tiles import accumulate, dots

__all__ = ["refresh"]


@njit
def refresh(m: Record, at: Record, buf: Pointer, slot: int, key_head: int, start: int) -> None:
    """Advance the sketches of a key head's value heads through the window from token `start` of the ring on."""
    prepare_keys(m, at, buf, slot, start, key_head)
    for head in range(key_head * m.group, (key_head + 1) * m.group):
        prepare_fold(m, at, buf, slot, head, start, m.window)
        _advance(m, at, buf, slot, head, start)
        norm = _norm(m, at, buf, head)
        if LEAST_SQUARES < norm < MOST_SQUARES:
            _store_factors(m, at, buf, slot, head, norm)
        else:
            _store_formed(m, at, buf, slot, head, start)


@njit
def _advance(m: Record, at: Record, buf: Pointer, slot: int, head: int, start: int) -> None:
    """Compute Y in ``wide_values`` and X in ``wide_keys``, row by row."""
    rank, values, keys = field(m, head, RANK), m.values, m.keys
    writes, left = at.wide_values + rank * values, at.wide_keys + rank * keys
    _surrogate(m, at, buf, slot, head, at.wide_values, at.wide_keys)
    for s in range(m.window):
        value = slot * m.v_stride + (start + s) * m.value_row + head * values
        copy(buf, writes + s * values, floats(m.v), value, values)
        if m.kind == KDA:
            copy(buf, left + s * keys, buf, at.left + s * keys, keys)
        else:
            key = slot * m.k_stride + (start + s) * m.key_row + head // m.group * keys
            copy(buf, left + s * keys, floats(m.k), key, keys)
    if m.kind != MAMBA2:
        _erase(m, at, buf, rank, writes)
    for s in range(m.window):
        multiply(buf, writes + s * values, values, buf[at.reach + s])
    for g in range(rank):
        for c in range(0, keys, LANES):
            place = at.wide_keys + g * keys + c
            store(buf, place, load(buf, at.decay + c) * load(buf, place))


@njit
def _erase(m: Record, at: Record, buf: Pointer, rank: int, writes: int) -> None:
    """Replace the values of a window's tokens by the tokens' writes: subtract predictions and solve."""
    products, values = at.wide_small, m.values
    for g in range(0, rank, LANES):
        for s in range(0, m.window, LANES):
            columns_16(buf, at.wide_keys + g * m.keys, m.keys, buf, at.keys_across + s, m.tokens, m.keys,
                       buf, products + s * m.columns + g, m.columns)  # fmt: skip
    for s in range(m.window):
        multiply(buf, products + s * m.columns, rank, -buf[at.start + s])
    accumulate(buf, writes, values, m.window, values, buf, at.ones, buf, products, 1, m.columns,
               buf, at.wide_values, values, rank)  # fmt: skip
    for s in range(m.window):
        multiply(buf, writes + s * values, values, buf[at.gram + s * (m.tokens + 1)])
        accumulate(buf, writes + s * values, 0, 1, values, buf, at.ones, buf, at.gram + s * m.tokens, 1, 0,
                   buf, writes, values, s)  # fmt: skip


@njit
def _norm(m: Record, at: Record, buf: Pointer, head: int) -> float:
    """``|S'|_F^2 = <Y^T Y, X X^T>``."""
    count, width = field(m, head, RANK) + m.window, m.columns + m.tokens
    norm = 0.0
    for j in range(0, count, 2):
        taken, rest = min(2, count - j), count - j
        y, x = at.wide_values + j * m.values, at.wide_keys + j * m.keys
        dots(buf, y, m.values, rest, buf, y, m.values, taken, m.values, buf, at.wide_small, width)
        dots(buf, x, m.keys, rest, buf, x, m.keys, taken, m.keys, buf, at.wide_small + 2 * width, width)
        for i in range(taken):
            place = at.wide_small + i * width
            norm += np.float64(buf[place + i]) * np.float64(buf[place + 2 * width + i])
            for r in range(i + 1, rest):
                norm += 2.0 * np.float64(buf[place + r]) * np.float64(buf[place + 2 * width + r])
    return norm


@njit
def _store_factors(m: Record, at: Record, buf: Pointer, slot: int, head: int, norm: float) -> None:
    """Store the sketch ``U' = Y (X Omega)`` and the map, whose rows are ``(T^T Y) X``."""
    rank, rows, width = field(m, head, RANK), field(m, head, ROWS), m.columns + m.tokens
    count, y, x = rank + m.window, at.wide_values, at.wide_keys
    padded_rank = lanes_up(rank, COLUMN_LANES)
    for i in range(0, count, LANES):
        for g in range(0, rank, COLUMN_LANES):
            columns_8(buf, x + i * m.keys, m.keys, floats(m.omega), field(m, head, OMEGA) + g, padded_rank, m.keys,
                      buf, at.wide_small + g * width + i, width)  # fmt: skip
    for c in range(at.sketch, at.sketch + rank * m.values, LANES):
        store(buf, c, splat(np.float32(0.0)))
    accumulate(buf, at.sketch, m.values, rank, m.values, buf, at.ones, buf, at.wide_small, 1, width,
               buf, y, m.values, count)  # fmt: skip
    unit, mu = begin_map(m, at, buf, slot, head, norm, buf, at.state)  # a norm in this range needs no state
    for i in range(0, rows, 2):
        dots(buf, y, m.values, count, buf, at.span + i * m.values, m.values, min(2, rows - i), m.values,
             buf, at.wide_small + i * width, width)  # fmt: skip
    energy = accumulate(buf, at.rows, m.keys, rows, m.keys, buf, at.ones, buf, at.wide_small, 1, width,
                        buf, x, m.keys, count)  # fmt: skip
    end_map(m, at, buf, slot, head, unit, mu, energy)


@njit
def _store_formed(m: Record, at: Record, buf: Pointer, slot: int, head: int, start: int) -> None:
    """Form the surrogate, fold the window into it, and sketch it as a state."""
    rank = field(m, head, RANK)
    _surrogate(m, at, buf, slot, head, at.sketch, at.rows)
    for c in range(at.state, at.state + m.values * m.keys, LANES):
        store(buf, c, splat(np.float32(0.0)))
    accumulate(buf, at.state, m.keys, m.values, m.keys, buf, at.ones, buf, at.sketch, m.values, 1,
               buf, at.rows, m.keys, rank)  # fmt: skip
    norm = 0.0
    for block in range(0, m.values, LANES):
        rows = at.state + block * m.keys
        norm += fold_block(m, at, buf, slot, head, block, start, m.window, buf, rows)
        project_block(m, at, buf, head, block, buf, rows)
    store_sketch(m, at, buf, slot, head, norm, buf, at.state)


@njit
def _surrogate(m: Record, at: Record, buf: Pointer, slot: int, head: int, columns: int, rows: int) -> None:
    """Load the columns of U and compute the rows R of a head's surrogate, ``S^^T = U R``."""
    rank = field(m, head, RANK)
    own, scales = slot * m.packed_stride, slot * m.factors_stride + field(m, head, FACTORS)
    _unpack(m, buf, head, own + field(m, head, SKETCH), columns, rank, m.values)
    _scale(m, buf, columns, rank, m.values, scales)
    if m.map == EXACT or m.map == RIDGE:
        _unpack(m, buf, head, own + field(m, head, MAP), rows, rank, m.keys)
    else:
        copy(buf, rows, floats(m.pi), field(m, head, PI), rank * m.keys)
        if m.map == LOWRANK or m.map == PRIOR:
            _rows_of_factors(m, at, buf, slot, head, rows)


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
def _rows_of_factors(m: Record, at: Record, buf: Pointer, slot: int, head: int, target: int) -> None:
    """Compute R in scratch memory from ``Pi^T`` and the factors of a map: ``R = Pi^T + C (I - Omega Pi^T)``.

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
    accumulate(buf, target, m.keys, rank, m.keys, buf, at.ones, floats(m.factors), factors + rank, rank, 1,
               buf, at.state, m.keys, rows)  # fmt: skip
