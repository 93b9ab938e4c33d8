// The end of a sketch: what is stored, from U and the warps' shares of S U, by one warp that has nothing else in its registers.
//
// factors (lowrank, prior): the pivots are Q = U_p R^-1, with R the Cholesky factor of their Gram matrix, so that
// B = S Q / sqrt(mu) and L = U^T Q / sqrt(mu) follow from S U_p and U^T U_p by substitution. own (ridge, exact): a dense
// map from exact blocks. See sketchssm/reference/maps.py for each in four lines.
#pragma once
// Outside of conditions, as sources are joined without a preprocessor.
#include "map_sums.cuh"
#if MAP == 0
#include "map_factors.cuh"
#elif MAP == 1
#include "map_dense.cuh"
#endif

// Rounds of products that a sketch takes: dense maps take LEFT columns of U a round.
__device__ __forceinline__ int rounds_of(int rank) { return MAP == OWN ? (rank + LEFT - 1) / LEFT : 1; }

// A warp's part of one head's sketch. `squares` is this thread's share of |S|^2; `turn` counts the block's rounds.
__device__ __forceinline__ void share_sketch(SketchMemory& m, SketchGates& gates, StateRows& rows, float squares, sketch_t* packed,
                                             const uint2* basis, int rank, int& turn) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    squares = warp_sum(squares);
    if (turn > 0) gates.free.wait(turn - 1);
    if (lane == 0) m.squares[warp] = squares;
    sketch_columns(m, rows, basis, rank);
    __syncwarp();
    store_columns(m, packed, rank);
    for (int round = 0; round < rounds_of(rank); round++, turn++) {
        if (round > 0) gates.free.wait(turn - 1);
        if (LEFT > 0) left_products(m, rows, round * LEFT, MAP == FACTORS ? pivots_of(rank) : min(rank - round * LEFT, LEFT));
        __syncwarp();
        if (lane == 0) gates.full.arrive();
    }
}

// The rest of it, by one other warp.
__device__ __forceinline__ void finish_sketch(SketchMemory& m, SketchGates& gates, [[maybe_unused]] sketch_t* packed,
                                              [[maybe_unused]] const sketch_t* projection, int rank,
                                              [[maybe_unused]] float ridge, int& turn) {
    for (int round = 0; round < rounds_of(rank); round++, turn++) {
        gates.full.wait(turn);
#if MAP == 2
        __syncwarp();  // else one lane opens rounds that another has yet to see
        if (threadIdx.x % 32 == 0) gates.free.arrive();
#else
        float mu = 0;
#pragma unroll
        for (int i = 0; i < NWARPS; i++) mu += m.squares[i];
        mu = mu > 0.f ? mu / K : 1.f;
#if MAP == 0
        store_factors(m, gates.free, packed, projection, rank, mu, ridge);
#else
        gather(m, round * LEFT, min(rank - round * LEFT, LEFT), mu);
        __syncwarp();
        if (round + 1 == rounds_of(rank)) store_dense(m, packed, rank, mu, ridge);
        __syncwarp();
        if (threadIdx.x % 32 == 0) gates.free.arrive();
#endif
#endif
    }
}
