// What the read kernel leaves for the flush kernel of the same step.
#pragma once
#include "common.cuh"

constexpr int MAX_ROWS = 512;

// One per engine, all zeros at first and after every step.
struct Schedule {
    int due;             // how many rows to flush
    u32 ticket;          // flush blocks that are done
    int rows[MAX_ROWS];  // which, in any order
};
