// Gates that whole warps open.
#pragma once
#include "common.cuh"

#ifdef EVERY_LANE_ARRIVES  // for racecheck, which does not see that lanes have met before one arrives for them
constexpr int ARRIVING = 32;
#else
constexpr int ARRIVING = 1;
#endif

// Opens when so many warps have arrived, once a round; see Gate.
struct WarpGate {
    Gate gate;

    __device__ __forceinline__ void init(int warps) { gate.init(warps * ARRIVING); }
    // What any lane has done before is seen by those that waited.
    __device__ __forceinline__ void arrive() {
        __syncwarp();
        if (threadIdx.x % 32 < ARRIVING) gate.arrive();
    }
    __device__ __forceinline__ void wait(int round) { gate.wait(round); }
};
