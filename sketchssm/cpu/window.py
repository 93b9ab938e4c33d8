"""The window of a slot between flushes: buffer a token, and weight the buffered tokens for its query.

The algebra and the names are those of `sketchssm.reference.window`. Functions take a range of heads of one slot and go
through the ring token by token, in the order of memory. The chains of dependent operations of several heads overlap.
Value heads share the products of their key head.
"""

from __future__ import annotations

import numpy as np

from sketchssm.cpu.jit import njit
from sketchssm.cpu.layout import Record
from sketchssm.cpu.llvm import LANES
from sketchssm.cpu.simd import Pointer, copy, exp, floats, fma, load, splat, store, total
from sketchssm.cpu.tiles import DOT_ROWS, accumulate, dots


@njit
def buffer_token(
    m: Record, at: Record, buf: Pointer, slot: int, place: int, cursor: int, first: int, last: int
) -> None:
    """Copy one token of some key heads to place `cursor` of the ring, and its queries and keys to scratch memory.

    `place` counts tokens over rows. The key heads are those from `first` to `last`, without `last`.
    """
    keys, values = slot * m.k_stride + cursor * m.key_row, slot * m.v_stride + cursor * m.value_row
    for key_head in range(first, last):
        source = (place * m.key_heads + key_head) * m.key_dim
        copy(buf, at.inputs + 2 * key_head * m.keys, floats(m.in_q), source, m.key_dim)
        copy(buf, at.inputs + (2 * key_head + 1) * m.keys, floats(m.in_k), source, m.key_dim)
        copy(floats(m.k), keys + key_head * m.keys, floats(m.in_k), source, m.key_dim)
    first, last = first * m.group, last * m.group
    for head in range(first, last):
        source = place * m.heads + head
        copy(floats(m.v), values + head * m.values, floats(m.in_v), source * m.value_dim, m.value_dim)
        if m.channel_decays:
            _buffer_gates(m, source * m.key_dim, slot * m.gate_stride + cursor * m.gate_row + head * m.keys)
    source, target, count = place * m.heads + first, cursor * m.heads + first, last - first
    if not m.channel_decays:
        copy(floats(m.gate), slot * m.gate_stride + target, floats(m.in_g), source, count)
        copy(buf, at.now + first, floats(m.in_g), source, count)
    if m.erases:
        copy(floats(m.beta), slot * m.beta_stride + target, floats(m.in_beta), source, count)


@njit
def _buffer_gates(m: Record, source: int, target: int) -> None:
    """Store one head's per-channel decays ``exp g``."""
    gate = floats(m.gate)
    copy(gate, target, floats(m.in_g), source, m.key_dim)
    for c in range(m.key_dim, m.keys):
        gate[target + c] = np.float32(0.0)
    for c in range(target, target + m.keys, LANES):
        store(gate, c, exp(load(gate, c)))


@njit
def weigh(
    m: Record, at: Record, buf: Pointer, slot: int, cursor: int, first: int, last: int, reaches: Pointer, reach: int
) -> None:
    """Compute the buffer weights of the newest queries of some key heads, in ``weights``.

    The newest token is number `cursor` of the ring. With a decay per channel, ``x`` then holds ``D_{1:t} q`` of every
    head and, if the layer erases, ``D_{1:t} k_t``.
    """
    if m.channel_decays:
        _channel_scores(m, at, buf, slot, cursor, first * m.group, last * m.group)
    else:
        _key_scores(m, at, buf, slot, cursor, first, last)
        _scalar_scores(m, at, buf, slot, cursor, first * m.group, last * m.group, reaches, reach)
    if m.erases:
        _solve(m, at, buf, slot, cursor, first * m.group, last * m.group)


@njit
def _key_scores(m: Record, at: Record, buf: Pointer, slot: int, cursor: int, first: int, last: int) -> None:
    """Compute ``<k_s, q>`` and ``<k_s, k_t>`` of the buffered keys, without decay."""
    for s in range(0, cursor + 1, DOT_ROWS):
        row = slot * m.k_stride + s * m.key_row
        for key_head in range(first, last):
            dots(floats(m.k), row + key_head * m.keys, m.key_row, min(DOT_ROWS, cursor + 1 - s),
                 buf, at.inputs + 2 * key_head * m.keys, m.keys, 2 if m.erases else 1, m.keys,
                 buf, at.scores + 2 * key_head * m.tokens + s, m.tokens)  # fmt: skip


@njit
def _scalar_scores(
    m: Record, at: Record, buf: Pointer, slot: int, cursor: int, first: int, last: int, reaches: Pointer, reach: int
) -> None:
    """Decay the shared scores by scalar gates. Lanes after the newest token are undefined and unused."""
    row, products = slot * m.start_stride + cursor * m.heads, slot * m.gram_stride + cursor * m.gram_row
    starts = floats(m.start)
    weights = at.open if m.erases else at.weights
    for head in range(first, last, LANES):
        store(buf, at.now + head, exp(load(buf, at.now + head)))
    for head in range(first, last):
        decay = buf[at.now + head]
        starts[row + head] = decay * starts[row + head - m.heads] if cursor else decay
        scores = at.scores + 2 * (head // m.group) * m.tokens
        own = reach + head * m.tokens
        carry_decays(m, reaches, own, cursor, decay)
        for i in range(0, cursor + 1, LANES):
            carried = load(reaches, own + i)
            store(buf, weights + head * m.tokens + i, carried * load(buf, scores + i))
            if m.erases:
                product = carried * load(buf, scores + m.tokens + i)
                store(floats(m.gram), products + head * m.tokens + i, product)


@njit
def carry_decays(m: Record, reaches: Pointer, own: int, cursor: int, decay: float) -> None:
    """Update one head's decays ``D_{s+1:t}`` for the token at `cursor`."""
    every = splat(decay)
    for i in range(0, cursor + 1, LANES):
        store(reaches, own + i, every * load(reaches, own + i))
    reaches[own + cursor] = np.float32(1.0)


@njit
def _channel_scores(m: Record, at: Record, buf: Pointer, slot: int, cursor: int, first: int, last: int) -> None:
    """Compute scores for per-channel decay: queries and newest keys decay backwards through the ring."""
    size, weights = 2 * m.keys, at.open if m.erases else at.weights
    for head in range(first, last):
        copy(buf, at.x + head * size, buf, at.inputs + head // m.group * size, size)
    newest = slot * m.gram_stride + cursor * m.gram_row
    for s in range(cursor, -1, -1):
        for head in range(first, last):
            keys = slot * m.k_stride + s * m.key_row + head // m.group * m.keys
            gates = slot * m.gate_stride + s * m.gate_row + head * m.keys
            x = at.x + head * size
            score, product = splat(np.float32(0.0)), splat(np.float32(0.0))
            for c in range(0, m.keys, LANES):
                key, gate = load(floats(m.k), keys + c), load(floats(m.gate), gates + c)
                query, newest_key = load(buf, x + c), load(buf, x + m.keys + c)
                score, product = fma(key, query, score), fma(key, newest_key, product)
                store(buf, x + c, gate * query)
                store(buf, x + m.keys + c, gate * newest_key)
            buf[weights + head * m.tokens + s] = total(score)
            if m.erases:
                floats(m.gram)[newest + head * m.tokens + s] = total(product)


@njit
def _solve(m: Record, at: Record, buf: Pointer, slot: int, cursor: int, first: int, last: int) -> None:
    """Solve the unit triangular systems by back substitution, from the newest token to the oldest.

    Lanes from j on of a Gram row are undefined, so the weights are in a separate area.
    """
    for j in range(cursor, -1, -1):
        betas, products = slot * m.beta_stride + j * m.heads, slot * m.gram_stride + j * m.gram_row
        for head in range(first, last):
            scores = at.open + head * m.tokens
            weight = floats(m.beta)[betas + head] * buf[scores + j]
            buf[at.weights + head * m.tokens + j] = weight
            minus, gram = splat(-weight), products + head * m.tokens
            for i in range(0, j, LANES):
                store(buf, scores + i, fma(minus, load(floats(m.gram), gram + i), load(buf, scores + i)))


@njit
def effective_query(m: Record, at: Record, buf: Pointer, slot: int, head: int, cursor: int) -> int:
    """Compute the effective query of a head; return its offset in scratch memory."""
    keys = slot * m.k_stride + head // m.group * m.keys
    if m.channel_decays:
        gates, x = slot * m.gate_stride + head * m.keys, at.x + 2 * head * m.keys
        if not m.erases:
            return x
        for c in range(0, m.keys, LANES):
            decay, query = splat(np.float32(1.0)), load(buf, x + c)
            for j in range(cursor + 1):
                decay = decay * load(floats(m.gate), gates + j * m.gate_row + c)
                weight = splat(-buf[at.weights + head * m.tokens + j])
                query = fma(weight, decay * load(floats(m.k), keys + j * m.key_row + c), query)
            store(buf, x + c, query)
        return x
    query = at.inputs + 2 * (head // m.group) * m.keys
    starts = slot * m.start_stride + head
    scale = splat(floats(m.start)[starts + cursor * m.heads])
    for c in range(0, m.keys, LANES):
        store(buf, at.x + c, scale * load(buf, query + c))
    if m.erases:
        for j in range(cursor + 1):
            weight = buf[at.weights + head * m.tokens + j]
            buf[at.walk + j] = -weight * floats(m.start)[starts + j * m.heads]
        accumulate(buf, at.x, 0, 1, m.keys, buf, at.ones, buf, at.walk, 1, 0,
                   floats(m.k), keys, m.key_row, cursor + 1)  # fmt: skip
    return at.x
