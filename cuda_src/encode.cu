// Sketches and residuals of states that a flush has just written, for the map subspace: a basis B adapted to each
// state, U = S^T B, and codes of what U B^T leaves of S^T. Flushes with raw keys encode states themselves (ENCODES in
// flush/config.cuh).
//
// Takes the rows of a call whose windows are at their beginning. A block has one (row, head) at a time, with the state
// in registers, while the next state is copied to shared memory if there is room. encode/basis.cuh has the sketch,
// encode/residual.cuh the residual.
//
// -D constants: read.cu's.
#include "encode/residual.cuh"
#include "slot/cursor.cuh"
#include "slot/schedule.cuh"

constexpr int ENCODE_BLOCKS = 16 / ENCODERS;  // of a multiprocessor

// 16 rows of a state, of one warp. Rows are so far apart that two rows, which a load of 16 bytes reads at once, are in
// different banks.
struct RowStage {
    static constexpr int STRIDE = K + 16, PIECE = 16 / sizeof(state_t);
    alignas(16) state_t rows[16][STRIDE];

    DEVICE state_t* at(int row, int channel) { return &rows[row][channel]; }
    DEVICE void fetch(const state_t* from) {
#pragma unroll 4
        for (int i = encoder_thread() % 32; i < 16 * K / PIECE; i += 32)
            copy_async_16(at(i / (K / PIECE), i % (K / PIECE) * PIECE), from + i * PIECE);
        copy_async_commit();
    }
    DEVICE void wait() {
        copy_async_wait<0>();
        __syncwarp();
    }
};

// Whether the blocks of a multiprocessor have room for them, beside 3 KB for static shared memory and the system; else
// warps read the state where it is.
constexpr bool STAGED =
    (sizeof(EncodeMemory) + ENCODERS * sizeof(RowStage) + 3072) * ENCODE_BLOCKS <= MOST_SHARED + 1024;

struct BlockMemory {
    EncodeMemory encode;
    RowStage stages[STAGED ? ENCODERS : 1];
};

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
    BlockMemory& m = *reinterpret_cast<BlockMemory*>(shared);
    __shared__ short rows[MAX_ROWS];
    RowStage& stage = m.stages[STAGED ? threadIdx.x / 32 : 0];
    wait_for_previous_kernel();
    allow_next_kernel();
    const int count = list_rows(*schedule, {cursor, cursor_stride}, batch, rows), tiles = SKETCHED_HEADS * count;
    // Head and slot of the block's nth tile; a slot of -1 past the last. All rows of a head follow one another, and the
    // blocks' order turns round each time: so every block has its share of the heads of high rank, which take longer.
    auto find = [&](int n) {
        const int own = blockIdx.x, blocks = gridDim.x, tile = n * blocks + (n % 2 ? blocks - 1 - own : own);
        if (tile >= tiles) return make_int2(0, -1);
        return make_int2(order[FULL_STATE_HEADS + tile / count], schedule->slots[rows[tile % count]]);
    };
    auto rows_of = [&](const int2& tile) {  // those of this warp
        return Strided<const state_t>{state, state_stride}.of(tile.y) +
               (tile.x * V + encoder_thread() / 32 * 16) * K;
    };
    auto fetch = [&](const int2& tile) {
        if (STAGED && tile.y >= 0) stage.fetch(rows_of(tile));
    };
    int2 coming = find(0);
    fetch(coming);
#pragma unroll 1
    for (int n = 1; coming.y >= 0; n++) {
        const int2 now = coming;
        coming = find(n);
        const int4 info = heads[now.x];
        sketch_t* const packed = Strided<sketch_t>{sketch, sketch_stride}.of(now.y) + info.y;
        [[maybe_unused]] const state_t* home = STAGED ? nullptr : rows_of(now);
        auto at = [&](int row, int channel) {
            if constexpr (STAGED) return stage.at(row, channel);
            else return home + row * K + channel;
        };
        if (STAGED) stage.wait();
        encode_state(m.encode, at, basis, packed, info, [&] {
            __syncwarp();
            fetch(coming);
        });
    }
}
#endif

// Values for the host's launch.
extern "C" __device__ int encode_shared_bytes = sizeof(BlockMemory);
extern "C" __device__ int encode_threads = 32 * ENCODERS;
