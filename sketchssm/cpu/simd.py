"""Vectors of 16 float32 numbers as Numba values.

LLVM splits a vector into the registers of the CPU: one with AVX-512, two with AVX2, four with NEON. A sum over lanes
has one order, so that a row's result does not depend on the batch.

Plain loops with ``fastmath={"reassoc", "contract"}`` become vectors too, but cannot keep a tile of a matrix product in
registers. Measured on one core with AVX-512, in cache, against the kernels built from these vectors:

=============================  ============================================
kernel                         time with plain loops
=============================  ============================================
fold, 16 tokens of 128 x 128   2.8 to 3.4 times as long
`combine`, 7 + 16 rows of 128  1.4 times as long
`dots`, 128 rows of 128        0.8 times; a window is 0% to 4.6% slower
standard decode of a token     1.03 times as long
=============================  ============================================

Kernels use plain pointers and element offsets. Arrays would be passed with descriptors and reference counts, which
cost more than a small kernel does. `load` widens narrow elements and `store` rounds to nearest even; `llvm.py` has
the types of elements.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from sketchssm.cpu.llvm import (
    INT8,
    INT32,
    LANES,
    VECTOR,
    broadcast,
    constant,
    every,
    fused,
    load_lanes,
    parities,
    store_lanes,
    vector_type,
)

Pointer = Any
"""In signatures of compiled functions: a pointer to elements of one of the types of `llvm.py`."""


def padded(size: int, multiple: int = LANES) -> int:
    """Return the least multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


@intrinsic
def copy(typingctx: Any, target: Any, target0: Any, source: Any, source0: Any, count: Any) -> Any:
    """Copy `count` elements between areas that don't overlap."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, source = builder.gep(args[0], [args[1]]), builder.gep(args[2], [args[3]])
        cgutils.raw_memcpy(builder, to, source, args[4], ir.Constant(args[4].type, target.dtype.bitwidth // 8))
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp, types.intp), codegen


@intrinsic
def doubles(typingctx: Any, pointer: Any, index: Any) -> Any:
    """View the memory from one float32 element on as float64."""
    result = types.CPointer(types.float64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.gep(args[0], [args[1]]), context.get_value_type(result))

    return result(pointer, types.intp), codegen


@intrinsic
def prefetch(typingctx: Any, pointer: Any, index: Any) -> Any:
    """Prefetch the cache line of an element into the second cache. The element need not exist."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        place = builder.bitcast(builder.gep(args[0], [args[1]]), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [place, INT32(0), INT32(2), INT32(1)])
        return context.get_dummy_value()

    return types.void(pointer, types.intp), codegen


def pointer_cast(kind: Any) -> Any:
    """Make a function that takes an address as a pointer, or as a record by reference."""

    @intrinsic
    def cast(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(kind))

        return kind(types.intp), codegen

    return cast


floats = pointer_cast(types.CPointer(types.float32))
bfloats = pointer_cast(types.CPointer(types.uint16))
halves = pointer_cast(types.CPointer(types.int16))
int8s = pointer_cast(types.CPointer(INT8))
integers = pointer_cast(types.CPointer(types.int64))
short_integers = pointer_cast(types.CPointer(types.int32))


@intrinsic
def load(typingctx: Any, pointer: Any, index: Any) -> Any:
    """Read 16 consecutive elements as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load_lanes(builder, builder.gep(args[0], [args[1]]), pointer.dtype)

    return VECTOR(pointer, types.intp), codegen


@intrinsic
def store(typingctx: Any, pointer: Any, index: Any, value: Any) -> Any:
    """Write 16 consecutive elements."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store_lanes(builder, args[2], builder.gep(args[0], [args[1]]), pointer.dtype)
        return context.get_dummy_value()

    return types.void(pointer, types.intp, VECTOR), codegen


@intrinsic
def splat(typingctx: Any, scalar: Any) -> Any:
    """Copy a float32 number to all lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return broadcast(builder, args[0])

    return VECTOR(types.float32), codegen


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Compute ``a b + c`` lane by lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return fused(builder, *args)

    return VECTOR(VECTOR, VECTOR, VECTOR), codegen


@intrinsic
def total(typingctx: Any, vector: Any) -> Any:
    """Add up the lanes, neighbours first."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = args[0]
        while value.type.count > 1:
            value = builder.fadd(*parities(builder, value))
        return builder.extract_element(value, INT32(0))

    return types.float32(VECTOR), codegen


EXP_LOWEST = -87.0
"""`exp` returns 0 for smaller arguments: the result would be subnormal in float32."""

EXP_TERMS = [1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0]


@intrinsic
def exp(typingctx: Any, vector: Any) -> Any:
    """Compute ``exp`` of numbers <= 0, -inf included, to about one unit in the last place."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = args[0]
        wide = ir.VectorType(INT32, LANES)
        vanished = builder.fcmp_ordered("<", x, constant(EXP_LOWEST))
        x = builder.select(vanished, constant(0.0), x)
        # exp x = 2^n exp r with n = round(x / ln 2) and |r| <= ln(2) / 2; ln 2 in two parts keeps r exact.
        # Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
        shifted = fused(builder, x, constant(1.4426950408889634), constant(12582912.0))
        n = builder.fsub(shifted, constant(12582912.0))
        r = fused(builder, n, constant(-0.693359375), x)
        r = fused(builder, n, constant(2.12194440054690583e-4), r)
        value = constant(EXP_TERMS[0])
        for term in EXP_TERMS[1:]:
            value = fused(builder, value, r, constant(term))
        exponent = builder.shl(builder.bitcast(shifted, wide), every(23))
        scaled = builder.bitcast(builder.add(builder.bitcast(value, wide), exponent), vector_type())
        return builder.select(vanished, constant(0.0), scaled)

    return VECTOR(VECTOR), codegen


def _operator(symbol: Callable[..., Any], method: str) -> None:
    @intrinsic
    def lanewise(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, method)(*args)

        return VECTOR(VECTOR, VECTOR), codegen

    @overload(symbol, strict=False, inline="never")
    def apply(a: Any, b: Any) -> Any:
        return (lambda a, b: lanewise(a, b)) if a == VECTOR and b == VECTOR else None


_operator(operator.add, "fadd")
_operator(operator.sub, "fsub")
_operator(operator.mul, "fmul")
