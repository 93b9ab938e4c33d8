// Dense map (ridge), from exact blocks, by one warp: (U^T U / mu + ridge I)^-1 (S U)^T / mu.
//
// In codes the split form is stored: Q = U (W / sqrt(mu))^T and B = (W / sqrt(mu)) (S U)^T, whose product is U times
// the map.
//
// One elimination gives the lower triangular W with U^T U / mu + ridge I = W^-1 W^-T. The map is W^T W (S U)^T / mu,
// two products on the tensor cores. Rows and columns past the rank hold zeros, with the ridge on the diagonal.
#pragma once
#include "map/sums.cuh"

// U^T U / mu + ridge I of 8 TILES columns. Calls `between` when U has been read and before the last matrix is
// overwritten.
template <int TILES, class Between>
DEVICE void gram_of_tiles(SketchMemory& m, int rank, float mu, float ridge, Between between) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    float dots[TILES][4], squares[TILES];
    multiply_first_columns<TILES, TILES>(m.columns[0], rank, dots, squares);
    const float scale = 1.f / mu;
    between();
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int e = 0; e < 2 * TILES; e++) {
            const int row = r + 8 * (e / 2), column = 8 * tile + 2 * c + e % 2;
            m.gram[row][column] = dots[tile][e] * scale + (row == column ? ridge : 0.f);
        }
    __syncwarp();
}

// Replaces the matrix by W times `scale`. A lane has one column of the matrix or of the identity, and subtracts the
// pivot row from the other rows. The pivot row is always in register 0, so that the elimination can be a rolled loop:
// the code must stay short because the other roles share the instruction cache.
template <int TILES> DEVICE void eliminate_tiles(SketchMemory& m, float scale, float ridge) {
    constexpr int N = 8 * TILES;
    const int lane = threadIdx.x % 32, column = lane % N;
    float x[N];
    load_floats(x, m.gram[column]);  // the matrix is symmetric
    if (lane / N % 2)
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = i == column ? 1.f : 0.f;
    __syncwarp();
#pragma unroll 1
    for (int j = 0; j < N; j++) {
        const float root = rsqrtf(fmaxf(__shfl_sync(ALL, x[0], j), ridge)), own = x[0] * root;
        if (lane / N == 1) m.gram[j][column] = scale * own;
#pragma unroll
        for (int i = 1; i < N; i++) x[i - 1] = x[i] - __shfl_sync(ALL, x[i], j) * (own * root);
        x[N - 1] = 0;
    }
    __syncwarp();
}

// W^T W (S U)^T, 32 channels at a time: a lane's four neighbouring channels are rows r and r + 8 of two left operands.
// Calls `then` when W has been read.
template <int TILES, class Then>
DEVICE void multiply_tiles(const SketchMemory& m, const Sums& sums, sketch_t* map, int rank, Then then) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    float first[TILES][TILES][2], second[TILES][TILES][2];  // W^T and W as right operands, without tiles of zeros
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int n = 0; n <= i; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                first[i][n][e] = m.gram[8 * i + r][8 * n + c + 4 * e],
                second[i][n][e] = m.gram[8 * i + 2 * c + e][8 * n + r];
    then();
#pragma unroll 1
    for (int channel = 4 * r; channel < K; channel += 32) {
        float x[2 * TILES][4];
#pragma unroll
        for (int q = 0; q < 2 * TILES; q++) {
            x[q][0] = x[q][1] = x[q][2] = x[q][3] = 0;
            if (4 * q + c < rank) sum_parts(sums, 4 * q + c, channel, x[q]);
        }
        float rows[2][TILES][4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float y[TILES][4] = {};
            LeftOperand left;
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) left.a[n][e] = x[2 * n + e / 2][2 * half + e % 2];
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int n = 0; n <= i; n++) left.multiply<false, false>(n, y[i], y[i], first[i][n][0], first[i][n][1]);
#pragma unroll
            for (int i = 0; i < TILES; i++) {  // columns 2c and 2c + 1 stand for c and c + 4
                left.a[i][0] = y[i][0], left.a[i][1] = y[i][2], left.a[i][2] = y[i][1], left.a[i][3] = y[i][3];
#pragma unroll
                for (int n = 0; n <= i; n++)
                    left.multiply<false, false>(i, rows[half][n], rows[half][n], second[i][n][0], second[i][n][1]);
            }
        }
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int row = 8 * n + 2 * c + e;
                Packed<SKETCH, 4> rounded;
                rounded.set({rows[0][n][e], rows[0][n][2 + e], rows[1][n][e], rows[1][n][2 + e]});
                if (row < rank) rounded.store(map + row * K + channel);
            }
    }
}

// Word n of a row is the four numbers that become word n of its codes. A lane has words r, r + 8, ... of rows 2c and
// 2c + 1 of each operand tile: rows_of_lane(i) for i = 0 to 2 TILES - 1.
DEVICE int rows_of_lane(int i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// W times rows of LENGTH numbers, in place, 32 numbers at a time. `load(row, n, x)` and `store(row, n, x)` move word n
// of a row. `largest`: the largest magnitudes of the lane's products, or NaN.
template <int TILES, int LENGTH, class Load, class Store>
DEVICE void multiply_words(const float (&w)[TILES][TILES][2], int rank, float (&largest)[2 * TILES], const Load& load,
                           const Store& store) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (float& x : largest) x = 0;
#pragma unroll 1
    for (int n = r; n < (LENGTH + 31) / 32 * 8; n += 8) {
        const bool exists = LENGTH % 32 == 0 || n < LENGTH / 4;
        float x[2 * TILES][4], rows[2][TILES][4] = {};
#pragma unroll
        for (int q = 0; q < 2 * TILES; q++) {
            x[q][0] = x[q][1] = x[q][2] = x[q][3] = 0;
            if (4 * q + c < rank && exists) load(4 * q + c, n, x[q]);
        }
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            LeftOperand left;
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) left.a[i][e] = x[2 * i + e / 2][2 * half + e % 2];
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int j = 0; j <= i; j++)
                    left.multiply<false, false>(j, rows[half][i], rows[half][i], w[i][j][0], w[i][j][1]);
        }
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            const float product[4] = {rows[0][i / 2][i % 2], rows[0][i / 2][2 + i % 2], rows[1][i / 2][i % 2],
                                      rows[1][i / 2][2 + i % 2]};
#pragma unroll
            for (float y : product) largest[i] = larger(largest[i], fabsf(y));
            if (rows_of_lane(i) < rank && exists) store(rows_of_lane(i), n, product);
        }
    }
}

// Stores rows of products as codes: each lane the words that it has computed. Makes `largest` the rows' largest
// magnitudes. `load` as above; `place(row, byte)` is the address of a byte of a row's codes.
template <int TILES, int LENGTH, class Load, class Place>
DEVICE void store_products(int rank, float (&largest)[2 * TILES], const Load& load, const Place& place) {
    const int r = threadIdx.x % 32 / 4;
    float inverses[2 * TILES];
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
#pragma unroll
        for (int bit = 4; bit < 32; bit *= 2) largest[i] = larger(largest[i], __shfl_xor_sync(ALL, largest[i], bit));
        inverses[i] = inverse_scale(largest[i]);
    }
#pragma unroll 1
    for (int n = r; n < LENGTH / 4; n += 8)
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            const int row = rows_of_lane(i);
            if (row >= rank) continue;
            float x[4];
            load(row, n, x);
            *reinterpret_cast<u32*>(place(row, 4 * n)) = codes_of(x, inverses[i]);
        }
}

// Q and B, in place of U and of the sums, and their codes. Calls `w_is_read` when W has been read, and
// `q_is_stored` when the codes of Q are stored.
template <int TILES, class Read, class Stored>
DEVICE void split_tiles(SketchMemory& m, Sums& sums, sketch_t* packed, int rank, float factor, Read w_is_read,
                        Stored q_is_stored) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    float w[TILES][TILES][2];
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int n = 0; n <= i; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) w[i][n][e] = m.gram[8 * i + r][8 * n + c + 4 * e];
    w_is_read();
    float largest_q[2 * TILES], largest_b[2 * TILES];
    auto load_q = [&](int row, int n, float(&x)[4]) { load_column_word(x, m.columns[0].of[row], n); };
    multiply_words<TILES, V>(w, rank, largest_q, load_q, [&](int row, int n, const float(&x)[4]) {
        store_column_word(m.columns[0].of[row], n, x);
    });
    store_products<TILES, V>(rank, largest_q, load_q, [&](int row, int byte) {
        const CodedColumn as(row);
        return packed + as.at + (byte ^ as.mask);
    });
    q_is_stored();
    multiply_words<TILES, K>(
        w, rank, largest_b, [&](int row, int n, float(&x)[4]) { sum_parts(sums, row, 4 * n, x); },
        [&](int row, int n, const float(&x)[4]) {
            *reinterpret_cast<float4*>(sums.at(0, row, 4 * n)) = make_float4(x[0], x[1], x[2], x[3]);
        });
    sketch_t* const b = packed + rank * V;
    store_products<TILES, K>(
        rank, largest_b,
        [&](int row, int n, float(&x)[4]) {
            float four[4];
            load_floats(four, sums.at(0, row, 4 * n));
            x[0] = four[0], x[1] = four[2], x[2] = four[1], x[3] = four[3];
        },
        [&](int row, int byte) { return b + row * K + byte; });
    const SmallPart<float> small(packed, rank);
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++)
        if (r == 0 && rows_of_lane(i) < rank)
            small.scale[rows_of_lane(i)] = scale_of(largest_q[i]) * scale_of(largest_b[i]) * factor;
}

template <int TILES, class Wait>
DEVICE void store_tiles(SketchMemory& m, Sums& sums, SketchBarriers& barriers, sketch_t* packed, int rank, float mu,
                        float ridge, float factor, int sketch_n, Wait wait_sums) {
    gram_of_tiles<TILES>(m, rank, mu, ridge, [&] {
        if (!CODED) barriers.columns_empty[0].arrive();
        if (EPILOGUE_WARPS > 1 && sketch_n > 0) barriers.gram_empty.wait(sketch_n - 1);
    });
    eliminate_tiles<TILES>(m, rsqrtf(mu), ridge);
    wait_sums();
    auto w_is_read = [&] {
        if (EPILOGUE_WARPS > 1) barriers.gram_empty.arrive();
    };
    if constexpr (CODED) {
        split_tiles<TILES>(m, sums, packed, rank, factor, w_is_read, [&] { barriers.columns_empty[0].arrive(); });
    } else {
        multiply_tiles<TILES>(m, sums, packed + rank * V, rank, w_is_read);
    }
}

template <class Wait>
DEVICE void store_dense(SketchMemory& m, Sums& sums, SketchBarriers& barriers, sketch_t* packed, int rank, float mu,
                        float ridge, float factor, int sketch_n, Wait wait_sums) {
    if (RANK_MAX > 8 && rank > 8)
        store_tiles<BASIS_TILES>(m, sums, barriers, packed, rank, mu, ridge, factor, sketch_n, wait_sums);
    else store_tiles<1>(m, sums, barriers, packed, rank, mu, ridge, factor, sketch_n, wait_sums);
}
