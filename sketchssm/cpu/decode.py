"""Decode with a buffered window: the kernels that run slots and heads in parallel.

A unit of work is one slot's key head with all its value heads and all tokens of the call. Units share nothing they
write, and each runs the same instructions whatever the batch: a row's result does not depend on the others. Workers
take every n-th unit, so that rows which flush and rows which don't are spread over all of them.
"""

from __future__ import annotations

import numba
import numpy as np

from sketchssm.cpu.layout import KDA, MAMBA2, Array, Record, blank, open_call
from sketchssm.cpu.maps import advance_sketch, coefficients, project_block, refresh
from sketchssm.cpu.packed import PENDING, RANK, SKETCH, field
from sketchssm.cpu.simd import (
    LANES,
    Pointer,
    bfloats,
    copy,
    floats,
    fma,
    integers,
    load,
    njit,
    parallel,
    short_integers,
    splat,
    store,
    total,
)
from sketchssm.cpu.tiles import accumulate, dots
from sketchssm.cpu.window import (
    buffer_key,
    buffer_value,
    dense_query,
    fold_block,
    prepare_fold,
    prepare_keys,
    score_keys,
    weigh,
)
from sketchssm.recurrence import DENSE

__all__ = ["flush", "rebuild", "step"]


@parallel
def step(
    context: Array, areas: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, rows: Array, out: Array
) -> None:
    """Decode ``out.shape[1]`` tokens for each row; the caller moves the cursors afterwards."""
    open_call(context, q, k, v, g, beta, rows, out)
    for worker in numba.prange(context[0].workers):
        _step(context[0], areas[0], worker)


@njit
def _step(m: Record, at: Record, worker: int) -> None:
    """One worker's share of `step`."""
    buf = floats(m.scratch + 4 * worker * at.size)
    for unit in range(worker, m.batch * m.key_heads, m.workers):
        row, key_head = unit // m.key_heads, unit % m.key_heads
        slot = integers(m.rows)[row]
        if slot >= 0:
            _decode(m, at, buf, slot, row, key_head)
        else:
            blank(m, row, key_head * m.group, m.group)


@njit
def _decode(m: Record, at: Record, buf: Pointer, slot: int, row: int, key_head: int) -> None:
    """All tokens of one row and key head."""
    cursor = np.int64(short_integers(m.position)[slot])
    for t in range(m.length):
        place = row * m.length + t
        buffer_key(m, at, buf, place * m.key_heads + key_head, slot, key_head, cursor)
        full = cursor + 1 == m.window
        if full:
            prepare_keys(m, at, buf, slot, key_head)
        elif m.kind != KDA:
            score_keys(m, at, buf, slot, key_head, cursor + 1)
        for head in range(key_head * m.group, (key_head + 1) * m.group):
            buffer_value(m, at, buf, place * m.heads + head, slot * m.heads + head, cursor)
            if full:
                _fold(m, at, buf, slot, head, m.window)
                _read_rows(m, at, buf, slot, head, at.query)
            else:
                _read(m, at, buf, slot, head, cursor)
            copy(floats(m.out), (place * m.heads + head) * m.value_dim, buf, at.output, m.value_dim)
        cursor = 0 if full else cursor + 1


@njit
def _read(m: Record, at: Record, buf: Pointer, slot: int, head: int, cursor: int) -> None:
    """Output of the newest token, between flushes: a read of the state or its sketch, plus the buffer's part."""
    scale = weigh(m, at, buf, slot, head, cursor)
    row = slot * m.heads + head
    rank = field(m, head, RANK)
    if rank == DENSE:
        dense_query(m, at, buf, slot, head, cursor, scale)
        _read_rows(m, at, buf, slot, head, at.x)
    else:
        _sketch_coefficients(m, at, buf, slot, head, cursor, scale)
        for c in range(0, m.values, LANES):
            store(buf, at.output + c, splat(np.float32(0.0)))
        own = slot * m.packed_stride + field(m, head, SKETCH)
        if m.bfloat:
            accumulate(buf, at.output, 0, 1, m.values, buf, at.ones, buf, at.coefficients, 1, 0,
                       bfloats(m.packed), own, m.values, rank)  # fmt: skip
        else:
            accumulate(buf, at.output, 0, 1, m.values, buf, at.ones, buf, at.coefficients, 1, 0,
                       floats(m.packed), own, m.values, rank)  # fmt: skip
    accumulate(buf, at.output, 0, 1, m.values, buf, at.ones, buf, at.weights, 1, 0,
               floats(m.v), row * m.window * m.values, m.values, cursor + 1)  # fmt: skip


@njit
def _sketch_coefficients(m: Record, at: Record, buf: Pointer, slot: int, head: int, cursor: int, scale: float) -> None:
    """``C x_t = C D_{1:t} q_t - sum_j c_tj h_j`` with the projected keys ``h_j = C D_{1:j} k_j``."""
    erases = m.kind != MAMBA2
    coefficients(m, at, buf, slot, head, at.x if m.kind == KDA else at.query, 2 if erases else 1)
    rank = field(m, head, RANK)
    every = splat(scale)
    pending = slot * m.pending_stride + field(m, head, PENDING)
    if erases:
        for g in range(rank):
            floats(m.pending)[pending + cursor * rank + g] = scale * buf[at.key_coefficients + g]
    for g in range(0, rank, LANES):
        value = every * load(buf, at.coefficients + g)
        if erases:
            for j in range(cursor + 1):
                value = fma(splat(-buf[at.weights + j]), load(floats(m.pending), pending + j * rank + g), value)
        store(buf, at.coefficients + g, value)


@njit
def _read_rows(m: Record, at: Record, buf: Pointer, slot: int, head: int, vector: int) -> None:
    """Full state read of a vector in scratch."""
    first = (slot * m.heads + head) * m.values * m.keys
    dots(floats(m.state), first, m.keys, m.values, buf, vector, m.keys, 1, m.keys, buf, at.output, 0)


@njit
def _fold(m: Record, at: Record, buf: Pointer, slot: int, head: int, count: int) -> None:
    """Advance a head's state through its ring, 16 rows at a time, and sketch it anew."""
    prepare_fold(m, at, buf, slot, head, count)
    sketched = field(m, head, RANK) != DENSE
    norm = 0.0
    for block in range(0, m.values, LANES):
        norm += fold_block(m, at, buf, slot, head, block, count)
        if sketched and m.kind == KDA:
            project_block(m, at, buf, slot, head, block)
    if sketched:
        if m.kind != KDA:
            advance_sketch(m, at, buf, slot, head, count)
        refresh(m, at, buf, slot, head, norm)


@parallel
def flush(context: Array, areas: Array, slots: Array) -> None:
    """Fold what the slots have buffered into their states."""
    for worker in numba.prange(context[0].workers):
        _flush(context[0], areas[0], worker, slots)


@njit
def _flush(m: Record, at: Record, worker: int, slots: Array) -> None:
    """One worker's share of `flush`."""
    buf = floats(m.scratch + 4 * worker * at.size)
    for unit in range(worker, slots.size * m.key_heads, m.workers):
        slot, key_head = slots[unit // m.key_heads], unit % m.key_heads
        count = np.int64(short_integers(m.position)[slot]) if slot >= 0 else 0
        if count > 0:
            prepare_keys(m, at, buf, slot, key_head)
            for head in range(key_head * m.group, (key_head + 1) * m.group):
                _fold(m, at, buf, slot, head, count)


@parallel
def rebuild(context: Array, areas: Array, slots: Array) -> None:
    """Sketch states anew, as after loading them."""
    for worker in numba.prange(context[0].workers):
        _rebuild(context[0], areas[0], worker, slots)


@njit
def _rebuild(m: Record, at: Record, worker: int, slots: Array) -> None:
    """One worker's share of `rebuild`."""
    buf = floats(m.scratch + 4 * worker * at.size)
    state = floats(m.state)
    for unit in range(worker, slots.size * m.heads, m.workers):
        slot, head = slots[unit // m.heads], unit % m.heads
        if slot >= 0 and field(m, head, RANK) != DENSE:
            first = (slot * m.heads + head) * m.values * m.keys
            norm = 0.0
            for block in range(0, m.values, LANES):
                squares = splat(np.float32(0.0))
                for c in range(first + block * m.keys, first + (block + LANES) * m.keys, LANES):
                    squares = fma(load(state, c), load(state, c), squares)
                norm += total(squares)
                project_block(m, at, buf, slot, head, block)
            refresh(m, at, buf, slot, head, norm)
