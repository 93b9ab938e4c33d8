// Dense map (ridge) of more than 16 columns, from exact blocks, by a team of warps:
// (U^T U / mu + ridge I)^-1 (S U)^T / mu.
//
// In codes the split form is stored: Q = U W^T and B = W (S U)^T / mu, whose product is U times the map.
//
// A block elimination (map/elimination.cuh) gives the lower triangular W with U^T U / mu + ridge I = W^-1 W^-T. The
// map is W^T W (S U)^T / mu. All products are on the tensor cores. Rows and columns past the rank hold zeros, with the
// ridge on the diagonal.
//
// The warps of the team share each step piece by piece, and meet between steps (named barrier):
//
//   step             piece                                       result
//   gram_of_columns  two blocks (SLICED: one)                    U^T U / mu + ridge I
//   eliminate        two blocks; the first warp also inverts     W
//                    the diagonal blocks
//   multiply_dense   16 channels (beyond rank 40: 32)            the map
//   split_dense      16 channels (beyond rank 40: 32)            Q and B (codes)
//   store_split      a column                                    codes and scales of Q and B
#pragma once
#include "map/elimination.cuh"

static_assert(SKETCH_GROUPS == 1, "the product with W replaces the sums");
// Whether rows of S U past the rank may be read, where W has zeros: the numbers must be finite. With
// SLICED, rows past the rank are zeros; rows past Sums::ROWS lie in the Gram matrix, unless they reach beyond its end.
constexpr bool FINITE_PAST_RANK = SLICED && sizeof(float) * (RANKS - Sums::ROWS) * K <= sizeof(SketchMemory::gram);
static_assert(!FINITE_PAST_RANK || ((SUM_STAGES == 1 || Sums::ROWS == RANKS) &&
                                    sizeof(SketchMemory) == sizeof(Basis) + sizeof(Columns) * COLUMN_STAGES +
                                                                sizeof(Sums) * SUM_STAGES + sizeof(SketchMemory::gram)),
              "the Gram matrix begins where the last sums end");

// Products of column 8 i + r of U with columns 8 j + 2c and 8 j + 2c + 1, from the slices of U (SLICED).
DEVICE float2 products_of_slices(const Columns& u, int i, int j) {
    float sum[2][4] = {};
#pragma unroll 4
    for (int step = 0; step < ROW_BLOCKS; step++) {
        u32 left[4], right[4];
        u.operand(left, i, step), u.operand(right, j, step);
        mma_bf16(sum[0], left, right[0], right[2]);
        mma_bf16(sum[1], left, right[1], right[3]);
    }
    return make_float2((sum[0][0] + sum[0][2]) + (sum[1][0] + sum[1][2]),
                       (sum[0][1] + sum[0][3]) + (sum[1][1] + sum[1][3]));
}

// U^T U / mu + ridge I: blocks on and above the diagonal, and some below, which are not used.
template <int SIZE>
DEVICE void gram_of_columns(const Team<SIZE>& team, SketchMemory& m, int rank, float mu, float ridge) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    const float scale = 1.f / mu;
    int piece = 0;
    if constexpr (SLICED) {
        const int blocks = blocks_of(rank);
#pragma unroll 1
        for (int i = 0; i < blocks; i++)
#pragma unroll 1
            for (int j = i; j < blocks; j++) {
                if (piece++ % SIZE != team.member) continue;
                float2 dots = products_of_slices(m.columns[0], i, j);
                const int row = BLOCK * i + r, column = BLOCK * j + 2 * c;
                dots.x = dots.x * scale + (row == column ? ridge : 0.f);
                dots.y = dots.y * scale + (row == column + 1 ? ridge : 0.f);
                *reinterpret_cast<float2*>(&m.gram[row][column]) = dots;
            }
    } else {
#pragma unroll 1
        for (int i = 0; i < rank; i += 2 * BLOCK)
#pragma unroll 1
            for (int j = i; j < rank; j += BLOCK) {
                if (piece++ % SIZE != team.member) continue;
                float dots[4];
                multiply_columns<2>(m.columns[0], rank, i, j, dots, [](auto&, auto&) {});
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int row = i + r + 8 * (e / 2), column = j + 2 * c + e % 2;
                    if (row < RANKS) m.gram[row][column] = dots[e] * scale + (row == column ? ridge : 0.f);
                }
            }
    }
}

// Rows of U or of S U in shared memory: `channels` numbers, `length` apart. `mask` is their swizzle, see Sums.
struct Rows {
    float* data;
    int channels, length, mask;

    DEVICE float* at(int row, int channel) const { return data + row * length + (channel ^ row % 4 * mask); }
};
DEVICE Rows rows_of(Columns& u) { return {&u.of[0][0], V, COLUMN, 0}; }
DEVICE Rows rows_of(Sums& sums) { return {&sums.parts[0][0][0], K, K, 8}; }

// Eight rows of a product with blocks [begin, end) of rows: `weight(i, e)` is an element of the other factor's block i,
// in the order of a right operand. A lane has four neighbouring channels of rows 2c and 2c + 1. SHORT: the rows are
// rounded to tf32.
template <bool SHORT, class Weight>
DEVICE void multiply_blocks(float (&to)[2][4], const Rows& rows, int rank, int channel, int begin, int end, float scale,
                            const Weight& weight) {
    const int c = threadIdx.x % 4;
    float sum[2][4] = {}, rest[2][4] = {};  // left operands: channels 4r + 2 half and 4r + 2 half + 1
#pragma unroll 2
    for (int i = begin; i < end; i++) {
        float x[2][4] = {};
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = BLOCK * i + c + 4 * e;
            if (FINITE_PAST_RANK || (row < rank && channel < rows.channels)) load_floats(x[e], rows.at(row, channel));
        }
        const float upper = weight(i, 0), lower = weight(i, 1);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            LeftOperand left;
#pragma unroll
            for (int e = 0; e < 4; e++) left.a[0][e] = x[e / 2][2 * half + e % 2];
            left.multiply<SHORT, false>(0, sum[half], rest[half], upper, lower);
        }
    }
#pragma unroll
    for (int e = 0; e < 2; e++)
#pragma unroll
        for (int n = 0; n < 4; n++)
            to[e][n] = scale * (sum[n / 2][e + n % 2 * 2] + rest[n / 2][e + n % 2 * 2]);
}

// W times rows, in place, times `scale`: from the last rows to the first, in the 32 channels that contain `channel`.
DEVICE void multiply_in_place(const SketchMemory& m, const Rows& rows, int rank, int channel, float scale) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll 1
    for (int n = blocks_of(rank) - 1; n >= 0; n--) {
        float products[2][4];
        multiply_blocks<false>(products, rows, rank, channel, 0, n + 1, scale,
                        [&](int i, int e) { return m.gram[BLOCK * n + r][BLOCK * i + c + 4 * e]; });
        __syncwarp();
#pragma unroll
        for (int e = 0; e < 2; e++) {
            Packed<FP32, 4> row;
            row.set(products[e]);
            const int at = BLOCK * n + 2 * c + e;
            if (at < (SLICED ? Sums::ROWS : rank) && channel < rows.channels) row.store(rows.at(at, channel));
        }
        __syncwarp();
    }
}

// Up to rank 40 (HELD) a warp holds 16 channels of all rows of a product in registers. x[n] is the accumulator of block
// n of rows: a lane has channels 2r and 2r + 1 (rows r and r + 8 of an operand) of rows 2c and 2c + 1 of the block.
constexpr bool HELD = BASIS_TILES <= 5;
struct HeldRows {
    float x[BASIS_TILES][4] = {};

    DEVICE float2 row(int n, int e, float scale) const { return make_float2(scale * x[n][e], scale * x[n][2 + e]); }
};

// W times rows. `channel`: the lane's first channel.
DEVICE HeldRows multiply_held(const SketchMemory& m, const Rows& rows, int rank, int channel) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4, blocks = blocks_of(rank);
    HeldRows product;
#pragma unroll
    for (int n = 0; n < BASIS_TILES; n++) {
        if (n >= blocks) break;
        LeftOperand left;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = BLOCK * n + c + 4 * e;
            float2 x = make_float2(0, 0);
            if (FINITE_PAST_RANK || row < rank) x = *reinterpret_cast<const float2*>(rows.at(row, channel));
            left.a[0][2 * e] = x.x, left.a[0][2 * e + 1] = x.y;
        }
#pragma unroll
        for (int i = n; i < BASIS_TILES; i++) {
            if (i >= blocks) break;
            const float* const w = &m.gram[BLOCK * i + r][BLOCK * n + c];
            left.multiply<false, false>(0, product.x[i], product.x[i], w[0], w[4]);
        }
    }
    return product;
}

// W^T times rows times `scale`.
DEVICE HeldRows multiply_transposed(const SketchMemory& m, const HeldRows& rows, int rank, float scale) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4, blocks = blocks_of(rank);
    HeldRows product;
#pragma unroll
    for (int i = 0; i < BASIS_TILES; i++) {
        if (i >= blocks) break;
        LeftOperand left;  // its columns c and c + 4 are rows 2c and 2c + 1 of the block, as in the accumulator
#pragma unroll
        for (int e = 0; e < 4; e++) left.a[0][e] = scale * rows.x[i][e / 2 + e % 2 * 2];
        // Bf16 sketches (SLICED): tf32 is enough for W (S U)^T. Reads multiply its error by U W^T / sqrt(mu), whose
        // norm is at most 1.
#pragma unroll
        for (int n = 0; n <= i; n++)
            left.multiply<SLICED, false>(0, product.x[n], product.x[n], m.gram[BLOCK * i + 2 * c][BLOCK * n + r],
                                         m.gram[BLOCK * i + 2 * c + 1][BLOCK * n + r]);
    }
    return product;
}

// The map W^T W (S U)^T / mu. Beyond rank 40, W (S U)^T replaces the sums.
template <int SIZE>
DEVICE void multiply_dense(const Team<SIZE>& team, const SketchMemory& m, Sums& sums, sketch_t* map, int rank,
                           float mu) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4, blocks = blocks_of(rank);
    const Rows rows = rows_of(sums);
    const float scale = 1.f / mu;
    if constexpr (HELD) {
#pragma unroll 1
        for (int channel = 16 * team.member + 2 * r; channel < K; channel += 16 * SIZE) {
            const HeldRows product = multiply_transposed(m, multiply_held(m, rows, rank, channel), rank, scale);
#pragma unroll
            for (int n = 0; n < 2 * BASIS_TILES; n++) {
                const int row = BLOCK * (n / 2) + 2 * c + n % 2;
                const float2 x = product.row(n / 2, n % 2, 1.f);
                Packed<SKETCH, 2> rounded;
                rounded.set({x.x, x.y});
                if (row < rank) rounded.store(map + row * K + channel);
            }
        }
    } else {
#pragma unroll 1
        for (int channel = 32 * team.member + 4 * r; channel < K; channel += 32 * SIZE) {
            multiply_in_place(m, rows, rank, channel, scale);
#pragma unroll 1
            for (int n = 0; n < blocks; n++) {
                float products[2][4];
                // SLICED: as in multiply_transposed.
                multiply_blocks<SLICED>(products, rows, rank, channel, n, blocks, 1.f,
                                [&](int i, int e) { return m.gram[BLOCK * i + c + 4 * e][BLOCK * n + r]; });
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    Packed<SKETCH, 4> rounded;
                    rounded.set(products[e]);
                    const int row = BLOCK * n + 2 * c + e;
                    if (row < rank) rounded.store(map + row * K + channel);
                }
            }
        }
    }
}

// Q and B, in place of U and of the sums.
template <int SIZE> DEVICE void split_dense(const Team<SIZE>& team, SketchMemory& m, Sums& sums, int rank, float mu) {
    constexpr int PADDED = (V + 31) / 32 * 32;
    const int r = threadIdx.x % 32 / 4;
    const float scale = 1.f / mu;
    if constexpr (HELD) {
        const int c = threadIdx.x % 4;
#pragma unroll 1
        for (int channel = 16 * team.member + 2 * r; channel < V + K; channel += 16 * SIZE) {
            const bool is_u = channel < V;
            const Rows rows = is_u ? rows_of(m.columns[0]) : rows_of(sums);
            const int own = is_u ? channel : channel - V;
            const HeldRows product = multiply_held(m, rows, rank, own);
            __syncwarp();
#pragma unroll
            for (int n = 0; n < 2 * BASIS_TILES; n++) {
                const int row = BLOCK * (n / 2) + 2 * c + n % 2;
                if (row < rank)
                    *reinterpret_cast<float2*>(rows.at(row, own)) = product.row(n / 2, n % 2, is_u ? 1.f : scale);
            }
        }
    } else {
#pragma unroll 1
        for (int channel = 32 * team.member + 4 * r; channel < PADDED + K; channel += 32 * SIZE) {
            const bool first = channel < PADDED;
            multiply_in_place(m, first ? rows_of(m.columns[0]) : rows_of(sums), rank,
                              first ? channel : channel - PADDED, first ? 1.f : scale);
        }
    }
}

// Stores Q and B, which have replaced U and the sums, as codes. The scales are multiplied by `factor`.
template <int SIZE>
DEVICE void store_split(const Team<SIZE>& team, const Columns& q, const Sums& b, sketch_t* packed, int rank,
                        float factor) {
    const SmallPart<float> small(packed, rank);
#pragma unroll 1
    for (int g = team.member; g < rank; g += SIZE) {
        const float scale = store_column_codes(q.of[g], g, packed) *
                            store_row_codes(packed + rank * V + g * K, [&](int channel, float(&x)[4]) {
                                load_floats(x, b.at(0, g, channel));
                            });
        if (threadIdx.x % 32 == 0) small.scale[g] = scale * factor;
    }
}

// Computes and stores the map, by the whole team. Begins with team.sync(), because other warps of the team may still be
// working on the previous sketch.
template <int SIZE, class Wait>
DEVICE void store_dense_by_team(const Team<SIZE>& team, SketchMemory& m, Sums& sums, SketchBarriers& barriers,
                                sketch_t* packed, int rank, float mu, float ridge, float factor, Wait wait_sums) {
    team.sync();
    gram_of_columns(team, m, rank, mu, ridge);
    if (!CODED) barriers.columns_empty[0].arrive();
    team.sync();
    eliminate(team, m, rank, ridge);
    wait_sums();
    if constexpr (CODED) {
        split_dense(team, m, sums, rank, mu);
        team.sync();
        store_split(team, m.columns[0], sums, packed, rank, factor);
        barriers.columns_empty[0].arrive();
    } else {
        multiply_dense(team, m, sums, packed + rank * V, rank, mu);
    }
}
