// A call's integers per row: slots, lengths and accepted counts.
#pragma once
#include "constants.cuh"
#include "lib/strided.cuh"

struct Numbers {
    const void* first;
    int flags;

    DEVICE i64 of(int row) const {
        return flags & WIDE ? static_cast<const i64*>(first)[row] : static_cast<const int*>(first)[row];
    }
    // A number's words, loaded without a branch, so that later loads start at once. high == low if there is one word.
    struct Words {
        int low, high;
    };
    // `Int`: const int, or const volatile int where the previous kernel may still change the number.
    template <class Int = const int> DEVICE Words words(int row) const {
        const int wide = flags & WIDE;
        Int* const at = static_cast<Int*>(first) + row * (1 + wide);
        return {at[0], at[wide]};
    }
    // The number if an int holds it, otherwise the least int.
    DEVICE int to_int(const Words& x) const { return flags & WIDE && x.high != x.low >> 31 ? -2147483647 - 1 : x.low; }
};

// Slots of rows without work: padding rows, and rows that are left out because their slot does not exist or another row
// names the same slot.
enum { PADDING = -1, LEFT_OUT = -2 };

// Rows that must be searched for repeated slots: `from` to `to` - 1, relative to the launch's rows. Empty if the host
// has already searched.
struct Scan {
    int from, to;
    DEVICE bool needed() const { return to - from > 1; }
};

constexpr int SCAN_ROOM = 512;  // slots in shared memory

struct CallSlots {
    Numbers numbers;
    Scan scan;
    int pad, count;  // the number that means padding; slots 0 to count - 1 exist
    int* left_out;   // how many rows were left out

    // Slot of a row, PADDING or LEFT_OUT; without a look at the other rows.
    DEVICE int of(int row) const { return checked(numbers.words(row)); }
    DEVICE int checked(const Numbers::Words& words) const {
        const int number = numbers.to_int(words);
        return number == pad ? PADDING : static_cast<u32>(number) < static_cast<u32>(count) ? number : LEFT_OUT;
    }
    // Whether one of the rows first, first + step, ... other than `row` names the slot.
    DEVICE bool repeated(int row, int slot, int first, int step) const {
        bool found = false;
#pragma unroll 1
        for (int i = scan.from + first; i < scan.to; i += step)
            found |= numbers.to_int(numbers.words(i)) == slot && i != row;
        return found && slot >= 0;
    }
    // The slot, or LEFT_OUT if another row names the same slot. By a whole warp, or by a whole block, for one row.
    DEVICE int once_in_warp(int row, int slot) const {
        if (!scan.needed()) return slot;
        return __any_sync(0xffffffffu, repeated(row, slot, threadIdx.x % 32, 32)) ? LEFT_OUT : slot;
    }
    DEVICE int once_in_block(int row, int slot) const {
        if (!scan.needed()) return slot;
        return __syncthreads_or(repeated(row, slot, threadIdx.x, blockDim.x)) ? LEFT_OUT : slot;
    }
    // The same by all threads of a block, each for its own row; `room`: SCAN_ROOM numbers in shared memory.
    DEVICE int once_by_thread(int row, int slot, int* room) const {
        bool found = false;
        for (int first = scan.from; scan.needed() && first < scan.to; first += SCAN_ROOM) {
            const int size = min(SCAN_ROOM, scan.to - first);
            __syncthreads();
            for (int i = threadIdx.x; i < size; i += blockDim.x) room[i] = of(first + i);
            __syncthreads();
            for (int i = 0; i < size; i++) found |= room[i] == slot && first + i != row;
        }
        return found && slot >= 0 ? LEFT_OUT : slot;
    }
    // Counts a row that is left out. By one thread per row.
    DEVICE void note(int slot) const { if (slot == LEFT_OUT && numbers.flags & COUNTED) atomicAdd(left_out, 1); }
};

// A kernel's parameters that are constant for a head, and the slots made from all parameters.
#define SLOT_LIMITS int pad_slot, int slot_count, int *left_out
#define SLOTS                                                                                      \
    CallSlots {                                                                                    \
        {slot_numbers, slot_flags}, {scan_from, scan_to}, pad_slot, slot_count, left_out           \
    }
