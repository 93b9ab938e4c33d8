// `commit`: keeps the first accepted drafts of each row in its ring. One block. For standard decode (`window` 1), the
// drafts are only cleared: standard_draft.cu has decoded them.
#include "slot/call_slots.cuh"
#include "slot/cursor.cuh"

constexpr int THREADS = 512;

extern "C" __global__ void __launch_bounds__(THREADS)
    commit(int* cursor, int cursor_stride, int* clock_word, int window, COMMIT_PARAMETERS, SLOT_LIMITS) {
    __shared__ int room[SCAN_ROOM];
    wait_for_previous_kernel();
    allow_next_kernel();
    const CallSlots slots = SLOTS;
    const Numbers kept{accepted, accepted_flags};
    const int stroke = Clock{clock_word}.commit(window);
    for (int first = 0; first < batch; first += THREADS) {
        const int row = first + threadIdx.x;
        const int slot = slots.once_by_thread(row, row < batch ? slots.of(row) : PADDING, room);
        slots.note(slot);
        if (slot < 0) continue;
        int* const word = Strided<int>{cursor, cursor_stride}.of(slot);
        *word = window > 1 ? after_commit(*word, kept.of(row), window) | stroke : 0;
    }
}
