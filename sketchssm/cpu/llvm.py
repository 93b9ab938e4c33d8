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

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

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
        half = ir.VectorType(ir.HalfType(), lanes)
        return builder.fpext(builder.load(builder.bitcast(pointer, half.as_pointer()), align=2), vector_type(lanes))
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
        value = builder.fptrunc(value, ir.VectorType(ir.HalfType(), lanes))
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
