// Errors of reads at flush tokens, which are exact: `SketchHead.errors`.
//
// The read kernel also reads the tokens of measured flushes, and leaves the sketch's answers in the place of their
// outputs. The flush then waits for the end of the reads, compares each answer with the output that replaces it, and
// adds to the sums of the slot. One warp of a flush adds to a row block's sums: no order of additions changes.
//
// -D MONITOR: every so many flushes of a slot are measured. Without it none is. With -D TOLERANCE the last block of a
// flush compares the sums of measured rows with it (`compare_with_tolerance`).
#pragma once
#include "lib/strided.cuh"

#ifndef MONITOR
#define MONITOR 0
#endif

// Sums of a (slot, head, row block).
struct alignas(16) ErrorSums {
    float error, energy;  // squares of differences, and of exact outputs
    float flushes;        // measured or not; equal in all heads and row blocks
    float unused;

    DEVICE bool measures() const { return MONITOR > 0 && static_cast<int>(flushes) % (MONITOR + !MONITOR) == 0; }
};

// A kernel's parameters for the sums (slots, heads, V / 16), and for the tolerance; flushes look at it.
#if MONITOR
#define ERRORS_PARAMETERS , ErrorSums *errors, int errors_stride, [[maybe_unused]] float tolerance
#else
#define ERRORS_PARAMETERS
#endif
