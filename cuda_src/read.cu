// Read step: outputs of the rows whose windows do not end with this token.
//
// Appends each row's token to the row's ring and computes o = (state read of the effective query x) + (output of the
// window's tokens). The state read is U C x for a head with a sketch, and S^T x for a full-state head. Replay is the
// variant in which all heads are full-state heads. Rows whose windows end are only listed in `Schedule`; flush.cu
// computes their outputs, and advances the cursors of all rows. With MONITOR some of them are read
// too (slot/errors.cuh).
//
// One block per multiprocessor takes an even share of the (row, head group) tiles. Each warp works on its own tiles
// (read/warp.cuh).
//
// -D constants besides lib/common.cuh's: W, FULL_STATE_HEADS and SKETCHED_HEADS (numbers of heads), RANK_MAX, PIVOTS,
// MAP (form of the map: FACTORS, DENSE or NONE, in slot/sketch_layout.cuh), SKETCH (type of sketches and maps: BF16,
// FP32 or INT8, in lib/common.cuh), PACE (read/warp.cuh).
#include "slot/cursor.cuh"
#include "slot/schedule.cuh"
#include "slot/call_slots.cuh"
#include "read/state.cuh"
#include "read/warp.cuh"

#ifndef SIZES_ONLY  // defined by a test that needs only the constants at the end
constexpr int BLOCK_WARPS = SKETCHED_HEADS ? MAX_WARPS : 4, MIN_BLOCKS = SKETCHED_HEADS ? 1 : CHANNEL_DECAYS ? 5 : 4;

extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, MIN_BLOCKS)
    read_step(MEMORY_PARAMETERS, const float* gate_input, const projection_t* projection, const int4* heads,
              const int* order ERRORS_PARAMETERS, READ_STEP_PARAMETERS, SLOT_LIMITS, int shared_bytes) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Arguments arg{MEMORY, gate_input, projection, heads, INPUTS, {}, {out, out_stride}};
    const CallSlots slots = SLOTS;
    [[maybe_unused]] auto zero = [&](int row, int first, int count) {
        for (int i = lane; i < count; i += 32) arg.out.of(row)[first + i] = narrow<OUT>(0.f);
    };
    auto list = [&](int slot, int row, int word, bool measured) {
        const u32 measure = word & LASTING ? UNCOUNTED : measured ? MEASURED : UNMEASURED;
        schedule->rows[atomicAdd(&schedule->due, 1)] =
            DueRow{slot, static_cast<u32>(row), static_cast<u32>(position_of(word, W)), measure};
    };
#if SKETCHED_HEADS  // before the wait: only data that no kernel changes
    extern __shared__ uint4 shared[];
    ReadMemory& block = *reinterpret_cast<ReadMemory*>(shared);
    const Share share(batch);
    const int begin = share.begin, end = share.end, count = share.count, first_row = share.first_row,
              rows = share.rows, first_key = share.first_key, keys = share.keys;
    KeyScores* const scores = reinterpret_cast<KeyScores*>(block.rows + rows);
    const BlockRows own_rows{block.rows, first_row};
    const NewTokens new_tokens(arg, begin * TILE_HEADS, end * TILE_HEADS);
    if (threadIdx.x == 0)
        block.max_tokens = -1, block.max_elements = 0, block.next_tile = block.next_piece = 0,
        block.pieces = new_tokens.pieces();
    for (int i = threadIdx.x; i < keys; i += blockDim.x) scores[i].full.init(1);
    if (lane < 2) block.full[warp][lane].init();
    __syncthreads();
    share.load_heads(block, heads);  // constant
    // The previous kernel may still change `slots`. An early look selects which cursors to prefetch and to load early,
    // and searches for repeated slots. If a slot has changed after the wait, the search is repeated.
    int early_slot = 0;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
        const int slot = slots.checked(slots.numbers.words<const volatile int>(first_row + i));
        block.rows[i].x = slot;
        if (slot < 0) continue;
        prefetch(arg.memory.cursor.of(slot));
        // full-state heads leave no register for early_slot
        if (FULL_STATE_HEADS == 0 && i == threadIdx.x) early_slot = slot;
    }
    const int compared = slots.scan.from + threadIdx.x;  // the row whose slot this thread compares with the block's
    const bool compares = compared < slots.scan.to;
    const int early_number =
        compares ? slots.numbers.to_int(slots.numbers.words<const volatile int>(compared)) : PADDING;
    bool search = slots.scan.to - slots.scan.from > static_cast<int>(blockDim.x);
    __syncthreads();
    for (int n = 0; n < rows; n++) {
        const int slot = block.rows[n].x;
        search |= slot >= 0 && slot == early_number && compared != first_row + n;
    }
    __syncthreads();
#endif
    wait_for_previous_kernel();
#if FULL_STATE_HEADS
    // Four warps for a full-state head of a row. Without sketches, the four warps are the whole block: no divergence.
    const int groups = SKETCHED_HEADS ? blockDim.x / (32 * QUARTERS) : 1, group = SKETCHED_HEADS ? warp / QUARTERS : 0;
    for (int i = blockIdx.x * groups + group; group < groups && i < FULL_STATE_HEADS * batch; i += gridDim.x * groups) {
        const int part = warp % QUARTERS, row = i % batch, nth = i / batch, head = order[nth];
        int slot = slots.of(row);
        const int word = slot < 0 ? 0 : *arg.memory.cursor.of(slot);
        slot = slots.once_in_warp(row, slot);
        if (!SKETCHED_HEADS && i < batch && threadIdx.x == 0) schedule->slots[row] = slot, slots.note(slot);
        if (slot >= 0 && !flushes_now(word, W)) read_state(arg, nth, head, row, slot, position_of(word, W), part);
        else if (slot < 0) zero(row, head * V + part * (V / QUARTERS), V / QUARTERS);
        else if (!SKETCHED_HEADS && i < batch && threadIdx.x == 0) list(slot, row, word, false);
        if (!SKETCHED_HEADS) break;  // one (row, head) a block
    }
#endif
#if SKETCHED_HEADS
    const u32 start = clock_now();
    bool due = false;
    [[maybe_unused]] bool measures = false;
    auto first_tile_is_own = [&](int row) { return row * ROW_TILES >= begin; };  // one block has each row's first tile
    Numbers::Words words{};
    if (compares) words = slots.numbers.words(compared);  // used after the next loads
#pragma unroll 1
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
        int word = FULL_STATE_HEADS ? 0 : *arg.memory.cursor.of(early_slot);
        const int row = first_row + i, slot = slots.of(row);
        if (FULL_STATE_HEADS || slot != early_slot) word = slot < 0 ? 0 : *arg.memory.cursor.of(slot);
        bool reads = slot < 0 || !flushes_now(word, W);
        due |= !reads;
#if MONITOR
        if (!reads && !(word & LASTING) && Strided<ErrorSums>{errors, errors_stride}.of(slot)->measures())
            reads = measures = true;
#endif
        const int pos = reads ? position_of(word, W) : NO_READ;
        block.rows[i] = make_int2(slot, pos);
        if (reads) atomicMax(&block.max_tokens, pos);
        search |= slot == LEFT_OUT;
        if (first_tile_is_own(row)) schedule->slots[row] = slot;
    }
    search |= compares && slots.numbers.to_int(words) != early_number;
    if (__syncthreads_or(due || search)) {
        if (__syncthreads_or(search))
#pragma unroll 1
            for (int n = 0; n < rows; n++) {
                const int row = first_row + n, slot = block.rows[n].x, left = slots.once_in_block(row, slot);
                if (threadIdx.x > 0) continue;
                block.rows[n].x = left;
                if (left < 0) atomicMax(&block.max_tokens, 0);  // there are zeros to write
                if (first_tile_is_own(row)) schedule->slots[row] = left, slots.note(left);
            }
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < rows; i += blockDim.x) {
            const int row = first_row + i, slot = block.rows[i].x;
            if (slot < 0 || !first_tile_is_own(row) || (!MONITOR && BlockRows::continues(slot, block.rows[i].y)))
                continue;
            const int word = *arg.memory.cursor.of(slot);
            if (!MONITOR || flushes_now(word, W)) list(slot, row, word, block.rows[i].y != NO_READ);
        }
        __syncthreads();
    }
#if MONITOR
    measures = __syncthreads_or(measures);
#endif
    // Let the flush start while the reads continue. By the warp that is likely to finish its copies last.
    if (threadIdx.x == blockDim.x - 1) {
        // with full-state heads, other warps may still need cursors; a measured flush must follow its read
        if (FULL_STATE_HEADS == 0 && !measures) schedule->report_listed();
        allow_next_kernel();
    }
    if (block.max_tokens < 0) return;  // all rows are due

    // As many active warps as fit, each with room for the largest tile.
    const int pool_at =
        round_up_128(sizeof(ReadMemory) + rows * static_cast<int>(sizeof(int2)) +
                     keys * static_cast<int>(sizeof(KeyScores)));
    const int largest = TileBuffer::bytes(BOTH_HALVES, block.max_tokens, block.max_elements),
              room = TILES_OFFSET + round_up_128(largest);
    // At least one warp fits, because the host asks for read_shared_bytes. The ballot replaces a division, which would
    // delay all warps.
    const int fit = __popc(__ballot_sync(ALL, (lane + 1) * room <= shared_bytes - pool_at));
    const int active_warps = min(min(static_cast<int>(blockDim.x) / 32, count), fit),
              part_bytes = 128 * quotient((shared_bytes - pool_at) / 128, active_warps);
    // The warps whose tiles arrive last compute the scores.
    const int scoring = (active_warps + 1) / 2;
    if (SHARED_SCORES && warp >= scoring)
        compute_scores(arg, own_rows, first_key, keys, warp - scoring, static_cast<int>(blockDim.x) / 32 - scoring,
                       scores);
    if (warp < active_warps) {
        char* const lower = reinterpret_cast<char*>(shared) + pool_at + warp * part_bytes + TILES_OFFSET;
        WarpMemory& memory = *reinterpret_cast<WarpMemory*>(lower - TILES_OFFSET);
        const TileReader reading{arg, block, own_rows, scores, first_key, begin, count, active_warps, start};
        if (TWO_HALVES) read_tiles_in_halves(reading, memory, lower, lower - TILES_OFFSET + part_bytes);
        else read_whole_tiles(reading, memory, lower, lower - TILES_OFFSET + part_bytes);
    }
    // Warps without tiles append the newest tokens to the ring, piece by piece.
    for (int piece; (piece = claim_next(block.next_piece)) < block.pieces;) new_tokens.append(own_rows, piece);
#endif
}
#endif

// Values for the host: least shared memory of a block (one warp), most warps of a block, tiles of a row, most tiles of
// a block.
extern "C" __device__ int read_shared_bytes = least_shared<KeyScores>(TILES_OFFSET, LARGEST_TILE);
extern "C" __device__ int read_max_warps = MAX_WARPS;
extern "C" __device__ int read_row_tiles = ROW_TILES;
extern "C" __device__ int read_max_tiles = SHARED_SCORES ? (MAX_SCORES - 2) * KEY_TILES : MAX_ROWS * ROW_TILES;
