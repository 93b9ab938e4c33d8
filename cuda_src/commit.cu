// Keeps the first drafts of each row: `commit`. One block.
#include "cursor.cuh"

extern "C" __global__ void __launch_bounds__(512) commit(int* cursor, int* clock_word, int window, const i64* slots,
                                                         const i64* accepted, int batch) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const int stroke = Clock{clock_word}.commit(window);
    for (int row = threadIdx.x; row < batch; row += blockDim.x) {
        const i64 slot = slots[row];
        if (slot >= 0) cursor[slot] = after_commit(cursor[slot], accepted[row]) | stroke;
    }
}
