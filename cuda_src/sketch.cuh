// From an updated state to its sketch U = S^T Phi, and to products of vectors of V with the state.
//
// Products along K (U) take pieces of the state as they lie; products along V (S U, of which the coefficient maps are
// made) take them transposed by 8 x 8 blocks within the warp. For a sketch that is stored in bf16, 11 bits of the state and
// 8 of the basis are plenty in U, and two slices of U and 8 bits of the state in S U; for float32 two slices of each.
//
// Products along V are sums over blocks of 16 value rows. Warps that sketch go in groups, each with some blocks: a warp makes U
// of its own blocks, and S U for its share of the channels, from all blocks of its group. So the group must meet, but what
// it leaves is one sum. What is left of a sketch is the sum over groups and algebra of the size of U, which one warp or two
// do while the others go on (maps.cuh).
#pragma once
#include "warp_latch.cuh"
#include "stage.cuh"
#include "sketch_layout.cuh"

constexpr int COLUMN = V + 4;                                       // padded, so that fragment stores of U hit all banks
constexpr int LEFT = MAP == OWN ? RANK_MAX : MAP == FACTORS ? PIVOTS : 0;  // columns of U that are multiplied with the state
constexpr int DOTS = PIVOTS + 1;                                        // of a column of U: with the pivots, and with itself
constexpr int GROUPS = NWARPS / GROUP_BLOCKS;
constexpr bool OWN_ROWS = RAW;  // warps that sketch bring rows themselves, which their group reads
constexpr int OWN_STEPS = (STEPS + SHARERS - 1) / SHARERS, OWN_BLOCKS = (GROUP_BLOCKS + SHARERS - 1) / SHARERS;  // a warp's

// A head's basis as operands, 8 columns at a time, as the host laid them out (see sketchssm/cuda/layout.py): in one slice where
// they make a sketch that is stored in bf16, in two for float32.
constexpr int SLICES = SKETCH == BF16 ? 1 : 2, BASIS_TILES = (RANK_MAX + 7) / 8, RANKS = 8 * BASIS_TILES;
struct Basis {
    alignas(16) uint2 columns[BASIS_TILES][STEPS][SLICES][32];
    Delivery delivery;

    __device__ __forceinline__ void fetch(const uint2* basis, int rank) {
        delivery.stretch<1>(columns, 0, basis, (rank + 7) / 8 * static_cast<int>(sizeof(columns[0])));
        delivery.end();
    }
};

// Warps that finish sketches, in turns. Where a team prepares keys there is room for two.
constexpr int FINISHERS = !RAW && (MAP == FACTORS || (MAP == OWN && RANK_MAX <= 16)) ? 2 : 1;

// Each group's share of S U, with U times the group's power.
struct Sums {
    alignas(16) float parts[GROUPS][LEFT > 0 ? LEFT : 1][LEFT > 0 ? K : 4];

    // Neighbouring channels of a row. Four rows that are read at once lie in different banks.
    __device__ __forceinline__ const float* at(int group, int row, int channel) const { return &parts[group][row][channel ^ row % 4 * 8]; }
    __device__ __forceinline__ float* at(int group, int row, int channel) { return &parts[group][row][channel ^ row % 4 * 8]; }
};
constexpr int SUMS = MAP != SHARED && !RAW && WP == 16 && RANK_MAX <= 16 ? 2 : 1;  // where there is room, the next sums come while a map is being made

// U, a column a row, and the norm of each block of the state's rows.
struct Columns {
    alignas(16) float of[RANK_MAX][COLUMN];
    float norms[NWARPS];

    // The power of two that U is multiplied with before it is squared or multiplied with the state.
    template <int COUNT> __device__ __forceinline__ float power(int first) const {
        return power_for_norm(warp_most(threadIdx.x % 32 < COUNT ? norms[first + threadIdx.x % 32] : 0.f));
    }
};
typedef float Scale[GROUPS];  // brings the groups' shares of S U to S and U times the power of all
constexpr int COLUMN_SETS = MAP == FACTORS && PIVOTS <= 4 ? SUMS : 1;  // so may the next columns; else they would take a state's place

struct SketchMemory {
    Basis basis;
    Columns columns[COLUMN_SETS];
    Sums sums[SUMS];
    Scale scale[FINISHERS];
#if MAP == 0
    float dots[FINISHERS][RANK_MAX][DOTS];  // U^T U, columns of the pivots, then |u|^2
#elif MAP == 1
    alignas(16) float gram[RANKS][RANKS + (RAW ? 4 : 0)];  // padded where there is room
#endif
};

struct SketchLatches {
    WarpLatch made[FINISHERS], full[FINISHERS];  // U is there, or all shares of S U as well
    WarpLatch columns_read[COLUMN_SETS], sums_read[SUMS];  // the one has been used, or the other
    WarpLatch gram_read;                // the Gram matrix has been used
    WarpLatch met[GROUPS];

    __device__ __forceinline__ void init() {
        gram_read.init(1);
        for (WarpLatch& latch : columns_read) latch.init(1);
        for (WarpLatch& latch : made) latch.init(GROUPS * SHARERS);
        for (WarpLatch& latch : full) latch.init(GROUPS * SHARERS);
        for (WarpLatch& latch : sums_read) latch.init(1);
        for (WarpLatch& latch : met) latch.init(SHARERS);
    }
};

// Where warps that sketch do not meet after they have used rows, `then` (see share_sketch): one that is an item ahead must not count for
// another, so each says it of its own blocks, for all of them.
template <class Then> __device__ __forceinline__ void leave_rows(int member, Then then) {
    if (OWN_ROWS) return then(0);
    for (int block = member; block < GROUP_BLOCKS; block += SHARERS)
        for (int i = 0; i < SHARERS; i++) then(block);
}

// U of a warp's own blocks of value rows, 8 TILES columns from `first` on; read by the group after it has met.
template <int TILES>
__device__ __forceinline__ void sketch_tiles(Columns& u, const Basis& from, Rows* rows, int group, int member, int first, int rank) {
    const int lane = threadIdx.x % 32;
    auto block = [&](int i) { return group * GROUP_BLOCKS + member + i * SHARERS; };
    auto exists = [&](int i) { return GROUP_BLOCKS % SHARERS == 0 || member + i * SHARERS < GROUP_BLOCKS; };
    float sum[OWN_BLOCKS][2][4] = {}, rest[OWN_BLOCKS][2][4] = {};
#pragma unroll(2 / OWN_BLOCKS)
    for (int step = 0; step < STEPS; step++) {
        LeftOperand basis;
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            const auto& columns = from.columns[first / 8 + tile % TILES][step];
            if (tile < TILES) basis.set(tile, columns[0][lane]);
            else basis.set(tile, make_uint2(0, 0));
            if constexpr (SLICES > 1) {
                LeftOperand more;
                more.set(tile, tile < TILES ? columns[SLICES - 1][lane] : make_uint2(0, 0));
#pragma unroll
                for (int j = 0; j < 4; j++) basis.a[j / 2][tile + j % 2 * 2] += more.a[j / 2][tile + j % 2 * 2];
            }
        }
#pragma unroll
        for (int i = 0; i < OWN_BLOCKS; i++) {
            Piece piece;
            piece.load(rows[exists(i) ? block(i) : block(0)].state, step);
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int j = 0; j < 2; j++)
                    basis.multiply<SLICES == 1, SLICES == 1>(j, sum[i][half], rest[i][half], piece.s[half][2 * j], piece.s[half][2 * j + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < OWN_BLOCKS; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int column = first + lane / 4 + e / 2 * 8;
                if (e / 2 < TILES && column < rank && exists(i))
                    u.of[column][16 * block(i) + value_at(half, e % 2)] = sum[i][half][e] + rest[i][half][e];
            }
}
__device__ __forceinline__ void sketch_columns(Columns& u, const Basis& basis, Rows* rows, int group, int member, int rank) {
    for (int first = 0; first < rank; first += 16)
        if (rank - first > 8) sketch_tiles<2>(u, basis, rows, group, member, first, rank);
        else sketch_tiles<1>(u, basis, rows, group, member, first, rank);
}

// A block's rows of U into the packed sketch.
__device__ __forceinline__ void store_columns(const Columns& u, int block, sketch_t* packed, int rank) {
    const int lane = threadIdx.x % 32, row = 16 * block + lane % 8 * 2;
    for (int g = lane / 8; g < rank; g += 4) {
        Packed<SKETCH, 2> pair;
        pair.set({u.of[g][row], u.of[g][row + 1]});
        pair.store(packed + g * V + (row ^ turn_of(g)));
    }
}

// All of them, by one warp.
__device__ __forceinline__ void store_columns(const Columns& u, sketch_t* packed, int rank) {
#pragma unroll 2
    for (int i = threadIdx.x % 32; i < rank * (V / 4); i += 32) {
        const int g = i / (V / 4), row = i % (V / 4) * 4;
        Packed<FP32, 4> x;
        x.load(&u.of[g][row]);
        Packed<SKETCH, 4> rounded;
        rounded.set({x[0], x[1], x[2], x[3]});
        rounded.store(packed + g * V + (row ^ turn_of(g)));
    }
}

// sums.parts[group] = columns [first, first + count) of U, at most 8 TILES, times `power` and the group's rows of the state, in the channels of
// the warp that is `member`. For maps that are stored in bf16 the state is rounded to it: one and the same
// matrix for all columns, so that solving with them enlarges nothing.
template <int TILES, class Then>
__device__ __forceinline__ void left_tiles(Sums& sums, const Columns& columns, Rows* rows, int group, int member, int first, int count,
                                           float power, Then then) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    // Rows 0 to 7 of an operand are the vectors' first slices and rows 8 to 15 their second: one product for both. The
    // operand's columns 2c, 2c + 1 are value rows c, 8 + c, and 8 further ones lie 4 on.
    float sum[OWN_STEPS][TILES][2][4] = {};
#pragma unroll 2
    for (int i = group * GROUP_BLOCKS; i < (group + 1) * GROUP_BLOCKS; i++) {
        u32 a[TILES][4];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            u32(&x)[4] = a[tile];
            x[0] = x[1] = x[2] = x[3] = 0;
            if (8 * tile + r < count) {
                const float* const u = &columns.of[first + 8 * tile + r][16 * i + c];
                slices<2>(power * u[0], power * u[8], &x[0], 1);
                slices<2>(power * u[4], power * u[12], &x[2], 1);
            }
        }
#pragma unroll
        for (int own = 0; own < OWN_STEPS; own++) {
            const int step = member + own * SHARERS;
            if (STEPS % SHARERS && step >= STEPS) break;
            Piece piece;
            piece.load(rows[i].state, step);
#pragma unroll
            for (int t = 0; t < 2; t++) {
                u32 upper[SLICES], lower[SLICES];
                if constexpr (SLICES == 1) {
                    upper[0] = floats_to_bf16(piece.s[0][2 * t], piece.s[0][2 * t + 1]);
                    lower[0] = floats_to_bf16(piece.s[1][2 * t], piece.s[1][2 * t + 1]);
                } else {
                    slices<SLICES>(piece.s[0][2 * t], piece.s[0][2 * t + 1], upper, 1);
                    slices<SLICES>(piece.s[1][2 * t], piece.s[1][2 * t + 1], lower, 1);
                }
#pragma unroll
                for (int j = 0; j < SLICES; j++) {
                    const u32 x = transpose_8x8(upper[j]), y = transpose_8x8(lower[j]);
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) mma_bf16(sum[own][tile][t], a[tile], x, y);
                }
            }
        }
        then(i);
    }
#pragma unroll
    for (int own = 0; own < OWN_STEPS; own++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int step = member + own * SHARERS;
            const float(&x)[2][4] = sum[own][tile];
            const float4 product = make_float4(x[0][0] + x[0][2], x[0][1] + x[0][3], x[1][0] + x[1][2], x[1][1] + x[1][3]);
            if (8 * tile + r < count && step < STEPS)
                *reinterpret_cast<float4*>(sums.at(group, first + 8 * tile + r, 16 * step + 4 * c)) = product;
        }
}
template <class Then>
__device__ __forceinline__ void left_products(Sums& sums, const Columns& u, Rows* rows, int group, int member, int count, Then then) {
    const float power = u.power<GROUP_BLOCKS>(group * GROUP_BLOCKS);
    if constexpr (LEFT <= 8) {
        left_tiles<1>(sums, u, rows, group, member, 0, count, power, then);
    } else {
        for (int first = 0; first < count; first += 16) {
            auto last = [&](int block) {
                if (first + 16 >= count) then(block);
            };
            if (count - first > 8) left_tiles<2>(sums, u, rows, group, member, first, count - first, power, last);
            else left_tiles<1>(sums, u, rows, group, member, first, count - first, power, last);
        }
    }
}
