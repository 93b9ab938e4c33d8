// The dense map (ridge, exact) from exact blocks, by one warp.
#pragma once
#include "map_sums.cuh"

// Rows [first, first + count) of S U, over all warps.
__device__ __forceinline__ void gather(SketchMemory& m, int first, int count, float mu) {
    for (int i = 0; i < count; i++) {
        float x[MINE];
        sum_parts(m, i, x);
        Packed<FP32, MINE> row;
#pragma unroll
        for (int n = 0; n < MINE; n++) x[n] /= mu;
        row.set(x);
        row.store(&m.b[first + i][MINE * (threadIdx.x % 32)]);
    }
}

// Lower triangle of U^T U / mu + ridge I, in pieces of 4 x 8.
__device__ __forceinline__ void gram_of_columns(SketchMemory& m, int rank, float mu, float ridge) {
    const int lane = threadIdx.x % 32;
    auto column = [&](int g, int n) { return g < rank && lane + 32 * n < V ? m.u[g][lane + 32 * n] : 0.f; };
    for (int i = 0; i < rank; i += 4)
        for (int j = 0; j < i + 4; j += 8) {
            float sums[32] = {};
#pragma unroll
            for (int n = 0; n < VALUES; n++) {
                float x[4];
#pragma unroll
                for (int a = 0; a < 4; a++) x[a] = column(i + a, n);
#pragma unroll
                for (int b = 0; b < 8; b++) {
                    const float y = column(j + b, n);
#pragma unroll
                    for (int a = 0; a < 4; a++) sums[8 * a + b] += x[a] * y;
                }
            }
            const float sum = warp_sums(sums) / mu;
            const int a = i + lane / 8, b = j + lane % 8;
            if (a < rank && b <= a) m.gram[a][b] = a == b ? sum + ridge : sum;
        }
    __syncwarp();
}

// Dense map (Phi^T H Phi + ridge I)^-1 Phi^T H from exact blocks, by Cholesky; `exact` is its limit of a small ridge.
__device__ __forceinline__ void store_dense(SketchMemory& m, sketch_t* packed, int rank, float mu, float ridge) {
    const int lane = threadIdx.x % 32;
    gram_of_columns(m, rank, mu, ridge);
    for (int j = 0; j < rank; j++) {  // right-looking Cholesky; the diagonal holds its inverse
        const float inverse = rsqrtf(fmaxf(m.gram[j][j], 1e-20f));
        __syncwarp();
        for (int i = j + lane; i < rank; i += 32) m.gram[i][j] = i == j ? inverse : m.gram[i][j] * inverse;
        __syncwarp();
        for (int i = j + 1 + lane; i < rank; i += 32)
            for (int n = j + 1; n <= i; n++) m.gram[i][n] -= m.gram[i][j] * m.gram[n][j];
        __syncwarp();
    }
    // Substitution forward and back, 8 rows of this lane's channels in registers at a time.
    constexpr int BLOCK = 8;
    float x[BLOCK][MINE];
    auto row = [&](int i) { return &m.b[i][MINE * lane]; };
    auto take = [&](float (&from)[MINE], float factor, int i) {
        Packed<FP32, MINE> other;
        other.load(row(i));
#pragma unroll
        for (int n = 0; n < MINE; n++) from[n] -= factor * other[n];
    };
    auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            Packed<FP32, MINE> other;
            other.clear();
            if (first + i < rank) other.load(row(first + i));
#pragma unroll
            for (int n = 0; n < MINE; n++) x[i][n] = other[n];
        }
    };
    auto factor = [&](int i, int j) { return i < rank && j < rank ? m.gram[i][j] : 0.f; };
    for (int first = 0; first < rank; first += BLOCK) {
        load(first);
        for (int j = 0; j < first; j++)
#pragma unroll
            for (int i = 0; i < BLOCK; i++) take(x[i], factor(first + i, j), j);
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
#pragma unroll
            for (int j = 0; j <= i; j++) {
                const float l = factor(first + i, first + j);
#pragma unroll
                for (int n = 0; n < MINE; n++) x[i][n] = i == j ? x[i][n] * l : x[i][n] - l * x[j][n];
            }
            Packed<FP32, MINE> solved;
            solved.set(x[i]);
            if (first + i < rank) solved.store(row(first + i));
        }
    }
    for (int first = (rank - 1) / BLOCK * BLOCK; first >= 0; first -= BLOCK) {
        load(first);
        for (int j = first + BLOCK; j < rank; j++)
#pragma unroll
            for (int i = 0; i < BLOCK; i++) take(x[i], factor(j, first + i), j);
#pragma unroll
        for (int i = BLOCK - 1; i >= 0; i--) {
#pragma unroll
            for (int j = BLOCK - 1; j >= i; j--) {
                const float l = factor(first + j, first + i);
#pragma unroll
                for (int n = 0; n < MINE; n++) x[i][n] = i == j ? x[i][n] * l : x[i][n] - l * x[j][n];
            }
            Packed<FP32, MINE> solved;
            solved.set(x[i]);
            Packed<SKETCH, MINE> rounded;
            rounded.set(x[i]);
            if (first + i < rank) {
                solved.store(row(first + i));
                rounded.store(packed + rank * V + (first + i) * K + MINE * lane);
            }
        }
    }
}
