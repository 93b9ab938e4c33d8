// From an updated state tile to its sketch U = S^T Phi, and to products of vectors of V with the state.
//
// All of it reads the state from registers. Products along K (U) take the tile as it lies; products along V (S U, of
// which the coefficient maps are made) take it transposed by 8 x 8 blocks within the warp. Two slices of 8 bits per
// factor are plenty for what is stored in bf16 (2^-16 against 2^-9), and one is enough for such a sketch's basis.
//
// A warp multiplies its own rows of the state by its own rows of U, so that it waits for nobody: what is left of a
// sketch is the sum over warps and algebra of the size of U, which one warp does while the others go on (maps.cuh).
#pragma once
#include "fragments.cuh"
#include "sketch_layout.cuh"

constexpr int COLUMN = V + 4;                                       // padded, so that fragment stores of U hit all banks
constexpr int LEFT = MAP == OWN ? 8 : MAP == FACTORS ? PIVOTS : 0;  // columns of U that one pass multiplies with the tile
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
struct BasisTile {
    uint2 slice[STEPS][SLICES];
    __device__ __forceinline__ void load(const uint2* basis, int tile) {
#pragma unroll
        for (int i = 0; i < STEPS * SLICES; i++) slice[i / SLICES][i % SLICES] = basis[(tile * STEPS * SLICES + i) * 32 + threadIdx.x % 32];
    }
};

// U of the warp's 16 value rows; read back by the same warp after it has met.
__device__ __forceinline__ void sketch_columns(SketchMemory& m, const Tile& tile, BasisTile& basis, const uint2* more, int rank) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4, row = threadIdx.x / 32 * 16 + r;
    for (int first = 0; first < rank; first += 8) {
        if (first) basis.load(more, first / 8);
        float high[4] = {}, low[4] = {};  // chains of products
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const uint2 b = basis.slice[step][0];
            const Operand<2> a(tile.s[step][0], tile.s[step][1]);
            mma_bf16(high, a.a[0], b.x, b.y);
            mma_bf16(low, a.a[1], b.x, b.y);
            if constexpr (SLICES > 1) mma_bf16(low, a.a[0], basis.slice[step][SLICES - 1].x, basis.slice[step][SLICES - 1].y);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (first + 2 * c + i % 2 < rank) m.u[first + 2 * c + i % 2][row + 8 * (i / 2)] = high[i] + low[i];
    }
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

// parts[warp] = columns [first, first + count) of U times the tile, over the warp's value rows; at most 8.
__device__ __forceinline__ void left_products(SketchMemory& m, const Tile& tile, int first, int count) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, c = lane % 4;
    // Rows 0 to 7 of the operand are the vectors' first slices and rows 8 to 15 their second: one product for both.
    u32 a[4] = {0, 0, 0, 0};
    if (r < count) {
        const float2 x = *reinterpret_cast<const float2*>(&m.u[first + r][16 * warp + 2 * c]);
        const float2 y = *reinterpret_cast<const float2*>(&m.u[first + r][16 * warp + 8 + 2 * c]);
        slices<2>(x.x, x.y, &a[0], 1);
        slices<2>(y.x, y.y, &a[2], 1);
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        float4 product;
#pragma unroll
        for (int t = 0; t < 2; t++) {
            u32 upper[2], lower[2];
            slices<2>(tile.s[step][0][2 * t], tile.s[step][0][2 * t + 1], upper, 1);
            slices<2>(tile.s[step][1][2 * t], tile.s[step][1][2 * t + 1], lower, 1);
            float sum[4] = {};
#pragma unroll
            for (int i = 0; i < 2; i++) mma_bf16(sum, a, transpose_8x8(upper[i]), transpose_8x8(lower[i]));
            if (t == 0) product.x = sum[0] + sum[2], product.y = sum[1] + sum[3];
            else product.z = sum[0] + sum[2], product.w = sum[1] + sum[3];
        }
        if (r < count) *reinterpret_cast<float4*>(&m.parts[warp][r][16 * step + 4 * c]) = product;
    }
}
