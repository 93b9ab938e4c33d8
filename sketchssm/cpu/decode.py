"""Decode with a buffered window: the kernels that run rows and heads in parallel.

Workers share nothing that they write, and every head goes through the same instructions whatever the batch: a row's
result does not depend on the others. Rows that flush cost ten times as much as rows that don't, so each kind is dealt
out to the workers on its own: flushes by key head, reads by row, or by part of one where rows are few.
"""

from __future__ import annotations

import numba
import numpy as np

from sketchssm.cpu.fold import fold_block, prepare_fold, prepare_keys
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
from sketchssm.cpu.window import add_values, buffer_token, dense_query, weigh
from sketchssm.recurrence import DENSE

__all__ = ["flush", "rebuild", "step"]

PARTS_PER_WORKER = 4
"""Parts that the reads of a call are cut into at least, to be shared evenly."""


@parallel
def step(
    context: Array, areas: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, rows: Array, out: Array
) -> None:
    """Decode ``out.shape[1]`` tokens for each row, one after the other."""
    open_call(context, q, k, v, g, beta, rows, out)
    for token in range(out.shape[1]):
        context[0].token = token
        for worker in numba.prange(context[0].workers):
            _step(context[0], areas[0], worker)
        _advance(context[0])


@njit
def _advance(m: Record) -> None:
    """Move the cursors by one token."""
    position = short_integers(m.position)
    for row in range(m.batch):
        slot = integers(m.rows)[row]
        if slot >= 0:
            position[slot] = (position[slot] + 1) % m.window


@njit
def _step(m: Record, at: Record, worker: int) -> None:
    """One worker's share of one token."""
    buf = floats(m.scratch + 4 * worker * at.size)
    parts = min(m.key_heads, -(-PARTS_PER_WORKER * m.workers // m.batch))
    flushes = reads = 0
    for row in range(m.batch):
        slot, place = integers(m.rows)[row], row * m.length + m.token
        cursor = np.int64(short_integers(m.position)[slot]) if slot >= 0 else 0
        if slot >= 0 and cursor + 1 == m.window:
            for key_head in range(m.key_heads):
                if (flushes + key_head) % m.workers == worker:
                    buffer_token(m, at, buf, slot, place, cursor, key_head, key_head + 1)
                    _fold(m, at, buf, slot, key_head, m.window)
                    _read_new_state(m, at, buf, slot, place, key_head)
            flushes += m.key_heads
            continue
        for part in range(parts):
            if (reads + part) % m.workers == worker:
                first, last = part * m.key_heads // parts, (part + 1) * m.key_heads // parts
                if slot >= 0:
                    _read(m, at, buf, slot, place, cursor, first, last)
                else:
                    blank(m, place * m.heads + first * m.group, (last - first) * m.group)
        reads += parts


@njit
def _read(m: Record, at: Record, buf: Pointer, slot: int, place: int, cursor: int, first: int, last: int) -> None:
    """Outputs of one token between flushes: reads of states or sketches, plus the buffer's part."""
    buffer_token(m, at, buf, slot, place, cursor, first, last)
    weigh(m, at, buf, slot, cursor, first, last)
    for head in range(first * m.group, last * m.group):
        if field(m, head, RANK) == DENSE:
            x = dense_query(m, at, buf, slot, head, cursor)
            _read_rows(m, at, buf, floats(m.served), slot, head, x)
        else:
            _read_sketch(m, at, buf, slot, head, cursor)
    add_values(m, at, buf, slot, cursor, first * m.group, last * m.group)
    for head in range(first * m.group, last * m.group):
        target = (place * m.heads + head) * m.value_dim
        copy(floats(m.out), target, buf, at.output + head * m.values, m.value_dim)


@njit
def _read_sketch(m: Record, at: Record, buf: Pointer, slot: int, head: int, cursor: int) -> None:
    """Output of one head's sketch, ``U C x_t``.

    ``C x_t = C D_{1:t} q_t - sum_j c_tj h_j`` with the projected keys ``h_j = C D_{1:j} k_j`` of all tokens so far.
    """
    rank, erases = field(m, head, RANK), m.kind != MAMBA2
    if m.kind == KDA:
        x, scale = at.x + 2 * head * m.keys, np.float32(1.0)
    else:
        x = at.inputs + 2 * (head // m.group) * m.keys
        scale = floats(m.start)[(slot * m.window + cursor) * m.heads + head]
    coefficients(m, at, buf, slot, head, x, 2 if erases else 1)
    pending = slot * m.pending_stride + field(m, head, PENDING)
    if erases:
        newest = pending + cursor * m.pending_share
        for g in range(rank):
            floats(m.pending)[newest + g] = scale * buf[at.key_coefficients + g]
    for g in range(0, rank, LANES):
        value = splat(scale) * load(buf, at.coefficients + g)
        if erases:
            weights = at.weights + head * m.tokens
            for j in range(cursor):
                projected = load(floats(m.pending), pending + j * m.pending_share + g)
                value = fma(splat(-buf[weights + j]), projected, value)
            # the newest comes from scratch: loading what was stored in pieces a moment ago would stall
            value = fma(splat(-scale * buf[weights + cursor]), load(buf, at.key_coefficients + g), value)
        store(buf, at.coefficients + g, value)
    output = at.output + head * m.values
    for c in range(output, output + m.values, LANES):
        store(buf, c, splat(np.float32(0.0)))
    own = slot * m.packed_stride + field(m, head, SKETCH)
    if m.bfloat:
        accumulate(buf, output, 0, 1, m.values, buf, at.ones, buf, at.coefficients, 1, 0,
                   bfloats(m.packed), own, m.values, rank)  # fmt: skip
    else:
        accumulate(buf, output, 0, 1, m.values, buf, at.ones, buf, at.coefficients, 1, 0,
                   floats(m.packed), own, m.values, rank)  # fmt: skip


@njit
def _read_rows(m: Record, at: Record, buf: Pointer, states: Pointer, slot: int, head: int, x: int) -> None:
    """Output of one head's full state for a vector in scratch."""
    first = (slot * m.heads + head) * m.values * m.keys
    dots(states, first, m.keys, m.values, buf, x, m.keys, 1, m.keys, buf, at.output + head * m.values, 0)


@njit
def _read_new_state(m: Record, at: Record, buf: Pointer, slot: int, place: int, key_head: int) -> None:
    """Outputs of the token that completes a window: from the state that it completes."""
    for head in range(key_head * m.group, (key_head + 1) * m.group):
        _read_rows(m, at, buf, floats(m.state), slot, head, at.inputs + 2 * key_head * m.keys)
        target = (place * m.heads + head) * m.value_dim
        copy(floats(m.out), target, buf, at.output + head * m.values, m.value_dim)


@njit
def _fold(m: Record, at: Record, buf: Pointer, slot: int, key_head: int, count: int) -> None:
    """Advance the states of a key head's value heads through their rings, and sketch them anew."""
    prepare_keys(m, at, buf, slot, key_head)
    for head in range(key_head * m.group, (key_head + 1) * m.group):
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
        slot = slots[unit // m.key_heads]
        count = np.int64(short_integers(m.position)[slot]) if slot >= 0 else 0
        if count > 0:
            _fold(m, at, buf, slot, unit % m.key_heads, count)


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
