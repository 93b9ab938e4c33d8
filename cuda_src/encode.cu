// Sketches and residuals of states that a flush has just written, for the map subspace: a basis B adapted to each
// state, U = S^T B, and codes of what U B^T leaves of S^T. Flushes with raw keys encode states themselves (ENCODES in
// flush/config.cuh).
//
// Takes the rows of a call whose windows are at their beginning. A block has one (row, head) at a time, with the state
// in registers. encode/basis.cuh has the sketch, encode/residual.cuh the residual.
//
// -D constants: read.cu's.
#include "encode/residual.cuh"
#include "slot/cursor.cuh"
#include "slot/schedule.cuh"

constexpr int ENCODE_BLOCKS = 16 / ENCODERS;  // of a multiprocessor

#ifndef SIZES_ONLY
// Lists the rows at the beginning of a window, in the same order in every block; returns their number.
DEVICE int list_rows(const Schedule& schedule, const Strided<int>& cursor, int batch, short* rows) {
    __shared__ int counts[ENCODERS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int total = 0;
#pragma unroll 1
    for (int first = 0; first < batch; first += 32 * ENCODERS) {
        const int row = first + threadIdx.x, slot = row < batch ? schedule.slots[row] : -1;
        const bool begins = slot >= 0 && position_of(*cursor.of(slot), W) == 0;
        const u32 ballot = __ballot_sync(ALL, begins);
        if (lane == 0) counts[warp] = __popc(ballot);
        __syncthreads();
        int before = total;
        for (int i = 0; i < ENCODERS; i++) {
            if (i < warp) before += counts[i];
            total += counts[i];
        }
        if (begins) rows[before + __popc(ballot & ((1u << lane) - 1))] = static_cast<short>(row);
        __syncthreads();
    }
    return total;
}

extern "C" __global__ void __launch_bounds__(32 * ENCODERS, ENCODE_BLOCKS)
    encode_states(const state_t* state, int state_stride, sketch_t* sketch, int sketch_stride, int* cursor,
                  int cursor_stride, const uint2* basis, const int4* heads, const int* order,
                  ENCODE_STATES_PARAMETERS) {
    extern __shared__ uint4 shared[];
    EncodeMemory& m = *reinterpret_cast<EncodeMemory*>(shared);
    __shared__ short rows[MAX_ROWS];
    wait_for_previous_kernel();
    allow_next_kernel();
    const int tiles = SKETCHED_HEADS * list_rows(*schedule, {cursor, cursor_stride}, batch, rows);
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int head = order[FULL_STATE_HEADS + tile % SKETCHED_HEADS];
        const int slot = schedule->slots[rows[tile / SKETCHED_HEADS]];
        const int4 info = heads[head];
        sketch_t* const packed = Strided<sketch_t>{sketch, sketch_stride}.of(slot) + info.y;
        const state_t* const home =
            Strided<const state_t>{state, state_stride}.of(slot) + (head * V + threadIdx.x / 32 * 16) * K;
        auto at = [&](int row, int channel) { return home + row * K + channel; };
        encode_state(m, at, basis, packed, info, [] {});
    }
}
#endif

// Values for the host's launch.
extern "C" __device__ int encode_shared_bytes = sizeof(EncodeMemory);
extern "C" __device__ int encode_threads = 32 * ENCODERS;
