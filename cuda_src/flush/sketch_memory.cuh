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

// U and the norms of the state's row blocks. Row g of `of` is column g of U.
struct Columns {
    alignas(16) float of[RANK_MAX][COLUMN];
    float norms[ROW_BLOCKS];

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
        for (int i = threadIdx.x % 32; i < rank * 16 * COUNT; i += 32)
            of[i / (16 * COUNT)][16 * first + i % (16 * COUNT)] *= factor;
    }
};
constexpr int GRAM_ROW = RANKS + (RAW_KEYS ? 4 : 0);  // padded where there is room
// Each group's share of S U.
struct Sums {
    alignas(16) float parts[SKETCH_GROUPS][PRODUCT_COLUMNS > 0 ? PRODUCT_COLUMNS : 1][PRODUCT_COLUMNS > 0 ? K : 4];

    // Neighbouring channels of a row, swizzled: four rows that are read at once are in different banks.
    DEVICE const float* at(int group, int row, int channel) const { return &parts[group][row][channel ^ row % 4 * 8]; }
    DEVICE float* at(int group, int row, int channel) { return &parts[group][row][channel ^ row % 4 * 8]; }
};
struct SketchMemory {
    Basis basis;
    Columns columns[COLUMN_STAGES];
    Sums sums[SUM_STAGES];
#if MAP == FACTORS
    float dots[EPILOGUE_WARPS][RANK_MAX][DOTS];  // U^T U in the pivots' columns, then |u|^2
#elif MAP == DENSE
    alignas(16) float gram[RANKS][GRAM_ROW];
#endif
};

struct SketchBarriers {
    // Of both, one for each epilogue warp; completed by all groups. With two stages of S U, the next sums may be
    // complete before the epilogue waits for the current sums.
    WarpMbarrier columns_full[EPILOGUE_WARPS], sums_full[EPILOGUE_WARPS];
    WarpMbarrier columns_empty[COLUMN_STAGES], sums_empty[SUM_STAGES];
    WarpMbarrier columns_stored;  // by the warps that sketch
    WarpMbarrier gram_empty;
    WarpMbarrier group_sync[SKETCH_GROUPS];

    DEVICE void init() {
        gram_empty.init(1), columns_stored.init(SKETCH_GROUPS * GROUP_WARPS);
        for (WarpMbarrier& barrier : columns_empty) barrier.init(1);
        for (WarpMbarrier& barrier : columns_full) barrier.init(SKETCH_GROUPS * GROUP_WARPS);
        for (WarpMbarrier& barrier : sums_full) barrier.init(SKETCH_GROUPS * GROUP_WARPS);
        for (WarpMbarrier& barrier : sums_empty) barrier.init(1);
        for (WarpMbarrier& barrier : group_sync) barrier.init(GROUP_WARPS);
    }
};
