"""Vectors as int8 codes, each vector with its own scale.

The codes are those of `sketchssm.reference.codes`, computed in float32. If a number is halfway between two codes, the
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
from sketchssm.cpu.llvm import INT32, LANES
from sketchssm.cpu.simd import Pointer, int8s, load, splat, store

LEAST = 2.0**-120
"""A vector whose largest magnitude is smaller has scale 0: float32 cannot hold the inverse of its scale."""


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


@njit
def encode(buf: Pointer, source: int, size: int, address: int) -> float:
    """Store a vector from scratch memory as int8 codes; return its scale, NaN with a NaN or an infinity."""
    largest = np.float64(peak(buf, source, size))
    factor = splat(np.float32(0.0 if largest < LEAST else 127.0 / largest))
    for c in range(0, size, LANES):
        store(int8s(address), c, factor * load(buf, source + c))
    if not largest < np.inf:
        return np.nan
    return 0.0 if largest < LEAST else largest / 127.0
