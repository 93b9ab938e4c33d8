"""From a state to its sketch and coefficient map.

`sketchssm.reference.maps` defines the maps; here they run on the rows of a K-last state. Every map ends with a
product of a few vectors over V with the state, ``T^T S``. For `lowrank`, T holds the pivots over ``sqrt(mu)`` and the
product is B. For `ridge`, T is the regularised pseudo-inverse of U and the product is C. For
`subspace`, T is U; the product becomes the basis, and U is then computed from it.

Float32 cannot hold the squares of every float32 state. A state whose squares overflow or underflow is therefore
multiplied by a power of two, the *unit*, before anything is squared; T is multiplied by the unit again.
"""

from __future__ import annotations

import math

import numpy as np

from sketchssm.cpu.codes import encode
from sketchssm.cpu.columns import COLUMN_LANES, columns_8
from sketchssm.cpu.jit import njit
from sketchssm.cpu.layout import Record
from sketchssm.cpu.llvm import LANES
from sketchssm.cpu.packed import (
    BFLOAT,
    BITS,
    FACTORS,
    INT8,
    LOWRANK,
    MAP,
    MASTER,
    OMEGA,
    PI,
    RANK,
    RIDGE,
    ROWS,
    SKETCH,
    SUBSPACE,
    field,
)
from sketchssm.cpu.residual import store_residual
from sketchssm.cpu.simd import Pointer, bfloats, copy, doubles, floats, fma, load, padded, splat, store, total
from sketchssm.cpu.tiles import accumulate, dots
from sketchssm.reference.maps import PIVOT_TOLERANCE

lanes_up = njit(padded)

LEAST_SQUARES, MOST_SQUARES = 2.0**-60, 2.0**80
"""Range of squared norms that need no unit. The margins to float32's range are for small and for large columns."""

MOST_UNIT = 2.0**100
"""Bound on the unit. The map of a state with a norm below the inverse of this bound goes to zero with the state."""


@njit
def project_block(m: Record, at: Record, buf: Pointer, head: int, block: int, state: Pointer, first: int) -> None:
    """Sketch 16 rows of a head's state, from element `first` on, ``U^T = Omega^T S``, into scratch."""
    rank = field(m, head, RANK)
    width = lanes_up(rank, COLUMN_LANES)
    for g in range(0, rank, COLUMN_LANES):
        columns_8(state, first, m.keys, floats(m.omega), field(m, head, OMEGA) + g, width, m.keys,
                  buf, at.sketch + g * m.values + block, m.values)  # fmt: skip


@njit
def advance_sketch(m: Record, at: Record, buf: Pointer, slot: int, head: int, count: int) -> None:
    """Advance U through the ring beside the state, for scalar gates, into scratch.

    ``S_t = a S0 + sum_s l_s w_s^T`` gives ``U_t = a U0 + sum_s w_s (Omega^T l_s)^T``, which takes a G-th of the flops
    of ``S_t^T Omega``. The update runs on a float32 copy of U, the master, and rounds as a float32 state does. The
    state does not depend on U.
    """
    rank, width = field(m, head, RANK), lanes_up(field(m, head, RANK), COLUMN_LANES)
    keys = slot * m.k_stride + head // m.group * m.keys
    for s in range(0, count, LANES):
        for g in range(0, rank, COLUMN_LANES):
            columns_8(floats(m.k), keys + s * m.key_row, m.key_row, floats(m.omega), field(m, head, OMEGA) + g, width,
                      m.keys, buf, at.key_sketch + g * m.tokens + s, m.tokens)  # fmt: skip
    master = slot * m.master_stride + field(m, head, MASTER)
    copy(buf, at.sketch, floats(m.master), master, rank * m.values)
    accumulate(buf, at.sketch, m.values, rank, m.values, buf, at.decay, buf, at.key_sketch, 1, m.tokens,
               buf, at.carried, m.values, count)  # fmt: skip


@njit
def store_sketch(
    m: Record, at: Record, buf: Pointer, slot: int, head: int, norm: float, state: Pointer, first: int
) -> None:
    """Store a head's sketch from scratch, and compute and store its map.

    The head's state begins at element `first` of `state`. `norm` is the sum of the state's squares in float32, where
    it may have overflowed or underflowed.
    """
    rank, rows = field(m, head, RANK), field(m, head, ROWS)
    own = slot * m.packed_stride + field(m, head, SKETCH)
    split = m.sketch_type == INT8 and (m.map == RIDGE or m.map == SUBSPACE)
    scales = slot * m.factors_stride + field(m, head, FACTORS)
    if not split and m.map != SUBSPACE:
        _pack_rows(m, buf, at.sketch, own, rank, m.values, scales)
    if m.tracked:
        copy(floats(m.master), slot * m.master_stride + field(m, head, MASTER), buf, at.sketch, rank * m.values)
    unit, mu = _normalise(m, norm, state, first)
    if m.map == SUBSPACE and unit == 1.0:  # the squares of S U are fourth powers of the state
        unit = math.ldexp(1.0, -math.frexp(math.sqrt(mu))[1])
    if unit != 1.0:
        _multiply(buf, at.sketch, rank * m.values, unit)
    if m.map == RIDGE:
        _ridge_span(m, at, buf, rank, mu, unit, split)
    elif m.map == SUBSPACE:
        copy(buf, at.span, buf, at.sketch, rank * m.values)
    else:
        _orthonormal(at, buf, at.sketch, at.span, rows, m.values)
        _multiply(buf, at.span, rows * m.values, unit / math.sqrt(mu))
    for c in range(0, rows * m.keys, LANES):
        store(buf, at.rows + c, splat(np.float32(0.0)))
    # the rows T^T S
    accumulate(buf, at.rows, m.keys, rows, m.keys, buf, at.ones, buf, at.span, 1, m.values,
               state, first, m.keys, m.values)  # fmt: skip
    if m.map == SUBSPACE:
        if unit != 1.0:
            _multiply(buf, at.rows, rank * m.keys, unit)
        _orthonormal(at, buf, at.rows, at.rows, rank, m.keys)
        for g in range(0, rank, 2):
            dots(state, first, m.keys, m.values, buf, at.rows + g * m.keys, m.keys, min(2, rank - g), m.keys,
                 buf, at.span + g * m.values, m.values)  # fmt: skip
        if not split:
            _pack_rows(m, buf, at.span, own, rank, m.values, scales)
    if m.map == LOWRANK:
        _factors(m, at, buf, slot, head, mu, unit)
    if split:
        _pack_split(m, at, buf, slot, head, 1.0 if m.map == SUBSPACE else mu / unit / unit)
    else:
        _pack_rows(m, buf, at.rows, slot * m.packed_stride + field(m, head, MAP), rows, m.keys, scales + rank)
    if field(m, head, BITS):
        store_residual(m, at, buf, slot, head, unit, state, first)


@njit
def _normalise(m: Record, norm: float, state: Pointer, first: int) -> tuple[float, float]:
    """Return the unit of a state, and ``mu = |S|_F^2 / K`` of the state times its unit; 1 and 1 for a zero state."""
    if LEAST_SQUARES < norm < MOST_SQUARES:
        return 1.0, norm / m.key_dim
    largest = 0.0
    for c in range(first, first + m.values * m.keys):
        largest = max(largest, abs(np.float64(state[c])))
    if largest == 0.0:
        return 1.0, 1.0
    unit = min(math.ldexp(1.0, -math.frexp(largest)[1]), MOST_UNIT)
    norm = 0.0
    for c in range(first, first + m.values * m.keys):
        norm += (unit * state[c]) ** 2
    # the norm is at least a quarter unless the unit is at its bound
    return unit, max(norm, 0.25) / m.key_dim


@njit
def _multiply(buf: Pointer, first: int, size: int, factor: float) -> None:
    """Multiply numbers in scratch by a factor."""
    scale = splat(np.float32(factor))
    for c in range(first, first + size, LANES):
        store(buf, c, scale * load(buf, c))


@njit
def _pack_rows(m: Record, buf: Pointer, source: int, target: int, rows: int, width: int, scales: int) -> None:
    """Store rows from scratch, rounded to the sketch's type, and the scales of codes."""
    if m.sketch_type == INT8:
        for i in range(rows):
            scale = encode(buf, source + i * width, width, m.packed + target + i * width)
            floats(m.factors)[scales + i] = np.float32(scale)
    elif m.sketch_type == BFLOAT:
        for c in range(0, rows * width, LANES):
            store(bfloats(m.packed), target + c, load(buf, source + c))
    else:
        copy(floats(m.packed), target, buf, source, rows * width)


@njit
def _pack_split(m: Record, at: Record, buf: Pointer, slot: int, head: int, factor: float) -> None:
    """Store Q and B of the split form as codes; scratch has ``Q / factor`` in `span`, and B in `rows`."""
    own, scales = m.packed + slot * m.packed_stride, slot * m.factors_stride + field(m, head, FACTORS)
    column, row = own + field(m, head, SKETCH), own + field(m, head, MAP)
    for g in range(field(m, head, RANK)):
        scale = encode(buf, at.span + g * m.values, m.values, column + g * m.values)
        scale *= encode(buf, at.rows + g * m.keys, m.keys, row + g * m.keys)
        floats(m.factors)[scales + g] = np.float32(factor * scale)


@njit
def _inner(buf: Pointer, a: int, b: int, size: int) -> float:
    """Inner product of two vectors."""
    value = splat(np.float32(0.0))
    for c in range(0, size, LANES):
        value = fma(load(buf, a + c), load(buf, b + c), value)
    return total(value)


@njit
def _orthonormal(at: Record, buf: Pointer, source: int, target: int, count: int, size: int) -> None:
    """Orthonormal basis of `count` vectors of `size` numbers, by Gram-Schmidt done twice; `target` may be `source`.

    A vector that depends on the vectors before it becomes zero.
    """
    for i in range(count):
        own = target + i * size
        whole = math.sqrt(_inner(buf, source + i * size, source + i * size, size))
        if target != source:
            copy(buf, own, buf, source + i * size, size)
        for _ in range(2 if i else 0):
            dots(buf, target, size, i, buf, own, 0, 1, size, buf, at.low, 0)
            for j in range(i):
                buf[at.low + j] = -buf[at.low + j]
            accumulate(buf, own, 0, 1, size, buf, at.ones, buf, at.low, 1, 0, buf, target, size, i)
        length = math.sqrt(_inner(buf, own, own, size))
        _multiply(buf, own, size, 1.0 / length if length > PIVOT_TOLERANCE * whole else 0.0)


@njit
def _factors(m: Record, at: Record, buf: Pointer, slot: int, head: int, mu: float, unit: float) -> None:
    """Compute the Woodbury factors w and F, and turn the rows B into ``B - Pi Diag(w) L``."""
    rank, rows = field(m, head, RANK), field(m, head, ROWS)
    lanes = m.columns
    for i in range(rows):
        dots(buf, at.sketch, m.values, rank, buf, at.span + i * m.values, 0, 1, m.values,
             buf, at.low + i * lanes, 0)  # fmt: skip
    if unit != 1.0:
        _multiply(buf, at.low, rows * lanes, 1.0 / unit)
    factors = slot * m.factors_stride + field(m, head, FACTORS)
    if m.sketch_type == INT8:
        factors += rank + rows
    inverse = doubles(buf, at.doubles)
    small = doubles(buf, at.doubles + 2 * rank)
    solution = doubles(buf, at.doubles + 2 * rank + 2 * rows * rows)
    for g in range(rank):
        column = at.sketch + g * m.values
        residual = _inner(buf, column, column, m.values) / mu
        for i in range(rows):
            residual -= np.float64(buf[at.low + i * lanes + g]) ** 2
        residual = max(residual, 0.0)
        inverse[g] = 1.0 / (residual + m.ridge)
        floats(m.factors)[factors + g] = residual * inverse[g]
    for i in range(rows):
        for j in range(i + 1):
            value = 1.0 if i == j else 0.0
            for g in range(rank):
                value += inverse[g] * buf[at.low + i * lanes + g] * buf[at.low + j * lanes + g]
            small[i * rows + j] = value
    cholesky(small, rows, 1.0)
    for g in range(rank):
        for i in range(rows):
            solution[i] = inverse[g] * buf[at.low + i * lanes + g]
        _cholesky_solve(small, rows, solution)
        for i in range(rows):
            floats(m.factors)[factors + (1 + i) * rank + g] = solution[i]
            buf[at.low + i * lanes + g] *= -floats(m.factors)[factors + g]
    accumulate(buf, at.rows, m.keys, rows, m.keys, buf, at.ones, buf, at.low, 1, lanes,
               floats(m.pi), field(m, head, PI), m.keys, rank)  # fmt: skip


@njit
def _ridge_span(m: Record, at: Record, buf: Pointer, rank: int, mu: float, unit: float, split: bool) -> None:
    """``(U^T U / mu + ridge I)^-1 U^T unit / mu``; the matrix is factored in float64.

    With `split` its Cholesky factor takes its place.
    """
    gram = doubles(buf, at.doubles)
    lanes, share, v = m.columns, 1.0 / mu, m.values
    for g in range(0, rank, 2):
        dots(buf, at.sketch, v, rank, buf, at.sketch + g * v, v, min(2, rank - g), v, buf, at.low + g * lanes, lanes)
    for g in range(rank):
        for i in range(g + 1):
            gram[g * rank + i] = share * buf[at.low + g * lanes + i]
        gram[g * rank + g] += m.ridge
    cholesky(gram, rank, m.ridge)
    # minus the factor with a unit diagonal
    for g in range(rank):
        for i in range(g):
            buf[at.low + g * lanes + i] = -gram[g * rank + i] * gram[i * rank + i]
    copy(buf, at.span, buf, at.sketch, rank * v)
    for g in range(1, rank):
        accumulate(buf, at.span + g * v, 0, 1, v, buf, at.ones, buf, at.low + g * lanes, 1, 0, buf, at.span, v, g)
    for g in range(rank):
        diagonal = gram[g * rank + g]
        _multiply(buf, at.span + g * v, v, unit * share * diagonal * (1.0 if split else diagonal))
    if split:
        return
    for g in range(rank - 2, -1, -1):
        below, right = at.span + (g + 1) * v, at.low + (g + 1) * lanes + g
        accumulate(buf, at.span + g * v, 0, 1, v, buf, at.ones, buf, right, lanes, 0, buf, below, v, rank - 1 - g)


@njit
def cholesky(a: Pointer, n: int, least: float) -> None:
    """Replace the lower triangle of a matrix, in rows without gaps, with its Cholesky factor, the diagonal inverted.

    `least` is a lower bound of the exact matrix's eigenvalues, and so of its pivots. A pivot that rounding took below
    the bound, or below zero, is raised to the bound.
    """
    for i in range(n):
        for j in range(i + 1):
            value = a[i * n + j]
            for k in range(j):
                value -= a[i * n + k] * a[j * n + k]
            a[i * n + j] = 1.0 / math.sqrt(max(value, least)) if i == j else value * a[j * n + j]


@njit
def _cholesky_solve(factor: Pointer, n: int, x: Pointer) -> None:
    """Solve in place, given the factor from `cholesky`."""
    for i in range(n):
        value = x[i]
        for k in range(i):
            value -= factor[i * n + k] * x[k]
        x[i] = value * factor[i * n + i]
    for i in range(n - 1, -1, -1):
        value = x[i]
        for k in range(i + 1, n):
            value -= factor[k * n + i] * x[k]
        x[i] = value * factor[i * n + i]
