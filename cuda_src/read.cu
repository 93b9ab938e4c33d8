// Read step: the tokens of a window that touch no full state, except in heads that have no sketch.
//
// Appends the row's token to its ring and computes o = (state read of the effective query) + (buffer output). The
// state read is U C x for a head with a sketch, a group of lanes per (row, head), and S^T x for a dense one, one block per
// (row, head); buffered replay is the variant whose heads are all dense. Rows whose slot is due for a flush are left
// to `flush.cu`, which finds them listed, and which moves the cursors.
//
// -D constants besides common.cuh's: W, DENSE_HEADS, SKETCHED_HEADS, RANK_MAX, PIVOTS, MAP (0 factors, 1 dense,
// 2 shared), SKETCH (type of sketches and maps: 0 bf16, 2 float32), READ_LANES (lanes of a sketched row).
#include "window.cuh"
#include "schedule.cuh"
#include "sketch_layout.cuh"

constexpr int READ_BLOCKS = KIND == KDA ? 5 : 4;  // blocks that registers should leave room for, measured on H200
// Whether vectors of V set out before the coefficients are computed: only where they fit the registers.
constexpr bool EARLY = KIND == MAMBA2;

constexpr int WARPS = 4;
[[maybe_unused]] constexpr int DENSE_ROWS = 8;  // value rows of the state that a warp holds in flight

struct Arguments {
    const float* state;
    i64 slot_stride;
    act_t *ring_k, *ring_v;
    float *ring_g, *ring_beta;
    const sketch_t *sketch, *projection;
    i64 sketch_stride;
    const int4* heads;
    const act_t *q, *k, *v;
    const float *g, *beta;
    out_t* out;
};

#if SKETCHED_HEADS
typedef ValueShare<READ_LANES> Share;
constexpr int PART = K / READ_LANES;          // key channels of a lane
constexpr int GROUPS = 32 / READ_LANES;       // heads of a warp
constexpr int BATCH = 8;                      // vectors of V fetched at a time

// The group's share of BATCH vectors of V.
template <int TYPE> struct Batch {
    Packed<TYPE, Share::WIDTH> x[BATCH][Share::COUNT];

    __device__ __forceinline__ void load(const typename Element<TYPE>::type* vectors, int first, int count) {
#pragma unroll
        for (int j = 0; j < BATCH; j++)
#pragma unroll
            for (int i = 0; i < Share::COUNT; i++) {
                x[j][i].clear();
                if (first + j < count && Share::at(i) < V) x[j][i].load(vectors + (first + j) * V + Share::at(i));
            }
    }
    __device__ __forceinline__ void add(int j, float weight, float (&o)[Share::COUNT][Share::WIDTH]) const {
#pragma unroll
        for (int i = 0; i < Share::COUNT; i++)
#pragma unroll
            for (int n = 0; n < Share::WIDTH; n++) o[i][n] += weight * x[j][i][n];
    }
};

// Row j of the map's small factors, as stored: widening them here would wait for them.
struct Factor {
    sketch_t w, f[PIVOTS];
    __device__ __forceinline__ void load(const sketch_t* w_, const sketch_t* f_, int j, int rank, int p) {
        w = j < rank ? w_[j] : sketch_t(0);
#pragma unroll
        for (int i = 0; i < PIVOTS; i++) f[i] = j < rank && i < p ? f_[j * p + i] : sketch_t(0);
    }
};

template <class T> __device__ __forceinline__ void fetch_ahead(const T* from, int elements) {
    constexpr int LINE = 128 / sizeof(T);
    for (int i = LINE * (threadIdx.x % READ_LANES); i < elements; i += LINE * READ_LANES) prefetch_line(from + i);
}

// One group of lanes: one row of a head with a sketch. A group without a head goes along and stores nothing.
__device__ __forceinline__ void read_sketched(const Arguments& arg, int head, i64 at, i64 slot, int pos, bool active,
                                              float* c, float* scores) {
    const int lane = threadIdx.x % READ_LANES;
    const int4 info = arg.heads[head];
    const int rank = info.x, p = pivots_of(rank);
    const int most = GROUPS > 1 ? max(rank, __shfl_xor_sync(ALL, rank, READ_LANES)) : rank;  // in this warp
    const sketch_t* const packed = arg.sketch + slot * arg.sketch_stride + info.y;
    const sketch_t *const u = packed, *const b = u + rank * V, *const f = b + p * K, *const w = f + rank * p;
    // What depends on the slot alone sets out before anything is waited for; it is read from the L2 cache later.
    fetch_ahead(packed, rank * V + p * K + rank * p + rank);
    Packed<SKETCH, PART> pivot[PIVOTS];
    Factor factor;
    if (MAP == FACTORS) {
        factor.load(w, f, lane, rank, p);
#pragma unroll
        for (int i = 0; i < PIVOTS; i++) {
            pivot[i].clear();
            if (i < p) pivot[i].load(b + i * K + lane * PART);
        }
    }
    const Token token(arg.q, arg.k, arg.v, arg.g, arg.beta, at, head);
    const Ring ring(arg.ring_k, arg.ring_v, arg.ring_g, arg.ring_beta, slot, head);
    fetch_ahead(ring.v, pos * V);
    if (KIND == KDA) fetch_ahead(ring.g, pos * GATES);
    Packed<ACT, Share::WIDTH> newest[Share::COUNT];
#pragma unroll
    for (int i = 0; i < Share::COUNT; i++) {
        newest[i].clear();
        if (Share::at(i) < V) newest[i].load(token.v + Share::at(i));
    }
    if (!ERASES && scores) {
        share_scores<READ_LANES>(token, ring, pos, scores);
        __syncthreads();
    }
    const auto window = read_window<READ_LANES>(token, ring, pos, scores);
    if (active) append<READ_LANES>(token, ring, newest, pos, head);

    Batch<SKETCH> columns;
    Batch<ACT> values;
    if (EARLY) columns.load(u, 0, rank), values.load(ring.v, 0, pos);

    // Rows of the map against x: the projection of the whole head, or this state's own map.
    const sketch_t* const rows = MAP == OWN ? b : arg.projection + info.z;
    for (int first = 0; first < most; first += 8) {
        Packed<SKETCH, PART> row[8];
        float sums[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            row[j].clear();
            if (first + j < rank) row[j].load(rows + (first + j) * K + lane * PART);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            sums[j] = 0;
#pragma unroll
            for (int n = 0; n < PART; n++) sums[j] += row[j][n] * window.x[n];
        }
        const float sum = group_sums<READ_LANES>(sums);
        const int j = first + lane / (READ_LANES / 8);
        if (lane % (READ_LANES / 8) == 0 && j < rank) c[j] = sum;
    }
    __syncwarp();
    if (MAP == FACTORS) {  // c = w z + F (B^T x)
        float sums[PIVOTS_2] = {};
#pragma unroll
        for (int i = 0; i < PIVOTS; i++)
#pragma unroll
            for (int n = 0; n < PART; n++) sums[i] += pivot[i][n] * window.x[n];
        const float y = group_sums<READ_LANES>(sums);
        for (int j = lane; j - lane < most; j += READ_LANES) {
            if (j != lane) factor.load(w, f, j, rank, p);
            float own = j < rank ? widen<SKETCH>(factor.w) * c[j] : 0.f;
#pragma unroll
            for (int i = 0; i < PIVOTS; i++)
                own += widen<SKETCH>(factor.f[i]) * __shfl_sync(ALL, y, i * (READ_LANES / PIVOTS_2), READ_LANES);
            if (j < rank) c[j] = own;
        }
        __syncwarp();
    }
    float o[Share::COUNT][Share::WIDTH] = {};
    for (int first = 0; first < most; first += BATCH) {
        if (!EARLY || first) columns.load(u, first, rank);
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            if (first + j < most) columns.add(j, first + j < rank ? c[first + j] : 0.f, o);
    }
    for (int first = 0; first < pos; first += BATCH) {
        if (!EARLY || first) values.load(ring.v, first, pos);
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            if (first + j < pos) values.add(j, __shfl_sync(ALL, window.weight, first + j, READ_LANES), o);
    }
    const float last = __shfl_sync(ALL, window.weight, pos, READ_LANES);
#pragma unroll
    for (int i = 0; i < Share::COUNT; i++)
#pragma unroll
        for (int n = 0; n < Share::WIDTH; n++) o[i][n] += last * newest[i][n];
    if (!active) return;
#pragma unroll
    for (int i = 0; i < Share::COUNT; i++) {
        if (Share::at(i) >= V) continue;
        Packed<OUT, Share::WIDTH> rounded;
        rounded.set(o[i]);
        rounded.store(arg.out + (at * HEADS + head) * V + Share::at(i));
    }
}
#endif

#if DENSE_HEADS
// One warp of four: value rows [part V / 4, (part + 1) V / 4) of a head that reads its full state.
__device__ __forceinline__ void read_dense(const Arguments& arg, int head, i64 at, i64 slot, int pos, int part) {
    const int lane = threadIdx.x % 32;
    constexpr int SPAN = V / WARPS;  // 16, 20, 24 or 32 rows
    const Token token(arg.q, arg.k, arg.v, arg.g, arg.beta, at, head);
    const Ring ring(arg.ring_k, arg.ring_v, arg.ring_g, arg.ring_beta, slot, head);
    const float* const home = arg.state + slot * arg.slot_stride + static_cast<i64>(head) * V * K + lane * LK;
    Packed<FP32, LK> rows[DENSE_ROWS];
#pragma unroll
    for (int i = 0; i < DENSE_ROWS; i++) rows[i].load(home + (part * SPAN + i) * K);
    typedef ValueShare<32> Whole;
    Packed<ACT, Whole::WIDTH> newest[Whole::COUNT];
#pragma unroll
    for (int i = 0; i < Whole::COUNT; i++) {
        newest[i].clear();
        if (part == 0 && Whole::at(i) < V) newest[i].load(token.v + Whole::at(i));
    }
    const auto window = read_window<32>(token, ring, pos);
    if (part == 0) append<32>(token, ring, newest, pos, head);
    for (int first = 0; first < SPAN; first += DENSE_ROWS) {
        float sums[DENSE_ROWS];
#pragma unroll
        for (int i = 0; i < DENSE_ROWS; i++) {
            sums[i] = 0;
#pragma unroll
            for (int c = 0; c < LK; c++) sums[i] += rows[i][c] * window.x[c];
        }
#pragma unroll
        for (int i = 0; i < DENSE_ROWS; i++)
            if (first + DENSE_ROWS + i < SPAN) rows[i].load(home + (part * SPAN + first + DENSE_ROWS + i) * K);
        // four lanes share a value row: they add a quarter of the buffer each
        float o = warp_sums(sums), buffer = 0;
        const int row = first + lane / 4, value = part * SPAN + row;
#pragma unroll
        for (int s = 0; s < W; s += 4) {
            const int mine = s + lane % 4;
            const float weight = __shfl_sync(ALL, window.weight, mine);
            if (mine <= pos && row < SPAN)
                buffer += weight * widen<ACT>(mine < pos ? ring.v[mine * V + value] : token.v[value]);
        }
        buffer += __shfl_xor_sync(ALL, buffer, 1);
        buffer += __shfl_xor_sync(ALL, buffer, 2);
        if (lane % 4 == 0 && row < SPAN) arg.out[(at * HEADS + head) * V + value] = narrow<OUT>(o + buffer);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS, READ_BLOCKS) read_step(
    const float* state, i64 slot_stride, const int* cursor, act_t* ring_k, act_t* ring_v, float* ring_g,
    float* ring_beta, const sketch_t* sketch, i64 sketch_stride, const sketch_t* projection, const int4* heads,
    const int* order, const act_t* q, const act_t* k, const act_t* v, const float* g, const float* beta, out_t* out,
    const i64* slots, int batch, int tokens, int t, Schedule* schedule) {
    [[maybe_unused]] const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const Arguments arg{state, slot_stride, ring_k, ring_v, ring_g, ring_beta, sketch, projection, sketch_stride,
                        heads, q, k, v, g, beta, out};
    auto zero = [&](i64 at, int head, int first, int stride) {
        for (int i = first; i < V; i += stride) out[(at * HEADS + head) * V + i] = narrow<OUT>(0.f);
    };
    const int dense_blocks = DENSE_HEADS * batch, block = blockIdx.x;
    // The first block of a row that is due lists it.
    auto goes_on = [&](int row, int pos) {
        if (pos + 1 < W) return true;
        if (block < batch && threadIdx.x == 0) schedule->rows[atomicAdd(&schedule->due, 1)] = row;
        return false;
    };
#if DENSE_HEADS
    if (block < dense_blocks) {
        const int head = order[block / batch], row = block % batch;
        const i64 slot = slots[row], at = static_cast<i64>(row) * tokens + t;
        if (slot < 0) return zero(at, head, threadIdx.x, 32 * WARPS);
        const int pos = cursor[slot];
        if (goes_on(row, pos)) read_dense(arg, head, at, slot, pos, warp);
        return;
    }
#endif
#if SKETCHED_HEADS
    // A block's groups take neighbouring heads of one row, which share keys; neighbouring blocks take the next rows
    // of the same heads, so that a multiprocessor finds their projections in its cache again.
    __shared__ float scratch[WARPS * GROUPS][RANK_MAX];
    const int index = block - dense_blocks, row = index % batch;
    const i64 slot = slots[row], at = static_cast<i64>(row) * tokens + t;
    const int group = threadIdx.x / READ_LANES, place = index / batch * WARPS * GROUPS + group;
    const bool active = place < SKETCHED_HEADS;
    const int leader = order[DENSE_HEADS + place - group], head = active ? order[DENSE_HEADS + place] : leader;
    if (slot < 0) {
        if (active) zero(at, head, lane % READ_LANES, READ_LANES);
        return;
    }
    const int pos = cursor[slot];
    if (!goes_on(row, pos)) return;
    __shared__ float scores[W];
    const bool together = !ERASES && __syncthreads_and(head / GROUP == leader / GROUP);
    read_sketched(arg, head, at, slot, pos, active, scratch[group], together ? scores : nullptr);
#endif
}
