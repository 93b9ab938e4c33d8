"""Register-blocked products of small matrices, which do nearly all of the arithmetic.

Each intrinsic keeps a tile of sums in registers and runs one loop over the contracted axis. The functions cut matrices
of any size into tiles. Row lengths are multiples of `LANES` (see `layout`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sketchssm.cpu import llvm
from sketchssm.cpu.jit import njit
from sketchssm.cpu.llvm import INT32, LANES, VECTOR
from sketchssm.cpu.simd import Pointer, splat

TILE_ROWS = 4
"""Rows of a tile of `accumulate`."""

DOT_ROWS = 4
"""Rows of a tile of `dots`."""


def element(builder: Any, start: Any, *steps: tuple[Any, Any]) -> Any:
    """Compute ``start + sum of count * stride`` over pairs; counts may be Python integers."""
    for count, stride in steps:
        number = ir.Constant(ir.IntType(64), count) if isinstance(count, int) else count
        start = builder.add(start, builder.mul(number, stride))
    return start


def fixed(count: int) -> Any:
    """A constant offset."""
    return ir.Constant(ir.IntType(64), count)


def zero_sums(context: Any, builder: Any, count: int, lanes: int = LANES) -> list[Any]:
    """Make variables for sums over lanes, all zero."""
    zero = llvm.constant(0.0, lanes)
    variables = [cgutils.alloca_once(builder, zero.type) for _ in range(count)]
    for variable in variables:
        builder.store(zero, variable)
    return variables


def add_product(builder: Any, variable: Any, a: Any, b: Any) -> None:
    """Add ``a b`` to a variable."""
    builder.store(llvm.fused(builder, a, b, builder.load(variable)), variable)


def _tile_accumulate(rows: int, chunks: int) -> Any:
    """``C[r, :] = decay * C[r, :] + sum_s w[s, r] L[s, :]`` for a tile; returns ``sum_r C[r]^2`` over its chunks."""

    @intrinsic
    def tile(typingctx: Any, c: Any, c0: Any, c_row: Any, decay: Any, d0: Any, w: Any, w0: Any, w_step: Any,
             w_row: Any, x: Any, x0: Any, x_step: Any, depth: Any) -> Any:  # fmt: skip
        i = types.intp
        signature = VECTOR(c, i, i, decay, i, w, i, i, i, x, i, i, i)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def at(which: int, index: Any) -> Any:
                return builder.gep(args[which], [index])

            _, c0, c_row, _, d0, _, w0, w_step, w_row, _, x0, x_step, depth = args
            shift = [ir.Constant(ir.IntType(64), LANES * chunk) for chunk in range(chunks)]
            accumulators = zero_sums(context, builder, rows * chunks)
            places = []
            for chunk in range(chunks):
                factor = llvm.load_lanes(builder, at(3, builder.add(d0, shift[chunk])), types.float32)
                for row in range(rows):
                    place = at(0, builder.add(element(builder, c0, (row, c_row)), shift[chunk]))
                    places.append(place)
                    scaled = builder.fmul(factor, llvm.load_lanes(builder, place, types.float32))
                    builder.store(scaled, accumulators[len(places) - 1])
            with cgutils.for_range(builder, depth) as loop:
                lanes = []
                for chunk in range(chunks):
                    index = builder.add(element(builder, x0, (loop.index, x_step)), shift[chunk])
                    lanes.append(llvm.load_lanes(builder, at(9, index), x.dtype))
                for row in range(rows):
                    weight = builder.load(at(5, element(builder, w0, (loop.index, w_step), (row, w_row))))
                    every = llvm.broadcast(builder, weight)
                    for chunk in range(chunks):
                        add_product(builder, accumulators[chunk * rows + row], every, lanes[chunk])
            # one sum for each row, so that no addition waits for the previous one
            squares = [llvm.constant(0.0)] * rows
            for number, (variable, place) in enumerate(zip(accumulators, places, strict=True)):
                value, row = builder.load(variable), number % rows
                llvm.store_lanes(builder, value, place, types.float32)
                squares[row] = llvm.fused(builder, value, value, squares[row])
            while len(squares) > 1:
                squares = [builder.fadd(*squares[n : n + 2]) for n in range(0, len(squares), 2)]
            return squares[0]

        return signature, codegen

    return tile


_accumulate_4x4 = _tile_accumulate(TILE_ROWS, 4)
_accumulate_4x1 = _tile_accumulate(TILE_ROWS, 1)
_accumulate_2x4 = _tile_accumulate(2, 4)
_accumulate_1x4 = _tile_accumulate(1, 4)
_accumulate_1x1 = _tile_accumulate(1, 1)


@njit
def accumulate_tile_rows(
    c: Pointer, c0: int, c_row: int, width: int, decay: Pointer, d0: int,
    w: Pointer, w0: int, w_step: int, w_row: int, x: Pointer, x0: int, x_step: int, depth: int,
) -> Any:  # fmt: skip
    """`accumulate` for `TILE_ROWS` rows; returns a vector whose lanes add up to ``|C|_F^2``."""
    squares = splat(np.float32(0.0))
    j = 0
    while j + 4 * LANES <= width:
        squares = squares + _accumulate_4x4(
            c, c0 + j, c_row, decay, d0 + j, w, w0, w_step, w_row, x, x0 + j, x_step, depth
        )
        j += 4 * LANES
    while j < width:
        squares = squares + _accumulate_4x1(
            c, c0 + j, c_row, decay, d0 + j, w, w0, w_step, w_row, x, x0 + j, x_step, depth
        )
        j += LANES
    return squares


@njit
def accumulate(
    c: Pointer, c0: int, c_row: int, rows: int, width: int, decay: Pointer, d0: int,
    w: Pointer, w0: int, w_step: int, w_row: int, x: Pointer, x0: int, x_step: int, depth: int,
) -> None:  # fmt: skip
    """``C[r, :width] = decay[:width] * C[r] + sum_s w[s, r] X[s]`` over `depth` rows of X."""
    r = 0
    while r + TILE_ROWS <= rows:
        accumulate_tile_rows(
            c, c0 + r * c_row, c_row, width, decay, d0, w, w0 + r * w_row, w_step, w_row, x, x0, x_step, depth
        )
        r += TILE_ROWS
    while r < rows:
        taken = 2 if rows - r >= 2 and width % (4 * LANES) == 0 else 1
        at, weight = c0 + r * c_row, w0 + r * w_row
        j = 0
        while j + 4 * LANES <= width:
            if taken == 2:
                _accumulate_2x4(c, at + j, c_row, decay, d0 + j, w, weight, w_step, w_row, x, x0 + j, x_step, depth)
            else:
                _accumulate_1x4(c, at + j, c_row, decay, d0 + j, w, weight, w_step, w_row, x, x0 + j, x_step, depth)
            j += 4 * LANES
        while j < width:
            _accumulate_1x1(c, at + j, c_row, decay, d0 + j, w, weight, w_step, w_row, x, x0 + j, x_step, depth)
            j += LANES
        r += taken


def _tile_combine(chunks: int) -> Any:
    """``out = sum_g a[g] X[g] + sum_s b[s] Y[s]`` for a piece of a row."""

    @intrinsic
    def tile(typingctx: Any, out: Any, out0: Any, a: Any, a0: Any, x: Any, x0: Any, x_step: Any, n: Any,
             b: Any, b0: Any, y: Any, y0: Any, y_step: Any, depth: Any) -> Any:  # fmt: skip
        i = types.intp
        signature = types.void(out, i, a, i, x, i, i, i, b, i, y, i, i, i)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators = zero_sums(context, builder, chunks)
            for weights, start, rows, first, step, count, kind in ((*args[2:8], x.dtype), (*args[8:], y.dtype)):
                with cgutils.for_range(builder, count) as loop:
                    weight = builder.load(builder.gep(weights, [builder.add(start, loop.index)]))
                    every, place = llvm.broadcast(builder, weight), element(builder, first, (loop.index, step))
                    for chunk, variable in enumerate(accumulators):
                        pointer = builder.gep(rows, [builder.add(place, fixed(LANES * chunk))])
                        add_product(builder, variable, every, llvm.load_lanes(builder, pointer, kind))
            for chunk, variable in enumerate(accumulators):
                pointer = builder.gep(args[0], [builder.add(args[1], fixed(LANES * chunk))])
                llvm.store_lanes(builder, builder.load(variable), pointer, types.float32)
            return context.get_dummy_value()

        return signature, codegen

    return tile


_combine_4 = _tile_combine(4)
_combine_1 = _tile_combine(1)


@njit
def combine(
    out: Pointer, out0: int, width: int, a: Pointer, a0: int, x: Pointer, x0: int, x_step: int, n: int,
    b: Pointer, b0: int, y: Pointer, y0: int, y_step: int, depth: int,
) -> None:  # fmt: skip
    """``out[:width] = sum_g a[g] X[g] + sum_s b[s] Y[s]`` over n rows of X and `depth` rows of Y."""
    j = 0
    while j + 4 * LANES <= width:
        _combine_4(out, out0 + j, a, a0, x, x0 + j, x_step, n, b, b0, y, y0 + j, y_step, depth)
        j += 4 * LANES
    while j < width:
        _combine_1(out, out0 + j, a, a0, x, x0 + j, x_step, n, b, b0, y, y0 + j, y_step, depth)
        j += LANES


def _tile_dots(rows: int, vectors: int) -> Any:
    """``out[n, r] = <R[r], X[n]>`` for a few rows and vectors; the sums over lanes are taken together.

    Rows after `last` repeat row `last`, which costs less than to take the rows of a short tile one by one.
    """

    @intrinsic
    def tile(typingctx: Any, r: Any, r0: Any, r_row: Any, x: Any, x0: Any, x_row: Any, width: Any, out: Any,
             out0: Any, out_row: Any, last: Any) -> Any:  # fmt: skip
        i = types.intp
        signature = types.void(r, i, i, x, i, i, i, out, i, i, i)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def at(which: int, index: Any) -> Any:
                return builder.gep(args[which], [index])

            _, r0, r_row, _, x0, x_row, width, _, out0, out_row, last = args
            accumulators = zero_sums(context, builder, rows * vectors)
            starts = []
            for row in range(rows):
                number = ir.Constant(last.type, row)
                clamped = builder.select(builder.icmp_signed("<", last, number), last, number)
                starts.append(element(builder, r0, (clamped, r_row)))
            chunks = builder.udiv(width, ir.Constant(ir.IntType(64), LANES))
            with cgutils.for_range(builder, chunks) as loop:
                shift = builder.mul(loop.index, ir.Constant(ir.IntType(64), LANES))
                lanes = [
                    llvm.load_lanes(
                        builder, at(3, builder.add(element(builder, x0, (n, x_row)), shift)), types.float32
                    )
                    for n in range(vectors)
                ]
                for row, start in enumerate(starts):
                    place = builder.gep(args[0], [builder.add(start, shift)])
                    value = llvm.load_lanes(builder, place, r.dtype)
                    for n in range(vectors):
                        add_product(builder, accumulators[n * rows + row], value, lanes[n])
            sums = sums_of_lanes(builder, [builder.load(variable) for variable in accumulators])
            for n in range(vectors):
                pick = ir.Constant(ir.VectorType(INT32, rows), [INT32(n * rows + row) for row in range(rows)])
                part = builder.shuffle_vector(sums, sums, pick)
                llvm.store_lanes(builder, part, at(7, element(builder, out0, (n, out_row))), types.float32)
            return context.get_dummy_value()

        return signature, codegen

    return tile


def sums_of_lanes(builder: Any, vectors: list[Any]) -> Any:
    """Add up the lanes of each of a few vectors, neighbours first; returns a vector of the sums."""
    count, values = len(vectors), vectors
    while len(values) > 1:
        values = [_fold(builder, *values[n : n + 2]) for n in range(0, len(values), 2)]
    while values[0].type.count > count:
        values = [builder.fadd(*llvm.parities(builder, values[0]))]
    return values[0]


def _fold(builder: Any, a: Any, b: Any) -> Any:
    """Add neighbouring lanes: the sums of a, then the sums of b."""
    n = a.type.count
    kind = ir.VectorType(INT32, n)
    even, odd = (ir.Constant(kind, [INT32(2 * i + parity) for i in range(n)]) for parity in (0, 1))
    return builder.fadd(builder.shuffle_vector(a, b, even), builder.shuffle_vector(a, b, odd))


_dots_1 = _tile_dots(DOT_ROWS, 1)
_dots_2 = _tile_dots(DOT_ROWS, 2)


@njit
def dots(
    r: Pointer, r0: int, r_row: int, rows: int, x: Pointer, x0: int, x_row: int, vectors: int, width: int,
    out: Pointer, out0: int, out_row: int,
) -> None:  # fmt: skip
    """``out[n, r] = <R[r], X[n]>`` over `width` elements, for one vector or two; writes groups of `DOT_ROWS`."""
    for i in range(0, rows, DOT_ROWS):
        last = rows - 1 - i
        if vectors == 2:
            _dots_2(r, r0 + i * r_row, r_row, x, x0, x_row, width, out, out0 + i, out_row, last)
        else:
            _dots_1(r, r0 + i * r_row, r_row, x, x0, x_row, width, out, out0 + i, out_row, last)
