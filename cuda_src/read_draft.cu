// Draft read: outputs of one to MAX_DRAFTS new tokens of each row, without moving the row's position.
//
// The flush kernel runs first (mode DRAFT, flush.cu): it folds the rows whose rings have no room for the drafts. This
// kernel then stores each row's number of drafts, and the position at which they begin, in the cursor word. A draft's
// output equals the output of a read step at the same position. A row's tile is loaded once for all drafts of the row.
// The drafts' raw inputs are appended to the ring past the position: a commit only advances the position, and later
// tokens overwrite uncommitted drafts.
//
// Tiles are divided among blocks and warps as in read.cu. -D constants: read.cu's.
#include "draft/warp.cuh"
#include "draft/state.cuh"

// Several tokens need more registers than one token, which leaves room for 16 warps.
constexpr int BLOCK_WARPS = SKETCHED_HEADS ? (MAX_WARPS < 16 ? MAX_WARPS : 16) : 4;

#ifndef SIZES_ONLY  // defined by a test that needs only the constants at the end
constexpr int MIN_BLOCKS = SKETCHED_HEADS ? 1 : 3;

extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, MIN_BLOCKS)
    read_draft(MEMORY_PARAMETERS, const float* gate_input, const projection_t* projection, const int4* heads,
               const int* order, READ_DRAFT_PARAMETERS, SLOT_LIMITS, int* clock_word, int shared_bytes) {
    const int warp = threadIdx.x / 32;
    const Arguments arg{MEMORY, gate_input, projection, heads, INPUTS, TOKEN_STEPS, {out, out_stride}};
    const CallSlots slots = SLOTS;
    // Cursor word of a row after the draft begins. Several blocks may read and one block may write a row's word at the
    // same time. All of them get the same result, because after_draft of the new word is the new word: the row has
    // room.
    auto word_of = [&](int row, int slot, bool write) {
        if (slot < 0) return 0;
        int* const word = arg.memory.cursor.of(slot);
        const int next = after_draft(*word, Lengths{{lengths, length_flags}, tokens}.of(row), W);
        if (write) *word = next;
        return next;
    };
#if SKETCHED_HEADS  // before the wait: only data that no kernel changes
    extern __shared__ uint4 shared[];
    ReadMemory& block = *reinterpret_cast<ReadMemory*>(shared);
    const Share share(batch);
    const int begin = share.begin, end = share.end, count = share.count, first_row = share.first_row,
              rows = share.rows, first_key = share.first_key, keys = share.keys;
    DraftScores* const scores = reinterpret_cast<DraftScores*>(block.rows + rows);
    // What tiles do not append themselves: scalars, and keys that several tiles share.
    NewTokens new_tokens(arg, begin * TILE_HEADS, end * TILE_HEADS);
    new_tokens.values.to = new_tokens.values.from;
    if (!SHARED_SCORES) new_tokens.keys.to = new_tokens.keys.from;
    if (CHANNEL_DECAYS) new_tokens.gates.to = new_tokens.gates.from;
    const int pieces = new_tokens.pieces();
    if (threadIdx.x == 0)
        block.max_tokens = block.max_elements = 0, block.next_tile = block.next_piece = 0,
        block.pieces = pieces * tokens;
    for (int i = threadIdx.x; i < keys; i += blockDim.x) scores[i].full.init(1);
    if (threadIdx.x % 32 < 2) block.full[warp][threadIdx.x % 32].init();
    __syncthreads();
    share.load_heads(block, heads);
#endif
    wait_for_previous_kernel();
    allow_next_kernel();
    if (clock_word && ticks && blockIdx.x == 0 && threadIdx.x == 0) Clock{clock_word}.draft(tokens, W);
#if FULL_STATE_HEADS
    const int groups = SKETCHED_HEADS ? blockDim.x / (32 * QUARTERS) : 1, group = SKETCHED_HEADS ? warp / QUARTERS : 0;
    for (int i = blockIdx.x * groups + group; group < groups && i < FULL_STATE_HEADS * batch; i += gridDim.x * groups) {
        const int row = i % batch, slot = slots.of(row);
        const int word = word_of(row, slot, !SKETCHED_HEADS && i < batch && threadIdx.x == 0);
        read_state_drafts(arg, i / batch, order[i / batch], row, slot, position_of(word, W), drafted_of(word), tokens,
                          warp % QUARTERS);
    }
#endif
#if SKETCHED_HEADS
    const u32 start = clock_now();
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
        const int row = first_row + i, slot = slots.of(row);
        const int word = word_of(row, slot, row * ROW_TILES >= begin);  // the block with the row's first tile writes
        block.rows[i] = make_int2(slot, word);
        const int length = drafted_of(word);
        if (length > 0) atomicMax(&block.max_tokens, position_of(word, W) + length);
    }
    __syncthreads();

    // As many active warps as fit, each with room for the largest tile. At least one fits, because the host asks for
    // read_draft_shared_bytes.
    const int pool_at = round_up_128(sizeof(ReadMemory) + rows * static_cast<int>(sizeof(int2)) +
                                     keys * static_cast<int>(sizeof(DraftScores)));
    const int most = block.max_tokens;  // one tile's key half fits beside another tile's value half
    const int largest = DraftBuffer::bytes(BOTH_HALVES, most, min(tokens, most), block.max_elements),
              room = DRAFTS_OFFSET + round_up_128(largest);
    const int fit = __popc(__ballot_sync(ALL, (threadIdx.x % 32 + 1) * room <= shared_bytes - pool_at));
    const int active_warps = min(min(static_cast<int>(blockDim.x) / 32, count), fit),
              part_bytes = 128 * quotient((shared_bytes - pool_at) / 128, active_warps);
    const int scoring = (active_warps + 1) / 2;
    if (SHARED_SCORES && warp >= scoring)
        compute_draft_scores(arg, DraftRows{block.rows, first_row, tokens, 0}, first_key, keys, warp - scoring,
                             static_cast<int>(blockDim.x) / 32 - scoring, scores);
    // Half of the warps append the drafts that tiles do not append, while they would wait for their turn to start.
    if (warp >= min(scoring, static_cast<int>(blockDim.x) / 32 - 1))
        for (int piece; (piece = claim_next(block.next_piece)) < block.pieces;)
            new_tokens.append(DraftRows{block.rows, first_row, tokens, piece / pieces}, piece % pieces);
    if (warp < active_warps) {
        char* const lower = reinterpret_cast<char*>(shared) + pool_at + warp * part_bytes + DRAFTS_OFFSET;
        DraftMemory& memory = *reinterpret_cast<DraftMemory*>(lower - DRAFTS_OFFSET);
        char* const upper = lower - DRAFTS_OFFSET + part_bytes;
        const DraftRows own_rows{block.rows, first_row, tokens, 0};
        const DraftReader reader{arg, block, own_rows, scores - first_key, begin, begin + active_warps, end, start};
        if constexpr (TWO_HALVES) read_drafts_in_halves(reader, memory, lower, upper);
        else read_whole_drafts(reader, memory, lower, upper);
    }
#endif
}
#endif

// Values for the host: most warps of a block, and least shared memory of a block.
extern "C" __device__ int read_draft_max_warps = BLOCK_WARPS;
extern "C" __device__ int read_draft_shared_bytes = least_shared<DraftScores>(DRAFTS_OFFSET, LARGEST_DRAFT);
