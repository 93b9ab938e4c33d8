// Shared memory and barriers of sketches: the next head's basis, U, S U, and the workspace of the map.
#pragma once
#include "lib/warp_mbarrier.cuh"
#include "flush/solve.cuh"

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

// SLICED: shared memory has U as two bf16 slices, in the order of left operands (flushes with high ranks and bf16
// sketches). Gram matrix and S U use the same slices, so the map is exact for a U with an error of 2^-17, which is less
// than the error of U in a bf16 sketch.
constexpr bool SLICED = HIGH_RANKS && !CODED && BASIS_SLICES == 1;

// U and the norms of the state's row blocks. Row g of `of` is column g of U; SLICED: `operands` has U instead.
struct Columns {
    union {
        alignas(16) float of[SLICED ? 1 : RANK_MAX][COLUMN];
        // Operands of 8 columns and 16 value rows: rows 0 to 7 are the first slices, rows 8 to 15 the second slices.
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
    // Whether U of these row blocks must be scaled before it is squared or multiplied by the state (flush/sketch_scale.cuh).
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
        } else {
            for (int i = threadIdx.x % 32; i < rank * 16 * COUNT; i += 32)
                of[i / (16 * COUNT)][16 * first + i % (16 * COUNT)] *= factor;
        }
    }
};
constexpr int GRAM_ROW = RANKS + (RAW_KEYS || HIGH_RANKS ? 4 : 0);  // padded where there is room
// Shared memory of a block of the flush with high ranks and raw keys, if the block has `states` stages of states and
// `sums` of S U. flush/tiles.cuh compares this number with the size of BlockMemory.
constexpr int bytes_with(int states, int sums) {
    const int rest = 16 * ROW_BLOCKS * states + 320;  // barriers, tile scheduler
    return static_cast<int>(states * ROW_BLOCKS * sizeof(StateStage) + KEY_STAGES * sizeof(KeyStage) +
                            VALUE_STAGES * sizeof(ValueStage) + SOLVE_STAGES * sizeof(Solve) + sizeof(PreparedKeys) +
                            2 * sizeof(TransformShared) + sizeof(Basis) + sizeof(Columns) +
                            sizeof(float) * (sums * (sums > 1 ? RANKS : RANK_MAX) * K + RANKS * GRAM_ROW)) +
           rest;
}
// With high ranks S U has two stages if the second stage costs neither a block of the multiprocessor nor a state stage.
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
// Two if there is room: the next S U is then computed during the epilogue.
constexpr int SUM_STAGES = TWO_SUMS || (MAP != SHARED && !RAW_KEYS && WP == 16 && RANK_MAX <= 16) ? 2 : 1;
// Number of sums_full barriers, used in turn. With two stages one barrier is not enough: the next sums may be complete
// before the epilogue waits for the current sums.
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
        if (SLICED)  // FINITE_PAST_RANK: the padding, too, must be finite
            for (int i = 0; i < RANKS * 4; i++) gram[i / 4][RANKS + i % 4] = 0;
#endif
    }
};

#if MAP == 1
// Whether map/blocks.cuh may read rows of S U past the rank, where W has zeros: the numbers must be finite. With
// SLICED, rows past the rank are zeros; rows past Sums::ROWS lie in the Gram matrix, unless they reach beyond its end.
constexpr bool FINITE_PAST_RANK = SLICED && sizeof(float) * (RANKS - Sums::ROWS) * K <= sizeof(SketchMemory::gram);
static_assert(!FINITE_PAST_RANK || ((SUM_STAGES == 1 || Sums::ROWS == RANKS) &&
                                    sizeof(SketchMemory) == sizeof(Basis) + sizeof(Columns) * COLUMN_STAGES +
                                                                sizeof(Sums) * SUM_STAGES + sizeof(SketchMemory::gram)),
              "the Gram matrix begins where the last sums end");
#endif

struct SketchBarriers {
    WarpMbarrier columns_full[EPILOGUE_TEAMS], sums_full[SUM_PHASES];  // completed by all groups
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
