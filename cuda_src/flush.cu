// Flush: one pass over the state of every (row, head) whose window is full.
//
// Reads the state, folds the window's raw tokens into it exactly, reads the output from the updated state, rebuilds
// the sketch and its map, and writes the state back. A fixed number of blocks claims the (row, head) items in turn, so
// that all of them work on one stretch of memory at a time. A block's warps have different tasks (flush_roles.cuh) and
// hardly wait for each other: latches in shared memory say when something is there and when it has been used.
//
// mode STEP: the rows that the read kernel has listed, whose windows end with this token. mode FOLD: all rows that have
// buffered something, without an output. mode LOAD: new states, nothing to fold.
//
// -D constants besides read.cu's: PRIOR, MIN_BLOCKS (blocks that should fit on one multiprocessor).
#include "flush_roles.cuh"

#ifndef SIZES_ONLY  // set where only the last lines are asked for
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS) flush_step(
    float* state, i64 slot_stride, int* cursor, act_t* ring_k, act_t* ring_v, gate_t* ring_g, float* ring_beta,
    const float* gate_input, sketch_t* sketch, i64 sketch_stride, const sketch_t* projection, const uint2* basis, const int4* heads,
    const act_t* q, const act_t* k, const act_t* v, const gate_t* g, const float* beta, out_t* out, const i64* slots,
    int batch, int tokens, int t, Schedule* schedule, int mode, float ridge) {
    start_kernel_after();
    auto move_cursors = [&] {  // atomics, as nobody has to wait for what they return
        for (int row = threadIdx.x; row < batch; row += 32 * WARPS) {
            const i64 slot = slots[row];
            if (slot >= 0) atomicInc(reinterpret_cast<u32*>(&cursor[slot]), W - 1);
        }
    };
    // Mostly nothing is due, and that is known before the read has ended, if no head is dense: then only one block stays to wait for it.
    const bool idle = DENSE_HEADS == 0 && mode == STEP && schedule->is_idle();
    if (idle && blockIdx.x > 0) return;
    if (idle) move_cursors();
    wait_for_kernel_before();
    if (mode == STEP && blockIdx.x == 0 && threadIdx.x == 0) schedule->forget();
    if (idle) return;
    extern __shared__ uint4 shared[];
    Memory& m = *reinterpret_cast<Memory*>(shared);
    const int warp = threadIdx.x / 32;
    int count = 0;
    const int own = blockIdx.x + threadIdx.x * gridDim.x;  // the thread's item, of those that the block begins with
    int2 entry = make_int2(0, 0);
    auto find = [&] {
        if (threadIdx.x < ItemQueue::AHEAD) entry = schedule->rows[min(own / HEADS, MAX_ROWS - 1)];
    };
    if (mode == STEP) {
        find();  // loaded together with their number: past that it is an old entry, which nobody uses
        count = schedule->due;
        if (blockIdx.x == 0) move_cursors();  // nobody else looks at them now: rows that are due stand at their window's last place
        if (count == 0) return;
    } else {
        count = list_rows(schedule->rows, cursor, slots, batch, mode);
        find();
    }
    if (threadIdx.x == 0) m.init();
    if (threadIdx.x < ItemQueue::AHEAD) m.queue.items[threadIdx.x] = own < count * HEADS ? item_of(own, entry) : NO_ITEM;
    if (RAW && W < WP && warp == SERVER)
        for (int i = 0; i < KEYS; i++) m.keys[i].clear(W);
    __syncthreads();

    const Flush flush{m, state, slot_stride, cursor, ring_k, ring_v, ring_g, ring_beta, gate_input, sketch, sketch_stride, projection, basis,
                      heads, q, k, v, g, beta, out, tokens, t, schedule, mode, ridge, count};
    if (warp < NWARPS) fold_items(flush);
    else if (warp < FINISHER + FINISHERS) serve_items(flush, warp == SERVER, warp - FINISHER);
    else if constexpr (!RAW) {
        if (warp == MOVER) move_items(flush);
        else if (warp < TEAM_WARPS) sketch_items(flush);
        else prepare_items(flush);
    }

    // The block that comes last clears the schedule, and starts the rows' windows anew where others had to see them.
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(&schedule->ticket, 1u) == gridDim.x - 1;
        if (last) schedule->ticket = 0, schedule->due = 0, schedule->claimed = 0;
    }
    __syncthreads();
    if (!last || mode == STEP) return;
    for (int i = threadIdx.x; i < count; i += 32 * WARPS) cursor[schedule->rows[i].x] = 0;
}
#endif

// What the host must know for the launch.
extern "C" __device__ int flush_shared_bytes = sizeof(Memory);
extern "C" __device__ int flush_threads = 32 * WARPS;
