// Factors of the low-rank-plus-diagonal map (lowrank), by one warp.
#pragma once
#include "map/sums.cuh"

// Products of each column of U with the pivots, and with itself.
typedef float ColumnDots[RANK_MAX][DOTS];

DEVICE void dots_of_columns(ColumnDots& to, const Columns& u, int rank) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    auto put = [&](int g, float first, float second, float square) {
        if (g >= rank) return;
        if (2 * c < PIVOTS) to[g][2 * c] = first;
        if (2 * c + 1 < PIVOTS) to[g][2 * c + 1] = second;
        if (c == 0) to[g][PIVOTS] = square;
    };
    if (rank <= 8) {
        float dots[1][4], squares[1];
        multiply_first_columns<1, 1>(u, rank, dots, squares);
        put(r, dots[0][0], dots[0][1], squares[0]);
    } else if (RANK_MAX > 8) {
        float dots[1][4], squares[2];
        multiply_first_columns<2, 1>(u, rank, dots, squares);
        put(r, dots[0][0], dots[0][1], squares[0]), put(8 + r, dots[0][2], dots[0][3], squares[1]);
    }
    __syncwarp();
}

// Factors of the map. U and the sums are read first and then released for the next tile.
template <class Wait>
DEVICE void store_factors(ColumnDots& dots, const Sums& sums, const Columns& u, WarpMbarrier& columns_empty,
                          WarpMbarrier& sums_empty, sketch_t* packed, const projection_t* projection, int rank,
                          float mu, float ridge, Wait wait_sums) {
    const int lane = threadIdx.x % 32, p = pivots_of(rank);
    sketch_t* const b = packed + rank * V;
    const SmallPart<small_t> small(packed, rank);
    const float root = rsqrtf(mu);
    constexpr int AHEAD = RAW_KEYS ? 8 : 2;  // projection rows in flight; fewer make the code of many roles shorter
    ChannelShare<CODED ? BF16 : SKETCH> rows[AHEAD];
#pragma unroll
    for (int g = 0; g < AHEAD; g++) {
        rows[g].clear();
        if (g < rank) rows[g].load(projection + g * K);
    }
    dots_of_columns(dots, u, rank);
    columns_empty.arrive();
    wait_sums();

    float r[PIVOTS][PIVOTS], inverse[PIVOTS];  // R above its diagonal, and the inverse of its diagonal
    float image[PIVOTS][LK];                 // S U_p, then B
    float low[PIVOTS], residual;               // of column `lane`: U^T U_p, then L; the residual's diagonal
#pragma unroll
    for (int i = 0; i < PIVOTS; i++) {
#pragma unroll
        for (int n = 0; n < LK; n++) image[i][n] = 0;
        if (i < p && has_channels()) sum_parts(sums, i, LK * lane, image[i]);
#pragma unroll
        for (int j = 0; j <= i; j++) r[j][i] = i < p ? dots[i][j] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < PIVOTS; i++) low[i] = lane < rank ? dots[lane][i] : 0.f;
    residual = lane < rank ? dots[lane][PIVOTS] / mu : 0.f;
    sums_empty.arrive();

    float errors[PIVOTS];  // relative, of the pivots' squares
#pragma unroll
    for (int j = 0; j < PIVOTS; j++)
#pragma unroll
        for (int i = 0; i <= j; i++) {
            const float whole = r[i][j];
            float error = ROUNDING * whole;
#pragma unroll
            for (int n = 0; n < i; n++) {
                const float x = r[n][i] * r[n][j];
                r[i][j] -= x;
                if (i == j) error += x * errors[n];
            }
            if (i < j) {
                r[i][j] *= inverse[i];
            } else {
                inverse[j] = r[i][j] > fmaxf(INDEPENDENT * whole, SURE * error) ? rsqrtf(r[i][j]) : 0.f;
                errors[j] = error * inverse[j] * inverse[j];
            }
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
#pragma unroll
    for (int n = 0; n < LK; n++) {
        substitute([&](int i) -> float& { return image[i][n]; });
#pragma unroll
        for (int i = 0; i < PIVOTS; i++) image[i][n] *= root;
    }

    constexpr int TRIANGLE = PIVOTS * (PIVOTS + 1) / 2, CHUNKS = (TRIANGLE + 15) / 16;
    float products[CHUNKS][16] = {};  // lower triangle of L^T D^-1 L, by rows
    float scaled[PIVOTS];  // D^-1 L
    substitute([&](int i) -> float& { return low[i]; });
#pragma unroll
    for (int i = 0; i < PIVOTS; i++) {
        low[i] *= root;
        residual -= low[i] * low[i];
    }
    residual = fmaxf(residual, 0.f);
    const float over = 1.f / (residual + ridge);
    if (lane < rank) small.w[lane] = narrow<SMALL>(residual * over);
#pragma unroll
    for (int i = 0; i < PIVOTS; i++) {
        scaled[i] = low[i] * over;
#pragma unroll
        for (int j = 0; j <= i; j++) {
            const int at = i * (i + 1) / 2 + j;
            products[at / 16][at % 16] = low[i] * scaled[j];
        }
    }
    float total[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) total[i] = warp_sums(products[i]);

    // B~ = B - Pi Diag(w) L, with Diag(w) L in `dots`. The next projection rows are loaded meanwhile.
#pragma unroll
    for (int i = 0; i < PIVOTS; i++)
        if (lane < rank) dots[lane][i] = residual * scaled[i];
    __syncwarp();
#pragma unroll 1
    for (int first = 0; first < rank; first += AHEAD)
#pragma unroll
        for (int n = 0; n < AHEAD; n++) {
            const int g = first + n;
            if (g >= rank) break;
            const ChannelShare<CODED ? BF16 : SKETCH> row = rows[n];
            if (g + AHEAD < rank) rows[n].load(projection + (g + AHEAD) * K);
#pragma unroll
            for (int i = 0; i < PIVOTS; i++)
#pragma unroll
                for (int c = 0; c < LK; c++) image[i][c] -= row[c] * dots[g][i];
        }
    __syncwarp();  // before the next products are stored
#pragma unroll
    for (int i = 0; i < PIVOTS; i++) {
        if constexpr (CODED) {
            if (i >= p) break;
            constexpr int EACH = LK < 4 ? 1 : LK / 4;  // words of a lane
            float words[EACH][4];
#pragma unroll
            for (int n = 0; n < 4 * EACH; n++)
                words[n / 4][n % 4] = LK >= 4 ? image[i][n % LK]
                                              : __shfl_sync(ALL, image[i][n % LK], (2 * lane + n / 2) % 32);
            const float scale = store_row_codes(b + i * K, [&](int channel, float(&x)[4]) {
#pragma unroll
                for (int n = 0; n < 4; n++) x[n] = words[channel / 4 % EACH][n];
            });
            if (lane == 0) small.pivot_scale[i] = scale;
        } else {
            ChannelShare<SKETCH> rounded;
            rounded.set(image[i]);
            if (i < p) rounded.store(b + i * K);
        }
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
    for (int i = 0; i < PIVOTS; i++) {  // F = D^-1 L (I + L^T D^-1 L)^-1
#pragma unroll
        for (int j = 0; j < i; j++) scaled[i] -= l[i][j] * scaled[j];
        scaled[i] *= l[i][i];
    }
#pragma unroll
    for (int i = PIVOTS - 1; i >= 0; i--) {
#pragma unroll
        for (int j = i + 1; j < PIVOTS; j++) scaled[i] -= l[j][i] * scaled[j];
        scaled[i] *= l[i][i];
    }
#pragma unroll
    for (int i = 0; i < PIVOTS; i++)
        if (i < p && lane < rank) small.f[lane * p + i] = narrow<SMALL>(scaled[i]);
}
