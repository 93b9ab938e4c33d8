// Read step: the tokens of a window that touch no full state, except in heads that have no sketch.
//
// Appends the row's token to its ring and computes o = (state read of the effective query) + (buffer output). The
// state read is U C x for a head with a sketch and S^T x for a dense one; buffered replay is the variant whose heads
// are all dense. Rows whose slot is due for a flush are left to `flush.cu`, which finds them listed, and which moves
// the cursors. Warps work alone: each goes through its share of items while the next one's bytes come in.
//
// -D constants besides common.cuh's: W, DENSE_HEADS, SKETCHED_HEADS, RANK_MAX, PIVOTS, MAP (0 factors, 1 dense,
// 2 shared), SKETCH (type of sketches and maps: 0 bf16, 2 float32).
#include "schedule.cuh"
#include "read_dense.cuh"
#include "read_sketch.cuh"

// A block's shared memory: this, a row's slot and position for each row, then a part for each of its warps.
struct BlockMemory {
    int most_tokens, most_elements;  // of any item
    Heads heads[PARTS];  // of the block's own parts
    Piece pieces[PIECES];
    alignas(16) int2 rows[1];
};
constexpr int LARGEST = Item::bytes(W - 2, TOGETHER * sketch_elements(RANK_MAX));
constexpr int MAX_WARPS = 16;

// A warp's part: this, then room for at least one item.
struct WarpMemory {
    Scratch scratch;
    Arrival arrival[2];
    alignas(128) char items[1];
};
constexpr int ITEMS_AT = (sizeof(WarpMemory) - 1) / 128 * 128;
__device__ __forceinline__ constexpr int rounded(int bytes) { return (bytes + 127) / 128 * 128; }

#ifndef SIZES_ONLY  // set where only the last lines are asked for
constexpr int MOST_WARPS = SKETCHED_HEADS ? MAX_WARPS : 4, LEAST_BLOCKS = SKETCHED_HEADS ? 1 : KIND == KDA ? 5 : 4;

extern "C" __global__ void __launch_bounds__(32 * MOST_WARPS, LEAST_BLOCKS) read_step(
    const float* state, i64 slot_stride, const int* cursor, act_t* ring_k, act_t* ring_v, gate_t* ring_g,
    float* ring_beta, const float* gate_input, const sketch_t* sketch, i64 sketch_stride, const sketch_t* projection, const int4* heads,
    const int* order, const act_t* q, const act_t* k, const act_t* v, const gate_t* g, const float* beta, out_t* out,
    const i64* slots, int batch, int tokens, int t, Schedule* schedule, int shared_bytes) {
    wait_for_kernel_before();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Arguments arg{state, slot_stride, ring_k, ring_v, ring_g, ring_beta, gate_input, sketch, projection, sketch_stride,
                        heads, q, k, v, g, beta, out};
    auto at = [&](int row) { return row * tokens + t; };
    [[maybe_unused]] auto zero = [&](int row, int first, int count) {
        for (int i = lane; i < count; i += 32) place<HEADS * V>(out, at(row), first)[i] = narrow<OUT>(0.f);
    };
    auto goes_on = [&](i64 slot, int pos) { return slot >= 0 && pos + 1 < W; };
    auto list = [&](int row) { schedule->rows[atomicAdd(&schedule->due, 1)] = row; };
#if DENSE_HEADS
    // Four warps for a head of a row: the block itself where there is no other work, which keeps the path uniform.
    const int groups = SKETCHED_HEADS ? blockDim.x / (32 * QUARTERS) : 1, group = SKETCHED_HEADS ? warp / QUARTERS : 0;
    for (int i = blockIdx.x * groups + group; group < groups && i < DENSE_HEADS * batch; i += gridDim.x * groups) {
        const int part = warp % QUARTERS, row = i % batch, head = order[i / batch];
        const i64 slot = slots[row];
        const int pos = slot < 0 ? 0 : cursor[slot];
        if (goes_on(slot, pos)) read_dense(arg, head, at(row), slot, pos, part);
        else if (slot < 0) zero(row, head * V + part * (V / QUARTERS), V / QUARTERS);
        else if (!SKETCHED_HEADS && i < batch && threadIdx.x == 0) list(row);
        if (!SKETCHED_HEADS) break;  // a block for each
    }
#endif
#if SKETCHED_HEADS
    extern __shared__ uint4 shared[];
    BlockMemory& block = *reinterpret_cast<BlockMemory*>(shared);
    // An even share, all heads of a row one after the other.
    const int items = PARTS * batch;
    const int begin = static_cast<u32>(items) * blockIdx.x / gridDim.x;
    const int end = static_cast<u32>(items) * (blockIdx.x + 1) / gridDim.x;
    const int first_row = begin / PARTS, rows = (end - 1) / PARTS - first_row + 1;
    if (threadIdx.x == 0) block.most_tokens = 0, block.most_elements = 0;
    __syncthreads();
    bool due = false;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
        const int row = first_row + i, slot = static_cast<int>(slots[row]), pos = slot < 0 ? 0 : cursor[slot];
        block.rows[i] = make_int2(slot, pos);
        if (goes_on(slot, pos)) atomicMax(&block.most_tokens, pos);
        else if (slot >= 0) {
            due = true;
            if (row * PARTS >= begin) list(row);  // in the block that has the row's first item
        }
    }
    if (warp == static_cast<int>(blockDim.x) / 64 && lane < PIECES) block.pieces[lane].set(arg, lane);
    for (int i = begin + blockDim.x - 1 - threadIdx.x; i < min(end, begin + PARTS); i += blockDim.x) {
        const int part = i % PARTS;
        block.heads[part].load(heads, part);
        atomicMax(&block.most_elements, block.heads[part].elements);
    }
    due = __syncthreads_or(due);

    // As many warps as have room for an item, but no more than share the rounds evenly.
    const int rows_end = static_cast<int>(sizeof(BlockMemory)) + rows * static_cast<int>(sizeof(int2));
    const int pool = shared_bytes - rounded(rows_end), largest = Item::bytes(block.most_tokens, block.most_elements);
    const int most_warps = min(static_cast<int>(blockDim.x) / 32, pool / (ITEMS_AT + rounded(largest)));
    const int rounds = (end - begin + most_warps - 1) / most_warps;
    const int sharing = (end - begin + rounds - 1) / rounds;
    if (warp >= sharing) return;
    const int part_bytes = pool / sharing / 128 * 128;
    char* const lower = reinterpret_cast<char*>(shared) + rounded(rows_end) + warp * part_bytes + ITEMS_AT;
    char* const upper = lower - ITEMS_AT + part_bytes;
    WarpMemory& memory = *reinterpret_cast<WarpMemory*>(lower - ITEMS_AT);
    if (lane < 2) memory.arrival[lane].init();
    __syncwarp();

    auto heads_of = [&](const Work& work) -> const Heads& { return block.heads[work.part]; };
    auto find = [&](int row, int part) {
        while (part >= PARTS) part -= PARTS, row++;
        Work work{row, part, -1, 0, false};
        if (row * PARTS + part >= end) return work;
        const int2 entry = block.rows[row - first_row];
        work.slot = entry.x, work.pos = entry.y;
        work.reads = goes_on(entry.x, entry.y) && heads_of(work).elements > 0;
        return work;
    };
    int sent = 0, read = 0;  // items, by their copies
    auto send = [&](Item& to, Gates& gates, const Work& work) {
        const Heads& own = heads_of(work);
        to.pos = work.pos, to.at = sent % 2 ? upper - Item::bytes(work.pos, own.elements) : lower;
        fetch(arg, block.pieces, to, own, work, at(work.row), memory.arrival[sent++ % 2]);
        gates.load(arg, work, at(work.row));
    };
    Item item{}, next_item{};
    Gates gates, next_gates;
    Work work = find(first_row, begin - first_row * PARTS + warp);
    if (work.reads) send(item, gates, work);
    copy_async_commit();
    // not where there is something to flush: on a multiprocessor that was set up for a read's shared memory it is slower
    if (!due) start_kernel_after();
    for (int i = begin + warp; i < end; i += sharing) {
        const Work next = find(work.row, work.part + sharing);
        const Heads& own = heads_of(work);
        const int taken = work.reads ? Item::bytes(work.pos, own.elements) : 0;
        const bool early = next.reads && taken + Item::bytes(next.pos, heads_of(next).elements) <= upper - lower;
        FirstRows first_rows;  // of a shared projection they are on their way while the item is
        GateInput<LK> input;
        if (work.reads) {
            input.load(gate_input, work.part, lane * LK);  // a head an item
            if (MATRIX && MAP != OWN) first_rows.load(arg, item, own);
            memory.arrival[read % 2].wait(read / 2);
            read++;
            __syncwarp();
            if (MATRIX && MAP == OWN) first_rows.load(arg, item, own);
        }
        // not sooner: all of the device's warps begin at once, and would wait for twice the bytes
        if (early) send(next_item, next_gates, next);
        copy_async_commit();
        out_t* const output = place<HEADS * V>(out, at(work.row), work.part * TOGETHER * V);
        if (work.reads) {
            gates.append(arg, work);
            item.append(arg, work);
            read_sketched(arg, item, own, gates, input, first_rows, output, memory.scratch);
            __syncwarp();
        } else if (work.slot < 0) {
            for (int j = lane; j < TOGETHER * V; j += 32)
                if (own.rank[j / V] > 0) output[j] = narrow<OUT>(0.f);
        }
        if (next.reads && !early) send(next_item, next_gates, next);
        copy_async_commit();
        work = next, item = next_item, gates = next_gates;
    }
#endif
}
#endif

// What the host must know: the least shared memory of a block, with one warp, and the items of a row.
extern "C" __device__ int read_shared_bytes =
    SKETCHED_HEADS ? rounded(sizeof(BlockMemory) + MAX_ROWS * sizeof(int2)) + ITEMS_AT + rounded(LARGEST) : 0;
extern "C" __device__ int read_parts = PARTS;
