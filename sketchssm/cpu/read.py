"""Reads between flushes: outputs ``o_t = U C x_t + sum_s c_ts v_s`` of one token.

A full-state head reads its state, or the shadow of it, instead of ``U C``. A head with a residual adds the residual's
product with its query (`sketchssm.cpu.residual`). Both compute the effective query itself. A head's operations are
chains of dependent operations, so each stage processes a few heads together.
"""

from __future__ import annotations

import numpy as np

from sketchssm.cpu.jit import njit
from sketchssm.cpu.layout import FLOAT32, HEADS_TOGETHER, Record, blank
from sketchssm.cpu.llvm import LANES
from sketchssm.cpu.packed import (
    BFLOAT,
    BITS,
    FACTORS,
    INT8,
    LOWRANK,
    MAP,
    PENDING,
    PI,
    RANK,
    ROWS,
    SHADOW,
    SKETCH,
    field,
)
from sketchssm.cpu.residual import read_residual
from sketchssm.cpu.simd import Pointer, bfloats, copy, exp, floats, fma, int8s, load, prefetch, splat, store
from sketchssm.cpu.states import widen
from sketchssm.cpu.tiles import accumulate, combine, dots
from sketchssm.cpu.window import buffer_token, carry_decays, effective_query, weigh
from sketchssm.layer.recurrence import FULL_STATE

BLOCKS_AHEAD = 1
"""Blocks of 16 rows by which reads of full states prefetch."""

LINES_AHEAD = 64
"""Cache lines by which reads of sketches prefetch: a few heads."""


@njit
def read(
    m: Record, at: Record, buf: Pointer, slot: int, place: int, cursor: int, first: int, last: int,
    reaches: Pointer, reach: int,
) -> None:  # fmt: skip
    """Append one token of some key heads to place `cursor` of the ring and compute its outputs.

    The decays that reads update from token to token begin at element `reach` of `reaches`.
    """
    buffer_token(m, at, buf, slot, place, cursor, first, last)
    weigh(m, at, buf, slot, cursor, first, last, reaches, reach)
    last *= m.group
    for start in range(first * m.group, last, HEADS_TOGETHER):
        end = min(start + HEADS_TOGETHER, last)
        for head in range(start, end):
            if field(m, head, RANK) != FULL_STATE and not field(m, head, BITS):
                _fetch(m, slot, head, cursor)
                _see(m, at, buf, slot, head, at.coefficients + 4 * (head - start) * m.columns)
        for head in range(start, end):
            spot = at.coefficients + 4 * (head - start) * m.columns
            if field(m, head, RANK) == FULL_STATE:
                _read_rows(m, at, buf, slot, head, effective_query(m, at, buf, slot, head, cursor))
            elif field(m, head, BITS):
                read_residual(m, at, buf, slot, head, effective_query(m, at, buf, slot, head, cursor), spot)
            else:
                _solve(m, at, buf, slot, head, cursor, spot)
        for head in range(start, end):
            _sum(m, at, buf, slot, head, cursor, at.coefficients + 4 * (head - start) * m.columns)
            target = (place * m.heads + head) * m.value_dim
            copy(floats(m.out), target, buf, at.output + head * m.values, m.value_dim)


@njit
def read_drafts(
    m: Record, at: Record, buf: Pointer, slot: int, place: int, cursor: int, count: int, first: int, last: int
) -> None:
    """Append drafts of some key heads to the ring and compute their outputs; `place` is the first draft's.

    All drafts of a few heads are computed together, so that the heads' sketches or states come from memory once.
    Decays that reads update in place are updated in a copy, so that rejected drafts change nothing.
    """
    together = max(1, HEADS_TOGETHER // m.group)
    for start in range(first, last, together):
        end = min(start + together, last)
        if not m.channel_decays:
            heads = start * m.group * m.tokens
            copy(buf, at.draft_reach + heads, floats(m.reach), slot * m.reach_stride + heads,
                 (end - start) * m.group * m.tokens)  # fmt: skip
        for t in range(count):
            read(m, at, buf, slot, place + t, cursor + t, start, end, buf, at.draft_reach)
    for t in range(count, m.length):
        blank(m, (place + t) * m.heads + first * m.group, (last - first) * m.group)


@njit
def keep_drafts(m: Record, at: Record, buf: Pointer, slot: int, cursor: int, count: int) -> None:
    """Update the decays of a slot for its first `count` drafts, as `read` does."""
    if m.channel_decays:
        return
    reaches = floats(m.reach)
    for t in range(cursor, cursor + count):
        copy(buf, at.now, floats(m.gate), slot * m.gate_stride + t * m.heads, m.heads)
        for head in range(0, m.heads, LANES):
            store(buf, at.now + head, exp(load(buf, at.now + head)))
        for head in range(m.heads):
            carry_decays(m, reaches, slot * m.reach_stride + head * m.tokens, t, buf[at.now + head])


@njit
def _fetch(m: Record, slot: int, head: int, cursor: int) -> None:
    """Prefetch the ring of a head, and one head's share of the packed sketches some way ahead.

    A head's numbers are too few for the hardware's prefetcher.
    """
    for s in range(cursor):
        first = slot * m.v_stride + s * m.value_row + head * m.values
        for line in range(first, first + m.values, LANES):
            prefetch(floats(m.v), line)
    # in float32 numbers, 16 to a line
    share = 4 if m.sketch_type == INT8 else (2 if m.sketch_type == BFLOAT else 1)
    own = (slot * m.packed_stride + field(m, head, SKETCH)) // share + LINES_AHEAD * LANES
    size = (field(m, head, MAP) - field(m, head, SKETCH) + field(m, head, ROWS) * m.keys) // share
    for line in range(own, own + size, LANES):
        prefetch(floats(m.packed), line)


@njit
def _see(m: Record, at: Record, buf: Pointer, slot: int, head: int, spot: int) -> None:
    """Multiply the stored rows of a head's map by the decayed query and, if the layer erases, by the newest key.

    For `lowrank`, the results are ``Pi^T x`` of both vectors, then ``(B - Pi Diag(w) L)^T x`` of both.
    """
    x = at.x + 2 * head * m.keys if m.channel_decays else at.inputs + 2 * (head // m.group) * m.keys
    vectors = 2 if m.erases else 1
    if m.map == LOWRANK:
        dots(floats(m.pi), field(m, head, PI), m.keys, field(m, head, RANK), buf, x, m.keys, vectors, m.keys,
             buf, spot, m.columns)  # fmt: skip
        spot += 2 * m.columns
    rows, own = field(m, head, ROWS), slot * m.packed_stride + field(m, head, MAP)
    if m.sketch_type == BFLOAT:
        dots(bfloats(m.packed), own, m.keys, rows, buf, x, m.keys, vectors, m.keys, buf, spot, m.columns)
    elif m.sketch_type == INT8:
        dots(int8s(m.packed), own, m.keys, rows, buf, x, m.keys, vectors, m.keys, buf, spot, m.columns)
    else:
        dots(floats(m.packed), own, m.keys, rows, buf, x, m.keys, vectors, m.keys, buf, spot, m.columns)


@njit
def _solve(m: Record, at: Record, buf: Pointer, slot: int, head: int, cursor: int, spot: int) -> None:
    """Compute the coefficients of the effective query.

    ``C x_t = C D_{1:t} q_t - sum_j c_tj h_j``, with the projected keys ``h_j = C D_{1:j} k_j`` of all tokens so far.
    """
    rank, rows, erases = field(m, head, RANK), field(m, head, ROWS), m.erases
    scales = slot * m.factors_stride + field(m, head, FACTORS)
    if m.map == LOWRANK:
        factors = scales
        if m.sketch_type == INT8:
            factors += rank + rows
        for result in range(spot, spot + (2 if erases else 1) * m.columns, m.columns):
            if m.sketch_type == INT8:
                for i in range(rows):
                    buf[result + 2 * m.columns + i] *= floats(m.factors)[scales + rank + i]
            for g in range(0, rank, LANES):
                value = load(floats(m.factors), factors + g) * load(buf, result + g)
                for i in range(rows):
                    factor = load(floats(m.factors), factors + (1 + i) * rank + g)
                    value = fma(splat(buf[result + 2 * m.columns + i]), factor, value)
                store(buf, result + g, value)
    scale = splat(
        floats(m.start)[slot * m.start_stride + cursor * m.heads + head] if not m.channel_decays else np.float32(1.0)
    )
    weights, pending = at.weights + head * m.tokens, slot * m.pending_stride + field(m, head, PENDING)
    for g in range(0, rank, LANES):
        each = scale
        if m.sketch_type == INT8:
            each = scale * load(floats(m.factors), scales + g)
        value = each * load(buf, spot + g)
        if erases:
            newest = each * load(buf, spot + m.columns + g)
            store(buf, spot + m.columns + g, newest)
            value = fma(splat(-buf[weights + cursor]), newest, value)
            for j in range(cursor):
                projected = load(floats(m.pending), pending + j * m.pending_share + g)
                value = fma(splat(-buf[weights + j]), projected, value)
        store(buf, spot + g, value)
    if erases:
        copy(floats(m.pending), pending + cursor * m.pending_share, buf, spot + m.columns, rank)


@njit
def _read_rows(m: Record, at: Record, buf: Pointer, slot: int, head: int, x: int) -> None:
    """Multiply one head's full state, or its shadow, by a vector in scratch memory."""
    output = at.output + head * m.values
    if m.shadow:
        shadow = slot * m.shadow_stride + field(m, head, SHADOW)
        dots(bfloats(m.shadow), shadow, m.keys, m.values, buf, x, m.keys, 1, m.keys, buf, output, 0)
        return
    states, first, size = floats(m.served), slot * m.served_stride + head * m.values * m.keys, LANES * m.keys
    for block in range(0, m.values, LANES):
        place = first + block * m.keys
        if m.state_type != FLOAT32:
            widen(m, m.served, place, buf, at.state, size)
            dots(buf, at.state, m.keys, LANES, buf, x, m.keys, 1, m.keys, buf, output + block, 0)
            continue
        # prefetch the next rows of this state, then those of the next head
        for line in range(place + BLOCKS_AHEAD * size, place + (BLOCKS_AHEAD + 1) * size, LANES):
            prefetch(states, line)
        dots(states, place, m.keys, LANES, buf, x, m.keys, 1, m.keys, buf, output + block, 0)


@njit
def _add_sketch(m: Record, at: Record, buf: Pointer, head: int, own: int, output: int, spot: int) -> None:
    """Add ``U c`` to the output of a head with a residual."""
    rank, v = field(m, head, RANK), m.values
    if m.sketch_type == BFLOAT:
        accumulate(buf, output, 0, 1, v, buf, at.ones, buf, spot, 1, 0, bfloats(m.packed), own, v, rank)
    elif m.sketch_type == INT8:
        accumulate(buf, output, 0, 1, v, buf, at.ones, buf, spot, 1, 0, int8s(m.packed), own, v, rank)
    else:
        accumulate(buf, output, 0, 1, v, buf, at.ones, buf, spot, 1, 0, floats(m.packed), own, v, rank)


@njit
def _sum(m: Record, at: Record, buf: Pointer, slot: int, head: int, cursor: int, spot: int) -> None:
    """Add the weighted values to the read of a sketch or of a full state, and the sketch to that of a residual."""
    rank, own = field(m, head, RANK), slot * m.packed_stride + field(m, head, SKETCH)
    output, weights = at.output + head * m.values, at.weights + head * m.tokens
    values = slot * m.v_stride + head * m.values
    if rank == FULL_STATE or field(m, head, BITS):
        combine(buf, output, m.values, buf, at.ones, buf, output, m.values, 1,
                buf, weights, floats(m.v), values, m.value_row, cursor + 1)  # fmt: skip
        if rank != FULL_STATE:
            _add_sketch(m, at, buf, head, own, output, spot)
    elif m.sketch_type == BFLOAT:
        combine(buf, output, m.values, buf, spot, bfloats(m.packed), own, m.values, rank,
                buf, weights, floats(m.v), values, m.value_row, cursor + 1)  # fmt: skip
    elif m.sketch_type == INT8:
        combine(buf, output, m.values, buf, spot, int8s(m.packed), own, m.values, rank,
                buf, weights, floats(m.v), values, m.value_row, cursor + 1)  # fmt: skip
    else:
        combine(buf, output, m.values, buf, spot, floats(m.packed), own, m.values, rank,
                buf, weights, floats(m.v), values, m.value_row, cursor + 1)  # fmt: skip
