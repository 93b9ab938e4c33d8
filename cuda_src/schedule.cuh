// What the read kernel leaves for the flush kernel of the same step.
#pragma once
#include "common.cuh"

constexpr int MAX_ROWS = 512;

// One per engine. All zeros at first, and all but the rows after every step.
struct Schedule {
    int due;              // how many rows to flush
    int claimed;          // items of the flush, beyond those that its blocks begin with
    u32 ticket;           // flush blocks that are done
    alignas(8) int2 rows[MAX_ROWS];  // which, in any order: slot and row
};
