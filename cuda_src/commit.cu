// Keeps the first drafts of each row: `commit`. One block. Without windows (`window` 1) drafts are only dropped.
#include "call_slots.cuh"
#include "cursor.cuh"
#include "strided.cuh"

extern "C" __global__ void __launch_bounds__(512)
    commit(int* cursor, int cursor_stride, int* clock_word, int window, SLOT_PARAMETERS, const void* accepted,
           int accepted_flags, int batch, SLOT_LIMITS) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const CallSlots slots{{slot_numbers, slot_flags}, pad_slot, slot_count};
    const Numbers kept{accepted, accepted_flags};
    const int stroke = Clock{clock_word}.commit(window);
    for (int row = threadIdx.x; row < batch; row += blockDim.x) {
        const int slot = slots.of(row);
        if (slot < 0) continue;
        int* const word = Strided<int>{cursor, cursor_stride}.of(slot);
        *word = window > 1 ? after_commit(*word, kept.of(row)) | stroke : 0;
    }
}
