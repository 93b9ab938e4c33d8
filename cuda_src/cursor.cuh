// The cursor word of a slot, and how calls change it. sketchssm/slots.py describes its bits; reference/engines.py is the
// twin of these functions.
#pragma once
#include "ptx.cuh"

constexpr int POSITION_BITS = 63, DUE = 64;

__device__ __forceinline__ int position_of(int word) { return word & POSITION_BITS; }

// Whether a plain token completes the row's window.
__device__ __forceinline__ bool flushes_now(int word, int window) {
    return word & DUE || position_of(word) == window - 1;
}
// The word after a plain token.
__device__ __forceinline__ int after_token(int word, int window) {
    return flushes_now(word, window) ? 0 : position_of(word) + 1;
}

// The head's clock: the cursor word of a virtual row that takes part in every call. Null: no clock.
struct Clock {
    int* word;

    // The DUE bit that a window begins with.
    __device__ __forceinline__ int stroke() const { return word ? *word & DUE : 0; }
    // Moves on by a plain token. By one thread.
    __device__ __forceinline__ void tick(int window) const {
        const int next = after_token(*word, window);
        *word = next | (next == window - 1 ? DUE : 0);
    }
};
