"""Vectors of float32 lanes in LLVM's code: building blocks of the compiled operations of `simd.py` and of the tiles.

The functions take an LLVM builder. `load_lanes` widens narrow elements and `store_lanes` rounds to nearest even. The
pointer's type names the elements:

=======  ==================================================================
pointer  elements
=======  ==================================================================
float32  float32
uint16   bfloat16
int16    float16
INT8     8-bit integers
=======  ==================================================================

Codes (INT8) are loaded and stored 16 at a time.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import models, register_model

__all__ = [
    "INT8",
    "INT32",
    "LANES",
    "VECTOR",
    "broadcast",
    "constant",
    "every",
    "fused",
    "load_lanes",
    "parities",
    "store_lanes",
    "vector_type",
]

LANES = 16

FLOAT = ir.FloatType()
INT32 = ir.IntType(32)


class Vector(types.Type):  # type: ignore[misc]
    """Numba type of 16 float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


VECTOR = Vector()


@register_model(Vector)
class VectorModel(models.PrimitiveModel):  # type: ignore[misc]  # the base is untyped
    """Data model: a vector is one LLVM value."""

    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, vector_type())


class Code(types.Type):  # type: ignore[misc]
    """Numba type of codes, for pointers: never a value itself."""


@register_model(Code)
class CodeModel(models.PrimitiveModel):  # type: ignore[misc]
    """Data model: a byte."""

    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, ir.IntType(8))


INT8 = Code(name="int8 codes")


def vector_type(lanes: int = LANES) -> Any:
    """Return LLVM's type of a vector of float32 lanes."""
    return ir.VectorType(FLOAT, lanes)


def constant(value: float, lanes: int = LANES) -> Any:
    """Return a vector with one number in every lane."""
    return ir.Constant(vector_type(lanes), [ir.Constant(FLOAT, value)] * lanes)


def broadcast(builder: Any, scalar: Any, lanes: int = LANES) -> Any:
    """Copy a scalar to every lane of a vector."""
    single = builder.insert_element(ir.Constant(vector_type(lanes), ir.Undefined), scalar, INT32(0))
    return builder.shuffle_vector(single, single, ir.Constant(ir.VectorType(INT32, lanes), [INT32(0)] * lanes))


def every(number: int, lanes: int = LANES, bits: int = 32) -> Any:
    """Return a vector with one integer in every lane."""
    kind = ir.IntType(bits)
    return ir.Constant(ir.VectorType(kind, lanes), [kind(number)] * lanes)


def load_codes(builder: Any, pointer: Any) -> Any:
    """Load 16 codes and widen them to float32."""
    raw = ir.VectorType(ir.IntType(8), LANES)
    codes = builder.load(builder.bitcast(pointer, raw.as_pointer()), align=1)
    return builder.sitofp(builder.sext(codes, ir.VectorType(INT32, LANES)), vector_type())


def converts_halves() -> bool:
    """Whether the CPU for which Numba compiles converts float16; else LLVM calls functions that the process lacks."""
    features = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return platform.machine() not in ("x86_64", "AMD64") or "+f16c" in features


def widen_halves(builder: Any, bits: Any) -> Any:
    """Widen the bits of float16 lanes to float32."""
    lanes = bits.type.count
    wide = ir.VectorType(INT32, lanes)
    if converts_halves():
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), lanes)), vector_type(lanes))
    bits = builder.zext(bits, wide)
    size = builder.and_(bits, every(0x7FFF, lanes))
    # digits in place, the exponent too small by 112: exact, also for subnormal numbers
    value = builder.fmul(
        builder.bitcast(builder.shl(size, every(13, lanes)), vector_type(lanes)), constant(2.0**112, lanes)
    )
    value = builder.bitcast(value, wide)
    endless = builder.icmp_unsigned(">=", size, every(0x7C00, lanes))
    value = builder.select(endless, builder.or_(value, every(0xFF << 23, lanes)), value)
    sign = builder.shl(builder.and_(bits, every(0x8000, lanes)), every(16, lanes))
    return builder.bitcast(builder.or_(value, sign), vector_type(lanes))


def round_halves(builder: Any, value: Any) -> Any:
    """Round float32 lanes to the bits of float16, to nearest even."""
    lanes = value.type.count
    wide, short = ir.VectorType(INT32, lanes), ir.VectorType(ir.IntType(16), lanes)
    if converts_halves():
        return builder.bitcast(builder.fptrunc(value, ir.VectorType(ir.HalfType(), lanes)), short)
    bits = builder.bitcast(value, wide)
    size = builder.and_(bits, every(0x7FFFFFFF, lanes))
    odd = builder.and_(builder.lshr(size, every(13, lanes)), every(1, lanes))
    halves = builder.lshr(builder.add(builder.add(size, odd), every(0xFFF - (112 << 23), lanes)), every(13, lanes))
    # below 2^-14 the low bits of a sum with 0.5 count multiples of 2^-24
    steps = builder.fadd(builder.bitcast(size, vector_type(lanes)), constant(0.5, lanes))
    steps = builder.sub(builder.bitcast(steps, wide), every(126 << 23, lanes))
    halves = builder.select(builder.icmp_unsigned("<", size, every(113 << 23, lanes)), steps, halves)
    beyond = builder.icmp_unsigned(">=", size, every(143 << 23, lanes))
    halves = builder.select(beyond, every(0x7C00, lanes), halves)
    halves = builder.select(builder.fcmp_unordered("uno", value, value), every(0x7E00, lanes), halves)
    sign = builder.and_(builder.lshr(bits, every(16, lanes)), every(0x8000, lanes))
    return builder.trunc(builder.or_(halves, sign), short)


def load_lanes(builder: Any, pointer: Any, dtype: Any, lanes: int = LANES) -> Any:
    """Load lanes, widened to float32."""
    if dtype == INT8:
        return load_codes(builder, pointer)
    if dtype == types.uint16:
        half = ir.VectorType(ir.IntType(16), lanes)
        raw = builder.load(builder.bitcast(pointer, half.as_pointer()), align=2)
        shifted = builder.shl(builder.zext(raw, ir.VectorType(INT32, lanes)), every(16, lanes))
        return builder.bitcast(shifted, vector_type(lanes))
    if dtype == types.int16:
        half = ir.VectorType(ir.IntType(16), lanes)
        return widen_halves(builder, builder.load(builder.bitcast(pointer, half.as_pointer()), align=2))
    return builder.load(builder.bitcast(pointer, vector_type(lanes).as_pointer()), align=4)


def store_codes(builder: Any, value: Any, pointer: Any) -> None:
    """Store 16 numbers as codes; magnitudes are at most 127."""
    wide, narrow = ir.VectorType(INT32, LANES), ir.VectorType(ir.IntType(8), LANES)
    # the low bits of a sum with 1.5 * 2^23 are the nearest integer
    codes = builder.bitcast(builder.fadd(value, constant(12582912.0)), wide)
    builder.store(builder.trunc(codes, narrow), builder.bitcast(pointer, narrow.as_pointer()), align=1)


def store_lanes(builder: Any, value: Any, pointer: Any, dtype: Any) -> None:
    """Store lanes as float32, or as narrower elements rounded to nearest even."""
    if dtype == INT8:
        store_codes(builder, value, pointer)
        return
    lanes = value.type.count
    if dtype == types.uint16:
        bits = builder.bitcast(value, ir.VectorType(INT32, lanes))
        odd = builder.and_(builder.lshr(bits, every(16, lanes)), every(1, lanes))
        rounded = builder.lshr(builder.add(builder.add(bits, every(0x7FFF, lanes)), odd), every(16, lanes))
        # rounding up would carry the digits of a NaN into its sign
        rounded = builder.select(builder.fcmp_unordered("uno", value, value), every(0x7FC0, lanes), rounded)
        value = builder.trunc(rounded, ir.VectorType(ir.IntType(16), lanes))
        builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=2)
        return
    if dtype == types.int16:
        value = round_halves(builder, value)
        builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=2)
        return
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=4)


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Compute ``a b + c``, with one rounding if the CPU can."""
    lanes = a.type.count
    name = f"llvm.fmuladd.v{lanes}f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name)
    return builder.call(function, [a, b, c])


def parities(builder: Any, vector: Any) -> tuple[Any, Any]:
    """Split a vector into its even and its odd lanes."""
    half = vector.type.count // 2
    kind = ir.VectorType(INT32, half)
    pick = [ir.Constant(kind, [INT32(2 * i + odd) for i in range(half)]) for odd in (0, 1)]
    return builder.shuffle_vector(vector, vector, pick[0]), builder.shuffle_vector(vector, vector, pick[1])
