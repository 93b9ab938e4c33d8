"""The kernel of decode with a buffered window.

Workers write to separate memory, and every head takes the same instructions for any batch. So a row's result does not
depend on the other rows. A flush costs ten times as much as a read. Workers therefore share the flushes and the reads
of a step separately: flushes by key head, reads by row, or by part of a row where rows are few.
"""

from __future__ import annotations

import numpy as np

from sketchssm.cpu.fold import fold_block, prepare_fold, prepare_keys
from sketchssm.cpu.jit import Kernel, njit, pasted
from sketchssm.cpu.layout import KDA, Record, areas_record, blank, call_record
from sketchssm.cpu.maps import advance_sketch, project_block, refresh
from sketchssm.cpu.packed import RANK, field
from sketchssm.cpu.read import read
from sketchssm.cpu.simd import LANES, Pointer, copy, floats, fma, integers, load, short_integers, splat, total
from sketchssm.cpu.tiles import dots
from sketchssm.cpu.window import buffer_token
from sketchssm.cpu.workers import SERIAL
from sketchssm.recurrence import DENSE

__all__ = ["FLUSH", "REBUILD", "STEP", "window_kernel"]

PARTS_PER_WORKER = 4
"""Least number of parts into which the reads of a call are cut, for each worker."""

NO_OUTPUT = -1
"""Place of a token that has no output."""


STEP, FLUSH, REBUILD = range(3)
"""Tasks of the kernel. One kernel for all of them compiles in less time than three."""


@Kernel
def window_kernel(context: int, areas: int, worker: int) -> None:
    """Run one worker's share of a task; of a step, for one token."""
    m, at = call_record(context), areas_record(areas)
    if worker == SERIAL:
        _advance(m)
    elif m.task == STEP:
        _step(m, at, worker)
    elif m.task == FLUSH:
        _flush(m, at, worker)
    else:
        _rebuild(m, at, worker)


@pasted
def _advance(m: Record) -> None:
    """Move the cursors by one token, or to the start of a window, and go to the next token."""
    position = short_integers(m.position)
    for row in range(m.batch):
        slot = integers(m.rows)[row]
        if slot >= 0:
            position[slot] = (position[slot] + 1) % m.window if m.task == STEP else 0
    m.token += 1


@pasted
def _step(m: Record, at: Record, worker: int) -> None:
    """Run one worker's share of one token."""
    buf = floats(m.scratch + 4 * worker * at.size)
    flushing = 0
    for row in range(m.batch):
        flushing += _flushes(m, row)
    parts = min(m.key_heads, -(-PARTS_PER_WORKER * m.workers // m.batch))
    flushes, reads = flushing * m.key_heads, (m.batch - flushing) * parts
    # contiguous shares, so that each worker reads memory in order
    flush_from, flush_to = flushes * worker // m.workers, flushes * (worker + 1) // m.workers
    read_from, read_to = reads * worker // m.workers, reads * (worker + 1) // m.workers
    flushed = passed = 0
    for row in range(m.batch):
        slot, place = integers(m.rows)[row], row * m.length + m.token
        cursor = np.int64(short_integers(m.position)[slot]) if slot >= 0 else 0
        if _flushes(m, row):
            for key_head in range(max(flush_from - flushed, 0), min(flush_to - flushed, m.key_heads)):
                buffer_token(m, at, buf, slot, place, cursor, key_head, key_head + 1)
                _fold(m, at, buf, slot, key_head, m.window, place)
            flushed += m.key_heads
            continue
        for part in range(max(read_from - passed, 0), min(read_to - passed, parts)):
            first, last = part * m.key_heads // parts, (part + 1) * m.key_heads // parts
            if slot >= 0:
                read(m, at, buf, slot, place, cursor, first, last)
            else:
                blank(m, place * m.heads + first * m.group, (last - first) * m.group)
        passed += parts


@pasted
def _flushes(m: Record, row: int) -> bool:
    """Whether this token completes a row's window."""
    slot = integers(m.rows)[row]
    return slot >= 0 and short_integers(m.position)[slot] + 1 == m.window


@njit
def _fold(m: Record, at: Record, buf: Pointer, slot: int, key_head: int, count: int, place: int) -> None:
    """Advance the states of a key head's value heads through their rings, and sketch them anew.

    The last token of a window reads its output from the new state.
    """
    prepare_keys(m, at, buf, slot, key_head)
    for head in range(key_head * m.group, (key_head + 1) * m.group):
        prepare_fold(m, at, buf, slot, head, count)
        sketched = field(m, head, RANK) != DENSE
        norm = 0.0
        for block in range(0, m.values, LANES):
            norm += fold_block(m, at, buf, slot, head, block, count)
            if place != NO_OUTPUT:
                rows = (slot * m.heads + head) * m.values + block
                dots(floats(m.state), rows * m.keys, m.keys, LANES, buf, at.inputs + 2 * key_head * m.keys, m.keys, 1,
                     m.keys, buf, at.output + head * m.values + block, 0)  # fmt: skip
            if sketched and m.kind == KDA:
                project_block(m, at, buf, slot, head, block)
        if sketched:
            if m.kind != KDA:
                advance_sketch(m, at, buf, slot, head, count)
            refresh(m, at, buf, slot, head, norm)
        if place != NO_OUTPUT:
            target = (place * m.heads + head) * m.value_dim
            copy(floats(m.out), target, buf, at.output + head * m.values, m.value_dim)


@pasted
def _flush(m: Record, at: Record, worker: int) -> None:
    """Fold the buffered tokens of one worker's share of slots and key heads into their states."""
    buf = floats(m.scratch + 4 * worker * at.size)
    units = m.batch * m.key_heads
    for unit in range(units * worker // m.workers, units * (worker + 1) // m.workers):
        slot = integers(m.rows)[unit // m.key_heads]
        count = np.int64(short_integers(m.position)[slot]) if slot >= 0 else 0
        if count > 0:
            _fold(m, at, buf, slot, unit % m.key_heads, count, NO_OUTPUT)


@pasted
def _rebuild(m: Record, at: Record, worker: int) -> None:
    """Sketch one worker's share of states that were loaded."""
    buf = floats(m.scratch + 4 * worker * at.size)
    state = floats(m.state)
    units = m.batch * m.heads
    for unit in range(units * worker // m.workers, units * (worker + 1) // m.workers):
        slot, head = integers(m.rows)[unit // m.heads], unit % m.heads
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
