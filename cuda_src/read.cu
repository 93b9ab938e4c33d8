// Read step: the tokens of a window that touch no full state, except in heads that have no sketch.
//
// Appends the row's token to its ring and computes o = (state read of the effective query) + (buffer output). The
// state read is U C x for a head with a sketch and S^T x for a dense one; buffered replay is the variant whose heads
// are all dense. Rows whose slot is due for a flush are left to `flush.cu`, which finds them listed, and which moves the
// cursors. Warps work alone: each goes through its share of items while the next one's bytes come in.
//
// -D constants besides common.cuh's: W, DENSE_HEADS, SKETCHED_HEADS, RANK_MAX, PIVOTS, MAP (0 factors, 1 dense,
// 2 shared), SKETCH (type of sketches and maps: 0 bf16, 2 float32).
#include "schedule.cuh"
#include "read_dense.cuh"
#include "read_sketch.cuh"

// A warp's shared memory: this, then room for at least one item.
struct WarpMemory {
    Scratch scratch;
    Arrival arrival[2];
    alignas(128) char items[1];
};
constexpr int LARGEST = Item::bytes(W - 2, TOGETHER * sketch_elements(RANK_MAX));
constexpr int ITEMS_AT = (sizeof(WarpMemory) - 1) / 128 * 128;

#ifndef SIZES_ONLY  // set where only the last lines are asked for
constexpr int MOST_WARPS = SKETCHED_HEADS ? 16 : 4, LEAST_BLOCKS = SKETCHED_HEADS ? 1 : KIND == KDA ? 5 : 4;

extern "C" __global__ void __launch_bounds__(32 * MOST_WARPS, LEAST_BLOCKS) read_step(
    const float* state, i64 slot_stride, const int* cursor, act_t* ring_k, act_t* ring_v, float* ring_g,
    float* ring_beta, const sketch_t* sketch, i64 sketch_stride, const sketch_t* projection, const int4* heads,
    const int* order, const act_t* q, const act_t* k, const act_t* v, const float* g, const float* beta, out_t* out,
    const i64* slots, int batch, int tokens, int t, Schedule* schedule, int memory_bytes) {
    const int lane = threadIdx.x % 32, warps = gridDim.x * (blockDim.x / 32);
    const int self = threadIdx.x / 32 * gridDim.x + blockIdx.x;  // neighbours are in other blocks
    const Arguments arg{state, slot_stride, ring_k, ring_v, ring_g, ring_beta, sketch, projection, sketch_stride,
                        heads, q, k, v, g, beta, out};
    auto at = [&](int row) { return static_cast<i64>(row) * tokens + t; };
    auto zero = [&](int row, int first, int count) {
        for (int i = lane; i < count; i += 32) out[at(row) * HEADS * V + first + i] = narrow<OUT>(0.f);
    };
    auto goes_on = [&](i64 slot, int pos) { return slot >= 0 && pos + 1 < W; };
    auto list = [&](int row) {
        if (lane == 0) schedule->rows[atomicAdd(&schedule->due, 1)] = row;
    };
#if DENSE_HEADS
    for (int i = self; i < DENSE_HEADS * QUARTERS * batch; i += warps) {
        const int part = i % QUARTERS, row = i / QUARTERS % batch, place = i / QUARTERS / batch, head = order[place];
        const i64 slot = slots[row];
        const int pos = slot < 0 ? 0 : cursor[slot];
        if (goes_on(slot, pos)) read_dense(arg, head, at(row), slot, pos, part);
        else if (slot < 0) zero(row, head * V + part * (V / QUARTERS), V / QUARTERS);
        else if (!SKETCHED_HEADS && part + place == 0) list(row);
    }
#endif
#if SKETCHED_HEADS
    extern __shared__ uint4 shared[];
    WarpMemory& memory = *reinterpret_cast<WarpMemory*>(reinterpret_cast<char*>(shared) + threadIdx.x / 32 * memory_bytes);
    char *const lower = reinterpret_cast<char*>(&memory) + ITEMS_AT, *const upper = reinterpret_cast<char*>(&memory) + memory_bytes;
    if (lane < 2) memory.arrival[lane].init();
    __syncwarp();
    // An even share, row after row of the same heads.
    const int items = PARTS * batch;
    int item = static_cast<int>(static_cast<i64>(items) * self / warps);
    const int end = static_cast<int>(static_cast<i64>(items) * (self + 1) / warps);

    auto slot_at = [&](int i) -> i64 { return i < end ? slots[i % batch] : -1; };
    auto position = [&](i64 slot) { return slot < 0 ? W - 1 : cursor[slot]; };
    i64 slot = slot_at(item), next_slot = slot_at(item + 1), third_slot = slot_at(item + 2);
    int row = item % batch, part = item / batch;
    Heads own{}, next_own;
    Gates gates, next_gates;
    Item now{lower, position(slot)}, next{nullptr, position(next_slot)};
    if (item < end) own.load(heads, part);
    next_own = own;
    int sent = 0, read = 0;  // items, by their copies
    auto send = [&](Item& to, const Heads& of, Gates& with, int n_part, int n_row, i64 n_slot) {
        to.at = sent % 2 ? upper - Item::bytes(to.pos, of.elements) : lower;
        to.fetch(arg, of, n_part * TOGETHER, at(n_row), n_slot, memory.arrival[sent++ % 2]);
        with.load(arg, n_part * TOGETHER, at(n_row), n_slot, to.pos);
    };
    if (item < end && goes_on(slot, now.pos) && own.elements > 0) send(now, own, gates, part, row, slot);
    copy_async_commit();
    for (; item < end; item++) {
        const int third_pos = position(third_slot);
        const i64 fourth_slot = slot_at(item + 3);
        const bool works = goes_on(slot, now.pos) && own.elements > 0;
        int next_row = row + 1, next_part = part;
        if (next_row == batch) {
            next_row = 0, next_part++;
            if (item + 1 < end) next_own.load(heads, next_part);
        }
        const bool coming = goes_on(next_slot, next.pos) && next_own.elements > 0;
        const int taken = works ? Item::bytes(now.pos, own.elements) : 0;
        const bool early = coming && taken + Item::bytes(next.pos, next_own.elements) <= upper - lower;
        if (early) send(next, next_own, next_gates, next_part, next_row, next_slot);
        copy_async_commit();
        if (works) {
            memory.arrival[read % 2].wait<1>(read / 2);
            read++;
            __syncwarp();
            gates.append(arg, part * TOGETHER, slot, now.pos);
            now.append(arg, part * TOGETHER, slot);
            read_sketched(arg, now, own, gates, part * TOGETHER, at(row), memory.scratch);
            __syncwarp();
        } else if (slot < 0) {
#pragma unroll
            for (int h = 0; h < TOGETHER; h++)
                if (own.rank[h] > 0) zero(row, (part * TOGETHER + h) * V, V);
        } else if (part == 0 && now.pos + 1 == W) {
            list(row);
        }
        if (coming && !early) send(next, next_own, next_gates, next_part, next_row, next_slot);
        copy_async_commit();
        slot = next_slot, next_slot = third_slot, third_slot = fourth_slot;
        row = next_row, part = next_part, own = next_own, gates = next_gates;
        now = next, next.pos = third_pos;
    }
#endif
}
#endif

// What the host must ask for at the launch: shared memory of a warp at least, and items of a row.
extern "C" __device__ int read_shared_bytes = SKETCHED_HEADS ? ITEMS_AT + (LARGEST + 127) / 128 * 128 : 0;
extern "C" __device__ int read_parts = PARTS;
