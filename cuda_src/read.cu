// Read step: the tokens of a window that touch no full state, except in heads that have no sketch.
//
// Appends the row's token to its ring and computes o = (state read of the effective query) + (buffer output). The
// state read is U C x for a head with a sketch and S^T x for a dense one; buffered replay is the variant whose heads
// are all dense. Rows whose slot is due for a flush are left to `flush.cu`, which finds them listed, and which moves
// the cursors. Warps work alone: each takes one item after the other while the next one's bytes come in.
//
// -D constants besides common.cuh's: W, DENSE_HEADS, SKETCHED_HEADS, RANK_MAX, PIVOTS, MAP (0 factors, 1 dense,
// 2 shared), SKETCH (type of sketches and maps: 0 bf16, 2 float32).
#include "schedule.cuh"
#include "read_dense.cuh"
#include "read_items.cuh"

// The host starts as many blocks as it takes for none to have more key heads than this, of all its rows: whole ones, and one at
// each end of its share that it has a part of.
constexpr int MOST_SCORES = 128;
constexpr int BLOCK_BYTES = sizeof(BlockMemory);

#ifndef SIZES_ONLY  // set where only the last lines are asked for
constexpr int MOST_WARPS = SKETCHED_HEADS ? MAX_WARPS : 4, LEAST_BLOCKS = SKETCHED_HEADS ? 1 : KIND == KDA ? 5 : 4;

extern "C" __global__ void __launch_bounds__(32 * MOST_WARPS, LEAST_BLOCKS) read_step(
    const float* state, i64 slot_stride, const int* cursor, act_t* ring_k, act_t* ring_v, gate_t* ring_g,
    float* ring_beta, const float* gate_input, const sketch_t* sketch, i64 sketch_stride, const sketch_t* projection, const int4* heads,
    const int* order, const act_t* q, const act_t* k, const act_t* v, const gate_t* g, const float* beta, out_t* out,
    const i64* slots, int batch, int tokens, int t, Schedule* schedule, int slot_count, int shared_bytes) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Arguments arg{state, slot_stride, ring_k, ring_v, ring_g, ring_beta, gate_input, sketch, projection, sketch_stride,
                        heads, q, k, v, g, beta, out};
    [[maybe_unused]] auto zero = [&](int row, int first, int count) {
        for (int i = lane; i < count; i += 32) place<HEADS * V>(out, row * tokens + t, first)[i] = narrow<OUT>(0.f);
    };
    auto list = [&](int slot, int row) { schedule->rows[atomicAdd(&schedule->due, 1)] = make_int2(slot, row); };
#if SKETCHED_HEADS  // what nobody changes comes before the wait
    extern __shared__ uint4 shared[];
    BlockMemory& block = *reinterpret_cast<BlockMemory*>(shared);
    // An even share, all heads of a row one after the other.
    const int items = PARTS * batch;
    const int begin = static_cast<u32>(items) * blockIdx.x / gridDim.x;
    const int end = static_cast<u32>(items) * (blockIdx.x + 1) / gridDim.x;
    const int count = end - begin, first_row = begin / PARTS, rows = (end - 1) / PARTS - first_row + 1;
    const int first_key = begin / PARTS_OF_KEY, keys = SCORED ? (end - 1) / PARTS_OF_KEY - first_key + 1 : 0;
    Scores* const scores = reinterpret_cast<Scores*>(block.rows + rows);
    const Share share{block.rows, first_row, tokens, t};
    const NewTokens new_tokens(arg, begin * TOGETHER, end * TOGETHER);
    if (threadIdx.x == 0) block.most_tokens = -1, block.most_elements = 0, block.claimed = block.appended = 0, block.pieces = new_tokens.pieces();
    for (int i = threadIdx.x; i < keys; i += blockDim.x) scores[i].known.init(1);
    if (lane < 2) block.arrivals[warp][lane].init();
    __syncthreads();
    for (int i = begin + blockDim.x - 1 - threadIdx.x; i < min(end, begin + PARTS); i += blockDim.x) {
        const int part = i % PARTS;
        block.heads[part].load(heads, part);  // which nobody ever changes
        atomicMax(&block.most_elements, block.heads[part].elements);
    }
    // Slots may still be changing: what they seem to be only says which cursors to bring nearer, and to load beside them.
    int seeming = 0;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
        const i64 slot = const_cast<const volatile i64*>(slots)[first_row + i];
        if (slot < 0 || slot >= slot_count) continue;
        prefetch(&cursor[slot]);
        if (DENSE_HEADS == 0 && i == threadIdx.x) seeming = static_cast<int>(slot);  // dense heads need the register
    }
#endif
    wait_for_kernel_before();
#if DENSE_HEADS
    // Four warps for a head of a row: the block itself where there is no other work, which keeps the path uniform.
    const int groups = SKETCHED_HEADS ? blockDim.x / (32 * QUARTERS) : 1, group = SKETCHED_HEADS ? warp / QUARTERS : 0;
    for (int i = blockIdx.x * groups + group; group < groups && i < DENSE_HEADS * batch; i += gridDim.x * groups) {
        const int part = warp % QUARTERS, row = i % batch, head = order[i / batch];
        const i64 slot = slots[row];
        const int pos = slot < 0 ? 0 : cursor[slot];
        if (Share::goes_on(slot, pos)) read_dense(arg, head, row * tokens + t, slot, pos, part);
        else if (slot < 0) zero(row, head * V + part * (V / QUARTERS), V / QUARTERS);
        else if (!SKETCHED_HEADS && i < batch && threadIdx.x == 0) list(static_cast<int>(slot), row);
        if (!SKETCHED_HEADS) break;  // a block for each
    }
#endif
#if SKETCHED_HEADS
    const u32 start = clock_now();
    bool due = false;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
        int pos = DENSE_HEADS ? 0 : cursor[seeming];
        const int row = first_row + i, slot = static_cast<int>(slots[row]);
        if (DENSE_HEADS || slot != seeming) pos = slot < 0 ? 0 : cursor[slot];
        block.rows[i] = make_int2(slot, pos);
        if (slot < 0 || Share::goes_on(slot, pos)) {
            atomicMax(&block.most_tokens, pos);
        } else {
            due = true;
            if (row * PARTS >= begin) list(slot, row);  // in the block that has the row's first item
        }
    }
    due = __syncthreads_or(due);
    // Flushes may begin, but not where there is something to flush: on a multiprocessor that was set up for a read's shared memory
    // they are slower. By a warp that fetches last.
    if (!due && threadIdx.x == blockDim.x - 1) {
        if (DENSE_HEADS == 0) schedule->has_none_due();  // a dense head looks at its cursor when its turn comes
        start_kernel_after();
    }
    if (block.most_tokens < 0) return;  // all rows are due

    // As many warps as have room for an item.
    const int pool_at = rounded(BLOCK_BYTES + rows * static_cast<int>(sizeof(int2)) + keys * static_cast<int>(sizeof(Scores)));
    const int largest = Item::bytes(BOTH, block.most_tokens, block.most_elements), room = ITEMS_AT + rounded(largest);
    // At least one: the host asks for as much (read_shared_bytes).
    const int fit = __popc(__ballot_sync(ALL, (lane + 1) * room <= shared_bytes - pool_at));  // without a division, for which all would wait
    const int sharing = min(min(static_cast<int>(blockDim.x) / 32, count), fit), part_bytes = 128 * quotient((shared_bytes - pool_at) / 128, sharing);
    // by the warps that fetch last
    const int scoring = (sharing + 1) / 2;
    if (SCORED && warp >= scoring)
        find_scores(arg, share, first_key, keys, warp - scoring, static_cast<int>(blockDim.x) / 32 - scoring, scores);
    if (warp < sharing) {
        char* const lower = reinterpret_cast<char*>(shared) + pool_at + warp * part_bytes + ITEMS_AT;
        WarpMemory& memory = *reinterpret_cast<WarpMemory*>(lower - ITEMS_AT);
        const Reading reading{arg, block, share, scores, first_key, begin, count, sharing, start};
        if (SPLIT) read_split_items(reading, memory, lower, lower - ITEMS_AT + part_bytes);
        else read_whole_items(reading, memory, lower, lower - ITEMS_AT + part_bytes);
    }
    // A warp without items takes pieces of the newest tokens, as long as there are any.
    for (int piece; (piece = next_number(block.appended)) < block.pieces;) new_tokens.append(share, piece);
#endif
}
#endif

// What the host must know: the least shared memory of a block, with one warp; its most warps; the items of a row; the most of a
// block.
extern "C" __device__ int read_shared_bytes =
    SKETCHED_HEADS ? rounded(BLOCK_BYTES + MAX_ROWS * sizeof(int2) + (SCORED ? MOST_SCORES * sizeof(Scores) : 0)) + ITEMS_AT + rounded(LARGEST) : 0;
extern "C" __device__ int read_most_warps = MAX_WARPS;
extern "C" __device__ int read_parts = PARTS;
extern "C" __device__ int read_most_items = SCORED ? (MOST_SCORES - 2) * PARTS_OF_KEY : MAX_ROWS * PARTS;
