// The coefficient map of one head from its pivots and sketch: factors of the low-rank-plus-diagonal metric (lowrank,
// prior), or a dense map from exact blocks (ridge, exact). See sketchssm/reference/maps.py for each in four lines.
#pragma once
#include "sketch.cuh"

// Sums the warps' parts into rows of b, times `scale`; returns this thread's share of the squares.
__device__ __forceinline__ float sum_parts(SketchMemory& m, int first, int count, float scale) {
    float squares = 0;
    for (int i = threadIdx.x; i < count * K; i += THREADS) {
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < NWARPS; warp++) sum += m.parts[warp][i / K][i % K];
        sum *= scale;
        m.b[first + i / K][i % K] = sum;
        squares += sum * sum;
    }
    return squares;
}

// Factors of the low-rank-plus-diagonal map; `prior` puts what the pivots miss where calibration saw energy.
__device__ __forceinline__ void store_factors(SketchMemory& m, sketch_t* packed, const sketch_t* projection, int rank,
                                              float mu, float ridge) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, p = pivots_of(rank);
    sketch_t *const b = packed + rank * V, *const f = b + p * K, *const w = f + rank * p;
    const float scale = rsqrtf(mu);
    // The first rows of the projection come in while the small factors are computed.
    constexpr int AHEAD = 8;
    constexpr int PAIRS = K / 2, USED = THREADS / PAIRS * PAIRS;  // threads that keep their channels from pivot to pivot
    const int channel = 2 * (threadIdx.x % PAIRS);
    Packed<SKETCH, 2> rows[AHEAD];
#pragma unroll
    for (int g = 0; g < AHEAD; g++) {
        rows[g].clear();
        if (g < rank) rows[g].load(projection + g * K + channel);
    }
    const float squares = warp_sum(sum_parts(m, 0, p, scale));
    if (lane == 0) m.missed[warp] = squares;
    for (int g = warp; g < rank; g += NWARPS) {  // L = U^T Q / sqrt(mu)
        float sums[PIVOTS_2] = {};
        for (int v = lane; v < V; v += 32)
#pragma unroll
            for (int i = 0; i < PIVOTS; i++)
                if (i < p) sums[i] += m.u[g][v] * m.q[i][v];
        const float sum = warp_sums(sums);
        const int i = lane / (32 / PIVOTS_2);
        if (lane % (32 / PIVOTS_2) == 0 && i < PIVOTS) m.low[g][i] = scale * sum;
    }
    __syncthreads();
    for (int g = threadIdx.x; g < rank; g += THREADS) {
        float residual = 0;
#if PRIOR
#pragma unroll
        for (int i = 0; i < NWARPS; i++) residual += m.missed[i];
        residual = 1.f - residual / K;
#else
#pragma unroll
        for (int i = 0; i < PIVOTS; i++) residual += m.low[g][i] * m.low[g][i];
        residual = m.energy[g] / mu - residual;
#endif
        residual = fmaxf(residual, 0.f);
        const float inverse = 1.f / (residual + ridge);
        w[g] = narrow<SKETCH>(residual * inverse);
#pragma unroll
        for (int i = 0; i < PIVOTS; i++) {
            m.scaled[g][i] = m.low[g][i] * inverse;
            m.seen[g][i] = residual * m.scaled[g][i];
        }
    }
    __syncthreads();
    if (threadIdx.x < PIVOTS * PIVOTS) {
        const int i = threadIdx.x / PIVOTS, j = threadIdx.x % PIVOTS;
        float sum = i == j;
        for (int g = 0; g < rank; g++) sum += m.low[g][i] * m.scaled[g][j];
        m.system[i][j] = sum;
    }
    for (int i = threadIdx.x; threadIdx.x < USED && i < p * PAIRS; i += USED) {  // B - Pi Diag(w) L, two channels each
        const int pivot = i / PAIRS;
        float x = m.b[pivot][channel], y = m.b[pivot][channel + 1];
        auto take = [&](int g, const Packed<SKETCH, 2>& row) {
            x -= row[0] * m.seen[g][pivot];
            y -= row[1] * m.seen[g][pivot];
        };
#pragma unroll
        for (int g = 0; g < AHEAD; g++)
            if (g < rank) take(g, rows[g]);
#pragma unroll 4
        for (int g = AHEAD; g < rank; g++) {
            Packed<SKETCH, 2> row;
            row.load(projection + g * K + channel);
            take(g, row);
        }
        b[pivot * K + channel] = narrow<SKETCH>(x);
        b[pivot * K + channel + 1] = narrow<SKETCH>(y);
    }
    __syncthreads();
    for (int g = threadIdx.x; g < rank; g += THREADS) {  // F = D^-1 L (I + L^T D^-1 L)^-1, by Cholesky
        float l[PIVOTS][PIVOTS], x[PIVOTS];
#pragma unroll
        for (int i = 0; i < PIVOTS; i++) {
            x[i] = m.scaled[g][i];
#pragma unroll
            for (int j = 0; j <= i; j++) {
                float sum = m.system[i][j];
#pragma unroll
                for (int n = 0; n < j; n++) sum -= l[i][n] * l[j][n];
                l[i][j] = i == j ? rsqrtf(sum) : sum * l[j][j];  // the diagonal holds its inverse
            }
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
            if (i < p) f[g * p + i] = narrow<SKETCH>(x[i]);
    }
}

// Dense map (Phi^T H Phi + ridge I)^-1 Phi^T H from exact blocks, by Cholesky; `exact` is its limit of a small ridge.
__device__ __forceinline__ void store_dense(SketchMemory& m, const Tile& tile, sketch_t* packed, int rank, float mu, float ridge) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int first = 0; first < rank; first += LEFT) {
        const int count = rank - first < LEFT ? rank - first : LEFT;
        left_products(m, tile, m.u + first, count);
        __syncthreads();
        sum_parts(m, first, count, 1.f / mu);
        __syncthreads();
    }
    for (int i = warp; i < rank; i += NWARPS)
        for (int j = 0; j <= i; j++) {
            float sum = 0;
            for (int v = lane; v < V; v += 32) sum += m.u[i][v] * m.u[j][v];
            sum = warp_sum(sum) / mu;
            if (lane == 0) m.gram[i][j] = i == j ? sum + ridge : sum;
        }
    __syncthreads();
    if (warp == 0) {  // right-looking Cholesky; the diagonal holds its inverse
        for (int j = 0; j < rank; j++) {
            const float inverse = rsqrtf(fmaxf(m.gram[j][j], 1e-20f));
            __syncwarp();
            for (int i = j + lane; i < rank; i += 32) m.gram[i][j] = i == j ? inverse : m.gram[i][j] * inverse;
            __syncwarp();
            for (int i = j + 1 + lane; i < rank; i += 32)
                for (int n = j + 1; n <= i; n++) m.gram[i][n] -= m.gram[i][j] * m.gram[n][j];
            __syncwarp();
        }
    }
    __syncthreads();
    for (int k = threadIdx.x; k < K; k += THREADS) {
        for (int i = 0; i < rank; i++) {
            float x = m.b[i][k];
            for (int j = 0; j < i; j++) x -= m.gram[i][j] * m.b[j][k];
            m.b[i][k] = x * m.gram[i][i];
        }
        for (int i = rank - 1; i >= 0; i--) {
            float x = m.b[i][k];
            for (int j = i + 1; j < rank; j++) x -= m.gram[j][i] * m.b[j][k];
            x *= m.gram[i][i];
            m.b[i][k] = x;
            packed[rank * V + i * K + k] = narrow<SKETCH>(x);
        }
    }
}

// Rebuilds one head's packed sketch from its tile. `squares` is this thread's share of |S|^2. Starts with a barrier
// of its own where memory is shared with the fold; the caller keeps the next user of that memory away.
__device__ __forceinline__ void store_sketch(SketchMemory& m, const Tile& tile, float squares, BasisTile& first,
                                             sketch_t* packed, const sketch_t* projection, const uint2* basis, int rank, float ridge) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    squares = warp_sum(squares);
    if (lane == 0) m.squares[warp] = squares;
    sketch_columns(m, tile, first, basis, rank);
    __syncthreads();
    float mu = 0;
#pragma unroll
    for (int i = 0; i < NWARPS; i++) mu += m.squares[i];
    mu = mu > 0.f ? mu / K : 1.f;
    if constexpr (MAP == FACTORS) {
        if (warp == 0) pivot_basis(m, pivots_of(rank));
        else store_columns(m, packed, rank, 1);
        __syncthreads();
        left_products(m, tile, m.q, pivots_of(rank));
        __syncthreads();
        store_factors(m, packed, projection, rank, mu, ridge);
    } else {
        store_columns(m, packed, rank, 0);
        if constexpr (MAP == OWN) store_dense(m, tile, packed, rank, mu, ridge);
    }
}
