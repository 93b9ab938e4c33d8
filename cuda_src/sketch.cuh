// From an updated state tile to its sketch U = S^T Phi, its pivots Q, and products of vectors of V with the state.
//
// All of it reads the state from registers. Products along K (U) take the tile as it lies; products along V (B, and
// the cross products of the dense maps) take it transposed by 8 x 8 blocks within the warp. Two slices of 8 bits per
// factor are plenty for what is stored in bf16 (2^-16 against 2^-9).
#pragma once
#include "fragments.cuh"
#include "sketch_layout.cuh"

constexpr int COLUMN = V + 4;  // padded, so that fragment stores of U hit all banks
constexpr int LEFT = 8;        // vectors of V that one pass multiplies with the tile

struct SketchMemory {
    alignas(16) float u[RANK_MAX][COLUMN];
    alignas(16) float q[PIVOTS][COLUMN];
    alignas(16) float parts[NWARPS][MAP == OWN ? LEFT : PIVOTS][K];  // a warp's share of S Q
    alignas(16) float b[MAP == OWN ? RANK_MAX : PIVOTS][K];
    float low[RANK_MAX][PIVOTS];   // L
    float scaled[RANK_MAX][PIVOTS];  // D^-1 L
    float seen[RANK_MAX][PIVOTS];    // Diag(w) L
    float energy[RANK_MAX];
    float system[PIVOTS][PIVOTS];  // I + L^T D^-1 L
    float gram[MAP == OWN ? RANK_MAX : 1][MAP == OWN ? RANK_MAX + 1 : 1];
    float squares[NWARPS], missed[NWARPS];
};

// Eight columns of a basis as operands, in two slices, as the host laid them out (see sketchssm/cuda/layout.py).
struct BasisTile {
    uint2 slice[STEPS][2];
    // Half of them: registers are short while the state is held.
    __device__ __forceinline__ void load(const uint2* basis, int tile, int half) {
#pragma unroll
        for (int i = half * STEPS; i < (half + 1) * STEPS; i++) slice[i / 2][i % 2] = basis[(tile * 2 * STEPS + i) * 32 + threadIdx.x % 32];
    }
};

// U of the warp's 16 value rows.
__device__ __forceinline__ void sketch_columns(SketchMemory& m, const Tile& tile, BasisTile& basis, const uint2* more, int rank) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4, row = threadIdx.x / 32 * 16 + r;
    for (int first = 0; first < rank; first += 8) {
        if (first) basis.load(more, first / 8, 0);
        basis.load(more, first / 8, 1);
        float sum[4] = {}, high_low[4] = {}, low_high[4] = {};  // three chains of products
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const uint2 high = basis.slice[step][0], low = basis.slice[step][1];
            const Operand<2> a(tile.s[step][0], tile.s[step][1]);
            mma_bf16(sum, a.a[0], high.x, high.y);
            mma_bf16(high_low, a.a[0], low.x, low.y);
            mma_bf16(low_high, a.a[1], high.x, high.y);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (first + 2 * c + i % 2 < rank)
                m.u[first + 2 * c + i % 2][row + 8 * (i / 2)] = sum[i] + (high_low[i] + low_high[i]);
    }
}

constexpr int VALUES = (V + 31) / 32;  // value rows of a lane: lane, lane + 32, ...

__device__ __forceinline__ void load_columns(const SketchMemory& m, int p, float (&q)[PIVOTS][VALUES]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < PIVOTS; i++)
#pragma unroll
        for (int n = 0; n < VALUES; n++) q[i][n] = i < p && lane + 32 * n < V ? m.u[i][lane + 32 * n] : 0.f;
}

__device__ __forceinline__ void store_pivots(SketchMemory& m, int p, const float (&q)[PIVOTS][VALUES]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < PIVOTS; i++)
#pragma unroll
        for (int n = 0; n < VALUES; n++)
            if (i < p && lane + 32 * n < V) m.q[i][lane + 32 * n] = q[i][n];
}

#define PIVOTS_FIT (PIVOTS <= 5)  // whether one warp_sums holds their Gram matrix

#if PIVOTS_FIT
// One pass of Cholesky QR over columns in registers: two reductions' latency for all of them. False, with nothing
// changed, if a column lies so close to the ones before it that the Gram matrix can't hold the difference.
__device__ __forceinline__ bool orthonormalise(float (&q)[PIVOTS][VALUES]) {
    float sums[16] = {}, r[PIVOTS][PIVOTS], inverse[PIVOTS];
#pragma unroll
    for (int j = 0; j < PIVOTS; j++)
#pragma unroll
        for (int i = 0; i <= j; i++)
#pragma unroll
            for (int n = 0; n < VALUES; n++) sums[j * (j + 1) / 2 + i] += q[i][n] * q[j][n];
    const float sum = warp_sums(sums);
    bool safe = true;
#pragma unroll
    for (int j = 0; j < PIVOTS; j++)
#pragma unroll
        for (int i = 0; i <= j; i++) {
            const float whole = __shfl_sync(ALL, sum, 2 * (j * (j + 1) / 2 + i));
            float x = whole;
#pragma unroll
            for (int n = 0; n < i; n++) x -= r[n][i] * r[n][j];
            if (i < j) {
                r[i][j] = x * inverse[i];
            } else {
                safe = safe && (x > 1e-3f * whole || whole == 0.f);
                inverse[j] = whole > 0.f ? rsqrtf(x) : 0.f;
            }
        }
    if (!safe) return false;
#pragma unroll
    for (int j = 0; j < PIVOTS; j++)
#pragma unroll
        for (int n = 0; n < VALUES; n++) {
            float x = q[j][n];
#pragma unroll
            for (int i = 0; i < j; i++) x -= r[i][j] * q[i][n];
            q[j][n] = x * inverse[j];
        }
    return true;
}
#endif

// Gram-Schmidt done twice, column by column. A column that depends on the ones before it leaves zeros.
__device__ __noinline__ void gram_schmidt(SketchMemory& m, int p) {
    float q[PIVOTS][VALUES];
    load_columns(m, p, q);
#pragma unroll
    for (int i = 0; i < PIVOTS; i++) {
        float norm = 0, left = 0;
#pragma unroll
        for (int n = 0; n < VALUES; n++) norm += q[i][n] * q[i][n];
        norm = warp_sum(norm);
#pragma unroll
        for (int pass = 0; pass < 2; pass++) {
            float dots[PIVOTS];
#pragma unroll
            for (int j = 0; j < i; j++) {
                dots[j] = 0;
#pragma unroll
                for (int n = 0; n < VALUES; n++) dots[j] += q[j][n] * q[i][n];
            }
#pragma unroll
            for (int j = 0; j < i; j++) dots[j] = warp_sum(dots[j]);
#pragma unroll
            for (int j = 0; j < i; j++)
#pragma unroll
                for (int n = 0; n < VALUES; n++) q[i][n] -= dots[j] * q[j][n];
        }
#pragma unroll
        for (int n = 0; n < VALUES; n++) left += q[i][n] * q[i][n];
        left = warp_sum(left);
        const float scale = left > 1e-10f * norm ? rsqrtf(left) : 0.f;  // PIVOT_TOLERANCE squared
#pragma unroll
        for (int n = 0; n < VALUES; n++) q[i][n] *= scale;
    }
    store_pivots(m, p, q);
}

// Orthonormal basis of the first p columns of U; one warp.
__device__ __forceinline__ void pivot_basis(SketchMemory& m, int p) {
#if PIVOTS_FIT
    float q[PIVOTS][VALUES];
    load_columns(m, p, q);
    if (orthonormalise(q) && orthonormalise(q)) return store_pivots(m, p, q);
#endif
    gram_schmidt(m, p);
}

// Writes U to the packed sketch and notes each column's |u_g|^2; warps first_warp to NWARPS - 1.
__device__ __forceinline__ void store_columns(SketchMemory& m, sketch_t* packed, int rank, int first_warp) {
    const int lane = threadIdx.x % 32;
    for (int g = threadIdx.x / 32 - first_warp; g < rank; g += NWARPS - first_warp) {
        float energy = 0;
        for (int v = lane; v < V; v += 32) {
            const float x = m.u[g][v];
            energy += x * x;
            packed[g * V + v] = narrow<SKETCH>(x);
        }
        energy = warp_sum(energy);
        if (lane == 0) m.energy[g] = energy;
    }
}

// parts[warp] = (count <= 8 vectors of V) times the tile, over the warp's value rows.
__device__ __forceinline__ void left_products(SketchMemory& m, const Tile& tile, const float (*vectors)[COLUMN], int count) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, c = lane % 4;
    // Rows 0 to 7 of the operand are the vectors' first slices and rows 8 to 15 their second: one product for both.
    u32 a[4] = {0, 0, 0, 0};
    if (r < count) {
        const float2 x = *reinterpret_cast<const float2*>(&vectors[r][16 * warp + 2 * c]);
        const float2 y = *reinterpret_cast<const float2*>(&vectors[r][16 * warp + 8 + 2 * c]);
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
