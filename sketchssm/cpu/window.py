"""One head's window: buffering a token, weighting the buffer, and folding it into the state.

The algebra and its names are those of `sketchssm.reference.window`. A call's work is divided by slot and key head;
what the value heads of one key head share (scores, the keys' Gram matrix) is computed once for all of them.
"""

from __future__ import annotations

import math

import numpy as np

from sketchssm.cpu.layout import GDN, KDA, MAMBA2, Record
from sketchssm.cpu.simd import LANES, Pointer, copy, exp, floats, fma, load, njit, splat, store, total
from sketchssm.cpu.tiles import accumulate, columns_16, dots, transpose

__all__ = [
    "buffer_key",
    "buffer_value",
    "dense_query",
    "fold_block",
    "prepare_fold",
    "prepare_keys",
    "score_keys",
    "weigh",
]


@njit
def buffer_key(m: Record, at: Record, buf: Pointer, place: int, slot: int, key_head: int, position: int) -> None:
    """Take one token's query and key: into scratch, and the key into the ring."""
    source = place * m.key_dim
    target = ((slot * m.key_heads + key_head) * m.window + position) * m.keys
    copy(buf, at.query, floats(m.in_q), source, m.key_dim)
    copy(buf, at.key, floats(m.in_k), source, m.key_dim)
    copy(floats(m.k), target, floats(m.in_k), source, m.key_dim)


@njit
def score_keys(m: Record, at: Record, buf: Pointer, slot: int, key_head: int, count: int) -> None:
    """Undecayed ``<k_s, q>`` and ``<k_s, k_t>`` of the buffered keys."""
    first = (slot * m.key_heads + key_head) * m.window * m.keys
    vectors = 1 if m.kind == MAMBA2 else 2
    dots(floats(m.k), first, m.keys, count, buf, at.query, m.keys, vectors, m.keys, buf, at.scores, m.tokens)


@njit
def buffer_value(m: Record, at: Record, buf: Pointer, place: int, row: int, position: int) -> None:
    """Take one token's value and gates into a head's ring; `row` counts heads over slots."""
    source = place * m.value_dim
    target = (row * m.window + position) * m.values
    copy(floats(m.v), target, floats(m.in_v), source, m.value_dim)
    at_token = row * m.tokens + position
    if m.kind != MAMBA2:
        floats(m.beta)[at_token] = floats(m.in_beta)[place]
    if m.kind == KDA:
        source = place * m.key_dim
        target = (row * m.window + position) * m.keys
        copy(floats(m.gate), target, floats(m.in_g), source, m.key_dim)
        for c in range(m.key_dim, m.keys):
            floats(m.gate)[target + c] = np.float32(0.0)
        for c in range(0, m.keys, LANES):
            store(floats(m.gate), target + c, exp(load(floats(m.gate), target + c)))
    else:
        floats(m.gate)[at_token] = floats(m.in_g)[place]


@njit
def weigh(m: Record, at: Record, buf: Pointer, slot: int, head: int, position: int) -> float:
    """Buffer weights of the newest token's query, and ``D_{1:t} q``, ``D_{1:t} k_t`` for the state read.

    Returns a scalar still to be multiplied onto the two vectors in ``x`` and ``x_key``.
    """
    row = slot * m.heads + head
    if m.kind == KDA:
        _channel_scores(m, at, buf, slot, head, position)
        scale = np.float32(1.0)
    else:
        scale = _scalar_scores(m, at, buf, row, position)
    if m.kind == MAMBA2:
        for i in range(0, position + 1, LANES):
            store(buf, at.weights + i, load(buf, at.open + i))
        return scale
    # back substitution from the newest token down, a column of the unit triangular system at a time;
    # lanes from j on hold anything, so the weights have a place of their own
    for j in range(position, -1, -1):
        weight = floats(m.beta)[row * m.tokens + j] * buf[at.open + j]
        gram = (row * m.window + j) * m.tokens
        minus = splat(-weight)
        for i in range(0, j, LANES):
            store(buf, at.open + i, fma(minus, load(floats(m.gram), gram + i), load(buf, at.open + i)))
        buf[at.weights + j] = weight
    return scale


@njit
def _scalar_scores(m: Record, at: Record, buf: Pointer, row: int, position: int) -> float:
    """Decay the shared scores by a scalar gate; lanes after the newest token hold anything and are never used."""
    first = row * m.tokens
    decay = np.float32(math.exp(floats(m.gate)[first + position]))
    floats(m.start)[first + position] = decay * floats(m.start)[first + position - 1] if position else decay
    every = splat(decay)
    for i in range(0, position + 1, LANES):
        store(floats(m.reach), first + i, every * load(floats(m.reach), first + i))
    floats(m.reach)[first + position] = np.float32(1.0)
    for i in range(0, position + 1, LANES):
        reach = load(floats(m.reach), first + i)
        store(buf, at.open + i, reach * load(buf, at.scores + i))
        if m.kind != MAMBA2:
            gram = (row * m.window + position) * m.tokens
            store(floats(m.gram), gram + i, reach * load(buf, at.key_scores + i))
    return floats(m.start)[first + position]


@njit
def _channel_scores(m: Record, at: Record, buf: Pointer, slot: int, head: int, position: int) -> None:
    """Scores under per-channel decay: the query and the newest key walk back through the ring, decaying."""
    row = slot * m.heads + head
    keys = (slot * m.key_heads + head // m.group) * m.window * m.keys
    gates = row * m.window * m.keys
    gram = (row * m.window + position) * m.tokens
    for c in range(0, 2 * m.keys, LANES):
        store(buf, at.x + c, load(buf, at.query + c))
    for s in range(position, -1, -1):
        score, product = splat(np.float32(0.0)), splat(np.float32(0.0))
        for c in range(0, m.keys, LANES):
            key, gate = load(floats(m.k), keys + s * m.keys + c), load(floats(m.gate), gates + s * m.keys + c)
            x, x_key = load(buf, at.x + c), load(buf, at.x_key + c)
            score, product = fma(key, x, score), fma(key, x_key, product)
            store(buf, at.x + c, gate * x)
            store(buf, at.x_key + c, gate * x_key)
        buf[at.open + s] = total(score)
        floats(m.gram)[gram + s] = total(product)


@njit
def dense_query(m: Record, at: Record, buf: Pointer, slot: int, head: int, position: int, scale: float) -> None:
    """Effective query of a head that reads its full state, into ``x``."""
    row = slot * m.heads + head
    keys = (slot * m.key_heads + head // m.group) * m.window * m.keys
    if m.kind == KDA:
        gates = row * m.window * m.keys
        for c in range(0, m.keys, LANES):
            decay, x = splat(np.float32(1.0)), load(buf, at.x + c)
            for j in range(position + 1):
                decay = decay * load(floats(m.gate), gates + j * m.keys + c)
                x = x - splat(buf[at.weights + j]) * decay * load(floats(m.k), keys + j * m.keys + c)
            store(buf, at.x + c, x)
        return
    for c in range(0, m.keys, LANES):
        store(buf, at.x + c, splat(scale) * load(buf, at.query + c))
    if m.kind == GDN:
        first = row * m.tokens
        for j in range(position + 1):
            buf[at.start + j] = -buf[at.weights + j] * floats(m.start)[first + j]
        accumulate(buf, at.x, 0, 1, m.keys, buf, at.ones, buf, at.start, 1, 0, floats(m.k), keys, m.keys,
                   position + 1)  # fmt: skip


@njit
def prepare_keys(m: Record, at: Record, buf: Pointer, slot: int, key_head: int) -> None:
    """What a fold needs of the keys and all value heads of a key head share: scalar gates only."""
    if m.kind != GDN:
        return
    first = (slot * m.key_heads + key_head) * m.window * m.keys
    _across(m, at, buf, floats(m.k), first)
    for j in range(0, m.tokens, LANES):
        for s in range(0, m.tokens, LANES):
            # written transposed, and symmetric
            columns_16(floats(m.k), first + j * m.keys, m.keys, buf, at.keys_across + s, m.tokens, m.keys,
                       buf, at.key_gram + s * m.tokens + j, m.tokens)  # fmt: skip


@njit
def _across(m: Record, at: Record, buf: Pointer, rows: Pointer, first: int) -> None:
    """Turn ``(W, K)`` rows into ``(K, W)``, tokens on lanes."""
    for s in range(0, m.tokens, LANES):
        for c in range(0, m.keys, LANES):
            transpose(rows, first + s * m.keys + c, m.keys, buf, at.keys_across + c * m.tokens + s,
                      m.tokens)  # fmt: skip


@njit
def prepare_fold(m: Record, at: Record, buf: Pointer, slot: int, head: int, count: int) -> None:
    """A head's decays over the buffered tokens and its Gram matrix, all from the ring's raw inputs."""
    row = slot * m.heads + head
    if m.kind == KDA:
        _prepare_channels(m, at, buf, slot, head, count)
        return
    first = row * m.tokens
    forward = np.float32(0.0)
    for s in range(count):
        forward += floats(m.gate)[first + s]
        buf[at.start + s] = math.exp(forward)
    backward = np.float32(0.0)
    for s in range(count - 1, -1, -1):
        buf[at.reach + s] = math.exp(backward)
        backward += floats(m.gate)[first + s]
    whole = splat(buf[at.start + count - 1])
    for c in range(0, max(m.keys, m.values), LANES):
        store(buf, at.decay + c, whole)
    if m.kind == MAMBA2:
        return
    # row j of the Gram matrix from row j - 1 of its decays; `weights` is free here
    for j in range(count):
        every = splat(np.float32(math.exp(floats(m.gate)[first + j])))
        for i in range(0, j + 1, LANES):
            store(buf, at.weights + i, every * load(buf, at.weights + i))
        buf[at.weights + j] = np.float32(1.0)
        for i in range(0, j + 1, LANES):
            at_row = j * m.tokens + i
            store(buf, at.gram + at_row, load(buf, at.weights + i) * load(buf, at.key_gram + at_row))


@njit
def _prepare_channels(m: Record, at: Record, buf: Pointer, slot: int, head: int, count: int) -> None:
    """`prepare_fold` under per-channel decay."""
    keys = (slot * m.key_heads + head // m.group) * m.window * m.keys
    gates = (slot * m.heads + head) * m.window * m.keys
    for c in range(0, m.keys, LANES):
        decay = splat(np.float32(1.0))
        for s in range(count):
            decay = decay * load(floats(m.gate), gates + s * m.keys + c)
            store(buf, at.left + s * m.keys + c, decay * load(floats(m.k), keys + s * m.keys + c))
        store(buf, at.decay + c, decay)
    _across(m, at, buf, buf, at.left)
    for s in range(count):
        for c in range(0, m.keys, LANES):
            store(buf, at.left + s * m.keys + c, load(floats(m.k), keys + s * m.keys + c))
        # key s walks forward through the window and meets every later key
        for j in range(s + 1, count):
            product = splat(np.float32(0.0))
            for c in range(0, m.keys, LANES):
                place = j * m.keys + c
                left = load(floats(m.gate), gates + place) * load(buf, at.left + s * m.keys + c)
                store(buf, at.left + s * m.keys + c, left)
                product = fma(left, load(floats(m.k), keys + place), product)
            buf[at.gram + j * m.tokens + s] = total(product)
    for s in range(count):
        buf[at.start + s] = np.float32(1.0)
        buf[at.reach + s] = np.float32(1.0)


@njit
def fold_block(m: Record, at: Record, buf: Pointer, slot: int, head: int, block: int, count: int) -> float:
    """Advance 16 rows of a state through the ring; returns their squared norm."""
    row = slot * m.heads + head
    first = (row * m.values + block) * m.keys
    erases = m.kind != MAMBA2
    if erases:
        for s in range(0, count, LANES):
            columns_16(floats(m.state), first, m.keys, buf, at.keys_across + s, m.tokens, m.keys,
                       buf, at.predicted + s * LANES, LANES)  # fmt: skip
    for s in range(count):
        write = load(floats(m.v), (row * m.window + s) * m.values + block)
        if erases:
            write = write - splat(buf[at.start + s]) * load(buf, at.predicted + s * LANES)
            for j in range(s):
                product = splat(buf[at.gram + s * m.tokens + j]) * load(buf, at.write + j * LANES)
                write = write - product
            write = splat(floats(m.beta)[row * m.tokens + s]) * write
            store(buf, at.write + s * LANES, write)
        store(buf, at.carried + s * m.values + block, splat(buf[at.reach + s]) * write)
    left, left_at = floats(m.k), (slot * m.key_heads + head // m.group) * m.window * m.keys
    if m.kind == KDA:
        left, left_at = buf, at.left
    return accumulate(floats(m.state), first, m.keys, LANES, m.keys, buf, at.decay, buf, at.carried + block, m.values, 1,
                      left, left_at, m.keys, count)  # fmt: skip
