// Overwrites one part of some slots' memory with rows of another array, or with zeros: `load_state` and `reset`.
//
// Sizes are in units of 16 bytes, strides in bytes. Each block handles a share of a row. Rows without a slot are
// skipped.
#include "slot/call_slots.cuh"
#include "slot/cursor.cuh"

extern "C" __global__ void __launch_bounds__(256)
    set_slots(uint4* part, int stride, int* cursor, int cursor_stride, SET_SLOTS_PARAMETERS, SLOT_LIMITS,
              int* clock_word) {
    const CallSlots slots = SLOTS;
    const int row = blockIdx.x / shares, share = blockIdx.x % shares, slot = slots.once_in_block(row, slots.of(row));
    if (share == 0 && threadIdx.x == 0) slots.note(slot);
    if (slot < 0) return;
    uint4* const to = Strided<uint4>{part, stride}.of(slot);
    const uint4* const from = reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(rows) + row * row_stride);
    for (int i = share * 256 + threadIdx.x; i < size; i += 256 * shares)
        to[i] = rows ? from[i] : make_uint4(0, 0, 0, 0);
    if (share == 0 && threadIdx.x == 0) *Strided<int>{cursor, cursor_stride}.of(slot) = Clock{clock_word}.stroke();
}
