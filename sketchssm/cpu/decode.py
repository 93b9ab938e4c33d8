"""The kernel of decode with a buffered window.

Workers write to separate memory, and every head executes the same instructions in any batch. So a row's result does
not depend on the other rows. A flush takes ten times as long as a read. Therefore flushes and reads are divided among
the workers separately: flushes by key head, reads by row, or by part of a row if there are few rows.
"""

from __future__ import annotations

import numpy as np

from sketchssm.cpu.cursors import accepted, advance, flushes, make_exact, position
from sketchssm.cpu.errors import add_error, exceeds, measures
from sketchssm.cpu.fold import fold_block, prepare_fold, prepare_keys, reflects
from sketchssm.cpu.jit import Kernel, njit, pasted
from sketchssm.cpu.layout import DRAFT, FLOAT32, FLUSH, REBUILD, STEP, Record, areas_record, blank, call_record
from sketchssm.cpu.llvm import LANES
from sketchssm.cpu.maps import advance_sketch, project_block, store_sketch
from sketchssm.cpu.packed import RANK, field
from sketchssm.cpu.read import keep_drafts, read, read_drafts
from sketchssm.cpu.simd import Pointer, copy, floats, fma, integers, load, splat, total
from sketchssm.cpu.states import narrow, shade, widen
from sketchssm.cpu.tiles import dots
from sketchssm.cpu.window import buffer_token
from sketchssm.cpu.workers import SERIAL
from sketchssm.layer.recurrence import FULL_STATE

PARTS_PER_WORKER = 4
"""Least number of parts into which the reads of a call are cut, for each worker."""

NO_OUTPUT = -1
"""Place of a token that has no output."""


@Kernel
def window_kernel(context: int, areas: int, worker: int) -> None:
    """Run one worker's share of a task (of a step: one token). One kernel for all tasks compiles in less time."""
    m, at = call_record(context), areas_record(areas)
    if worker == SERIAL:
        _advance(m)
    elif m.task == STEP or m.task == DRAFT:
        _decode(m, at, worker)
    elif m.task == FLUSH:
        _flush(m, at, worker)
    elif m.task == REBUILD:
        _rebuild(m, at, worker)
    else:
        _commit(m, at, worker)


@pasted
def _advance(m: Record) -> None:
    """Advance the cursors after a task, and go to the next token."""
    if m.task == STEP and m.tolerance > 0.0:
        for row in range(m.batch):
            if flushes(m, row) and exceeds(m, integers(m.rows)[row]):
                make_exact(m, integers(m.rows)[row])
    if m.task != REBUILD:
        advance(m)
    m.token += 1


@pasted
def _decode(m: Record, at: Record, worker: int) -> None:
    """Run one worker's share of one token of all rows, or of all drafts."""
    buf = floats(m.scratch + 4 * worker * at.size)
    flushing = 0
    for row in range(m.batch):
        flushing += flushes(m, row)
    parts = min(m.key_heads, -(-PARTS_PER_WORKER * m.workers // m.batch))
    folds, reads = flushing * m.key_heads, (m.batch - flushing) * parts
    # contiguous shares, so that each worker reads memory in order
    fold_from, fold_to = folds * worker // m.workers, folds * (worker + 1) // m.workers
    read_from, read_to = reads * worker // m.workers, reads * (worker + 1) // m.workers
    folded = passed = 0
    for row in range(m.batch):
        slot = integers(m.rows)[row]
        cursor = position(m, slot) if slot >= 0 else 0
        if flushes(m, row):
            for key_head in range(max(fold_from - folded, 0), min(fold_to - folded, m.key_heads)):
                _flush_and_read(m, at, buf, slot, row, cursor, key_head)
            folded += m.key_heads
            continue
        for part in range(max(read_from - passed, 0), min(read_to - passed, parts)):
            _read(m, at, buf, slot, row, cursor, part * m.key_heads // parts, (part + 1) * m.key_heads // parts)
        passed += parts


@pasted
def _read(m: Record, at: Record, buf: Pointer, slot: int, row: int, cursor: int, first: int, last: int) -> None:
    """Buffer and read a token, or all drafts, of some key heads of a row."""
    place = row * m.length + m.token
    if slot < 0:
        for t in range(m.length if m.task == DRAFT else 1):
            blank(m, (place + t) * m.heads + first * m.group, (last - first) * m.group)
    elif m.task == DRAFT:
        read_drafts(m, at, buf, slot, place, cursor, integers(m.counts)[row], first, last)
    else:
        read(m, at, buf, slot, place, cursor, first, last, floats(m.reach), slot * m.reach_stride)


@pasted
def _flush_and_read(m: Record, at: Record, buf: Pointer, slot: int, row: int, cursor: int, key_head: int) -> None:
    """Flush one key head of a row: with the new token, which reads the new state, or before the drafts."""
    place = row * m.length + m.token
    if m.task == DRAFT:
        if cursor > 0:
            _fold(m, at, buf, slot, key_head, cursor, NO_OUTPUT)
        read_drafts(m, at, buf, slot, place, 0, integers(m.counts)[row], key_head, key_head + 1)
    else:
        if measures(m, slot, key_head * m.group):
            read(m, at, buf, slot, place, cursor, key_head, key_head + 1, floats(m.reach), slot * m.reach_stride)
        else:
            buffer_token(m, at, buf, slot, place, cursor, key_head, key_head + 1)
        _fold(m, at, buf, slot, key_head, cursor + 1, place)


@njit
def _fold(m: Record, at: Record, buf: Pointer, slot: int, key_head: int, count: int, place: int) -> None:
    """Advance the states of a key head's value heads through their rings, and compute their sketches.

    The last token of a ring reads its output from the new state.
    """
    prepare_keys(m, at, buf, slot, key_head)
    size = m.values * m.keys
    for head in range(key_head * m.group, (key_head + 1) * m.group):
        sketched = field(m, head, RANK) != FULL_STATE
        state, first = floats(m.state), slot * m.state_stride + head * size
        if m.state_type != FLOAT32:
            widen(m, m.state, first, buf, at.state, size)
            state, first = buf, at.state
        prepare_fold(m, at, buf, slot, head, count)
        advances = m.tracked and not reflects(m, slot, head, count)
        norm = 0.0
        for block in range(0, m.values, LANES):
            rows = first + block * m.keys
            norm += fold_block(m, at, buf, slot, head, block, count, state, rows)
            if place != NO_OUTPUT:
                dots(state, rows, m.keys, LANES, buf, at.inputs + 2 * key_head * m.keys, m.keys, 1,
                     m.keys, buf, at.output + head * m.values + block, 0)  # fmt: skip
            if m.state_type != FLOAT32:
                narrow(m, buf, rows, m.state, slot * m.state_stride + head * size + block * m.keys, LANES * m.keys)
            if sketched and not advances:
                project_block(m, at, buf, head, block, state, rows)
        if sketched:
            if advances:
                advance_sketch(m, at, buf, slot, head, count)
            store_sketch(m, at, buf, slot, head, norm, state, first)
        else:
            shade(m, slot, head)
        if place != NO_OUTPUT:
            target = (place * m.heads + head) * m.value_dim
            if m.monitor:
                add_error(m, at, buf, slot, head, target)
            copy(floats(m.out), target, buf, at.output + head * m.values, m.value_dim)


@pasted
def _flush(m: Record, at: Record, worker: int) -> None:
    """Fold the buffered tokens of one worker's share of slots and key heads into their states."""
    buf = floats(m.scratch + 4 * worker * at.size)
    units = m.batch * m.key_heads
    for unit in range(units * worker // m.workers, units * (worker + 1) // m.workers):
        slot = integers(m.rows)[unit // m.key_heads]
        count = position(m, slot) if slot >= 0 else 0
        if count > 0:
            _fold(m, at, buf, slot, unit % m.key_heads, count, NO_OUTPUT)


@pasted
def _rebuild(m: Record, at: Record, worker: int) -> None:
    """Sketch or shade one worker's share of states that were loaded."""
    buf = floats(m.scratch + 4 * worker * at.size)
    units, size = m.batch * m.heads, m.values * m.keys
    for unit in range(units * worker // m.workers, units * (worker + 1) // m.workers):
        slot, head = integers(m.rows)[unit // m.heads], unit % m.heads
        if slot >= 0 and field(m, head, RANK) == FULL_STATE:
            shade(m, slot, head)
        elif slot >= 0:
            state, first = floats(m.state), slot * m.state_stride + head * size
            if m.state_type != FLOAT32:
                widen(m, m.state, first, buf, at.state, size)
                state, first = buf, at.state
            norm = 0.0
            for block in range(0, m.values, LANES):
                rows, squares = first + block * m.keys, splat(np.float32(0.0))
                for c in range(rows, rows + LANES * m.keys, LANES):
                    squares = fma(load(state, c), load(state, c), squares)
                norm += total(squares)
                project_block(m, at, buf, head, block, state, rows)
            store_sketch(m, at, buf, slot, head, norm, state, first)


@pasted
def _commit(m: Record, at: Record, worker: int) -> None:
    """Keep the accepted drafts of one worker's share of rows."""
    buf = floats(m.scratch + 4 * worker * at.size)
    for row in range(m.batch * worker // m.workers, m.batch * (worker + 1) // m.workers):
        slot = integers(m.rows)[row]
        if slot >= 0:
            keep_drafts(m, at, buf, slot, position(m, slot), accepted(m, row))
