// What the read kernel passes to the flush kernel of the same step, in global memory.
#pragma once
#include "common.cuh"

constexpr int MAX_ROWS = 512;

// A row to flush, and the number of tokens in its ring.
struct alignas(8) DueRow {
    int slot;
    u32 row : 16, buffered : 16;
};

// One for each stream and each captured graph of an engine. All zeros at first; all zeros but `rows` and `slots` after
// every step.
struct Schedule {
    int due;                         // number of rows to flush
    int next_tile;                   // next unclaimed tile of the flush, not counting those that its blocks begin with
    u32 finished_blocks;             // flush blocks that are done
    u32 listed_blocks;               // read blocks that have listed their due rows
    int listed;                      // 1 once all of them have
    int slots[MAX_ROWS];             // of all rows, checked: negative for padding and for rows that are left out
    DueRow rows[MAX_ROWS];           // in any order

    // By one thread of a read block, once its due rows are listed and none of its threads needs a cursor any more.
    __device__ __forceinline__ void report_listed() {
        __threadfence();
        if (atomicAdd(&listed_blocks, 1u) + 1 == gridDim.x) store_release(&listed, 1);
    }
    // For all threads of a block: whether the list is complete. The read kernel may still be running.
    __device__ __forceinline__ bool is_listed() const {
        return __syncthreads_or(threadIdx.x == 0 && load_acquire(&listed));
    }
    // After a flush, when the read kernel has ended.
    __device__ __forceinline__ void reset() { due = next_tile = listed = 0, finished_blocks = listed_blocks = 0; }
};
