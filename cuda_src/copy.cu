// Copies of slots, and updates of cursors after the caller has written slots' memory.
//
// `copy` is two kernels: check_pairs checks all pairs, copy_slots copies them. A block of copy_slots handles the same
// few bytes of all pairs and reads all of them before it writes. So a slot may be a destination and a source.
#include "slot/call_slots.cuh"
#include "slot/cursor.cuh"

constexpr int THREADS = 512, HELD = 8;  // units of 16 bytes that a thread holds

// One part of the slots' memory, as the host lists it.
struct CopyPart {
    char* first;
    i64 stride, units;
};

// Slots {source, destination} of each pair; PADDING if nothing is copied. One block.
extern "C" __global__ void __launch_bounds__(THREADS)
    check_pairs(CHECK_PAIRS_PARAMETERS, SLOT_LIMITS) {
    __shared__ int room[SCAN_ROOM];
    const CallSlots slots = SLOTS, from{{sources, source_flags}, {}, pad_slot, slot_count, left_out};
    const int row = threadIdx.x;
    const int to = slots.once_by_thread(row, row < count ? slots.of(row) : PADDING, room);
    if (row >= count) return;
    const int source = from.of(row);
    const bool wrong = to == LEFT_OUT || (source == LEFT_OUT && to != PADDING);
    slots.note(wrong ? LEFT_OUT : to);
    pairs[row] = wrong || to < 0 || source < 0 ? make_int2(PADDING, PADDING) : make_int2(source, to);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_slots(const CopyPart* parts, int part_count, int* cursor, int cursor_stride, COPY_SLOTS_PARAMETERS) {
    uint4 held[HELD];
    const Strided<int> cursors{cursor, cursor_stride};
    // Address of the block's unit number `i` in the source or the destination of its pair.
    auto place = [&](int i, bool source) -> uint4* {
        const int2 pair = i < count * units ? pairs[i / units] : make_int2(PADDING, PADDING);
        if (pair.y < 0) return nullptr;
        i64 unit = static_cast<i64>(blockIdx.x) * units + i % units;
        int part = 0;
        while (part < part_count && unit >= parts[part].units) unit -= parts[part++].units;
        if (part == part_count) return nullptr;
        return reinterpret_cast<uint4*>(parts[part].first + (source ? pair.x : pair.y) * parts[part].stride) + unit;
    };
    const bool moves = blockIdx.x == 0 && static_cast<int>(threadIdx.x) < count && pairs[threadIdx.x].y >= 0;
    const int word = moves ? *cursors.of(pairs[threadIdx.x].x) & (POSITION | DUE | EXACT) : 0;  // no drafts
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        const uint4* const from = place(threadIdx.x + n * THREADS, true);
        held[n] = from ? *from : make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    if (moves) *cursors.of(pairs[threadIdx.x].y) = word;
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        uint4* const to = place(threadIdx.x + n * THREADS, false);
        if (to) *to = held[n];
    }
}

// Cursors of slots whose memory the caller has written: drops their drafts; the slots are due if the clock is due. One
// block.
extern "C" __global__ void __launch_bounds__(THREADS)
    rejoin(int* cursor, int cursor_stride, int* clock_word, REJOIN_PARAMETERS, SLOT_LIMITS) {
    __shared__ int room[SCAN_ROOM];
    const CallSlots slots = SLOTS;
    for (int first = 0; first < count; first += THREADS) {
        const int row = first + threadIdx.x;
        const int slot = slots.once_by_thread(row, row < count ? slots.of(row) : PADDING, room);
        slots.note(slot);
        if (slot < 0) continue;
        int* const word = Strided<int>{cursor, cursor_stride}.of(slot);
        *word = (*word & (POSITION | EXACT)) | Clock{clock_word}.stroke();
    }
}
