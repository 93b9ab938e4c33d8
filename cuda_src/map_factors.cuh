// Factors of the low-rank-plus-diagonal maps (lowrank, prior), by one warp.
#pragma once
#include "map_sums.cuh"

// dots[g] = products of column g of U with the pivots, and with itself.
__device__ __forceinline__ void dots_of_columns(SketchMemory& m, int rank) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll 1
    for (int i = 0; i < rank; i += 16) {
        float dots[4], squares[2];
        multiply_columns(m, rank, i, 0, dots, squares);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int g = i + 8 * half + r;
            if (g >= rank) continue;
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (2 * c + e < PIVOTS) m.dots[g][2 * c + e] = dots[2 * half + e];
            if (c == 0) m.dots[g][PIVOTS] = squares[half];
        }
    }
    __syncwarp();
}

// Factors of the low-rank-plus-diagonal map; `prior` puts what the pivots miss where calibration saw energy. Shared
// memory is read first, and then left to the next item.
__device__ __forceinline__ void store_factors(SketchMemory& m, const Sums& sums, SketchLatches& latches, sketch_t* packed,
                                              const sketch_t* projection, int rank, float mu, float ridge) {
    const int lane = threadIdx.x % 32, p = pivots_of(rank);
    sketch_t *const b = packed + rank * V, *const f = b + p * K, *const w = f + rank * p;
    const float scale = rsqrtf(mu);
    constexpr int AHEAD = 8;  // rows of the projection that come in while the small factors are computed
    Packed<SKETCH, MINE> rows[AHEAD];
#pragma unroll
    for (int g = 0; g < AHEAD; g++) {
        rows[g].clear();
        if (g < rank) rows[g].load(projection + g * K + MINE * lane);
    }
    dots_of_columns(m, rank);

    constexpr int EACH = (RANK_MAX + 31) / 32;  // columns of U of a lane
    float r[PIVOTS][PIVOTS], inverse[PIVOTS];   // R above its diagonal, and the diagonal's inverse
    float image[PIVOTS][MINE];                  // S U_p, then B
    float low[EACH][PIVOTS], residual[EACH];    // U^T U_p, then L; the diagonal
#pragma unroll
    for (int i = 0; i < PIVOTS; i++) {
#pragma unroll
        for (int n = 0; n < MINE; n++) image[i][n] = 0;
        if (i < p) sum_parts(sums, i, MINE * lane, image[i]);
#pragma unroll
        for (int j = 0; j <= i; j++) r[j][i] = i < p ? m.dots[i][j] : 0.f;
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int g = lane + 32 * e;
#pragma unroll
        for (int i = 0; i < PIVOTS; i++) low[e][i] = g < rank ? m.dots[g][i] : 0.f;
        residual[e] = g < rank ? m.dots[g][PIVOTS] / mu : 0.f;
    }
    latches.columns_read.arrive(), latches.sums_read[0].arrive();

#pragma unroll
    for (int j = 0; j < PIVOTS; j++)
#pragma unroll
        for (int i = 0; i <= j; i++) {
            const float whole = r[i][j];
#pragma unroll
            for (int n = 0; n < i; n++) r[i][j] -= r[n][i] * r[n][j];
            if (i < j) r[i][j] *= inverse[i];
            else inverse[j] = r[i][j] > INDEPENDENT * whole ? rsqrtf(r[i][j]) : 0.f;
        }
    // x <- x R^-1
    auto substitute = [&](auto&& x) {
#pragma unroll
        for (int i = 0; i < PIVOTS; i++) {
#pragma unroll
            for (int n = 0; n < i; n++) x(i) -= r[n][i] * x(n);
            x(i) *= inverse[i];
        }
    };
    float squares = 0;
#pragma unroll
    for (int n = 0; n < MINE; n++) {
        substitute([&](int i) -> float& { return image[i][n]; });
#pragma unroll
        for (int i = 0; i < PIVOTS; i++) {
            image[i][n] *= scale;
            squares += image[i][n] * image[i][n];
        }
    }
    const float missed = PRIOR ? fmaxf(1.f - warp_sum(squares) / K, 0.f) : 0.f;

    constexpr int TRIANGLE = PIVOTS * (PIVOTS + 1) / 2, CHUNKS = (TRIANGLE + 15) / 16;
    float products[CHUNKS][16] = {};  // L^T D^-1 L, its lower triangle by rows
    float scaled[EACH][PIVOTS];   // D^-1 L
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int g = lane + 32 * e;
        substitute([&](int i) -> float& { return low[e][i]; });
#pragma unroll
        for (int i = 0; i < PIVOTS; i++) {
            low[e][i] *= scale;
            residual[e] -= low[e][i] * low[e][i];
        }
        residual[e] = PRIOR ? missed : fmaxf(residual[e], 0.f);
        const float over = 1.f / (residual[e] + ridge);
        if (g < rank) w[g] = narrow<SKETCH>(residual[e] * over);
#pragma unroll
        for (int i = 0; i < PIVOTS; i++) {
            scaled[e][i] = low[e][i] * over;
#pragma unroll
            for (int j = 0; j <= i; j++) {
                const int at = i * (i + 1) / 2 + j;
                products[at / 16][at % 16] += low[e][i] * scaled[e][j];
            }
        }
    }
    float total[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) total[i] = warp_sums(products[i]);

    auto take = [&](int e, int g, const Packed<SKETCH, MINE>& row) {  // B - Pi Diag(w) L
#pragma unroll
        for (int i = 0; i < PIVOTS; i++) {
            const float seen = __shfl_sync(ALL, residual[e] * scaled[e][i], g % 32);
#pragma unroll
            for (int n = 0; n < MINE; n++) image[i][n] -= row[n] * seen;
        }
    };
#pragma unroll
    for (int g = 0; g < AHEAD; g++)
        if (g < rank) take(0, g, rows[g]);
#pragma unroll
    for (int e = 0; e < EACH; e++)
        for (int g = e ? 32 * e : AHEAD; g < min(rank, 32 * e + 32); g++) {
            Packed<SKETCH, MINE> row;
            row.load(projection + g * K + MINE * lane);
            take(e, g, row);
        }
#pragma unroll
    for (int i = 0; i < PIVOTS; i++) {
        Packed<SKETCH, MINE> rounded;
        rounded.set(image[i]);
        if (i < p) rounded.store(b + i * K + MINE * lane);
    }

    float l[PIVOTS][PIVOTS];  // Cholesky factor of I + L^T D^-1 L; the diagonal holds its inverse
#pragma unroll
    for (int i = 0; i < PIVOTS; i++)
#pragma unroll
        for (int j = 0; j <= i; j++) {
            const int at = i * (i + 1) / 2 + j;
            float x = __shfl_sync(ALL, total[at / 16], 2 * (at % 16)) + (i == j ? 1.f : 0.f);
#pragma unroll
            for (int n = 0; n < j; n++) x -= l[i][n] * l[j][n];
            l[i][j] = i == j ? rsqrtf(x) : x * l[j][j];
        }
#pragma unroll
    for (int e = 0; e < EACH; e++) {  // F = D^-1 L (I + L^T D^-1 L)^-1
        float(&x)[PIVOTS] = scaled[e];
#pragma unroll
        for (int i = 0; i < PIVOTS; i++) {
#pragma unroll
            for (int j = 0; j < i; j++) x[i] -= l[i][j] * x[j];
            x[i] *= l[i][i];
        }
#pragma unroll
        for (int i = PIVOTS - 1; i >= 0; i--) {
#pragma unroll
            for (int j = i + 1; j < PIVOTS; j++) x[i] -= l[j][i] * x[j];
            x[i] *= l[i][i];
        }
#pragma unroll
        for (int i = 0; i < PIVOTS; i++)
            if (i < p && lane + 32 * e < rank) f[(lane + 32 * e) * p + i] = narrow<SKETCH>(x[i]);
    }
}
