// What the read kernel passes to the flush kernel of the same step, in global memory.
#pragma once
#include "common.cuh"

constexpr int MAX_ROWS = 512;

// A row to flush, and the number of tokens in its ring.
struct alignas(8) DueRow {
    int slot;
    u32 row : 16, buffered : 16;
};

// One per engine. All zeros at first; all zeros but `rows` after every step.
struct Schedule {
    int due;                         // number of rows to flush
    int next_tile;                   // next unclaimed tile of the flush, not counting those that its blocks begin with
    u32 finished_blocks;             // flush blocks that are done
    u32 idle_blocks;                 // read blocks without a due row
    int idle;                        // 1 once all read blocks are idle
    DueRow rows[MAX_ROWS];           // in any order

    // By one thread of a read block without a due row, once none of its threads needs a cursor any more.
    __device__ __forceinline__ void report_idle() {
        __threadfence();
        if (atomicAdd(&idle_blocks, 1u) + 1 == gridDim.x) store_release(&idle, 1);
    }
    // For all threads of a block: whether nothing is due. The read kernel may still be running.
    __device__ __forceinline__ bool is_idle() const {
        return __syncthreads_or(threadIdx.x == 0 && load_acquire(&idle));
    }
    __device__ __forceinline__ void reset_idle() { idle_blocks = 0, idle = 0; }
};
