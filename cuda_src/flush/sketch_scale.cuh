// Sketches of extreme states. float32 cannot hold the squares of an extreme state, so U is scaled by powers of two
// before U is squared or multiplied by the state. Extreme states are rare: these functions are not inlined, and scale
// shared memory in place.
//
// 1. Each group of warps with an extreme row block multiplies its rows of U by the group's power, between U and S U.
// 2. The epilogue warp brings all rows of U, and all groups' shares of S U, to one power for the whole state.
#pragma once
#include "flush/sketch.cuh"

DEVICE float group_power(const Columns& u, int group) {
    const int first = group * GROUP_BLOCKS;
    return u.extreme<GROUP_BLOCKS>(first) ? u.power<GROUP_BLOCKS>(first) : 1.f;
}

// Step 1, by warp `member` of an extreme group; ends with a barrier of the group. Stores U first, unless
// EPILOGUE_STORES.
__device__ __noinline__ void scale_group(Columns& u, int group, int member, sketch_t* packed, int rank) {
    const float power = group_power(u, group);
    for (int i = group * GROUP_BLOCKS + member; i < (group + 1) * GROUP_BLOCKS; i += GROUP_WARPS) {
        if constexpr (!EPILOGUE_STORES) store_columns(u, i, packed, rank);
        __syncwarp();
        u.scale<1>(i, rank, power);
    }
    named_barrier_sync<32 * GROUP_WARPS>(FIRST_GROUP_BARRIER + group);
}

// Step 2, by the epilogue warp, once U is scaled and stored and the sums are complete. Stores U if U has two stages,
// except as codes. Returns the state's power: U is now multiplied by this power, and S U by its square.
__device__ __noinline__ float scale_sketch(Columns& u, Sums& sums, sketch_t* packed, int rank) {
    const float power = u.power<ROW_BLOCKS>(0);
    float powers[SKETCH_GROUPS];
    for (int i = 0; i < SKETCH_GROUPS; i++) powers[i] = group_power(u, i);
    if constexpr (COLUMN_STAGES > 1 && !CODED) {
        for (int i = 0; i < SKETCH_GROUPS; i++)
            u.scale<GROUP_BLOCKS>(i * GROUP_BLOCKS, rank, inverse_of_power(powers[i]));
        __syncwarp();
        store_columns(u, packed, rank);
        __syncwarp();
    }
    for (int group = 0; group < SKETCH_GROUPS; group++) {
        const float factor = power * inverse_of_power(powers[group]);
        u.scale<GROUP_BLOCKS>(group * GROUP_BLOCKS, rank, COLUMN_STAGES > 1 && !CODED ? power : factor);
        float* const part = &sums.parts[group][0][0];
        for (int i = threadIdx.x % 32; i < static_cast<int>(sizeof(sums.parts[0]) / sizeof(float)); i += 32)
            part[i] *= power * factor;
    }
    __syncwarp();
    return power;
}
