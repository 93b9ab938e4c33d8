// Shared memory of a block of the flush, its tile scheduler, and the launch's arguments.
#pragma once
#include "slot/call_slots.cuh"
#include "slot/cursor.cuh"
#include "slot/schedule.cuh"
#include "lib/warp_mbarrier.cuh"
#include "slot/sketch_layout.cuh"
#include "flush/fold.cuh"
#include "map/maps.cuh"

enum { STEP = 0, FOLD = 1, LOAD = 2, DRAFT = 3 };

constexpr int OPERAND_STAGES = RAW_KEYS ? KEY_STAGES : PREPARED_STAGES;  // stages of the fold warps' key operands

// Work tile: a (row, head); index = row * HEADS + head. `buffered`: tokens in the ring. slot < 0: past the last tile.
struct alignas(8) FlushTile {
    int slot;
    u32 index : 26, buffered : 6;
    __device__ __forceinline__ bool exists() const { return slot >= 0; }
    __device__ __forceinline__ int row() const { return index / HEADS; }
    __device__ __forceinline__ int head() const { return index % HEADS; }
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

    __device__ __forceinline__ void init(int warps) {
        for (WarpMbarrier& barrier : full) barrier.init(1);
        for (WarpMbarrier& barrier : empty) barrier.init(warps);
    }
    // The block's nth tile. The warp may look at most AHEAD tiles beyond the first one that it has not released.
    __device__ __forceinline__ FlushTile get(int n) {
        if (n >= AHEAD) full[n % LENGTH].wait((n - AHEAD) / LENGTH);
        return tiles[n % LENGTH];
    }
    __device__ __forceinline__ void release(int n) {
        if (n % RELEASE_GROUP == RELEASE_GROUP - 1) empty[n % LENGTH / RELEASE_GROUP].arrive();
    }
    // By the solver warp, for n = AHEAD, AHEAD + 1, ...
    __device__ __forceinline__ void push(int n, const FlushTile& tile) {
        if (n >= LENGTH && n % RELEASE_GROUP == 0) empty[n % LENGTH / RELEASE_GROUP].wait(n / LENGTH - 1);
        if (threadIdx.x % 32 == 0) tiles[n % LENGTH] = tile;
        full[n % LENGTH].arrive();
    }
};

// A block's shared memory, with so many pipeline stages for states. flush/roles.cuh says who completes each barrier.
template <int STAGES> struct BlockMemoryOf {
    StateStage rows[STAGES][ROW_BLOCKS];
    KeyStage keys[KEY_STAGES];
    ValueStage values[VALUE_STAGES];
    PreparedKeys prepared[PREPARED_STAGES];
    Solve solve[SOLVE_STAGES];
    TransformShared transform[2];
    WarpMbarrier operands_empty[OPERAND_STAGES], solve_full[SOLVE_STAGES];
    WarpMbarrier gram_full[SOLVE_STAGES], operands_full[KEY_STAGES];
    WarpMbarrier state_folded[STAGES][ROW_BLOCKS], state_empty[STAGES][ROW_BLOCKS];
    WarpMbarrier first_keys_full;
    TileScheduler queue;
#if SKETCHED_HEADS
    SketchMemory sketch;
    SketchBarriers sketch_barriers;
#endif

    // By one thread, before a barrier of the block. `warps`: number of the block's warps; `team`: EPILOGUE_TEAM.
    __device__ __forceinline__ void init(int warps, [[maybe_unused]] int team) {
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
        for (ValueStage& stage : values) stage.full.init();
        for (auto& stage : rows)
            for (StateStage& block : stage) block.full.init();
#if SKETCHED_HEADS
        sketch_barriers.init(team), sketch.basis.full.init(), sketch.init();
#endif
    }
};
// Blocks on a multiprocessor, and warps of a team that finishes a sketch (EPILOGUE_TEAM). Without high ranks there are
// MIN_BLOCKS blocks, and teams of one warp. With high ranks a block has more warps and needs more shared memory:
//
//   keys         V            blocks                             warps of a team
//                                                                up to rank 21  beyond
//   raw          64, 80, 96   two if they fit, otherwise one     3              4
//   raw          128          two if they fit, up to rank 24 *   1 **           1 **
//   raw          128          otherwise one                      3              4
//   transformed  any          one                                2              4
//
//   *  rank 21 for bf16 sketches of float32 states (FOLD_WARPS_SKETCH)
//   ** with more than 20 warps on the multiprocessor, fold warps would have too few registers
constexpr int BLOCKS = HIGH_RANKS && sizeof(BlockMemoryOf<1>) > block_shared(WANTED_BLOCKS) ? 1 : WANTED_BLOCKS;
// Two state stages if they fit, and if the block has the multiprocessor to itself, or states have 16 bits, or ranks are
// high. (Otherwise several blocks on a multiprocessor overlap even with one stage each.)
constexpr int STATE_STAGES =
    (BLOCKS == 1 || STATE != FP32 || HIGH_RANKS) && sizeof(BlockMemoryOf<2>) <= block_shared(BLOCKS) ? 2 : 1;
typedef BlockMemoryOf<STATE_STAGES> BlockMemory;
static_assert(!SLICED || !RAW_KEYS ||
                  (sizeof(BlockMemory) <= bytes_with(STATE_STAGES, SUM_STAGES) &&
                   sizeof(BlockMemory) + 64 > bytes_with(STATE_STAGES, SUM_STAGES)),
              "bytes_with is the size of the block's memory");

constexpr bool TWO_LARGE_BLOCKS = BLOCKS > 1 && ROW_BLOCKS == 8;
constexpr int EPILOGUE_TEAM = !HIGH_RANKS || TWO_LARGE_BLOCKS ? 1 : RANK_MAX > 21 ? 4 : RAW_KEYS ? 3 : 2;
constexpr int EPILOGUE_WARPS = EPILOGUE_TEAMS * EPILOGUE_TEAM;
// Warp numbers by role, see flush/roles.cuh. One warp is both solver and epilogue if a separate epilogue warp would
// leave every thread too few registers: with 20 warps on a multiprocessor, a thread has 96 registers.
constexpr bool SOLVER_IS_EPILOGUE = RAW_KEYS && !ERASES && !HIGH_RANKS && (ROW_BLOCKS + 2) * MIN_BLOCKS > 20;
constexpr int SOLVER = ROW_BLOCKS, EPILOGUE = ROW_BLOCKS + !SOLVER_IS_EPILOGUE, PRODUCER = EPILOGUE + EPILOGUE_WARPS;
static_assert(FOLD_WARPS_SKETCH || GROUP_WARPS <= ROW_BLOCKS,
              "each sketch warp waits for the row blocks that it makes U of");
constexpr int FIRST_SKETCH_WARP = PRODUCER + 1,
              FIRST_TRANSFORM_WARP = FIRST_SKETCH_WARP + (SKETCHED_HEADS ? GROUP_WARPS : 0);
constexpr int WARPS = FOLD_WARPS_SKETCH ? EPILOGUE + EPILOGUE_WARPS
                                        : FIRST_TRANSFORM_WARP + (RAW_KEYS ? 0 : TRANSFORM_THREADS / 32);

// Checks the call's slots and lists the rows to flush, in order; returns their number. Every block computes and writes
// the same list. `room`: shared memory for SCAN_ROOM numbers.
__device__ __forceinline__ int list_rows(Schedule& schedule, const Memory& memory, const CallSlots& slots,
                                         const Lengths& lengths, int batch, int mode, int* room) {
    __shared__ int counts[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int total = 0;
#pragma unroll 1
    for (int first = 0; first < batch; first += 32 * WARPS) {
        const int row = first + threadIdx.x;
        const int slot = slots.once_by_thread(row, row < batch ? slots.of(row) : PADDING, room);
        if (row < batch) schedule.slots[row] = slot;
        if (blockIdx.x == 0) slots.note(slot);
        const int word = slot >= 0 && mode != LOAD ? *memory.cursor.of(slot) : 0, position = position_of(word, W);
        const bool folds = position > 0 && (mode == FOLD || folds_before(word, lengths.of(row), W));
        const bool due = slot >= 0 && (mode == LOAD || folds);
        const u32 ballot = __ballot_sync(ALL, due);
        if (lane == 0) counts[warp] = __popc(ballot);
        __syncthreads();
        int before = total;
        for (int i = 0; i < WARPS; i++) {
            if (i < warp) before += counts[i];
            total += counts[i];
        }
        if (due)
            schedule.rows[before + __popc(ballot & ((1u << lane) - 1))] =
                DueRow{slot, static_cast<u32>(row), static_cast<u32>(position)};
        __syncthreads();
    }
    fence_async_proxy();  // bulk copies will overwrite `room`
    return total;
}

// Whether no row folds before its drafts, as in most calls. Then the blocks share the check of the rows' slots. By
// all threads of a block.
__device__ __forceinline__ bool no_row_folds(Schedule& schedule, const Memory& memory, const CallSlots& slots,
                                             const Lengths& lengths, int batch) {
    bool folds = false;
#pragma unroll 1
    for (int row = threadIdx.x; row < batch; row += 32 * WARPS) {
        const int slot = slots.of(row), word = slot >= 0 ? *memory.cursor.of(slot) : 0;
        folds |= position_of(word, W) > 0 && folds_before(word, lengths.of(row), W);
    }
    if (__syncthreads_or(folds)) return false;
#pragma unroll 1
    for (int row = blockIdx.x; row < batch; row += gridDim.x) {
        const int slot = slots.once_in_block(row, slots.of(row));
        if (threadIdx.x == 0) schedule.slots[row] = slot, slots.note(slot);
    }
    return true;
}

// The launch's arguments, and a tile's addresses and scalars derived from them.
struct Flush {
    BlockMemory& m;
    Memory memory;
    const float* gate_input;
    const projection_t* projection;
    const uint2* basis;
    const int4* heads;
    Inputs inputs;
    Strided<out_t> out;
    Schedule* schedule;
    int mode;
    float ridge;
    int count;  // rows to flush

    __device__ __forceinline__ bool takes_own() const { return mode == STEP; }  // the step's own token is the last
    __device__ __forceinline__ int folded(const FlushTile& tile) const { return tile.buffered + takes_own(); }
    __device__ __forceinline__ Token token(const FlushTile& tile) const {
        return Token(inputs, tile.row(), tile.head());
    }
    __device__ __forceinline__ Ring ring(const FlushTile& tile) const {
        return Ring(memory, tile.slot, tile.head());
    }
    __device__ __forceinline__ state_t* home(const FlushTile& tile, int block) const {
        return memory.state.of(tile.slot) + (tile.head() * V + 16 * block) * K;
    }
    __device__ __forceinline__ sketch_t* packed(const FlushTile& tile, const int4& info) const {
        return memory.sketch.of(tile.slot) + info.y;
    }
    __device__ __forceinline__ out_t* output(const FlushTile& tile) const {
        return out.of(tile.row()) + tile.head() * V;
    }
    // {rank, offsets} of the tile's head in the plan; zeros if no head has a sketch.
    __device__ __forceinline__ int4 head(const FlushTile& tile) const {
        return SKETCHED_HEADS ? heads[tile.head()] : make_int4(0, 0, 0, 0);
    }
    // Lane s: token s's scalar from the ring, or from the step's own token.
    template <class T>
    __device__ __forceinline__ float scalar(const FlushTile& tile, const T* kept, const T* own) const {
        const int lane = threadIdx.x % 32, last = tile.buffered;
        return lane < last ? kept[lane] : takes_own() && lane == last ? *own : 0.f;
    }
    __device__ __forceinline__ float beta_of(const FlushTile& tile) const {
        return ERASES ? scalar(tile, ring(tile).beta, token(tile).beta) : 0.f;
    }
    __device__ __forceinline__ float gate_of(const FlushTile& tile) const {
        return KIND == KDA ? 0.f : scalar(tile, ring(tile).g, token(tile).g);
    }
};

constexpr FlushTile NO_TILE{-1};
// Tile number i of the flush. The tiles of a row are consecutive; `entry` is the row's entry in the schedule.
__device__ __forceinline__ FlushTile tile_at(int i, const DueRow& entry) {
    return FlushTile{entry.slot, static_cast<u32>(entry.row * HEADS + i % HEADS), entry.buffered};
}

// A warp's iteration over its block's tiles.
struct TileIterator {
    TileScheduler& queue;
    int n = 0;
    FlushTile now;

    __device__ __forceinline__ explicit TileIterator(const Flush& flush) : queue(flush.m.queue), now(queue.get(0)) {}
    __device__ __forceinline__ FlushTile ahead(int by) const { return queue.get(n + by); }
    __device__ __forceinline__ void advance() {
        queue.release(n++);
        now = queue.get(n);
    }
};

// The solver's claim of a tile, in three steps: `begin` and `find` start accesses of global memory, and other work can
// overlap with them.
struct TileClaim {
    const Flush& flush;
    int number;
    DueRow entry;

    __device__ __forceinline__ void begin() {
        if (threadIdx.x % 32 == 0) number = atomicAdd(&flush.schedule->next_tile, 1);
    }
    __device__ __forceinline__ void find() {
        number = __shfl_sync(ALL, number, 0) + TileScheduler::AHEAD * gridDim.x;
        entry = flush.schedule->rows[min(number / HEADS, MAX_ROWS - 1)];  // past the last row: stale, not used
    }
    __device__ __forceinline__ void push(int n) {
        flush.m.queue.push(n + TileScheduler::AHEAD, number < flush.count * HEADS ? tile_at(number, entry) : NO_TILE);
    }
};
