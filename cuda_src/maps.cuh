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

// A warp's part of one head's sketch; `rows` are its block's. `squares` is this thread's share of |S|^2; `turn` counts the
// block's sketches.
template <class Rows> __device__ __forceinline__ void share_sketch(SketchMemory& m, SketchGates& gates, Rows* rows, float squares, sketch_t* packed,
                                                                   const uint2* basis, int rank, int& turn) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    [[maybe_unused]] Gate& met = gates.met[warp / SHARERS];
    squares = warp_sum(squares);
    if (turn > 0) gates.free.wait(turn - 1);
    if (lane == 0) m.squares[warp] = squares;
    sketch_columns(m, rows[warp].state, basis, rank);
    __syncwarp();
    if (LEFT > 0 && lane == 0) met.arrive();
    store_columns(m, packed, rank);
    if constexpr (LEFT > 0) {
        met.wait(2 * turn);
        left_products(m, rows + warp / SHARERS * SHARERS, MAP == FACTORS ? pivots_of(rank) : rank);
    }
    __syncwarp();
    if (lane == 0) gates.full.arrive();
    if constexpr (LEFT > 0) {
        if (lane == 0) met.arrive();
        met.wait(2 * turn + 1);  // the group has read this warp's rows
    }
    turn++;
}

// The rest of it, by one other warp.
__device__ __forceinline__ void finish_sketch(SketchMemory& m, SketchGates& gates, [[maybe_unused]] sketch_t* packed,
                                              [[maybe_unused]] const sketch_t* projection, int rank,
                                              [[maybe_unused]] float ridge, int& turn) {
    gates.full.wait(turn++);
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
    store_dense(m, gates.free, packed, rank, mu, ridge);
#endif
#endif
}
