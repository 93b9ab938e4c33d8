// Latches that whole warps open.
#pragma once
#include "common.cuh"

#ifdef EVERY_LANE_ARRIVES  // for racecheck, which does not see that lanes have met before one arrives for them
constexpr int ARRIVING = 32;
#else
constexpr int ARRIVING = 1;
#endif

// Opens when so many warps have arrived, once a round; see Latch.
struct WarpLatch {
    Latch latch;

    __device__ __forceinline__ void init(int warps) { latch.init(warps * ARRIVING); }
    // What any lane has done before is seen by those that waited.
    __device__ __forceinline__ void arrive() {
        __syncwarp();
        if (threadIdx.x % 32 < ARRIVING) latch.arrive();
    }
    __device__ __forceinline__ void wait(int round) { latch.wait(round); }
};
