// Dense map (ridge, exact) of more than 16 columns, from exact blocks, by one warp, with a Cholesky factor:
// (U^T U / mu + ridge I)^-1 (S U)^T / mu. In codes the split form of the same product is stored, and there is no back
// substitution.
//
// Panels of 8 columns of U are in registers. Rows and columns past the rank hold zeros, with the ridge on the diagonal.
#pragma once
#include "map_sums.cuh"

constexpr int PANEL = 8;

// Lower triangle of U^T U / mu + ridge I, in 16 x 8 pieces.
__device__ __forceinline__ void gram_of_columns(SketchMemory& m, int rank, float mu, float ridge) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    const float scale = 1.f / mu;
#pragma unroll 1
    for (int i = 0; i < rank; i += 16)
#pragma unroll 1
        for (int j = 0; j < min(i + 16, rank); j += 8) {
            float dots[4], squares[2];
            multiply_columns(m.columns[0], rank, i, j, dots, squares);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = i + r + 8 * (e / 2), column = j + 2 * c + e % 2;
                if (row < RANKS) m.gram[row][column] = dots[e] * scale + (row == column ? ridge : 0.f);
            }
        }
    __syncwarp();
}

// Replaces the lower triangle by its Cholesky factor, with inverted diagonal elements. A lane has row first + lane of a
// panel.
__device__ __forceinline__ void factor_gram(SketchMemory& m, int rank, float ridge) {
    constexpr int EACH = (RANKS + 31) / 32;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int first = 0; first < rank; first += PANEL) {
        float a[EACH][PANEL];
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const float* const row = m.gram[min(first + lane + 32 * e, RANKS - 1)];
            load_floats(a[e], row + first);
#pragma unroll 1
            for (int j = 0; j < first; j += 4) {
                float own[4];
                load_floats(own, row + j);
#pragma unroll
                for (int n = 0; n < PANEL; n++) {
                    float other[4];
                    load_floats(other, &m.gram[first + n][j]);
#pragma unroll
                    for (int i = 0; i < 4; i++) a[e][n] -= own[i] * other[i];
                }
            }
        }
#pragma unroll
        for (int j = 0; j < PANEL; j++) {
            const float inverse = rsqrtf(fmaxf(__shfl_sync(ALL, a[0][j], j), ridge));
#pragma unroll
            for (int e = 0; e < EACH; e++) a[e][j] *= inverse;
#pragma unroll
            for (int n = j + 1; n < PANEL; n++) {
                const float other = __shfl_sync(ALL, a[0][j], n);
#pragma unroll
                for (int e = 0; e < EACH; e++) a[e][n] -= a[e][j] * other;
            }
            if (lane == j) a[0][j] = inverse;
        }
        __syncwarp();
#pragma unroll
        for (int e = 0; e < EACH; e++)
            if (first + lane + 32 * e < RANKS) {
                float4* const to = reinterpret_cast<float4*>(&m.gram[first + lane + 32 * e][first]);
                to[0] = make_float4(a[e][0], a[e][1], a[e][2], a[e][3]),
                to[1] = make_float4(a[e][4], a[e][5], a[e][6], a[e][7]);
            }
        __syncwarp();
    }
}

// A lane's N neighbouring channels of the rows of a panel.
template <int N> struct Panel {
    float x[PANEL][N];

    // Stores the rows from `first` on at(row).
    template <class At> __device__ __forceinline__ void store(const At& at, int first, int rank) const {
#pragma unroll
        for (int i = 0; i < PANEL; i++) {
            Packed<FP32, N> row;
            row.set(x[i]);
            if (first + i < rank) row.store(at(first + i));
        }
    }
    __device__ __forceinline__ void subtract(int i, float factor, const Packed<FP32, N>& row) {
#pragma unroll
        for (int n = 0; n < N; n++) x[i][n] -= factor * row[n];
    }

    // Forward substitution: row panels of L^-1 x, from the first to the last. A lane has its own channels of all rows.
    // `load(row, to)` gets a row of x. Panels are stored at(row), which may be the address that they were loaded from;
    // the last panel is stored only if LAST.
    template <bool LAST, class Load, class At>
    __device__ __forceinline__ void substitute_forward(const SketchMemory& m, int rank, const Load& load,
                                                       const At& at) {
        const int last = (rank - 1) / PANEL * PANEL;
        float l[PANEL];
        for (int first = 0; first <= last; first += PANEL) {
#pragma unroll
            for (int i = 0; i < PANEL; i++) {
#pragma unroll
                for (int n = 0; n < N; n++) x[i][n] = 0;
                if (first + i < rank) load(first + i, x[i]);
            }
#pragma unroll 1
            for (int j = 0; j < first; j += 4) {
                Packed<FP32, N> rows[4];
#pragma unroll
                for (int n = 0; n < 4; n++) rows[n].load(at(j + n));
#pragma unroll
                for (int i = 0; i < PANEL; i++) {
                    float factors[4];
                    load_floats(factors, &m.gram[first + i][j]);
#pragma unroll
                    for (int n = 0; n < 4; n++) subtract(i, factors[n], rows[n]);
                }
            }
#pragma unroll
            for (int i = 0; i < PANEL; i++) {
                load_floats(l, &m.gram[first + i][first]);
#pragma unroll
                for (int n = 0; n < N; n++) {
#pragma unroll
                    for (int j = 0; j < i; j++) x[i][n] -= l[j] * x[j][n];
                    x[i][n] *= l[i];
                }
            }
            if (LAST || first < last) store(at, first, rank);
        }
    }
};

// Solves for the map by forward and back substitution, in place of the sums. A lane has its own channels of all rows.
__device__ __forceinline__ void solve_dense(const SketchMemory& m, Sums& sums, sketch_t* map, int rank, float mu) {
    const int channel = MINE * (threadIdx.x % 32), last = (rank - 1) / PANEL * PANEL;
    const float inverse = 1.f / mu;
    Panel<MINE> panel;
    float(&x)[PANEL][MINE] = panel.x, l[PANEL];
    auto solved = [&](int i) { return sums.at(0, i, channel); };
    panel.substitute_forward<false>(
        m, rank,
        [&](int i, float(&row)[MINE]) {
            sum_parts(sums, i, channel, row);
#pragma unroll
            for (int n = 0; n < MINE; n++) row[n] *= inverse;
        },
        solved);
    for (int first = last; first >= 0; first -= PANEL) {
        if (first < last) {
#pragma unroll
            for (int i = 0; i < PANEL; i++) {
                Packed<FP32, MINE> row;
                row.load(solved(first + i));
#pragma unroll
                for (int n = 0; n < MINE; n++) x[i][n] = row[n];
            }
#pragma unroll 1
            for (int j = first + PANEL; j < rank; j++) {
                Packed<FP32, MINE> row;
                row.load(solved(j));
                load_floats(l, &m.gram[j][first]);
#pragma unroll
                for (int i = 0; i < PANEL; i++) panel.subtract(i, l[i], row);
            }
        }
#pragma unroll
        for (int i = PANEL - 1; i >= 0; i--) {
            load_floats(l, &m.gram[first + i][first]);
#pragma unroll
            for (int n = 0; n < MINE; n++) {
                x[i][n] *= l[i];
#pragma unroll
                for (int j = 0; j < i; j++) x[j][n] -= l[j] * x[i][n];
            }
        }
        if (first > 0) panel.store(solved, first, rank);
#pragma unroll
        for (int i = 0; i < PANEL; i++) {
            Packed<SKETCH, MINE> rounded;
            rounded.set(x[i]);
            if (first + i < rank) rounded.store(map + (first + i) * K + channel);
        }
    }
}

// Q = U L^-T and B = L^-1 (S U)^T / mu, in place of U and of the sums, four channels a lane.
__device__ __forceinline__ void split_dense(SketchMemory& m, Sums& sums, int rank, float mu) {
    const int lane = threadIdx.x % 32, channel = 4 * lane;
    const float inverse = 1.f / mu;
    Panel<4> panel;
    auto column = [&](int i) { return &m.columns[0].of[i][channel]; };
    if (lane < V / 4)
        panel.substitute_forward<true>(m, rank, [&](int i, float(&row)[4]) { load_floats(row, column(i)); }, column);
    if (lane >= K / 4) return;
    panel.substitute_forward<true>(
        m, rank,
        [&](int i, float(&row)[4]) {
            sum_parts(sums, i, channel, row);
#pragma unroll
            for (int n = 0; n < 4; n++) row[n] *= inverse;
        },
        [&](int i) { return sums.at(0, i, channel); });
}

template <class Wait>
__device__ __forceinline__ void store_dense(SketchMemory& m, Sums& sums, SketchBarriers& barriers,
                                            sketch_t* packed, int rank, int wide, float mu, float ridge, float missing,
                                            [[maybe_unused]] int sketch_n, Wait wait_sums) {
    gram_of_columns(m, rank, mu, ridge);
    if (!CODED) barriers.columns_empty[0].arrive();
    factor_gram(m, rank, ridge);
    wait_sums();
    if constexpr (CODED) {
        split_dense(m, sums, rank, mu);
        __syncwarp();
        store_split(m.columns[0], sums, packed, rank, wide, missing);
        barriers.columns_empty[0].arrive();
    } else {
        solve_dense(m, sums, packed + rank * V, rank, mu);
    }
}
