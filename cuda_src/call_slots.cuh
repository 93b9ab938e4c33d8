// The integers that a call names for its rows: slots, lengths and accepted counts.
#pragma once
#include "ptx.cuh"

enum { WIDE = 1 };  // a flag: numbers of 8 bytes, not of 4

struct Numbers {
    const void* first;
    int flags;

    __device__ __forceinline__ i64 of(int row) const {
        return flags & WIDE ? static_cast<const i64*>(first)[row] : static_cast<const int*>(first)[row];
    }
    // The number as it stands in memory at any time.
    __device__ __forceinline__ i64 early(int row) const {
        return flags & WIDE ? static_cast<const volatile i64*>(first)[row]
                            : static_cast<const volatile int*>(first)[row];
    }
};

// Slots of rows without work: padding; and rows that are left out.
enum { PADDING = -1, LEFT_OUT = -2 };

struct CallSlots {
    Numbers numbers;
    int pad, count;  // the number that means padding; slots 0 to count - 1 exist

    // Slot of a row; PADDING, or LEFT_OUT where there is no such slot.
    __device__ __forceinline__ int of(int row) const { return checked(numbers.of(row)); }
    __device__ __forceinline__ int early(int row) const { return checked(numbers.early(row)); }
    __device__ __forceinline__ int checked(i64 number) const {
        if (number == pad) return PADDING;
        return number >= 0 && number < count ? static_cast<int>(number) : LEFT_OUT;
    }
};

// A kernel's parameters for the slots of a call, and for what holds for all of a head's calls.
#define SLOT_PARAMETERS const void *slot_numbers, int slot_flags
#define SLOT_LIMITS int pad_slot, int slot_count
