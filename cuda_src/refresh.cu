// Refresh: for each row whose window ends without a flush, advances the sketch and the map through the window's tokens.
//
// The kernel reads no state. The surrogate S^T = U R of rank G, with R the map, advances as a product
// (sketchssm/reference/refresh.py):
//
//     S'^T = Y X,   Y = [U, w],   X = [R D; l^T],   U' = Y (X Omega),   S' U' = X^T (Y^T U'),
//     |S'|^2 = <Y^T Y, X X^T>
//
// The flush's functions compute the map from U' and S' U'. The output is S'^T q, which agrees with the window's other
// reads (maps in factors: see refresh_factors.cuh). The window's last token, the step's own, is appended to the ring.
//
// This kernel is the third launch of a step, after the flush. The read lists the rows in `Schedule`. Without inputs (q
// null) a draft follows: the flush (mode DRAFT) has listed the rows, and their windows end with no-op tokens in the
// ring, which have no output. A block processes one (row, head) after another, in float32:
//
//   warps         work                                            synchronisation
//   workers (4)   head n: output, Y, X, products; U' and S' U'    a named barrier among them (sync_workers)
//   map warp      the map of head n, while the workers begin      two __syncthreads with the workers per head:
//                 head n + 1                                      1. the map of head n - 1 is stored, so U' and S' U'
//                                                                 may be overwritten; 2. U' and S' U' are complete
//
// -D constants: flush.cu's.
#include "schedule.cuh"
constexpr bool SLICES_OF_U = false;  // see sketch_memory.cuh
#include "refresh.cuh"
#if MAP == 0
#include "refresh_factors.cuh"
#endif

#ifndef SIZES_ONLY  // defined by a test that needs only the constants at the end
static_assert(REFRESHES);

extern "C" __global__ void __launch_bounds__(REFRESH_THREADS, 3)
    refresh_step(MEMORY_PARAMETERS, const float* gate_input, const projection_t* projection, const uint2* basis,
                 const int4* heads, INPUT_PARAMETERS, Schedule* schedule, float ridge) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const Memory memory = MEMORY;
    const Inputs inputs = INPUTS;
    extern __shared__ uint4 shared[];
    RefreshMemory& m = *reinterpret_cast<RefreshMemory*>(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool works = warp < WORKER_WARPS;
    if (threadIdx.x == 0) m.barriers.init(1);
    __syncthreads();
    Columns& u = m.sketch.columns[0];
    const int tiles = schedule->refreshes * HEADS;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const DueRow entry = schedule->refreshed[tile / HEADS];
        const int head = tile % HEADS;
        const int4 info = heads[head];
        const int rank = info.x, wide = wide_of(info), count = rank + W;
        sketch_t* const packed = memory.sketch.of(entry.slot) + info.y;
        const RowsOf<COLUMN> y{m.y, count};
        const RowsOf<KEY_FACTOR> x{m.x, count};
        if (works) {
            const Ring ring(memory, entry.slot, head, window_start(entry.buffered));
            const WindowTokens tokens{ring, q ? Token(inputs, entry.row, head) : ring.token(W - 1)};
            GateInput<LK> input;
            input.load(gate_input, head, LK * lane);
            if (q) tokens.append(head);
            load_columns(m, packed, rank, wide);
#if MAP == 0
            compute_rows(m, packed, projection + info.z, basis + info.w, rank);
#endif
            advance_rows(m, tokens, packed, projection + info.z, input, rank, wide);
            sync_workers();
#if MAP == 0
            if (warp == 0) compare_maps(m, tokens, packed, rank);
            sync_workers();
#endif
            float most = 0;
            for (int i = threadIdx.x; i < V; i += WORKERS) {
                float read = advance_columns(m, tokens, rank, i);
#if MAP == 0
                for (int g = 0; g < rank; g++) read += m.missed[g] * m.y[g][i];
#endif
                if (q) (Strided<out_t>{out, out_stride}.of(entry.row) + head * V)[i] = narrow<OUT>(read);
                for (int n = 0; n < count; n++) most = fmaxf(most, fabsf(m.y[n][i]));
            }
            most = warp_most(most);
            if (lane == 0) m.most[warp] = most;
            sync_workers();
            // Y of extreme states is scaled, so that float32 holds squares.
            most = warp_most(m.most[lane % WORKER_WARPS]);
            if (most > MOST_ORDINARY || (most > 0.f && most < LEAST_ORDINARY)) {
                for (int i = threadIdx.x; i < count * V; i += WORKERS) m.y[i / V][i % V] *= power_for_norm(most);
                sync_workers();
            } else {
                most = 1;
            }
            multiply_small<K>(m, count, rank, x, BasisRows{basis + info.w});
            if constexpr (MAP != SHARED) {
                const float squares = norm_of_product(m, count);
                if (lane == 0) m.norms[warp] = squares;
            }
            if (threadIdx.x == 0) m.power = power_for_norm(most);
        }
        __syncthreads();  // the map of the previous head is stored
        if (works) {
            const float missing = inverse_of_power(m.power);
            for (int i = threadIdx.x; i < V; i += WORKERS)
                for (int first = 0; first < rank; first += 8) {
                    float own[8];
                    combine(own, m, m.y, count, first, i);
#pragma unroll
                    for (int n = 0; n < 8; n++) {
                        const int g = first + n;
                        if (g >= rank) break;
                        u.of[g][i] = own[n];
                        if constexpr (!CODED) packed[g * V + (i ^ swizzle(g))] = narrow<SKETCH>(missing * own[n]);
                    }
                }
            if (threadIdx.x == 0) {
                float squares = 0;
                for (int i = 0; i < WORKER_WARPS && MAP != SHARED; i++) squares += m.norms[i];
                m.mu = fmaxf(squares, LEAST_ORDINARY * LEAST_ORDINARY) / K, m.missing = missing;
            }
            sync_workers();
#if MAP != 2
            const int columns = MAP == FACTORS ? pivots_of(rank) : rank;  // columns of U' that S' is multiplied by
            multiply_small<V>(m, count, columns, y, RowsOf<COLUMN>{u.of, columns});
            sync_workers();
            for (int i = threadIdx.x; i < K; i += WORKERS)
                for (int first = 0; first < columns; first += 8) {
                    float own[8];
                    combine(own, m, m.x, count, first, i);
#pragma unroll
                    for (int n = 0; n < 8; n++)
                        for (int group = 0; group < SKETCH_GROUPS && first + n < columns; group++)
                            *m.sketch.sums[0].at(group, first + n, i) = group == 0 ? own[n] : 0.f;
                }
#endif
        }
        __syncthreads();
        if (works) continue;
#if MAP == 1
        store_dense(Team<1>{0}, m.sketch, m.sketch.sums[0], m.barriers, packed, rank, wide, m.mu, ridge, m.missing, 0,
                    [] {});
#else
        if constexpr (CODED) store_column_codes(u, packed, rank, m.missing);
#endif
#if MAP == 0
        store_factors(m.sketch.dots[0], m.sketch.sums[0], u, m.barriers.columns_empty[0], m.barriers.sums_empty[0],
                      packed, projection + info.z, rank, m.mu, ridge, [] {});
#endif
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    __threadfence();
    if (atomicAdd(&schedule->refreshing_blocks, 1u) == gridDim.x - 1)
        schedule->refreshes = 0, schedule->refreshing_blocks = 0;
}
#endif

// Value for the host: shared memory of a block.
extern "C" __device__ int refresh_shared_bytes = sizeof(RefreshMemory);
