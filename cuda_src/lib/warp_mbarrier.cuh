// mbarriers that count warps.
#pragma once
#include "lib/common.cuh"

#ifdef EVERY_LANE_ARRIVES  // for racecheck, which does not follow a __syncwarp before one lane's arrival
constexpr int ARRIVING = 32;
#else
constexpr int ARRIVING = 1;
#endif

// A phase completes when the given number of warps has arrived; see Mbarrier.
struct WarpMbarrier {
    Mbarrier mbarrier;

    DEVICE void init(int warps) { mbarrier.init(warps * ARRIVING); }
    // Makes what all lanes have written visible to those who wait.
    DEVICE void arrive() {
        __syncwarp();
        if (threadIdx.x % 32 < ARRIVING) mbarrier.arrive();
    }
    DEVICE void wait(int round) { mbarrier.wait(round); }
};
