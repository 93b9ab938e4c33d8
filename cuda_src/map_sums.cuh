// What all maps share: which values and channels a lane has, and sums over the folding warps' groups.
#pragma once
#include "sketch.cuh"

constexpr int VALUES = (V + 31) / 32;  // value rows of a lane: lane, lane + 32, ...
constexpr int MINE = K / 32;           // channels of a lane: neighbours
// A pivot that lies this close to the ones before it, in squares, is left out: PIVOT_TOLERANCE squared.
constexpr float INDEPENDENT = 9e-6f;

// This lane's channels of row i of S U, summed over groups.
__device__ __forceinline__ void sum_parts(const SketchMemory& m, int i, float (&x)[MINE]) {
#pragma unroll
    for (int n = 0; n < MINE; n++) x[n] = 0;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        Packed<FP32, MINE> part;
        part.load(&m.parts[group][i][MINE * (threadIdx.x % 32)]);
#pragma unroll
        for (int n = 0; n < MINE; n++) x[n] += part[n];
    }
}
