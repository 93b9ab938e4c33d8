// The sketch U = S^T Phi of an updated state S, and the products S U, from which the coefficient map is computed.
//
// U is a product along K: fragments of the state are operands as stored. S U is a product along V: fragments are
// transposed by 8 x 8 blocks within the warp. Precision: for a bf16 sketch, U takes 11 bits of the state and 8 of the
// basis, and S U takes two bf16 slices of U and 8 bits of the state; for a float32 sketch, two slices of each.
//
// S U is a sum over row blocks, and different warps have different row blocks. Warps that sketch form groups. Each warp
// computes U for its own row blocks and waits until the group's U is complete. Then each warp computes S U for its
// share of the channels, over all row blocks of the group. The result is one sum per group. The epilogue warps add the
// groups' sums and compute the map (maps.cuh).
#pragma once
#include "warp_mbarrier.cuh"
#include "solve.cuh"
#include "codes.cuh"

constexpr int COLUMN = V + 4;  // padded, so that fragment stores of U hit all banks
constexpr int PRODUCT_COLUMNS = MAP == DENSE       ? RANK_MAX
                                : MAP == FACTORS ? PIVOTS
                                                 : 0;  // columns of U that S is multiplied by
constexpr int DOTS = PIVOTS + 1;  // products of a column of U: with the pivots, and with itself
constexpr int SKETCH_GROUPS = ROW_BLOCKS / GROUP_BLOCKS;
constexpr int OWN_STEPS = (STEPS + GROUP_WARPS - 1) / GROUP_WARPS;          // a warp's steps along K
constexpr int OWN_BLOCKS = (GROUP_BLOCKS + GROUP_WARPS - 1) / GROUP_WARPS;  // a warp's row blocks

// A head's basis as operands of 8 columns, in the host's layout (sketchssm/cuda/layout.py): two bf16 slices for float32
// sketches, one otherwise.
constexpr int BASIS_SLICES = SKETCH == FP32 ? 2 : 1, BASIS_TILES = (RANK_MAX + 7) / 8, RANKS = 8 * BASIS_TILES;
struct Basis {
    alignas(16) uint2 columns[BASIS_TILES][STEPS][BASIS_SLICES][32];
    CopyBarrier full;

    __device__ __forceinline__ void fetch(const uint2* basis, int rank) {
        const int bytes = (rank + 7) / 8 * static_cast<int>(sizeof(columns[0]));
        full.expect(bytes);
        full.copy_contiguous<1>(columns, 0, basis, bytes);
        full.commit();
    }
};

// Teams of epilogue warps take sketches in turn. Variants with transform warps have room for two epilogue warps. With
// high ranks there is one team, whose warps share each sketch's map: another team would need more shared memory.
constexpr int EPILOGUE_TEAMS = !RAW_KEYS && (MAP == FACTORS || (MAP == DENSE && !HIGH_RANKS)) ? 2 : 1;

// Warps that compute a map together.
template <int SIZE> struct Team {
    int member;
    __device__ __forceinline__ void sync() const {
        if constexpr (SIZE > 1) named_barrier_sync<32 * SIZE>(FIRST_GROUP_BARRIER + SKETCH_GROUPS);
        else __syncwarp();
    }
};

// With high ranks and bf16 sketches, shared memory has U as two bf16 slices, in the order of left operands. Gram matrix
// and S U use the same slices, so the map is exact for U with an error of 2^-17, which is less than a bf16 sketch has.
// Refreshes have U in float32 (SLICES_OF_U).
constexpr bool SLICED = SLICES_OF_U && HIGH_RANKS && !CODED && BASIS_SLICES == 1;

// U, one column a row (not SLICED) or in slices, and the norms of the state's row blocks.
struct Columns {
    union {
        alignas(16) float of[SLICED ? 1 : RANK_MAX][COLUMN];
        // Operand of 8 columns and 16 value rows: rows 0 to 7 are the first slices, rows 8 to 15 the second slices.
        uint4 operands[SLICED ? BASIS_TILES : 1][SLICED ? ROW_BLOCKS : 1][SLICED ? 32 : 1];
    };
    float norms[ROW_BLOCKS];

    __device__ __forceinline__ void operand(u32 (&to)[4], int tile, int block) const {
        const uint4 x = operands[tile][block][threadIdx.x % 32];
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
    // The first slice, which is U rounded to bf16, of a column in row n of a row block: see value_at.
    __device__ __forceinline__ u16 leading(int column, int block, int n) const {
        const int c = PARTS == 2 ? n % 4 : n / 8 + n % 2 * 2, half = PARTS == 2 ? n / 4 % 2 : n / 2 % 2,
                  e = PARTS == 2 ? n / 8 : n / 4 % 2;
        return reinterpret_cast<const u16*>(&operands[column / 8][block][column % 8 * 4 + c])[4 * half + e];
    }

    // This lane's norm of COUNT row blocks.
    template <int COUNT> __device__ __forceinline__ float norm(int first) const {
        return threadIdx.x % 32 < COUNT ? norms[first + threadIdx.x % 32] : 0.f;
    }
    // Whether U of these row blocks must be scaled before it is squared or multiplied by the state (sketch_scale.cuh).
    template <int COUNT> __device__ __forceinline__ bool extreme(int first) const {
        const float x = norm<COUNT>(first);
        return __any_sync(ALL, x > MOST_ORDINARY || (x > 0.f && x < LEAST_ORDINARY));
    }
    // The power of two by which U of extreme row blocks is multiplied.
    template <int COUNT> __device__ __forceinline__ float power(int first) const {
        return power_for_norm(warp_most(norm<COUNT>(first)));
    }
    // Multiplies row blocks [first, first + COUNT) of U; by one warp.
    template <int COUNT> __device__ __forceinline__ void scale(int first, int rank, float factor) {
        if constexpr (SLICED) {
            for (int i = 0; i < (rank + 7) / 8 * COUNT; i++) {
                u32* const words = &operands[i / COUNT][first + i % COUNT][threadIdx.x % 32].x;
                for (int n = 0; n < 4; n++)
                    words[n] = upper_halves(factor * __uint_as_float(words[n] << 16),
                                            factor * __uint_as_float(words[n] & 0xffff0000u));
            }
            return;
        }
        for (int i = threadIdx.x % 32; i < rank * 16 * COUNT; i += 32)
            of[i / (16 * COUNT)][16 * first + i % (16 * COUNT)] *= factor;
    }
};
constexpr int GRAM_ROW = RANKS + (RAW_KEYS || HIGH_RANKS ? 4 : 0);  // padded where there is room
// Shared memory of a block of the flush with high ranks and raw keys (flush_tiles.cuh checks).
constexpr int bytes_with(int states, int sums) {
    const int rest = 16 * ROW_BLOCKS * states + (REFRESHES ? 384 : 320);  // barriers, tile scheduler
    return static_cast<int>(states * ROW_BLOCKS * sizeof(StateStage) + KEY_STAGES * sizeof(KeyStage) +
                            VALUE_STAGES * sizeof(ValueStage) + SOLVE_STAGES * sizeof(Solve) + sizeof(PreparedKeys) +
                            2 * sizeof(TransformShared) + sizeof(Basis) + sizeof(Columns) +
                            sizeof(float) * (sums * (sums > 1 ? RANKS : RANK_MAX) * K + RANKS * GRAM_ROW)) +
           rest;
}
// High ranks: two sums if they cost neither a block of a multiprocessor nor a state stage.
constexpr int BLOCKS_OF_ONE_SUM = bytes_with(1, 1) > block_shared(WANTED_BLOCKS) ? 1 : WANTED_BLOCKS;
constexpr bool TWO_SUMS =
    SLICED && RAW_KEYS &&
    bytes_with(bytes_with(2, 1) <= block_shared(BLOCKS_OF_ONE_SUM) ? 2 : 1, 2) <= block_shared(BLOCKS_OF_ONE_SUM);

// Each group's share of S U.
struct Sums {
    static constexpr int ROWS = TWO_SUMS ? RANKS : PRODUCT_COLUMNS > 0 ? PRODUCT_COLUMNS : 1;
    alignas(16) float parts[SKETCH_GROUPS][ROWS][PRODUCT_COLUMNS > 0 ? K : 4];

    // Neighbouring channels of a row, swizzled: four rows that are read at once are in different banks.
    __device__ __forceinline__ const float* at(int group, int row, int channel) const {
        return &parts[group][row][channel ^ row % 4 * 8];
    }
    __device__ __forceinline__ float* at(int group, int row, int channel) {
        return &parts[group][row][channel ^ row % 4 * 8];
    }
};
// Two if there is room: the next sums are computed during the epilogue.
constexpr int SUM_STAGES = TWO_SUMS || (MAP != SHARED && !RAW_KEYS && WP == 16 && RANK_MAX <= 16) ? 2 : 1;
// Phases of sums_full: the next sums may be complete before the epilogue waits for these.
constexpr int SUM_PHASES = SUM_STAGES > EPILOGUE_TEAMS ? SUM_STAGES : EPILOGUE_TEAMS;

// Two if this does not cost a state stage.
constexpr int COLUMN_STAGES = MAP == FACTORS && PIVOTS <= 4 ? SUM_STAGES : 1;
// The epilogue warp stores U: U has two stages, so nobody overwrites U meanwhile; or U is stored as codes with scales.
constexpr bool EPILOGUE_STORES = COLUMN_STAGES > 1 || CODED;

struct SketchMemory {
    Basis basis;
    Columns columns[COLUMN_STAGES];
    Sums sums[SUM_STAGES];
#if MAP == 0
    float dots[EPILOGUE_TEAMS][RANK_MAX][DOTS];  // U^T U in the pivots' columns, then |u|^2
#elif MAP == 1
    alignas(16) float gram[RANKS][GRAM_ROW];
#endif

    __device__ __forceinline__ void init() {
#if MAP == 1
        if (SLICED)
            for (int i = 0; i < RANKS * 4; i++) gram[i / 4][RANKS + i % 4] = 0;
#endif
    }
};

#if MAP == 1
// With SLICED, rows of the sums past the rank hold zeros, or, past Sums::ROWS, the first rows of the matrix: finite
// numbers, which maps multiply by zeros. Not if they reach past the matrix.
constexpr bool FINITE_PAST_RANK = SLICED && sizeof(float) * (RANKS - Sums::ROWS) * K <= sizeof(SketchMemory::gram);
#endif

struct SketchBarriers {
    WarpMbarrier columns_full[EPILOGUE_TEAMS], sums_full[SUM_PHASES];  // sums_full: all groups' S U as well
    WarpMbarrier columns_empty[COLUMN_STAGES], sums_empty[SUM_STAGES];
    WarpMbarrier columns_stored;  // by the warps that sketch
    WarpMbarrier gram_empty;
    WarpMbarrier group_sync[SKETCH_GROUPS];

    __device__ __forceinline__ void init(int team) {  // warps of a team
        gram_empty.init(1), columns_stored.init(SKETCH_GROUPS * GROUP_WARPS);
        for (WarpMbarrier& barrier : columns_empty) barrier.init(team);
        for (WarpMbarrier& barrier : columns_full) barrier.init(SKETCH_GROUPS * GROUP_WARPS);
        for (WarpMbarrier& barrier : sums_full) barrier.init(SKETCH_GROUPS * GROUP_WARPS);
        for (WarpMbarrier& barrier : sums_empty) barrier.init(team);
        for (WarpMbarrier& barrier : group_sync) barrier.init(GROUP_WARPS);
    }
};

// Releases a warp's row blocks if the group does not meet after S U. The barrier counts GROUP_WARPS arrivals for each
// row block. The owner makes all of them, because an arrival of another warp that is a tile ahead must not count.
template <class Then> __device__ __forceinline__ void release_rows(int member, Then then) {
    if (FOLD_WARPS_SKETCH) return then(0);
    for (int block = member; block < GROUP_BLOCKS; block += GROUP_WARPS)
        for (int i = 0; i < GROUP_WARPS; i++) then(block);
}

// Two bf16 slices of a pair. The first slice is the rounded number.
__device__ __forceinline__ void rounded_slices(float x, float y, u32& first, u32& second) {
    first = floats_to_bf16(x, y);
    second = floats_to_bf16(x - __uint_as_float(first << 16), y - __uint_as_float(first & 0xffff0000u));
}

// U of a warp's own row blocks, 8 TILES columns from `first` on. The group reads U after its barrier.
template <int TILES>
__device__ __forceinline__ void sketch_tiles(Columns& u, const Basis& from, StateStage* rows, int group, int member,
                                             int first, int rank) {
    const int lane = threadIdx.x % 32;
    auto block = [&](int i) { return group * GROUP_BLOCKS + member + i * GROUP_WARPS; };
    auto exists = [&](int i) { return GROUP_BLOCKS % GROUP_WARPS == 0 || member + i * GROUP_WARPS < GROUP_BLOCKS; };
    float sum[OWN_BLOCKS][2][4] = {}, rest[OWN_BLOCKS][2][4] = {};
#pragma unroll(2 / OWN_BLOCKS)
    for (int step = 0; step < STEPS; step++) {
        if constexpr (STATE == BF16 && BASIS_SLICES == 1) {
            StoredOperand basis;
#pragma unroll
            for (int tile = 0; tile < 2; tile++)
                basis.set(tile, tile < TILES ? from.columns[first / 8 + tile % TILES][step][0][lane]
                                             : make_uint2(0, 0));
#pragma unroll
            for (int i = 0; i < OWN_BLOCKS; i++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    basis.multiply(sum[i][half], StateFragment::words(
                                                     rows[exists(i) ? block(i) : block(0)].state, half, step));
            continue;
        }
        LeftOperand basis;
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            const auto& columns = from.columns[first / 8 + tile % TILES][step];
            if (tile < TILES) basis.set(tile, columns[0][lane]);
            else basis.set(tile, make_uint2(0, 0));
            if constexpr (BASIS_SLICES > 1) {
                LeftOperand more;
                more.set(tile, tile < TILES ? columns[BASIS_SLICES - 1][lane] : make_uint2(0, 0));
#pragma unroll
                for (int j = 0; j < 4; j++) basis.a[j / 2][tile + j % 2 * 2] += more.a[j / 2][tile + j % 2 * 2];
            }
        }
#pragma unroll
        for (int i = 0; i < OWN_BLOCKS; i++) {
            StateFragment fragment;
            fragment.load(rows[exists(i) ? block(i) : block(0)].state, step);
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int j = 0; j < 2; j++)
                    basis.multiply<BASIS_SLICES == 1, BASIS_SLICES == 1 || STATE != FP32>(
                        j, sum[i][half], rest[i][half], fragment.s[half][2 * j], fragment.s[half][2 * j + 1]);
        }
    }
    if constexpr (SLICED) {
#pragma unroll
        for (int i = 0; i < OWN_BLOCKS; i++)
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                uint4 x = make_uint4(0, 0, 0, 0);
                if (first + 8 * tile + lane / 4 < rank) {
                    rounded_slices(sum[i][0][2 * tile], sum[i][0][2 * tile + 1], x.x, x.y);
                    rounded_slices(sum[i][1][2 * tile], sum[i][1][2 * tile + 1], x.z, x.w);
                }
                if (exists(i)) u.operands[first / 8 + tile][block(i)][lane] = x;
            }
        return;
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
__device__ __forceinline__ void sketch_columns(Columns& u, const Basis& basis, StateStage* rows, int group, int member,
                                               int rank) {
    for (int first = 0; first < rank; first += 16)
        if (rank - first > 8) sketch_tiles<2>(u, basis, rows, group, member, first, rank);
        else sketch_tiles<1>(u, basis, rows, group, member, first, rank);
}

// Stores a row block of U in the packed sketch.
__device__ __forceinline__ void store_columns(const Columns& u, int block, sketch_t* packed, int rank) {
    const int lane = threadIdx.x % 32, row = 16 * block + lane % 8 * 2;
    for (int g = lane / 8; g < rank; g += 4) {
        Packed<SKETCH, 2> pair;
        if constexpr (SLICED)
            pair.word[0] = u.leading(g, block, row % 16) | u.leading(g, block, row % 16 + 1) << 16;
        else pair.set({u.of[g][row], u.of[g][row + 1]});
        pair.store(packed + g * V + (row ^ swizzle(g)));
    }
}

// Stores all of U, by one warp.
__device__ __forceinline__ void store_columns(const Columns& u, sketch_t* packed, int rank) {
#pragma unroll 2
    for (int i = threadIdx.x % 32; i < rank * (V / 4); i += 32) {
        const int g = i / (V / 4), row = i % (V / 4) * 4;
        Packed<FP32, 4> x;
        x.load(&u.of[g][row]);
        Packed<SKETCH, 4> rounded;
        rounded.set({x[0], x[1], x[2], x[3]});
        rounded.store(packed + g * V + (row ^ swizzle(g)));
    }
}

// Stores all of U as codes, by one warp. `missing`: factor that the scales are multiplied by.
__device__ __forceinline__ void store_column_codes(const Columns& u, sketch_t* packed, int rank, float missing) {
    const SmallPart<float> small(packed, rank, rank);
#pragma unroll 2
    for (int g = 0; g < rank; g++) {
        const float scale = store_column_codes(u.of[g], g, rank, packed);
        if (threadIdx.x % 32 == 0) small.scale[g] = scale * missing;
    }
}

// sums.parts[group] = columns [first, first + count) of U, at most 8 TILES, times the group's rows of the state, in the
// channels of warp `member`. For bf16 maps the state is rounded to bf16. All columns are multiplied by the same rounded
// matrix, so the solve does not amplify the rounding.
template <int TILES, class Then>
__device__ __forceinline__ void state_product_tiles(Sums& sums, const Columns& columns, StateStage* rows, int group,
                                                    int member, int first, int count, Then then) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    // Rows 0 to 7 of the operand are the first slices of 8 columns of U, rows 8 to 15 the second slices: one product
    // for both. The operand's columns 2c + e are value rows value_at(0, e); columns 8 further are value_at(1, e).
    float sum[OWN_STEPS][TILES][2][4] = {};
#pragma unroll 2
    for (int i = group * GROUP_BLOCKS; i < (group + 1) * GROUP_BLOCKS; i++) {
        u32 a[TILES][4];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            u32(&x)[4] = a[tile];
            if constexpr (SLICED) {
                columns.operand(x, first / 8 + tile, i);
                continue;
            }
            x[0] = x[1] = x[2] = x[3] = 0;
            if (8 * tile + r < count) {
                const float* const u = &columns.of[first + 8 * tile + r][16 * i + value_at(0, 0)];
                slices<2>(u[0], u[PART_ROWS], &x[0], 1);
                slices<2>(u[PART_ROWS / 2], u[PART_ROWS + PART_ROWS / 2], &x[2], 1);
            }
        }
#pragma unroll
        for (int own = 0; own < OWN_STEPS; own++) {
            const int step = member + own * GROUP_WARPS;
            if (STEPS % GROUP_WARPS && step >= STEPS) break;
            if constexpr (STATE == BF16) {  // exact
                const uint2 upper = StateFragment::words(rows[i].state, 0, step),
                            lower = StateFragment::words(rows[i].state, 1, step);
#pragma unroll
                for (int t = 0; t < 2; t++) {
                    const u32 x = transpose_8x8(t ? upper.y : upper.x), y = transpose_8x8(t ? lower.y : lower.x);
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) mma_bf16(sum[own][tile][t], a[tile], x, y);
                }
                continue;
            }
            StateFragment fragment;
            fragment.load(rows[i].state, step);
#pragma unroll
            for (int t = 0; t < 2; t++) {
                u32 upper[BASIS_SLICES], lower[BASIS_SLICES];
                if constexpr (BASIS_SLICES == 1) {
                    upper[0] = floats_to_bf16(fragment.s[0][2 * t], fragment.s[0][2 * t + 1]);
                    lower[0] = floats_to_bf16(fragment.s[1][2 * t], fragment.s[1][2 * t + 1]);
                } else {
                    slices<BASIS_SLICES>(fragment.s[0][2 * t], fragment.s[0][2 * t + 1], upper, 1);
                    slices<BASIS_SLICES>(fragment.s[1][2 * t], fragment.s[1][2 * t + 1], lower, 1);
                }
#pragma unroll
                for (int j = 0; j < BASIS_SLICES; j++) {
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
            const int step = member + own * GROUP_WARPS;
            const float(&x)[2][4] = sum[own][tile];
            const float4 product =
                make_float4(x[0][0] + x[0][2], x[0][1] + x[0][3], x[1][0] + x[1][2], x[1][1] + x[1][3]);
            // SLICED: also zeros past the rank.
            if ((SLICED ? first + 8 * tile + r < Sums::ROWS : 8 * tile + r < count) && step < STEPS)
                *reinterpret_cast<float4*>(sums.at(group, first + 8 * tile + r, 16 * step + 4 * c)) = product;
        }
}
template <class Then>
__device__ __forceinline__ void state_products(Sums& sums, const Columns& u, StateStage* rows, int group, int member,
                                              int count, Then then) {
    if constexpr (PRODUCT_COLUMNS <= 8) {
        state_product_tiles<1>(sums, u, rows, group, member, 0, count, then);
    } else {
        for (int first = 0; first < count; first += 16) {
            auto last = [&](int block) {
                if (first + 16 >= count) then(block);
            };
            if (count - first > 8)
                state_product_tiles<2>(sums, u, rows, group, member, first, count - first, last);
            else state_product_tiles<1>(sums, u, rows, group, member, first, count - first, last);
        }
    }
}
