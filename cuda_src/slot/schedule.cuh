// Data in global memory that the kernels of a call pass to each other: the list of rows to flush.
#pragma once
#include "lib/common.cuh"
#include "slot/cursor.cuh"

// What a flush does to the sums of its row's errors (slot/errors.cuh). UNCOUNTED: nothing, as all reads are exact.
enum { UNMEASURED, MEASURED, UNCOUNTED };
constexpr int MEASURE_BITS = LASTING ? 2 : 1;

// A row to flush, the number of tokens in its ring, and what the flush does to the row's errors.
struct alignas(8) DueRow {
    int slot;
    u32 row : 16, buffered : 16 - MEASURE_BITS, measure : MEASURE_BITS;
};

// An engine has one Schedule for each stream and each captured graph. All fields are zero at first. After every step,
// all fields except `rows` and `slots` are zero again.
struct Schedule {
    int due;                         // number of rows to flush
    int next_tile;                   // next unclaimed tile of the flush; the tiles that blocks begin with do not count
    u32 finished_blocks;             // flush blocks that are done
    u32 listed_blocks;               // read blocks that have listed their due rows
    int listed;                      // when all read blocks have listed their due rows: 1 + number of rows to flush
    int slots[MAX_ROWS];             // checked slots of all rows: negative for padding and for rows that are left out
    DueRow rows[MAX_ROWS];           // in any order

    // By one thread of a read block, when the block has listed its due rows and needs no cursor any more.
    DEVICE void report_listed() {
        __threadfence();
        if (atomicAdd(&listed_blocks, 1u) + 1 < gridDim.x) return;
        __threadfence();
        store_release(&listed, 1 + atomicAdd(&due, 0));
    }
    // Number of rows to flush, or -1 if the list is not complete. By all threads of a block, once. The read kernel may
    // still be running.
    DEVICE int listed_rows() const {
        __shared__ int seen;
        if (threadIdx.x == 0) seen = load_acquire(&listed);
        __syncthreads();
        return seen - 1;
    }
    // By one thread, after a flush and after the read kernel has ended.
    DEVICE void reset() { due = next_tile = listed = 0, finished_blocks = listed_blocks = 0; }
};
