// Shared memory and barriers of sketches: the next head's basis, U, S U, and the workspace of the map. Included by
// flush/config.cuh.
#pragma once
#include "lib/warp_mbarrier.cuh"

constexpr int COLUMN = V + 4;  // padded, so that fragment stores of U hit all banks
constexpr int DOTS = PIVOTS + 1;  // products of a column of U: with the pivots, and with itself

// A head's basis as operands of 8 columns, in the host's layout (sketchssm/cuda/layout.py).
struct Basis {
    alignas(16) uint2 columns[BASIS_TILES][STEPS][BASIS_SLICES][32];
    CopyBarrier full;

    DEVICE void fetch(const uint2* basis, int rank) {
        const int bytes = (rank + 7) / 8 * static_cast<int>(sizeof(columns[0]));
        full.expect(bytes);
        full.copy_contiguous<1>(columns, 0, basis, bytes);
        full.commit();
    }
};

// U and the norms of the state's row blocks. Row g of `of` is column g of U; SLICED: `operands` has U instead.
struct Columns {
    union {
        alignas(16) float of[SLICED ? 1 : RANK_MAX][COLUMN];
        // Operands of 8 columns and 16 value rows: rows 0 to 7 are the first slices, rows 8 to 15 the second slices.
        uint4 operands[SLICED ? BASIS_TILES : 1][SLICED ? ROW_BLOCKS : 1][SLICED ? 32 : 1];
    };
    float norms[ROW_BLOCKS];

    DEVICE void operand(u32 (&to)[4], int tile, int block) const {
        const uint4 x = operands[tile][block][threadIdx.x % 32];
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
    // The first slice, which is U rounded to bf16, of a column in row n of a row block: see value_at.
    DEVICE u16 leading(int column, int block, int n) const {
        const int c = PARTS == 2 ? n % 4 : n / 8 + n % 2 * 2, half = PARTS == 2 ? n / 4 % 2 : n / 2 % 2,
                  e = PARTS == 2 ? n / 8 : n / 4 % 2;
        return reinterpret_cast<const u16*>(&operands[column / 8][block][column % 8 * 4 + c])[4 * half + e];
    }

    // This lane's norm of COUNT row blocks.
    template <int COUNT> DEVICE float norm(int first) const {
        return threadIdx.x % 32 < COUNT ? norms[first + threadIdx.x % 32] : 0.f;
    }
    // Whether U of these row blocks must be scaled before it is squared or multiplied by the state (sketch_scale.cuh).
    template <int COUNT> DEVICE bool extreme(int first) const {
        const float x = norm<COUNT>(first);
        return __any_sync(ALL, x > MOST_ORDINARY || (x > 0.f && x < LEAST_ORDINARY));
    }
    // The power of two by which U of extreme row blocks is multiplied.
    template <int COUNT> DEVICE float power(int first) const { return power_for_norm(warp_most(norm<COUNT>(first))); }
    // Multiplies row blocks [first, first + COUNT) of U; by one warp.
    template <int COUNT> DEVICE void scale(int first, int rank, float factor) {
        if constexpr (SLICED) {
            for (int i = 0; i < (rank + 7) / 8 * COUNT; i++) {
                u32* const words = &operands[i / COUNT][first + i % COUNT][threadIdx.x % 32].x;
                for (int n = 0; n < 4; n++)
                    words[n] = upper_halves(factor * __uint_as_float(words[n] << 16),
                                            factor * __uint_as_float(words[n] & 0xffff0000u));
            }
        } else {
            for (int i = threadIdx.x % 32; i < rank * 16 * COUNT; i += 32)
                of[i / (16 * COUNT)][16 * first + i % (16 * COUNT)] *= factor;
        }
    }
};
constexpr int GRAM_ROW = RANKS + (RAW_KEYS || HIGH_RANKS ? 4 : 0);  // padded where there is room
// Each group's share of S U.
template <int STAGES> struct SumsOf {
    static constexpr int ROWS = SLICED && STAGES > 1 ? RANKS : PRODUCT_COLUMNS > 0 ? PRODUCT_COLUMNS : 1;
    alignas(16) float parts[SKETCH_GROUPS][ROWS][PRODUCT_COLUMNS > 0 ? K : 4];

    // Neighbouring channels of a row, swizzled: four rows that are read at once are in different banks.
    DEVICE const float* at(int group, int row, int channel) const { return &parts[group][row][channel ^ row % 4 * 8]; }
    DEVICE float* at(int group, int row, int channel) { return &parts[group][row][channel ^ row % 4 * 8]; }
};
// `SUMS`: number of stages of S U.
template <int SUMS> struct SketchMemoryOf {
    Basis basis;
    Columns columns[COLUMN_STAGES];
    SumsOf<SUMS> sums[SUMS];
#if MAP == FACTORS
    float dots[EPILOGUE_TEAMS][RANK_MAX][DOTS];  // U^T U in the pivots' columns, then |u|^2
#elif MAP == DENSE
    alignas(16) float gram[RANKS][GRAM_ROW];
#endif

    DEVICE void init() {
#if MAP == DENSE
        if (SLICED)  // FINITE_PAST_RANK: the padding, too, must be finite
            for (int i = 0; i < RANKS * 4; i++) gram[i / 4][RANKS + i % 4] = 0;
#endif
    }
};

template <int SUMS> struct SketchBarriersOf {
    // Barriers sums_full, used in turn. With two stages one barrier is not enough: the next sums may be complete
    // before the epilogue waits for the current sums.
    static constexpr int PHASES = SUMS > EPILOGUE_TEAMS ? SUMS : EPILOGUE_TEAMS;
    WarpMbarrier columns_full[EPILOGUE_TEAMS], sums_full[PHASES];  // completed by all groups
    WarpMbarrier columns_empty[COLUMN_STAGES], sums_empty[SUMS];
    WarpMbarrier columns_stored;  // by the warps that sketch
    WarpMbarrier gram_empty;
    WarpMbarrier group_sync[SKETCH_GROUPS];

    DEVICE void init(int team) {  // warps of a team
        gram_empty.init(1), columns_stored.init(SKETCH_GROUPS * GROUP_WARPS);
        for (WarpMbarrier& barrier : columns_empty) barrier.init(team);
        for (WarpMbarrier& barrier : columns_full) barrier.init(SKETCH_GROUPS * GROUP_WARPS);
        for (WarpMbarrier& barrier : sums_full) barrier.init(SKETCH_GROUPS * GROUP_WARPS);
        for (WarpMbarrier& barrier : sums_empty) barrier.init(team);
        for (WarpMbarrier& barrier : group_sync) barrier.init(GROUP_WARPS);
    }
};
