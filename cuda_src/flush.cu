// Flush: one pass over the state of every (row, head) whose window is full.
//
// Reads the state, folds the window's raw tokens into it exactly, reads the output from the updated state, rebuilds the
// sketch and its coefficient map, and writes the state back. The kernel is persistent: a fixed number of blocks claims
// the (row, head) tiles one by one (TileScheduler), so that all blocks work on neighbouring memory at any time. Warps
// are specialised and synchronise by mbarriers in shared memory: flush/roles.cuh has the diagram.
//
// mode    rows                                                                    output
// STEP    listed by the read kernel: windows that end with this token             yes
// FOLD    all with buffered tokens                                                no
// LOAD    newly loaded states; nothing to fold, only sketches                     no
// DRAFT   rows that must fold before they draft (see read_draft.cu): all rows,    no
//         if the head's clock must
//
// `ticks` (STEP): the head's clock moves on.
//
// -D constants besides read.cu's: BLOCKS (blocks of a multiprocessor that registers leave room for).
#include "flush/roles.cuh"

#ifndef SIZES_ONLY  // defined by a test that needs only the constants at the end
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT_BLOCKS)
    flush_step(MEMORY_PARAMETERS, const float* gate_input, const projection_t* projection, const uint2* basis,
               const int4* heads ERRORS_PARAMETERS, FLUSH_STEP_PARAMETERS, SLOT_LIMITS, int* clock_word, int mode,
               float ridge) {
    allow_next_kernel();
    const Memory memory = MEMORY;
    const Clock clock{clock_word};
    auto set_cursors = [&](auto next) {  // by all threads of a block
#pragma unroll 1
        for (int row = threadIdx.x; row < batch; row += 32 * WARPS) {
            const int slot = schedule->slots[row];
            if (slot < 0) continue;
            int* const word = memory.cursor.of(slot);
            *word = next(*word);
        }
    };
    auto move_cursors = [&] {
        if (clock.word && ticks && threadIdx.x == 0) clock.tick(W);
        if (clock.word) __syncthreads();
        const int stroke = clock.stroke();
        set_cursors([&](int word) { return after_token(word, W) | stroke; });
    };
    // Without full-state heads, the list of due rows is complete before the read kernel has ended: flushes then run
    // beside the reads of other rows.
    const int listed = FULL_STATE_HEADS == 0 && mode == STEP ? schedule->listed_rows() : -1;
    // In most steps no row is due. Block 0 stays to move the cursors; the other blocks make room for the next read.
    if (listed == 0 && blockIdx.x > 0) return;
    const bool early = listed >= 0;
    if (!early) wait_for_previous_kernel();
    extern __shared__ uint4 shared[];
    BlockMemory& m = *reinterpret_cast<BlockMemory*>(shared);
    const int warp = threadIdx.x / 32;
    int count = 0;
    const int own = blockIdx.x + threadIdx.x * gridDim.x;  // of the first AHEAD threads: the block's first tiles
    DueRow entry{};
    auto find = [&] {
        if (threadIdx.x < TileScheduler::AHEAD) entry = schedule->rows[min(own / HEADS, MAX_ROWS - 1)];
    };
    if (mode == STEP) {
        find();  // loaded together with their number; entries past `due` are stale and not used
        count = early ? listed : schedule->due;
        // Nobody else looks at cursors now: the list has the due rows' positions.
        if (blockIdx.x == 0) move_cursors();
        if (count == 0) {  // the schedule is reset when the read kernel has ended
            if (blockIdx.x == 0) {
                wait_for_previous_kernel();
                if (threadIdx.x == 0) schedule->reset();
            }
            return;
        }
    } else {
        // If the clock has no room for the draft, all rows fold with the clock: no row has room for W tokens. (The vote
        // tells the compiler that all threads agree; without the vote a flush of kda spills two more registers.)
        const bool strikes =
            __syncthreads_or(mode == DRAFT && clock.word && folds_before(*clock.word, draft_tokens, W));
        const Lengths drafts{{strikes ? nullptr : lengths, length_flags}, strikes ? W : draft_tokens};
        if (mode == DRAFT && no_row_folds(*schedule, memory, SLOTS, drafts, batch)) return;
        count = list_rows(*schedule, memory, SLOTS, drafts, batch, mode, reinterpret_cast<int*>(shared));
        if (mode == DRAFT && count == 0) return;
        find();
    }
    if (threadIdx.x == 0) m.init(WARPS);
    if (threadIdx.x < TileScheduler::AHEAD)
        m.queue.tiles[threadIdx.x] = own < count * HEADS ? tile_at(own, entry) : NO_TILE;
    if (RAW_KEYS && W < WP && warp == SOLVER)
        for (int i = 0; i < KEY_STAGES; i++) m.keys[i].clear(W);
    __syncthreads();

    const Flush flush{m,      memory,            gate_input, projection, basis, heads,
                      INPUTS, {out, out_stride}, schedule,   mode,       ridge, count
#if MONITOR
                      , {errors, errors_stride}, tolerance
#endif
    };
    if (warp < ROW_BLOCKS) run_fold_warp(flush);
    else if (warp < EPILOGUE + EPILOGUE_WARPS) run_solver_or_epilogue_warp(flush, warp == SOLVER, warp - EPILOGUE);
    else if constexpr (!RAW_KEYS) {
        if (warp == PRODUCER) run_producer_warp(flush);
        else if (warp < FIRST_TRANSFORM_WARP) run_sketch_warp(flush);
        else run_transform_warp(flush);
    }

    // The last block resets the schedule and, outside of STEP, the cursors, which other blocks have read until now.
    // The flush must not end before the read kernel.
    __shared__ bool last;
    if (early) wait_for_previous_kernel();
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(&schedule->finished_blocks, 1u) == gridDim.x - 1;
        if (last) schedule->reset();
    }
    __syncthreads();
    if (LASTING && last && mode == STEP) compare_with_tolerance(flush);
    if (!last || mode == STEP) return;
    if (mode == DRAFT) {  // the draft read sets the other rows' cursors
        for (int i = threadIdx.x; i < count; i += 32 * WARPS) *memory.cursor.of(schedule->rows[i].slot) &= LASTING;
    } else {
        const int stroke = clock.stroke();
        const int kept = mode == FOLD ? LASTING : 0;
        set_cursors([&](int word) { return (word & kept) | stroke; });
    }
}
#endif

// Values for the host's launch.
extern "C" __device__ int flush_shared_bytes = sizeof(BlockMemory);
extern "C" __device__ int flush_threads = 32 * WARPS;
