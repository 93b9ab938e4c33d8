"""Products of K-last rows with matrices, summed over K, with tokens or sketch columns on lanes.

The products are a state's predictions for all buffered keys, and a state's products with the basis. `substitute`
solves the triangular system of the tokens' writes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sketchssm.cpu import llvm
from sketchssm.cpu.llvm import INT32, LANES
from sketchssm.cpu.tiles import add_product, element, fixed, zero_sums

COLUMN_LANES = 8
"""Sketch columns that `columns_8` computes together: half a vector, so that ranks of 5 to 8 do not cost 16."""


def _interleave(builder: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """Interleave the lanes of a and b: the lower and the upper half of ``a0 b0 a1 b1 ...``."""
    n = a.type.count
    kind = ir.VectorType(INT32, n)
    orders = [[INT32(i // 2 + (i % 2) * n + half * n // 2) for i in range(n)] for half in (0, 1)]
    low, high = (builder.shuffle_vector(a, b, ir.Constant(kind, order)) for order in orders)
    return low, high


def _transposed(builder: Any, vectors: list[Any]) -> list[Any]:
    """Transpose a matrix of 16 rows, given as a list of vectors in row order.

    Interleaving the two halves of the flat matrix rotates the bits of every element's address by one place. Four
    rotations move the row's bits behind the column's.
    """
    for _ in range(4):
        half = len(vectors) // 2
        pairs = [_interleave(builder, vectors[i], vectors[i + half]) for i in range(half)]
        vectors = [vector for pair in pairs for vector in pair]
    return vectors


def _tile_columns(lanes: int) -> Any:
    """``out[c, r] = sum_k S[r, k] M[k, c]`` for 16 rows of S and `lanes` columns of M."""

    @intrinsic
    def tile(typingctx: Any, s: Any, s0: Any, s_row: Any, m: Any, m0: Any, m_step: Any, depth: Any, out: Any,
             out0: Any, out_row: Any) -> Any:  # fmt: skip
        i = types.intp
        signature = types.void(s, i, i, m, i, i, i, out, i, i)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def at(which: int, index: Any) -> Any:
                return builder.gep(args[which], [index])

            _, s0, s_row, _, m0, m_step, depth, _, out0, out_row = args
            accumulators = zero_sums(context, builder, LANES, lanes)
            with cgutils.for_range(builder, depth) as loop:
                column = llvm.load_lanes(
                    builder, at(3, element(builder, m0, (loop.index, m_step))), types.float32, lanes
                )
                for row, variable in enumerate(accumulators):
                    scalar = builder.load(at(0, builder.add(element(builder, s0, (row, s_row)), loop.index)))
                    add_product(builder, variable, llvm.broadcast(builder, scalar, lanes), column)
            rows = [builder.load(variable) for variable in accumulators]
            if lanes < LANES:
                kind = ir.VectorType(INT32, 2 * lanes)
                joined = ir.Constant(kind, [INT32(n) for n in range(2 * lanes)])
                rows = [builder.shuffle_vector(rows[n], rows[n + 1], joined) for n in range(0, LANES, 2)]
            for number, value in enumerate(_transposed(builder, rows)):
                place = at(7, element(builder, out0, (number, out_row)))
                llvm.store_lanes(builder, value, place, types.float32)
            return context.get_dummy_value()

        return signature, codegen

    return tile


columns_16 = _tile_columns(LANES)
columns_8 = _tile_columns(COLUMN_LANES)


@intrinsic
def transpose(typingctx: Any, source: Any, source0: Any, source_row: Any, out: Any, out0: Any, out_row: Any) -> Any:
    """``out[c, r] = source[r, c]`` for 16 rows and 16 columns."""
    i = types.intp

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def at(which: int, index: Any) -> Any:
            return builder.gep(args[which], [index])

        rows = [
            llvm.load_lanes(builder, at(0, element(builder, args[1], (row, args[2]))), types.float32)
            for row in range(LANES)
        ]
        for number, value in enumerate(_transposed(builder, rows)):
            llvm.store_lanes(builder, value, at(3, element(builder, args[4], (number, args[5]))), types.float32)
        return context.get_dummy_value()

    return types.void(source, i, i, out, i, i), codegen


@intrinsic
def substitute(typingctx: Any, lower: Any, lower0: Any, lower_row: Any, x: Any, x0: Any) -> Any:
    """``X[s] += sum_{j<s} L[s, j] X[j]`` for 16 rows of one vector each, one after the other."""
    i = types.intp

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = [builder.gep(args[3], [builder.add(args[4], fixed(LANES * row))]) for row in range(LANES)]
        rows = [llvm.load_lanes(builder, place, types.float32) for place in places]
        for j in range(LANES):
            for s in range(j + 1, LANES):
                place = builder.gep(args[0], [builder.add(element(builder, args[1], (s, args[2])), fixed(j))])
                every = llvm.broadcast(builder, builder.load(place))
                rows[s] = llvm.fused(builder, every, rows[j], rows[s])
        for row, place in zip(rows, places, strict=True):
            llvm.store_lanes(builder, row, place, types.float32)
        return context.get_dummy_value()

    return types.void(lower, i, i, x, i), codegen
