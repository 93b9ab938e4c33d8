"""Folding a head's ring into its state, from the raw inputs alone: `sketchssm.reference.window.fold`.

The state is advanced 16 rows at a time: predict what the rows hold for every buffered key (one matrix product), solve
for what the tokens write, and add it (another product). The rows stay in the first cache meanwhile.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sketchssm.cpu.layout import GDN, KDA, MAMBA2, Record
from sketchssm.cpu.simd import LANES, Pointer, exp, floats, fma, load, njit, prefetch, splat, store, total
from sketchssm.cpu.tiles import TILE_ROWS, accumulate, columns_16, transpose

__all__ = ["fold_block", "prepare_fold", "prepare_keys"]


@njit
def prepare_keys(m: Record, at: Record, buf: Pointer, slot: int, key_head: int) -> None:
    """What a fold needs of the keys and all value heads of a key head share: scalar gates only."""
    if m.kind != GDN:
        return
    stride = m.key_heads * m.keys
    first = slot * m.window * stride + key_head * m.keys
    _across(m, at, buf, floats(m.k), first, stride)
    for j in range(0, m.tokens, LANES):
        for s in range(0, m.tokens, LANES):
            # written transposed, and symmetric
            columns_16(floats(m.k), first + j * stride, stride, buf, at.keys_across + s, m.tokens, m.keys,
                       buf, at.key_gram + s * m.tokens + j, m.tokens)  # fmt: skip


@njit
def _across(m: Record, at: Record, buf: Pointer, rows: Pointer, first: int, stride: int) -> None:
    """Turn ``(W, K)`` rows into ``(K, W)``, tokens on lanes."""
    for s in range(0, m.tokens, LANES):
        for c in range(0, m.keys, LANES):
            transpose(rows, first + s * stride + c, stride, buf, at.keys_across + c * m.tokens + s, m.tokens)


@njit
def prepare_fold(m: Record, at: Record, buf: Pointer, slot: int, head: int, count: int) -> None:
    """A head's decays over the buffered tokens and its Gram matrix."""
    if m.kind == KDA:
        _prepare_channels(m, at, buf, slot, head, count)
        return
    gates = slot * m.window * m.heads + head
    forward, backward = np.float32(0.0), np.float32(0.0)
    for s in range(count):
        forward += floats(m.gate)[gates + s * m.heads]
        buf[at.start + s] = forward
    for s in range(count - 1, -1, -1):
        buf[at.reach + s] = backward
        backward += floats(m.gate)[gates + s * m.heads]
    for i in range(0, count, LANES):
        store(buf, at.start + i, exp(load(buf, at.start + i)))
        store(buf, at.reach + i, exp(load(buf, at.reach + i)))
    whole = splat(buf[at.start + count - 1])
    for c in range(0, max(m.keys, m.values), LANES):
        store(buf, at.decay + c, whole)
    if m.kind == MAMBA2:
        return
    # row j of the Gram matrix from row j - 1 of its decays
    for j in range(count):
        every = splat(np.float32(math.exp(floats(m.gate)[gates + j * m.heads])))
        for i in range(0, j + 1, LANES):
            store(buf, at.walk + i, every * load(buf, at.walk + i))
        buf[at.walk + j] = np.float32(1.0)
        for i in range(0, j + 1, LANES):
            row = j * m.tokens + i
            store(buf, at.gram + row, load(buf, at.walk + i) * load(buf, at.key_gram + row))


@njit
def _prepare_channels(m: Record, at: Record, buf: Pointer, slot: int, head: int, count: int) -> None:
    """`prepare_fold` under per-channel decay."""
    key_stride, gate_stride = m.key_heads * m.keys, m.heads * m.keys
    keys = slot * m.window * key_stride + head // m.group * m.keys
    gates = slot * m.window * gate_stride + head * m.keys
    for c in range(0, m.keys, LANES):
        decay = splat(np.float32(1.0))
        for s in range(count):
            decay = decay * load(floats(m.gate), gates + s * gate_stride + c)
            store(buf, at.left + s * m.keys + c, decay * load(floats(m.k), keys + s * key_stride + c))
        store(buf, at.decay + c, decay)
    _across(m, at, buf, buf, at.left, m.keys)
    for s in range(count):
        left = at.left + s * m.keys
        for c in range(0, m.keys, LANES):
            store(buf, left + c, load(floats(m.k), keys + s * key_stride + c))
        # key s walks forward through the window and meets every later key
        for j in range(s + 1, count):
            product = splat(np.float32(0.0))
            for c in range(0, m.keys, LANES):
                decayed = load(floats(m.gate), gates + j * gate_stride + c) * load(buf, left + c)
                store(buf, left + c, decayed)
                product = fma(decayed, load(floats(m.k), keys + j * key_stride + c), product)
            buf[at.gram + j * m.tokens + s] = total(product)
    for s in range(count):
        buf[at.start + s] = np.float32(1.0)
        buf[at.reach + s] = np.float32(1.0)


@njit
def fold_block(m: Record, at: Record, buf: Pointer, slot: int, head: int, block: int, count: int) -> Any:
    """Advance 16 rows of a state through the ring; returns their squared norm."""
    first = ((slot * m.heads + head) * m.values + block) * m.keys
    ring = slot * m.window * m.heads + head
    state = floats(m.state)
    erases = m.kind != MAMBA2
    if erases:
        for s in range(0, count, LANES):
            columns_16(state, first, m.keys, buf, at.keys_across + s, m.tokens, m.keys,
                       buf, at.predicted + s * LANES, LANES)  # fmt: skip
    for s in range(count):
        write = load(floats(m.v), (ring + s * m.heads) * m.values + block)
        if erases:
            write = write - splat(buf[at.start + s]) * load(buf, at.predicted + s * LANES)
            for j in range(s):
                write = fma(splat(-buf[at.gram + s * m.tokens + j]), load(buf, at.write + j * LANES), write)
            write = splat(floats(m.beta)[ring + s * m.heads]) * write
            store(buf, at.write + s * LANES, write)
        store(buf, at.carried + s * m.values + block, splat(buf[at.reach + s]) * write)
    left, stride = floats(m.k), m.key_heads * m.keys
    left_at = slot * m.window * stride + head // m.group * m.keys
    if m.kind == KDA:
        left, left_at, stride = buf, at.left, m.keys
    squares = np.float32(0.0)
    for r in range(0, LANES, TILE_ROWS):
        place = first + r * m.keys
        # the next block's rows, while these are computed with
        for line in range(place + LANES * m.keys, place + (LANES + TILE_ROWS) * m.keys, LANES):
            prefetch(state, line)
        squares += accumulate(state, place, m.keys, TILE_ROWS, m.keys, buf, at.decay, buf, at.carried + block + r,
                              m.values, 1, left, left_at, stride, count)  # fmt: skip
    return squares
