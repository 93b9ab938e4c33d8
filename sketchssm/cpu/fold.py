"""Fold a head's ring into its state, from the raw inputs alone: `sketchssm.reference.window.fold`.

A state advances 16 rows at a time: predict the values of the rows for all buffered keys (a matrix product), solve for
the values that the tokens write, and add them (another product). Meanwhile the rows stay in the first-level cache.

A window with a beta above 1 is folded token by token, as standard decode does. A transition then may reverse what a
state holds along a key and forget nothing. If the key repeats, rounding errors of the Gram matrix and of the written
values are the same in every window and add up.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sketchssm.cpu.columns import columns_16, substitute, transpose
from sketchssm.cpu.jit import njit
from sketchssm.cpu.layout import Record
from sketchssm.cpu.llvm import LANES
from sketchssm.cpu.simd import Pointer, exp, floats, fma, load, prefetch, splat, store, total
from sketchssm.cpu.tiles import TILE_ROWS, accumulate, accumulate_tile_rows, dots


@njit
def prepare_keys(m: Record, at: Record, buf: Pointer, slot: int, key_head: int) -> None:
    """Transpose the keys of a key head and compute their Gram matrix if its value heads share both."""
    if not m.erases or m.channel_decays:
        return
    first = slot * m.k_stride + key_head * m.keys
    _across(m, at, buf, floats(m.k), first, m.key_row)
    for j in range(0, m.tokens, LANES):
        for s in range(0, m.tokens, LANES):
            # written transposed, and symmetric
            columns_16(floats(m.k), first + j * m.key_row, m.key_row, buf, at.keys_across + s, m.tokens, m.keys,
                       buf, at.key_gram + s * m.tokens + j, m.tokens)  # fmt: skip


@njit
def _across(m: Record, at: Record, buf: Pointer, rows: Pointer, first: int, stride: int) -> None:
    """Transpose rows ``(W, K)`` to ``(K, W)``, with tokens on lanes."""
    for s in range(0, m.tokens, LANES):
        for c in range(0, m.keys, LANES):
            transpose(rows, first + s * stride + c, stride, buf, at.keys_across + c * m.tokens + s, m.tokens)


@njit
def prepare_fold(m: Record, at: Record, buf: Pointer, slot: int, head: int, count: int) -> None:
    """Compute a head's decays over `count` tokens and the Gram matrix that `substitute` needs.

    For a ring that is folded token by token, ``left`` gets decayed keys, or a head's decays in all channels.
    """
    if reflects(m, slot, head, count):
        _prepare_turns(m, at, buf, slot, head, count)
        return
    if m.channel_decays:
        _prepare_channels(m, at, buf, slot, head, count)
        if m.erases:
            _scale_gram(m, at, buf, slot, head, count)
        return
    gates = slot * m.gate_stride + head
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
    if not m.erases:
        return
    # the decays of row j of the Gram matrix follow from those of row j - 1
    for j in range(count):
        every = splat(np.float32(math.exp(floats(m.gate)[gates + j * m.heads])))
        for i in range(0, j + 1, LANES):
            store(buf, at.walk + i, every * load(buf, at.walk + i))
        buf[at.walk + j] = np.float32(1.0)
        for i in range(0, j + 1, LANES):
            row = j * m.tokens + i
            store(buf, at.gram + row, load(buf, at.walk + i) * load(buf, at.key_gram + row))
    _scale_gram(m, at, buf, slot, head, count)


@njit
def reflects(m: Record, slot: int, head: int, count: int) -> bool:
    """Whether a ring has a beta above 1, and so is folded token by token."""
    if m.erases:
        for s in range(count):
            if floats(m.beta)[slot * m.beta_stride + s * m.heads + head] > 1:
                return True
    return False


@njit
def _prepare_turns(m: Record, at: Record, buf: Pointer, slot: int, head: int, count: int) -> None:
    """`prepare_fold` for a ring that is folded token by token."""
    for s in range(count):
        key = slot * m.k_stride + s * m.key_row + head // m.group * m.keys
        gate = slot * m.gate_stride + s * m.gate_row + head * m.keys
        buf[at.start + s] = np.float32(1.0)
        if m.erases and not m.channel_decays:
            buf[at.start + s] = math.exp(floats(m.gate)[slot * m.gate_stride + s * m.heads + head])
        for c in range(0, m.keys, LANES):
            left = splat(buf[at.start + s])
            if m.channel_decays:
                left = load(floats(m.gate), gate + c) * load(floats(m.k), key + c)
            store(buf, at.left + s * m.keys + c, left)


@njit
def _fold_turns(
    m: Record, at: Record, buf: Pointer, slot: int, head: int, block: int, count: int, state: Pointer, first: int
) -> Any:
    """`fold_block` token by token."""
    squares = splat(np.float32(0.0))
    for s in range(count):
        left, key = at.left + s * m.keys, slot * m.k_stride + s * m.key_row + head // m.group * m.keys
        predictor, predictor_at, decays, decays_at = floats(m.k), key, buf, left
        if m.channel_decays:
            predictor, predictor_at, decays = buf, left, floats(m.gate)
            decays_at = slot * m.gate_stride + s * m.gate_row + head * m.keys
        dots(state, first, m.keys, LANES, predictor, predictor_at, 0, 1, m.keys, buf, at.write, 0)
        value = load(floats(m.v), slot * m.v_stride + s * m.value_row + head * m.values + block)
        value = value - splat(buf[at.start + s]) * load(buf, at.write)
        store(buf, at.write, splat(floats(m.beta)[slot * m.beta_stride + s * m.heads + head]) * value)
        squares = splat(np.float32(0.0))
        for r in range(0, LANES, TILE_ROWS):
            rows = first + r * m.keys
            squares = squares + accumulate_tile_rows(
                state, rows, m.keys, m.keys, decays, decays_at, buf, at.write + r, 0, 1, floats(m.k), key, 0, 1
            )
    return total(squares)


@njit
def _scale_gram(m: Record, at: Record, buf: Pointer, slot: int, head: int, count: int) -> None:
    """Replace the decayed Gram matrix A with ``-Diag(beta) A`` below the diagonal and beta on the diagonal."""
    for j in range(count):
        beta, row = floats(m.beta)[slot * m.beta_stride + j * m.heads + head], at.gram + j * m.tokens
        minus = splat(-beta)
        for i in range(row, row + j + 1, LANES):
            store(buf, i, minus * load(buf, i))
        buf[row + j] = beta


@njit
def _prepare_channels(m: Record, at: Record, buf: Pointer, slot: int, head: int, count: int) -> None:
    """`prepare_fold` for per-channel decay.

    ``lost`` is what the rounding of the products took: near 1 it has a sign, and states would shrink from window to
    window.
    """
    keys = slot * m.k_stride + head // m.group * m.keys
    gates = slot * m.gate_stride + head * m.keys
    none = splat(np.float32(0.0))
    for c in range(0, m.keys, LANES):
        decay, lost = splat(np.float32(1.0)), none
        for s in range(count):
            gate = load(floats(m.gate), gates + s * m.gate_row + c)
            product = decay * gate
            lost = fma(lost, gate, fma(decay, gate, none - product))
            decay = product
            store(buf, at.left + s * m.keys + c, decay * load(floats(m.k), keys + s * m.key_row + c))
        store(buf, at.decay + c, decay + lost)
    if m.erases:
        _across(m, at, buf, buf, at.left, m.keys)
    for s in range(count):
        left = at.left + s * m.keys
        for c in range(0, m.keys, LANES):
            store(buf, left + c, load(floats(m.k), keys + s * m.key_row + c))
        # key s decays forward through the window, for its products with all later keys
        for j in range(s + 1, count):
            product = splat(np.float32(0.0))
            for c in range(0, m.keys, LANES):
                decayed = load(floats(m.gate), gates + j * m.gate_row + c) * load(buf, left + c)
                store(buf, left + c, decayed)
                product = fma(decayed, load(floats(m.k), keys + j * m.key_row + c), product)
            buf[at.gram + j * m.tokens + s] = total(product)
    for s in range(count):
        buf[at.start + s] = np.float32(1.0)
        buf[at.reach + s] = np.float32(1.0)


@njit
def fold_block(
    m: Record, at: Record, buf: Pointer, slot: int, head: int, block: int, count: int, state: Pointer, first: int
) -> Any:
    """Advance 16 rows of a state, from element `first` on, through the ring; return their squared norm."""
    if reflects(m, slot, head, count):
        return _fold_turns(m, at, buf, slot, head, block, count, state, first)
    erases = m.erases
    if erases:
        for s in range(0, count, LANES):
            columns_16(state, first, m.keys, buf, at.keys_across + s, m.tokens, m.keys,
                       buf, at.write + s * LANES, LANES)  # fmt: skip
    for s in range(count):
        value = slot * m.v_stride + s * m.value_row + head * m.values + block
        write = load(floats(m.v), value)
        prefetch(floats(m.v), value + m.values)
        if erases:
            write = write - splat(buf[at.start + s]) * load(buf, at.write + s * LANES)
            store(buf, at.write + s * LANES, splat(buf[at.gram + s * (m.tokens + 1)]) * write)
        else:
            store(buf, at.carried + s * m.values + block, splat(buf[at.reach + s]) * write)
    if erases:
        for s in range(0, count, LANES):
            if s > 0:
                accumulate(buf, at.write + s * LANES, LANES, min(LANES, count - s), LANES, buf, at.ones,
                           buf, at.gram + s * m.tokens, 1, m.tokens, buf, at.write, LANES, s)  # fmt: skip
            substitute(buf, at.gram + s * (m.tokens + 1), m.tokens, buf, at.write + s * LANES)
        for s in range(count):
            store(buf, at.carried + s * m.values + block, splat(buf[at.reach + s]) * load(buf, at.write + s * LANES))
    left, stride = floats(m.k), m.key_row
    left_at = slot * m.k_stride + head // m.group * m.keys
    if m.channel_decays:
        left, left_at, stride = buf, at.left, m.keys
    squares = splat(np.float32(0.0))
    for r in range(0, LANES, TILE_ROWS):
        place = first + r * m.keys
        # prefetch the rows of the next head
        ahead = place + m.values * m.keys
        for line in range(ahead, ahead + TILE_ROWS * m.keys, LANES):
            prefetch(state, line)
        squares = squares + accumulate_tile_rows(
            state, place, m.keys, m.keys, buf, at.decay, buf, at.carried + block + r, m.values, 1,
            left, left_at, stride, count
        )  # fmt: skip
    return total(squares)
