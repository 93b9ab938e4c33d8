// Shared memory of a block of the flush, and its tile scheduler. Included by flush/config.cuh.
#pragma once
#include "encode/residual.cuh"
#include "flush/sketch_memory.cuh"
#include "flush/stages.cuh"
#include "slot/schedule.cuh"

// Work tile: a (row, head); index = row * HEADS + head. `buffered`: tokens in the ring. slot < 0: past the last tile.
// `measure`: as of DueRow; if MEASURED, the read kernel has left the sketch's answers in the place of the outputs.
struct alignas(8) FlushTile {
    int slot;
    u32 index : 26 - MEASURE_BITS, buffered : 6, measure : MEASURE_BITS;
    DEVICE bool exists() const { return slot >= 0; }
    DEVICE int row() const { return index / HEADS; }
    DEVICE int head() const { return index % HEADS; }
};

// The block's tile scheduler: a ring of work tiles in shared memory. A block begins with AHEAD tiles, gridDim.x apart,
// and the solver warp then claims one tile at a time for the whole block. Tiles are claimed, not divided evenly,
// because memory serves multiprocessors at different speeds and ranks differ: with even shares the last blocks ended up
// to 10% after the others.
struct TileScheduler {
    static constexpr int LENGTH = 8, AHEAD = RAW_KEYS ? 2 : 3, RELEASE_GROUP = 2;
    static_assert(AHEAD >= KEY_STAGES + !RAW_KEYS && AHEAD >= 2,
                  "the warps that fetch keys and states only wait for tiles that are already in the ring");
    static_assert(AHEAD + RELEASE_GROUP <= LENGTH && LENGTH % RELEASE_GROUP == 0,
                  "the solver never waits for a warp that waits for the solver");
    FlushTile tiles[LENGTH];
    WarpMbarrier full[LENGTH], empty[LENGTH / RELEASE_GROUP];  // tiles are released RELEASE_GROUP at a time

    DEVICE void init(int warps) {
        for (WarpMbarrier& barrier : full) barrier.init(1);
        for (WarpMbarrier& barrier : empty) barrier.init(warps);
    }
    // The block's nth tile. The warp may look at most AHEAD tiles beyond the first one that it has not released.
    DEVICE FlushTile get(int n) {
        if (n >= AHEAD) full[n % LENGTH].wait((n - AHEAD) / LENGTH);
        return tiles[n % LENGTH];
    }
    DEVICE void release(int n) {
        if (n % RELEASE_GROUP == RELEASE_GROUP - 1) empty[n % LENGTH / RELEASE_GROUP].arrive();
    }
    // By the solver warp, for n = AHEAD, AHEAD + 1, ...
    DEVICE void push(int n, const FlushTile& tile) {
        if (n >= LENGTH && n % RELEASE_GROUP == 0) empty[n % LENGTH / RELEASE_GROUP].wait(n / LENGTH - 1);
        if (threadIdx.x % 32 == 0) tiles[n % LENGTH] = tile;
        full[n % LENGTH].arrive();
    }
};

// A block's shared memory, with STAGES of states. flush/roles.cuh says who completes each barrier.
template <int STAGES> struct BlockMemoryOf {
    StateStage rows[STAGES][ROW_BLOCKS];
    KeyStage keys[KEY_STAGES];
    ValueStage values;
    PreparedKeys prepared[PREPARED_STAGES];
    Solve solve[SOLVE_STAGES];
    TransformShared transform[2];
    WarpMbarrier operands_empty[OPERAND_STAGES], solve_full[SOLVE_STAGES];
    WarpMbarrier gram_full[SOLVE_STAGES], operands_full[KEY_STAGES];
    WarpMbarrier state_folded[STAGES][ROW_BLOCKS], state_empty[STAGES][ROW_BLOCKS];
    WarpMbarrier first_keys_full;
    TileScheduler queue;
#if SKETCHES
    SketchMemory sketch;
    SketchBarriers sketch_barriers;
#elif ENCODES
    EncodeMemory encode;
#endif

    // By one thread, before a barrier of the block. `warps`: number of the block's warps.
    DEVICE void init(int warps) {
        first_keys_full.init(1), queue.init(warps);
        for (WarpMbarrier& barrier : gram_full) barrier.init(TRANSFORM_THREADS / 32);
        for (WarpMbarrier& barrier : operands_full) barrier.init(TRANSFORM_THREADS / 32);
        for (WarpMbarrier& barrier : operands_empty) barrier.init(ROW_BLOCKS);
        for (WarpMbarrier& barrier : solve_full) barrier.init(1);
        for (auto& stage : state_folded)
            for (WarpMbarrier& barrier : stage) barrier.init(1);
        for (auto& stage : state_empty)
            for (WarpMbarrier& barrier : stage) barrier.init(GROUP_WARPS);
        for (KeyStage& stage : keys) stage.full.init();
        values.full.init();
        for (auto& stage : rows)
            for (StateStage& block : stage) block.full.init();
#if SKETCHES
        sketch_barriers.init(), sketch.basis.full.init();
#endif
    }
};
