// Refresh of maps in factors (lowrank, prior): the rows R of the surrogate, and the part of reads that R does not have.
//
// With the stored rows T, C = Diag(w) Pi^T + F T. As Pi^T Omega = I, with M = T Omega
//
//     R = Pi^T + F (T - M Pi^T),     (C - R) x = (w - 1) z + F (M z),     z = Pi^T x.
//
// The window's reads are U C x, with x the effective query. So the output of the window's last token is the read of the
// advanced surrogate plus U (C - R) x.
#pragma once
#include "refresh.cuh"

// R in the first rows of X, and M in `factors`. `projection`: of the head.
__device__ __forceinline__ void compute_rows(RefreshMemory& m, const sketch_t* packed, const projection_t* projection,
                                             const uint2* basis, int rank) {
    const int p = pivots_of(rank), lane = threadIdx.x % 32;
    const SmallPart<const small_t> small(packed, rank, rank);
    float(*const rows)[KEY_FACTOR] = m.x + rank;  // T, later T - M Pi^T
    for (int i = threadIdx.x / 32; i < p; i += WORKER_WARPS) {
        float x[LK];
        load_row(x, packed + rank * V + i * K, false);
#pragma unroll
        for (int c = 0; c < LK; c++) {
            if constexpr (CODED) x[c] *= small.pivot_scale[i];
            rows[i][LK * lane + c] = x[c];
        }
    }
    sync_workers();
    multiply_small<K>(m, p, rank, RowsOf<KEY_FACTOR>{rows, p}, BasisRows{basis});
    sync_workers();
    for (int n = threadIdx.x; n < K; n += WORKERS) {
        for (int g = 0; g < rank; g++) {
            const float x = widen<CODED ? BF16 : SKETCH>(projection[g * K + n]);
            m.x[g][n] = x;
            for (int i = 0; i < p; i++) rows[i][n] -= m.small[i][g] * x;
        }
        for (int g = 0; g < rank; g++)
            for (int i = 0; i < p; i++) m.x[g][n] += widen<SMALL>(small.f[g * p + i]) * rows[i][n];
    }
    for (int i = threadIdx.x; i < p * RANKS; i += WORKERS)
        m.factors[i / RANKS][i % RANKS] = m.small[i / RANKS][i % RANKS];
    sync_workers();
}

// (C - R) x in `missed`, by one warp, from the products of keys and query with the rows of X and of Pi^T.
__device__ __forceinline__ void compare_maps(RefreshMemory& m, const WindowTokens& tokens, const sketch_t* packed,
                                             int rank) {
    const int p = pivots_of(rank), lane = threadIdx.x % 32;
    const SmallPart<const small_t> small(packed, rank, rank);
    // Lane s: the weight of token s, beta_s (<l_s, q> - sum over later tokens j of c_j <l_s(j), k_j>).
    float weight = ERASES && lane < W ? m.products[W][rank + lane] : 0.f;
    const float beta = ERASES && lane < W ? tokens.beta(lane) : 0.f;
#pragma unroll 1
    for (int j = W - 1; ERASES && j >= 0; j--) {
        if (lane == j) weight *= beta;
        const float later = __shfl_sync(ALL, weight, j);
        if (lane < j) weight -= later * m.products[j][rank + lane];
    }
    for (int g = lane; g < rank; g += 32) m.z[g] = m.projected[W][g];
    for (int s = 0; ERASES && s < W; s++) {
        const float own = __shfl_sync(ALL, weight, s);
        for (int g = lane; g < rank; g += 32) m.z[g] -= own * m.projected[s][g];
    }
    __syncwarp();
    for (int g = lane; g < rank; g += 32) {
        float sum = (widen<SMALL>(small.w[g]) - 1) * m.z[g];
        for (int i = 0; i < p; i++) {
            float dot = 0;
            for (int n = 0; n < rank; n++) dot += m.factors[i][n] * m.z[n];
            sum += widen<SMALL>(small.f[g * p + i]) * dot;
        }
        m.missed[g] = sum;
    }
}
