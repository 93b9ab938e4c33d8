// What the read kernel leaves for the flush kernel of the same step.
#pragma once
#include "common.cuh"

constexpr int MAX_ROWS = 512;

// One per engine. All zeros at first, and all but the rows after every step.
struct Schedule {
    int due;              // how many rows to flush
    int claimed;          // items of the flush, beyond those that its blocks begin with
    u32 ticket;           // flush blocks that are done
    u32 looked;           // read blocks that have found nothing due
    int idle;             // 1 once that is all of them
    alignas(8) int2 rows[MAX_ROWS];  // which, in any order: slot and row

    // By one thread of a read block that has met and needs no cursor any more, where none of its rows is due.
    __device__ __forceinline__ void has_none_due() {
        __threadfence();
        if (atomicAdd(&looked, 1u) + 1 == gridDim.x) store_release(&idle, 1);
    }
    // For all threads of a block: whether nothing is due. The read may not have ended.
    __device__ __forceinline__ bool is_idle() const { return __syncthreads_or(threadIdx.x == 0 && load_acquire(&idle)); }
    __device__ __forceinline__ void forget() { looked = 0, idle = 0; }
};
