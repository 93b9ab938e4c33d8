"""Vectors as codes of few bits, each vector with its own scale.

The codes are those of `sketchssm.reference.narrow`, computed in float32. If a number is halfway between two codes, the
two backends may choose different codes.
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
from sketchssm.cpu.llvm import E4M3_UNIT, INT32, LANES, VECTOR
from sketchssm.cpu.packed import FP8
from sketchssm.cpu.simd import (
    Pointer,
    e4m3s,
    fma,
    int4s,
    int8s,
    load,
    splat,
    store,
    total,
)
from sketchssm.reference.narrow import SHRINKS

__all__ = ["encode", "encode_4"]

LEAST = 2.0**-120
"""A vector whose largest magnitude is smaller has scale 0: float32 cannot hold the inverse of its scale."""

ROUNDING = np.float32(12582912.0)
"""1.5 * 2^23: a float32 number plus this, and minus this again, is the nearest integer."""


@intrinsic
def peak(typingctx: Any, pointer: Any, first: Any, count: Any) -> Any:
    """Return the largest magnitude of some float32 numbers, or NaN if there is one; `count` is a multiple of 16."""
    i = types.intp

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.VectorType(INT32, LANES)
        largest = cgutils.alloca_once_value(builder, llvm.every(0))
        chunks = builder.udiv(args[2], ir.Constant(args[2].type, LANES))
        with cgutils.for_range(builder, chunks) as loop:
            index = builder.add(args[1], builder.mul(loop.index, ir.Constant(args[1].type, LANES)))
            numbers = llvm.load_lanes(builder, builder.gep(args[0], [index]), types.float32)
            # magnitudes compare like their bits, and NaN is the largest
            size = builder.and_(builder.bitcast(numbers, wide), llvm.every(0x7FFFFFFF))
            before = builder.load(largest)
            builder.store(builder.select(builder.icmp_signed(">", size, before), size, before), largest)
        value = builder.load(largest)
        while value.type.count > 1:
            even, odd = llvm.parities(builder, value)
            value = builder.select(builder.icmp_signed(">", even, odd), even, odd)
        return builder.bitcast(builder.extract_element(value, INT32(0)), ir.FloatType())

    return types.float32(pointer, i, i), codegen


@intrinsic
def clamp(typingctx: Any, vector: Any, limit: Any) -> Any:
    """Limit the magnitude of every lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, limit = args[0], llvm.broadcast(builder, args[1])
        below = builder.fsub(llvm.constant(-0.0), limit)
        value = builder.select(builder.fcmp_ordered("<", value, limit), value, limit)
        return builder.select(builder.fcmp_ordered(">", value, below), value, below)

    return VECTOR(VECTOR, types.float32), codegen


@njit
def encode(kind: int, buf: Pointer, source: int, size: int, address: int) -> float:
    """Store a vector from scratch memory as int8 or fp8 codes; return the factor for loaded codes.

    The factor is NaN for a vector with a NaN or an infinity.
    """
    largest = np.float64(peak(buf, source, size))
    top = 448.0 if kind == FP8 else 127.0
    factor = splat(np.float32(0.0 if largest < LEAST else top / largest))
    for c in range(0, size, LANES):
        if kind == FP8:
            store(e4m3s(address), c, factor * load(buf, source + c))
        else:
            store(int8s(address), c, factor * load(buf, source + c))
    if not largest < np.inf:
        return np.nan
    return 0.0 if largest < LEAST else largest / top * (E4M3_UNIT if kind == FP8 else 1.0)


@njit
def encode_4(buf: Pointer, source: int, size: int, address: int) -> float:
    """`encode` for 4-bit codes, with the scale of least squared error."""
    largest = np.float64(peak(buf, source, size))
    if largest < LEAST:
        for c in range(0, size, LANES):
            store(int4s(address), c, splat(np.float32(0.0)))
        return 0.0
    unit = 7.0 / largest
    best, least = 1.0, np.inf
    for share in SHRINKS:
        error = _error(buf, source, size, np.float32(unit), np.float32(unit / share), np.float32(share))
        if error < least:
            best, least = share, error
    factor = splat(np.float32(unit / best))
    for c in range(0, size, LANES):
        store(int4s(address), c, clamp(factor * load(buf, source + c), np.float32(7.0)))
    return largest / 7.0 * best if largest < np.inf else np.nan


@njit
def _error(buf: Pointer, source: int, size: int, unit: float, inverse: float, step: float) -> float:
    """Squared error of 4-bit codes of a vector, whose largest magnitude counts as 7."""
    error, rounding = splat(np.float32(0.0)), splat(ROUNDING)
    for c in range(source, source + size, LANES):
        number = load(buf, c)
        code = clamp(splat(inverse) * number, np.float32(7.0)) + rounding - rounding
        rest = fma(splat(-step), code, splat(unit) * number)
        error = fma(rest, rest, error)
    return total(error)
