// Flush: one pass over the state of every (row, head) whose window is full.
//
// Reads the state, folds the window's raw tokens into it exactly, reads the output from the updated state, rebuilds
// the sketch and its map, and writes the state back. The tile stays in registers from the read to the write; while
// one is worked on, the next comes in behind it. A fixed number of blocks shares the (row, head) pairs evenly.
//
// mode STEP: the rows that the read kernel has listed, whose windows end with this token. mode FOLD: all rows that have
// buffered something, without an output. mode LOAD: new states, nothing to fold.
//
// -D constants besides read.cu's: PRIOR, MIN_BLOCKS (blocks that should fit on one multiprocessor).
#include "schedule.cuh"
#include "sketch_layout.cuh"
#include "fold.cuh"
#include "maps.cuh"

// Whether the basis sets out before the output is read: only mamba2 has the registers to hold it meanwhile.
constexpr bool EARLY_BASIS = KIND == MAMBA2;

// The fold's operands and the sketch's are never needed together. Sharing their memory costs a barrier, but keeps two
// blocks on a multiprocessor.
union Work {
    FoldMemory fold;
#if SKETCHED_HEADS
    SketchMemory sketch;
#endif
};

enum { STEP = 0, FOLD = 1, LOAD = 2 };

struct Memory {
    alignas(16) float tile[V][K];
    Work work;
    Stage stage;
    alignas(16) float query[K];
    u16 rows[MAX_ROWS];
    int counts[NWARPS];
    Arrival staged, tiled[NWARPS];
};

// Lists the rows to flush, in order; returns how many.
__device__ __forceinline__ int list_rows(Memory& m, const int* cursor, const i64* slots, int batch, int mode) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int total = 0;
    for (int first = 0; first < batch; first += THREADS) {
        const int row = first + threadIdx.x;
        const i64 slot = row < batch ? slots[row] : -1;
        const bool due = slot >= 0 && (mode == LOAD || cursor[slot] > 0);
        const u32 ballot = __ballot_sync(ALL, due);
        if (lane == 0) m.counts[warp] = __popc(ballot);
        __syncthreads();
        int before = total;
        for (int i = 0; i < NWARPS; i++) {
            if (i < warp) before += m.counts[i];
            total += m.counts[i];
        }
        if (due) m.rows[before + __popc(ballot & ((1u << lane) - 1))] = static_cast<u16>(row);
        __syncthreads();
    }
    return total;
}

#ifndef SIZES_ONLY  // set where only the last line is asked for
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) flush_step(
    float* state, i64 slot_stride, int* cursor, act_t* ring_k, act_t* ring_v, float* ring_g, float* ring_beta,
    sketch_t* sketch, i64 sketch_stride, const sketch_t* projection, const uint2* basis, const int4* heads,
    const act_t* q, const act_t* k, const act_t* v, const float* g, const float* beta, out_t* out, const i64* slots,
    int batch, int tokens, int t, Schedule* schedule, int mode, float ridge) {
    extern __shared__ uint4 shared[];
    Memory& m = *reinterpret_cast<Memory*>(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, c = lane % 4;
    int count = 0;
    if (threadIdx.x < NWARPS) m.tiled[threadIdx.x].init();
    if (threadIdx.x == 0) m.staged.init();
    if (mode == STEP) {
        count = schedule->due;
        // nobody else looks at the cursors now: rows that are due stand at their window's last place
        if (blockIdx.x == 0)
            for (int row = threadIdx.x; row < batch; row += THREADS) {
                const i64 slot = slots[row];
                if (slot >= 0) cursor[slot] = cursor[slot] + 1 < W ? cursor[slot] + 1 : 0;
            }
        if (count == 0) return;
        for (int i = threadIdx.x; i < count; i += THREADS) m.rows[i] = static_cast<u16>(schedule->rows[i]);
    } else {
        count = list_rows(m, cursor, slots, batch, mode);
    }
    __syncthreads();
    const int items = count * HEADS;
    // Even shares. Heads of a row follow one another: they lie side by side in memory and share keys.
    const int end = static_cast<i64>(items) * (blockIdx.x + 1) / gridDim.x;
    int item = static_cast<i64>(items) * blockIdx.x / gridDim.x;

    // One item ahead: which row, slot and window position, then its raw tokens, then its state.
    auto row_of = [&](int i) { return i < end ? static_cast<int>(m.rows[i / HEADS]) : -1; };
    auto position = [&](i64 slot) { return mode == STEP ? W - 1 : mode == LOAD ? 0 : cursor[slot]; };
    auto token_of = [&](int row, int head) { return Token(q, k, v, g, beta, static_cast<i64>(row) * tokens + t, head); };
    auto home = [&](i64 slot, int head) { return state + slot * slot_stride + static_cast<i64>(head) * V * K; };
    auto prefetch_tokens = [&](int row, i64 slot, int head, int pos) {
        if (warp == 0 && row >= 0)
            m.stage.prefetch(token_of(row, head), Ring(ring_k, ring_v, ring_g, ring_beta, slot, head), pos, mode == STEP, m.staged);
        copy_async_commit();
    };
    auto prefetch_tile = [&](int row, i64 slot, int head) {
        if (row >= 0) Tile::prefetch(m.tile, home(slot, head), m.tiled[warp]);
        copy_async_commit();
    };
    int next_row = row_of(item), next_pos = 0;
    i64 next_slot = 0;
    if (item < end) {
        next_slot = slots[next_row], next_pos = position(next_slot);
        prefetch_tokens(next_row, next_slot, item % HEADS, next_pos);
        prefetch_tile(next_row, next_slot, item % HEADS);
    }
    for (int round = 0; item < end; item++, round++) {
        const int head = item % HEADS, row = next_row, pos = next_pos, folded = mode == STEP ? pos + 1 : pos;
        const i64 slot = next_slot, at = static_cast<i64>(row) * tokens + t;
        next_row = row_of(item + 1);
        if (next_row >= 0) next_slot = slots[next_row], next_pos = position(next_slot);
        m.staged.wait<1>(round);
        __syncthreads();
        if (mode == STEP && threadIdx.x < K) m.query[threadIdx.x] = widen<ACT>(m.stage.q[threadIdx.x]);
#if SKETCHED_HEADS
        const int4 info = heads[head];
#endif
        Values values(m.stage, folded);
        prepare_fold(m.work.fold, m.stage, folded);
        if (ERASES) {
            if (warp == 0) prepare_solve(m.work.fold);
            __syncthreads();
        }

        prefetch_tokens(next_row, next_slot, (item + 1) % HEADS, next_pos);
        Tile tile;
        m.tiled[warp].wait<1>(round);
        __syncwarp();
        tile.load(m.tile);
        __syncwarp();
        prefetch_tile(next_row, next_slot, (item + 1) % HEADS);
        fold(tile, m.work.fold, values);
#if SKETCHED_HEADS
        BasisTile first;  // on its way while the output is read
        if (EARLY_BASIS && info.x > 0) first.load(basis + info.w, 0, 0);
#endif
        tile.store(home(slot, head));

        float squares = 0, read[2] = {0, 0};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const float4 x = *reinterpret_cast<const float4*>(&m.query[16 * step + 4 * c]);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float* s = tile.s[step][half];
                read[half] += s[0] * x.x + s[1] * x.y + s[2] * x.z + s[3] * x.w;
                squares += s[0] * s[0] + s[1] * s[1] + s[2] * s[2] + s[3] * s[3];
            }
        }
        if (mode == STEP) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                read[half] += __shfl_xor_sync(ALL, read[half], 1);
                read[half] += __shfl_xor_sync(ALL, read[half], 2);
                if (c == 0) out[(at * HEADS + head) * V + 16 * warp + r + 8 * half] = narrow<OUT>(read[half]);
            }
        }
        __syncthreads();
#if SKETCHED_HEADS
        if (info.x > 0) {
            if (!EARLY_BASIS) first.load(basis + info.w, 0, 0);
            store_sketch(m.work.sketch, tile, squares, first, sketch + slot * sketch_stride + info.y, projection + info.z,
                         basis + info.w, info.x, ridge);
        }
#endif
    }

    // The block that comes last clears the schedule, and starts the rows' windows anew where others had to see them.
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(&schedule->ticket, 1u) == gridDim.x - 1;
        if (last) schedule->ticket = 0, schedule->due = 0;
    }
    __syncthreads();
    if (!last || mode == STEP) return;
    for (int i = threadIdx.x; i < count; i += THREADS) cursor[slots[m.rows[i]]] = 0;
}
#endif

// What the host must ask for at the launch.
extern "C" __device__ int flush_shared_bytes = sizeof(Memory);
