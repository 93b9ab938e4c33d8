"""Residuals in few bits (`sketchssm.reference.residual`): the codes of a state, and their product with a query.

Eight rows of codes share their bytes, so that 16 neighbouring bytes hold 16 neighbouring columns. Codes of 3 bits have
a plane of their low 2 bits, then a plane of their high bit.

=====  ==============  =================================================
bits   planes          place of row v
=====  ==============  =================================================
1      1 bit           bit ``v mod 8`` of byte row ``v // 8``
2      2 bits          bits ``2 (v mod 4)`` and up of byte row ``v // 4``
3      2 bits, 1 bit   both
=====  ==============  =================================================

Memory holds the codes of the reference plus ``2^(b-1)``, from 0 to ``2^b - 1``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sketchssm.cpu import llvm
from sketchssm.cpu.jit import njit
from sketchssm.cpu.layout import Record
from sketchssm.cpu.llvm import INT32, LANES
from sketchssm.cpu.packed import BFLOAT, BITS, CODES, FACTORS, INT8, MAP, RANK, SCALES, SKETCH, field
from sketchssm.cpu.simd import Pointer, bfloats, copy, floats, fma, int8s, load, splat, store, total
from sketchssm.cpu.tiles import accumulate, add_product, dots, element, sums_of_lanes, zero_sums
from sketchssm.layer.residual import GAINS, STEPS

CODE_ROWS = 8
"""Rows of codes that share their bytes."""

LEAST = 2.0**-120
"""A smaller scale counts as 0: float32 cannot hold its inverse."""

DISTANCES, LEVEL_GAINS = (0.0, *STEPS.values()), (1.0, *GAINS.values())
"""Distance of neighbouring levels and their gain, by bits."""

WORDS = ir.VectorType(INT32, LANES)
BYTES = ir.VectorType(ir.IntType(8), LANES)


def _planes(bits: int) -> list[tuple[int, int]]:
    """Bits of each plane and the lowest bit of a code that it holds."""
    return {1: [(1, 0)], 2: [(2, 0)], 3: [(2, 0), (1, 2)]}[bits]


def _tile_dots(bits: int) -> Any:
    """``out[r] = sum_k code[r, k] x[k]`` for the 8 rows of a group; `plane` is the bytes of the first plane."""

    @intrinsic
    def tile(typingctx: Any, codes: Any, first: Any, plane: Any, group: Any, width: Any, x: Any, x0: Any, out: Any,
             out0: Any) -> Any:  # fmt: skip
        i = types.intp

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            codes, first, plane, group, width, x, x0, out, out0 = args
            accumulators = zero_sums(context, builder, CODE_ROWS)
            with cgutils.for_range(builder, builder.udiv(width, first.type(LANES))) as loop:
                column = builder.mul(loop.index, first.type(LANES))
                query = llvm.load_lanes(builder, builder.gep(x, [builder.add(x0, column)]), types.float32)
                values: list[Any] = [None] * CODE_ROWS
                for number, (size, low) in enumerate(_planes(bits)):
                    start = element(builder, first, (number, plane))
                    start = builder.add(element(builder, start, (size, builder.mul(group, width))), column)
                    for byte_row in range(size):
                        place = builder.gep(codes, [element(builder, start, (byte_row, width))])
                        word = builder.zext(builder.load(builder.bitcast(place, BYTES.as_pointer()), align=1), WORDS)
                        each = 8 // size
                        for j in range(each):
                            part = builder.lshr(word, llvm.every(j * size)) if j else word
                            part = builder.and_(part, llvm.every(2**size - 1))
                            part = builder.shl(part, llvm.every(low)) if low else part
                            v = byte_row * each + j
                            values[v] = part if values[v] is None else builder.or_(values[v], part)
                for variable, value in zip(accumulators, values, strict=True):
                    add_product(builder, variable, builder.uitofp(value, llvm.vector_type()), query)
            sums = sums_of_lanes(builder, [builder.load(variable) for variable in accumulators])
            llvm.store_lanes(builder, sums, builder.gep(out, [out0]), types.float32)
            return context.get_dummy_value()

        return types.void(codes, i, i, i, i, x, i, out, i), codegen

    return tile


def _tile_encode(bits: int) -> Any:
    """Store the codes ``floor(x[r, :] y[r] z[:])`` of the 8 rows of a group; y and z hold inverse scales."""

    @intrinsic
    def tile(typingctx: Any, codes: Any, first: Any, plane: Any, group: Any, width: Any, x: Any, x0: Any, y0: Any,
             z0: Any) -> Any:  # fmt: skip
        i = types.intp

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            codes, first, plane, group, width, x, x0, y0, z0 = args
            half = float(2 ** (bits - 1))
            least, most = llvm.constant(0.0), llvm.constant(2 * half - 1)
            floor = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(llvm.vector_type(), [llvm.vector_type()]), f"llvm.floor.v{LANES}f32"
            )
            with cgutils.for_range(builder, builder.udiv(width, first.type(LANES))) as loop:
                column = builder.mul(loop.index, first.type(LANES))

                def numbers(start: Any, column: Any = column) -> Any:
                    return llvm.load_lanes(builder, builder.gep(x, [builder.add(start, column)]), types.float32)

                across = numbers(z0)
                words = []
                for row in range(CODE_ROWS):
                    down = builder.load(builder.gep(x, [builder.add(y0, first.type(row))]))
                    value = builder.fmul(numbers(element(builder, x0, (row, width))), llvm.broadcast(builder, down))
                    value = builder.fadd(builder.call(floor, [builder.fmul(value, across)]), llvm.constant(half))
                    # ordered comparisons are false for NaN, which becomes 0
                    value = builder.select(builder.fcmp_ordered(">", value, least), value, least)
                    value = builder.select(builder.fcmp_ordered("<", value, most), value, most)
                    words.append(builder.fptosi(value, WORDS))
                for number, (size, low) in enumerate(_planes(bits)):
                    start = element(builder, first, (number, plane))
                    start = builder.add(element(builder, start, (size, builder.mul(group, width))), column)
                    each = 8 // size
                    for byte_row in range(size):
                        packed = llvm.every(0)
                        for j in range(each):
                            part = builder.lshr(words[byte_row * each + j], llvm.every(low))
                            part = builder.and_(part, llvm.every(2**size - 1))
                            packed = builder.or_(packed, builder.shl(part, llvm.every(j * size)))
                        place = builder.gep(codes, [element(builder, start, (byte_row, width))])
                        place = builder.bitcast(place, BYTES.as_pointer())
                        builder.store(builder.trunc(packed, BYTES), place, align=1)
            return context.get_dummy_value()

        return types.void(codes, i, i, i, i, x, i, i, i), codegen

    return tile


_dots_1, _dots_2, _dots_3 = (_tile_dots(bits) for bits in STEPS)
_encode_1, _encode_2, _encode_3 = (_tile_encode(bits) for bits in STEPS)


@njit
def read_residual(m: Record, at: Record, buf: Pointer, slot: int, head: int, x: int, spot: int) -> None:
    """Multiply one head's coefficient map, into `spot`, and its residual, into the outputs, by the query at `x`.

    The query is replaced by its products with the columns' scales.
    """
    rank, bits, keys = field(m, head, RANK), field(m, head, BITS), m.keys
    own = slot * m.packed_stride + field(m, head, MAP)
    if m.sketch_type == BFLOAT:
        dots(bfloats(m.packed), own, keys, rank, buf, x, keys, 1, keys, buf, spot, m.columns)
    elif m.sketch_type == INT8:
        dots(int8s(m.packed), own, keys, rank, buf, x, keys, 1, keys, buf, spot, m.columns)
        scales = slot * m.factors_stride + field(m, head, FACTORS)
        for g in range(0, rank, LANES):
            store(buf, spot + g, load(floats(m.factors), scales + g) * load(buf, spot + g))
    else:
        dots(floats(m.packed), own, keys, rank, buf, x, keys, 1, keys, buf, spot, m.columns)
    rows = slot * m.scales_stride + field(m, head, SCALES)
    whole = splat(np.float32(0.0))
    for c in range(0, keys, LANES):
        value = load(bfloats(m.scales), rows + m.values + c) * load(buf, x + c)
        whole = whole + value
        store(buf, x + c, value)
    # codes in memory are not negative, and levels lie between them
    shift = splat(-(np.float32(1 << (bits - 1)) - np.float32(0.5)) * total(whole))
    codes, output = slot * m.codes_stride + field(m, head, CODES), at.output + head * m.values
    plane = m.values * keys // 4
    for group in range(m.values // CODE_ROWS):
        target = output + group * CODE_ROWS
        if bits == 1:
            _dots_1(int8s(m.codes), codes, plane, group, keys, buf, x, buf, target)
        elif bits == 2:
            _dots_2(int8s(m.codes), codes, plane, group, keys, buf, x, buf, target)
        else:
            _dots_3(int8s(m.codes), codes, plane, group, keys, buf, x, buf, target)
    for v in range(0, m.values, LANES):
        store(buf, output + v, load(bfloats(m.scales), rows + v) * (load(buf, output + v) + shift))


@njit
def store_residual(
    m: Record, at: Record, buf: Pointer, slot: int, head: int, unit: float, state: Pointer, first: int
) -> None:
    """Code what the stored sketch leaves of a state that begins at element `first`; `unit` is that of the state."""
    rank, bits, keys, values = field(m, head, RANK), field(m, head, BITS), m.keys, m.values
    columns, rows = slot * m.packed_stride + field(m, head, SKETCH), slot * m.packed_stride + field(m, head, MAP)
    scales = slot * m.factors_stride + field(m, head, FACTORS)
    for g in range(rank):
        factor = -floats(m.factors)[scales + g] if m.sketch_type == INT8 else np.float32(-1.0)
        _unpack(m, buf, at.span + g * values, columns + g * values, values, factor)
        _unpack(m, buf, at.rows + g * keys, rows + g * keys, keys, np.float32(1.0))
    left = at.residual
    copy(buf, left, state, first, values * keys)
    accumulate(buf, left, keys, values, keys, buf, at.ones, buf, at.span, values, 1, buf, at.rows, keys, rank)
    down, across = left + values * keys, left + values * keys + values
    step, gain = DISTANCES[bits], LEVEL_GAINS[bits]
    place = slot * m.scales_stride + field(m, head, SCALES)
    for c in range(0, keys, LANES):
        store(buf, across + c, splat(np.float32(0.0)))
    for v in range(values):
        squares, each = splat(np.float32(0.0)), splat(np.float32(unit))
        for c in range(left + v * keys, left + (v + 1) * keys, LANES):
            value = each * load(buf, c)
            squares = fma(value, value, squares)
        buf[down + v] = gain * step * math.sqrt(total(squares) / m.key_dim) / unit
    _take_scales(m, buf, down, place, values)
    for v in range(0, values, LANES):
        store(buf, down + v, splat(np.float32(gain)) * load(buf, down + v))
    for v in range(values):
        each = splat(np.float32(step) * buf[down + v])
        for c in range(0, keys, LANES):
            share = each * load(buf, left + v * keys + c)
            store(buf, across + c, fma(share, share, load(buf, across + c)))
    for c in range(keys):
        buf[across + c] = math.sqrt(buf[across + c] / m.value_dim)
    _take_scales(m, buf, across, place + values, keys)
    codes, plane = slot * m.codes_stride + field(m, head, CODES), values * keys // 4
    for group in range(values // CODE_ROWS):
        source = left + group * CODE_ROWS * keys
        y = down + group * CODE_ROWS
        if bits == 1:
            _encode_1(int8s(m.codes), codes, plane, group, keys, buf, source, y, across)
        elif bits == 2:
            _encode_2(int8s(m.codes), codes, plane, group, keys, buf, source, y, across)
        else:
            _encode_3(int8s(m.codes), codes, plane, group, keys, buf, source, y, across)


@njit
def _unpack(m: Record, buf: Pointer, target: int, source: int, size: int, factor: float) -> None:
    """Copy stored numbers of a sketch or map, times a factor, into scratch."""
    each = splat(factor)
    for c in range(0, size, LANES):
        if m.sketch_type == BFLOAT:
            store(buf, target + c, each * load(bfloats(m.packed), source + c))
        elif m.sketch_type == INT8:
            store(buf, target + c, each * load(int8s(m.packed), source + c))
        else:
            store(buf, target + c, each * load(floats(m.packed), source + c))


@njit
def _take_scales(m: Record, buf: Pointer, scales: int, target: int, size: int) -> None:
    """Store scales from scratch, which then holds the inverses of the stored scales, 0 for a scale of 0."""
    for c in range(0, size, LANES):
        store(bfloats(m.scales), target + c, load(buf, scales + c))
        store(buf, scales + c, load(bfloats(m.scales), target + c))
    for c in range(size):
        scale = buf[scales + c]
        if scale < LEAST:
            bfloats(m.scales)[target + c] = 0
        buf[scales + c] = np.float32(0.0) if scale < LEAST else np.float32(1.0) / scale
