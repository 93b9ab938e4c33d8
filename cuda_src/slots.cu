// Overwrites the slots of an array with rows of another, or with zeros: `load_state` and `reset`.
//
// Rows are counted in units of 16 bytes. Each block handles a part of a row; rows of slot -1 are skipped.
#include "cursor.cuh"

extern "C" __global__ void __launch_bounds__(256) set_slots(uint4* array, i64 slot_stride, const uint4* rows, i64 size,
                                                            int* cursor, const i64* slots, int parts,
                                                            int* clock_word) {
    const i64 row = blockIdx.x / parts, slot = slots[row];
    const int part = blockIdx.x % parts;
    if (slot < 0) return;
    for (i64 i = part * 256 + threadIdx.x; i < size; i += 256 * parts)
        array[slot * slot_stride + i] = rows ? rows[row * size + i] : make_uint4(0, 0, 0, 0);
    if (part == 0 && threadIdx.x == 0) cursor[slot] = Clock{clock_word}.stroke();
}
