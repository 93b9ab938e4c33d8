// The end of a sketch: what is stored, from U and the warps' shares of S U, by one warp that has nothing else in its registers.
//
// factors (lowrank, prior): the pivots are Q = U_p R^-1, with R the Cholesky factor of their Gram matrix, so that
// B = S Q / sqrt(mu) and L = U^T Q / sqrt(mu) follow from S U_p and U^T U_p by substitution. own (ridge, exact): a dense
// map from exact blocks. See sketchssm/reference/maps.py for each in four lines.
#pragma once
#include "sketch.cuh"

constexpr int VALUES = (V + 31) / 32;  // value rows of a lane: lane, lane + 32, ...
constexpr int MINE = K / 32;           // channels of a lane: neighbours
// A pivot that lies this close to the ones before it, in squares, is left out: PIVOT_TOLERANCE squared.
constexpr float INDEPENDENT = 9e-6f;

// This lane's channels of row i of S U, summed over warps.
__device__ __forceinline__ void sum_parts(const SketchMemory& m, int i, float (&x)[MINE]) {
#pragma unroll
    for (int n = 0; n < MINE; n++) x[n] = 0;
#pragma unroll
    for (int warp = 0; warp < NWARPS; warp++) {
        Packed<FP32, MINE> part;
        part.load(&m.parts[warp][i][MINE * (threadIdx.x % 32)]);
#pragma unroll
        for (int n = 0; n < MINE; n++) x[n] += part[n];
    }
}

#if MAP == 0
// dots[g] = products of column g of U with the pivots, and with itself.
__device__ __forceinline__ void dots_of_columns(SketchMemory& m, int rank, int p) {
    constexpr int TOGETHER = 32 / DOTS;
    const int lane = threadIdx.x % 32;
    float q[PIVOTS][VALUES];
#pragma unroll
    for (int i = 0; i < PIVOTS; i++)
#pragma unroll
        for (int n = 0; n < VALUES; n++) q[i][n] = i < p && lane + 32 * n < V ? m.u[i][lane + 32 * n] : 0.f;
    for (int first = 0; first < rank; first += TOGETHER) {
        float sums[32];
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
#pragma unroll
            for (int i = 0; i < DOTS; i++) sums[DOTS * j + i] = 0;
#pragma unroll
            for (int n = 0; n < VALUES; n++) {
                const float x = first + j < rank && lane + 32 * n < V ? m.u[first + j][lane + 32 * n] : 0.f;
#pragma unroll
                for (int i = 0; i < PIVOTS; i++) sums[DOTS * j + i] += q[i][n] * x;
                sums[DOTS * j + PIVOTS] += x * x;
            }
        }
        const float sum = warp_sums(sums);
        if (first + lane / DOTS < rank) m.dots[first + lane / DOTS][lane % DOTS] = sum;
    }
    __syncwarp();
}

// Factors of the low-rank-plus-diagonal map; `prior` puts what the pivots miss where calibration saw energy. Shared
// memory is read first, and then left to the next item: `free` opens in the middle.
__device__ __forceinline__ void store_factors(SketchMemory& m, Gate& free, sketch_t* packed, const sketch_t* projection, int rank,
                                              float mu, float ridge) {
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
    dots_of_columns(m, rank, p);

    constexpr int EACH = (RANK_MAX + 31) / 32;  // columns of U of a lane
    float r[PIVOTS][PIVOTS], inverse[PIVOTS];   // R above its diagonal, and the diagonal's inverse
    float image[PIVOTS][MINE];                  // S U_p, then B
    float low[EACH][PIVOTS], residual[EACH];    // U^T U_p, then L; the diagonal
#pragma unroll
    for (int i = 0; i < PIVOTS; i++) {
#pragma unroll
        for (int n = 0; n < MINE; n++) image[i][n] = 0;
        if (i < p) sum_parts(m, i, image[i]);
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
    __syncwarp();
    if (lane == 0) free.arrive();

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
    float sums[CHUNKS][16] = {};  // L^T D^-1 L, its lower triangle by rows
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
                sums[at / 16][at % 16] += low[e][i] * scaled[e][j];
            }
        }
    }
    float total[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) total[i] = warp_sums(sums[i]);

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
#elif MAP == 1
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
#endif

// Rounds of products that a sketch takes: dense maps take LEFT columns of U a round.
__device__ __forceinline__ int rounds_of(int rank) { return MAP == OWN ? (rank + LEFT - 1) / LEFT : 1; }

// A warp's part of one head's sketch. `squares` is this thread's share of |S|^2; `turn` counts the block's rounds.
__device__ __forceinline__ void share_sketch(SketchMemory& m, SketchGates& gates, StateRows& rows, float squares, sketch_t* packed,
                                             const uint2* basis, int rank, int& turn) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    squares = warp_sum(squares);
    if (turn > 0) gates.free.wait(turn - 1);
    if (lane == 0) m.squares[warp] = squares;
    sketch_columns(m, rows, basis, rank);
    __syncwarp();
    store_columns(m, packed, rank);
    for (int round = 0; round < rounds_of(rank); round++, turn++) {
        if (round > 0) gates.free.wait(turn - 1);
        if (LEFT > 0) left_products(m, rows, round * LEFT, MAP == FACTORS ? pivots_of(rank) : min(rank - round * LEFT, LEFT));
        __syncwarp();
        if (lane == 0) gates.full.arrive();
    }
}

// The rest of it, by one other warp.
__device__ __forceinline__ void finish_sketch(SketchMemory& m, SketchGates& gates, [[maybe_unused]] sketch_t* packed,
                                              [[maybe_unused]] const sketch_t* projection, int rank,
                                              [[maybe_unused]] float ridge, int& turn) {
    for (int round = 0; round < rounds_of(rank); round++, turn++) {
        gates.full.wait(turn);
#if MAP == 2
        __syncwarp();  // else one lane opens rounds that another has yet to see
        if (threadIdx.x % 32 == 0) gates.free.arrive();
#else
        float mu = 0;
#pragma unroll
        for (int i = 0; i < NWARPS; i++) mu += m.squares[i];
        mu = mu > 0.f ? mu / K : 1.f;
#if MAP == 0
        store_factors(m, gates.free, packed, projection, rank, mu, ridge);
#else
        gather(m, round * LEFT, min(rank - round * LEFT, LEFT), mu);
        __syncwarp();
        if (round + 1 == rounds_of(rank)) store_dense(m, packed, rank, mu, ridge);
        __syncwarp();
        if (threadIdx.x % 32 == 0) gates.free.arrive();
#endif
#endif
    }
}
