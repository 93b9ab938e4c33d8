// The end of a sketch: what is stored, from U and the groups' sums of S U, by warps that have nothing else in their registers.
//
// factors (lowrank, prior): the pivots are Q = U_p R^-1, with R the Cholesky factor of their Gram matrix, so that
// B = S Q / sqrt(mu) and L = U^T Q / sqrt(mu) follow from S U_p and U^T U_p by substitution. own (ridge, exact): a dense
// map from exact blocks. See sketchssm/reference/maps.py for each in four lines.
#pragma once
// Outside of conditions, as sources are joined without a preprocessor.
#include "map_sums.cuh"
#if MAP == 0
#include "map_factors.cuh"
#elif MAP == 1 && RANK_MAX <= 16
#include "map_dense.cuh"
#elif MAP == 1
#include "map_panels.cuh"
#endif

// A warp's part of one head's sketch, as `member` of a group; `rows` are all of the state's. `turn` counts the block's sketches.
// `then` is told of each block of rows that the warp no longer needs, or called once, when the group no longer needs the warp's (OWN_ROWS).
template <class Then>
__device__ __forceinline__ void share_sketch(SketchMemory& m, SketchLatches& latches, Rows* rows, int group, int member, sketch_t* packed,
                                             int rank, int& turn, Then then) {
    const int lane = threadIdx.x % 32;
    [[maybe_unused]] WarpLatch& met = latches.met[group];
    Columns& u = m.columns[turn % COLUMN_SETS];
    if (turn >= COLUMN_SETS) latches.columns_read[turn % COLUMN_SETS].wait(turn / COLUMN_SETS - 1);
    // A finisher reads U while others may still multiply with it.
    if (COLUMN_SETS == 1 && LEFT > 0 && !OWN_ROWS && turn > 0) latches.full[(turn - 1) % FINISHERS].wait((turn - 1) / FINISHERS);
    m.basis.delivery.wait(turn);
    sketch_columns(u, m.basis, rows, group, member, rank);
#pragma unroll
    for (int i = 0; i < OWN_BLOCKS; i++) {
        const int block = group * GROUP_BLOCKS + member + i * SHARERS;
        if (lane == 0 && block < NWARPS) u.norms[block] = rows[block].norm;
    }
    latches.made[turn % FINISHERS].arrive();
    if constexpr (LEFT > 0) {
        if (GROUPS == 1) latches.made[turn % FINISHERS].wait(turn / FINISHERS);
        else met.arrive(), met.wait(2 * turn);
        if (turn >= SUMS) latches.sums_read[turn % SUMS].wait(turn / SUMS - 1);
        left_products(m.sums[turn % SUMS], u, rows, group, member, MAP == FACTORS ? pivots_of(rank) : rank, [&](int block) {
            if (!OWN_ROWS) then(block);
        });
    }
    if (LEFT > 0) latches.full[turn % FINISHERS].arrive();
    if (OWN_ROWS && LEFT > 0) met.arrive(), met.wait(GROUPS == 1 ? turn : 2 * turn + 1);
    if (OWN_ROWS || LEFT == 0) leave_rows(member, then);
    if constexpr (COLUMN_SETS == 1) {
#pragma unroll 1
        for (int i = member; i < GROUP_BLOCKS; i += SHARERS) store_columns(u, group * GROUP_BLOCKS + i, packed, rank);
        __syncwarp();  // before other lanes put the next columns there
    }
    turn++;
}

// The rest of it, by another warp. `then` is what may happen once the basis has been used.
template <class Then>
__device__ __forceinline__ void finish_sketch(SketchMemory& m, SketchLatches& latches, [[maybe_unused]] sketch_t* packed,
                                              [[maybe_unused]] const sketch_t* projection, int rank, [[maybe_unused]] float ridge,
                                              int turn, Then then) {
    latches.made[turn % FINISHERS].wait(turn / FINISHERS);
    then();
    [[maybe_unused]] const Columns& u = m.columns[turn % COLUMN_SETS];
    [[maybe_unused]] WarpLatch& columns_read = latches.columns_read[turn % COLUMN_SETS];
    if constexpr (COLUMN_SETS > 1) store_columns(u, packed, rank);
#if MAP == 2
    columns_read.arrive();
#else
    const float power = u.power<NWARPS>(0);
    const float norm = threadIdx.x % 32 < NWARPS ? power * u.norms[threadIdx.x % 32] : 0.f, squares = warp_sum(norm * norm);
    const float mu = fmaxf(squares, 1.f) / K;  // of the state times `power`; the bound is for zeros, and norms below 2^-116
    Sums& sums = m.sums[turn % SUMS];
    Scale& scale = m.scale[turn % FINISHERS];
#pragma unroll
    for (int i = 0; i < GROUPS; i++) scale[i] = power * (GROUPS > 1 ? power * inverse_of_power(u.power<GROUP_BLOCKS>(i * GROUP_BLOCKS)) : 1.f);
    __syncwarp();
    auto wait_sums = [&] { latches.full[turn % FINISHERS].wait(turn / FINISHERS); };  // U comes first
#if MAP == 0
    store_factors(m.dots[turn % FINISHERS], sums, scale, u, columns_read, latches.sums_read[turn % SUMS], packed, projection, rank, power, mu, ridge,
                  wait_sums);
#else
    store_dense(m, sums, scale, latches, packed, rank, power, mu, ridge, turn, wait_sums);  // has one set of columns
    latches.sums_read[turn % SUMS].arrive();
#endif
#endif
}
