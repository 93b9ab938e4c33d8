// From an updated state to its sketch U = S^T Phi, and to products of vectors of V with the state.
//
// Products along K (U) take pieces of the state as they lie; products along V (S U, of which the coefficient maps are
// made) take them transposed by 8 x 8 blocks within the warp. Two slices of 8 bits per factor are plenty for what is
// stored in bf16 (2^-16 against 2^-9), and one is enough for such a sketch's basis and for the state in S U.
//
// A warp multiplies its own rows of the state by its own rows of U, so that it waits for nobody: what is left of a
// sketch is the sum over warps and algebra of the size of U, which one warp does while the others go on (maps.cuh).
#pragma once
#include "fragments.cuh"
#include "sketch_layout.cuh"

constexpr int COLUMN = V + 4;                                       // padded, so that fragment stores of U hit all banks
constexpr int LEFT = MAP == OWN ? 8 : MAP == FACTORS ? PIVOTS : 0;  // columns of U that one pass multiplies with the state
constexpr int DOTS = 2 * PIVOTS_2;                                  // of a column of U: with the pivots, and with itself

struct SketchMemory {
    alignas(16) float u[RANK_MAX][COLUMN];
    alignas(16) float parts[NWARPS][LEFT > 0 ? LEFT : 1][LEFT > 0 ? K : 4];  // a warp's share of S U
#if MAP == 0
    float dots[RANK_MAX][DOTS];  // U^T U, columns of the pivots, then |u|^2
#elif MAP == 1
    alignas(16) float b[RANK_MAX][K];
    float gram[RANK_MAX][RANK_MAX + 1];
#endif
    float squares[NWARPS];
};

struct SketchGates {
    Gate full, free;  // all warps' shares are there; they have been used
};

// Eight columns of a basis as operands, as the host laid them out (see sketchssm/cuda/layout.py): in one slice where
// they make a sketch that is stored in bf16, in two for float32.
constexpr int SLICES = SKETCH == BF16 ? 1 : 2;
__device__ __forceinline__ const uint2* basis_at(const uint2* basis, int tile, int step) {
    return basis + (tile * STEPS + step) * SLICES * 32 + threadIdx.x % 32;
}

// U of the warp's value rows, 8 TILES columns from `first` on; read back by the same warp after it has met.
template <int TILES> __device__ __forceinline__ void sketch_tiles(SketchMemory& m, StateRows& rows, const uint2* basis, int first, int rank) {
    constexpr int AHEAD = 4;  // pieces whose bases are under way at a time
    float high[TILES][4] = {}, low[TILES][4] = {};
#pragma unroll 1
    for (int part = 0; part < STEPS; part += AHEAD) {
        uint2 b[AHEAD][TILES][SLICES];
#pragma unroll
        for (int i = 0; i < AHEAD * TILES * SLICES; i++)
            b[i / (TILES * SLICES)][i / SLICES % TILES][i % SLICES] = basis_at(basis, first / 8 + i / SLICES % TILES, part + i / (TILES * SLICES))[i % SLICES * 32];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            Piece piece;
            piece.load(rows, part + i);
            const Operand<2> a(piece.s[0], piece.s[1]);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                mma_bf16(high[tile], a.a[0], b[i][tile][0].x, b[i][tile][0].y);
                mma_bf16(low[tile], a.a[1], b[i][tile][0].x, b[i][tile][0].y);
                if constexpr (SLICES > 1) mma_bf16(low[tile], a.a[0], b[i][tile][SLICES - 1].x, b[i][tile][SLICES - 1].y);
            }
        }
    }
    const int own = threadIdx.x / 32 * 16;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = first + 8 * tile + 2 * (threadIdx.x % 4) + i % 2;
            if (column < rank) m.u[column][own + value_row(i / 2)] = high[tile][i] + low[tile][i];
        }
}
__device__ __forceinline__ void sketch_columns(SketchMemory& m, StateRows& rows, const uint2* basis, int rank) {
    for (int first = 0; first < rank; first += 16)
        if (rank - first > 8) sketch_tiles<2>(m, rows, basis, first, rank);
        else sketch_tiles<1>(m, rows, basis, first, rank);
}

// The warp's rows of U into the packed sketch.
__device__ __forceinline__ void store_columns(const SketchMemory& m, sketch_t* packed, int rank) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 8 * 2;
    for (int g = lane / 8; g < rank; g += 4) {
        Packed<SKETCH, 2> pair;
        pair.set({m.u[g][row], m.u[g][row + 1]});
        pair.store(packed + g * V + row);
    }
}

// parts[warp] = columns [first, first + count) of U times the warp's rows of the state; at most 8. For maps that are stored
// in bf16 the state is rounded to it: one and the same matrix for all columns, so that solving with them enlarges nothing.
__device__ __forceinline__ void left_products(SketchMemory& m, StateRows& rows, int first, int count) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, c = lane % 4;
    // Rows 0 to 7 of the operand are the vectors' first slices and rows 8 to 15 their second: one product for both. The
    // operand's columns 2c, 2c + 1 are value rows c, 8 + c, and 8 further ones lie 4 on.
    u32 a[4] = {0, 0, 0, 0};
    if (r < count) {
        const float* const u = &m.u[first + r][16 * warp + c];
        slices<2>(u[0], u[8], &a[0], 1);
        slices<2>(u[4], u[12], &a[2], 1);
    }
#pragma unroll 2
    for (int step = 0; step < STEPS; step++) {
        Piece piece;
        piece.load(rows, step);
        float4 product;
#pragma unroll
        for (int t = 0; t < 2; t++) {
            float sum[4] = {};
            if constexpr (SLICES == 1) {
                const u32 upper = round_pair(piece.s[0][2 * t], piece.s[0][2 * t + 1]), lower = round_pair(piece.s[1][2 * t], piece.s[1][2 * t + 1]);
                mma_bf16(sum, a, transpose_8x8(upper), transpose_8x8(lower));
            } else {
                u32 upper[2], lower[2];
                slices<2>(piece.s[0][2 * t], piece.s[0][2 * t + 1], upper, 1);
                slices<2>(piece.s[1][2 * t], piece.s[1][2 * t + 1], lower, 1);
#pragma unroll
                for (int i = 0; i < 2; i++) mma_bf16(sum, a, transpose_8x8(upper[i]), transpose_8x8(lower[i]));
            }
            if (t == 0) product.x = sum[0] + sum[2], product.y = sum[1] + sum[3];
            else product.z = sum[0] + sum[2], product.w = sum[1] + sum[3];
        }
        if (r < count) *reinterpret_cast<float4*>(&m.parts[warp][r][16 * step + 4 * c]) = product;
    }
}
