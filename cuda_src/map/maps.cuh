// Epilogue of a sketch: the coefficient map, from U and the groups' sums of S U.
//
// MAP       map              computed as
// FACTORS   lowrank          factors: the orthonormal pivots are Q = U_p R^-1, with R the Cholesky factor of U_p^T U_p,
//                            so B = S Q / sqrt(mu) and L = U^T Q / sqrt(mu) follow from S U_p and U^T U_p by
//                            substitution
// DENSE     ridge            a dense matrix from U^T U and (S U)^T
//
// sketchssm/reference/maps.py has the equations.
#pragma once
// Not inside the conditions: the sources are joined without a preprocessor.
#include "flush/sketch_scale.cuh"
#include "map/sums.cuh"
#if MAP == FACTORS
#include "map/factors.cuh"
#elif MAP == DENSE
#include "map/dense.cuh"
#endif

// A warp's part of one head's sketch, as warp `member` of a group. `rows`: all row blocks of the state. `sketch_n`
// counts the block's sketches. `then(block)` is called for each row block that the warp no longer needs; with RAW_KEYS
// once, when the group no longer needs the warp's row block.
//
// Waits for: columns_empty, sums_empty, basis.full; columns_full or group_sync (U of the whole group is stored);
// sums_full of the sketch before (see below). Signals: columns_full, sums_full, columns_stored, group_sync.
template <class Then>
DEVICE void sketch_head(SketchMemory& m, SketchBarriers& barriers, StateStage* rows, int group, int member,
                        sketch_t* packed, int rank, int& sketch_n, Then then) {
    const int lane = threadIdx.x % 32;
    [[maybe_unused]] WarpMbarrier& group_sync = barriers.group_sync[group];
    Columns& u = m.columns[sketch_n % COLUMN_STAGES];
    if (sketch_n >= COLUMN_STAGES) barriers.columns_empty[sketch_n % COLUMN_STAGES].wait(sketch_n / COLUMN_STAGES - 1);
    // An epilogue warp may read U while other warps still multiply by it.
    if (COLUMN_STAGES == 1 && !RAW_KEYS && sketch_n > 0)
        barriers.sums_full[(sketch_n - 1) % EPILOGUE_WARPS].wait((sketch_n - 1) / EPILOGUE_WARPS);
    m.basis.full.wait(sketch_n);
    sketch_columns(u, m.basis, rows, group, member, rank);
#pragma unroll
    for (int i = 0; i < OWN_BLOCKS; i++) {
        const int block = group * GROUP_BLOCKS + member + i * GROUP_WARPS;
        if (lane == 0 && block < ROW_BLOCKS) u.norms[block] = rows[block].norm;
    }
    barriers.columns_full[sketch_n % EPILOGUE_WARPS].arrive();
    if (SKETCH_GROUPS == 1) barriers.columns_full[sketch_n % EPILOGUE_WARPS].wait(sketch_n / EPILOGUE_WARPS);
    else group_sync.arrive(), group_sync.wait(2 * sketch_n);
    [[maybe_unused]] const bool extreme = u.extreme<GROUP_BLOCKS>(group * GROUP_BLOCKS);
    if (extreme) scale_group(u, group, member, packed, rank);
    if (sketch_n >= SUM_STAGES) barriers.sums_empty[sketch_n % SUM_STAGES].wait(sketch_n / SUM_STAGES - 1);
    state_products(m.sums[sketch_n % SUM_STAGES], u, rows, group, member, MAP == FACTORS ? pivots_of(rank) : rank,
                  [&](int block) {
                      if (!RAW_KEYS) then(block);
                  });
    barriers.sums_full[sketch_n % EPILOGUE_WARPS].arrive();
    if (RAW_KEYS) {
        group_sync.arrive(), group_sync.wait(SKETCH_GROUPS == 1 ? sketch_n : 2 * sketch_n + 1);
        then(0);
    }
    if constexpr (!EPILOGUE_STORES) {
#pragma unroll 1
        for (int i = member; i < GROUP_BLOCKS && !extreme; i += GROUP_WARPS)
            store_columns(u, group * GROUP_BLOCKS + i, packed, rank);
        __syncwarp();  // before the next columns are stored
        if (STORED_BARRIER) barriers.columns_stored.arrive();
    }
    sketch_n++;
}

// One epilogue warp's part of one head's sketch. Calls `then` when the basis has been used. Waits for: columns_full,
// sums_full; columns_stored if the state is extreme; gram_empty (dense maps, two epilogue warps). Signals:
// columns_empty, sums_empty, gram_empty.
template <class Then>
DEVICE void finish_sketch(SketchMemory& m, SketchBarriers& barriers, [[maybe_unused]] sketch_t* packed,
                          [[maybe_unused]] const projection_t* projection, int rank, [[maybe_unused]] float ridge,
                          int sketch_n, Then then) {
    barriers.columns_full[sketch_n % EPILOGUE_WARPS].wait(sketch_n / EPILOGUE_WARPS);
    then();
    [[maybe_unused]] Columns& u = m.columns[sketch_n % COLUMN_STAGES];
    [[maybe_unused]] WarpMbarrier& columns_empty = barriers.columns_empty[sketch_n % COLUMN_STAGES];
    Sums& sums = m.sums[sketch_n % SUM_STAGES];
    auto wait_sums = [&] { barriers.sums_full[sketch_n % EPILOGUE_WARPS].wait(sketch_n / EPILOGUE_WARPS); };
    float power = 1;
    if (u.extreme<ROW_BLOCKS>(0)) {
        wait_sums();
        if (STORED_BARRIER) barriers.columns_stored.wait(sketch_n);
        power = scale_sketch(u, sums, packed, rank);
    } else if constexpr (EPILOGUE_STORES && !CODED) {
        store_columns(u, packed, rank);
    }
    [[maybe_unused]] const float factor = CODED ? inverse_of_power(power) : 1.f;  // for the scales of U's codes
    const float norm = power * u.norm<ROW_BLOCKS>(0), squares = warp_sum(norm * norm);
    const float mu = fmaxf(squares, LEAST_ORDINARY * LEAST_ORDINARY) / K;  // the lower bound is for states of zeros
#if MAP == FACTORS
    if constexpr (CODED) store_column_codes(u, packed, rank, factor);
    store_factors(m.dots[sketch_n % EPILOGUE_WARPS], sums, u, columns_empty, barriers.sums_empty[sketch_n % SUM_STAGES],
                  packed, projection, rank, mu, ridge, wait_sums);
#else
    store_dense(m, sums, barriers, packed, rank, mu, ridge, factor, sketch_n, wait_sums);
    barriers.sums_empty[sketch_n % SUM_STAGES].arrive();
#endif
}
