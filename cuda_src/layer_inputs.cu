// From the activations of a model's layer to the inputs of a head, and from the outputs of a head to those of the
// layer: one launch for each. All arithmetic is in float32.
//
// Arrays may have any distance from row to row; within a row they are dense. A warp takes one head of a row, but for
// `delta_inputs`, where a thread does.
//
// -D constants besides common.cuh's: RAW, RATE and BIAS (types of raw gates, of rates and skips, and of biases). V is
// the number of elements of a head; K, OUT and STATE are not used.
#include "log_decay.cuh"

constexpr int WARPS = 8;
typedef Element<RAW>::type raw_t;
typedef Element<RATE>::type rate_t;
typedef Element<BIAS>::type bias_t;

__device__ __forceinline__ float softplus(float x) { return softplus(x, exp_of_negative(-fabsf(x))); }

// The warp's head of a row: row blockIdx.x / SHARES, heads in shares of WARPS.
struct RowHead {
    static constexpr int SHARES = (HEADS + WARPS - 1) / WARPS;
    int head;
    i64 row;
    __device__ __forceinline__ RowHead()
        : head(static_cast<int>(blockIdx.x % SHARES) * WARPS + threadIdx.x / 32), row(blockIdx.x / SHARES) {}
    __device__ __forceinline__ bool none() const { return head >= HEADS; }
    // First element of the head in an array with `stride` elements from row to row.
    __device__ __forceinline__ i64 of(i64 stride) const { return row * stride + head * V; }
};

// mamba2: v = step x and g = rate step, with step = softplus(dt + bias).
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    mamba_inputs(const act_t* x, i64 x_stride, const raw_t* dt, i64 dt_stride, const rate_t* rate,
                 const bias_t* bias, act_t* v, float* g) {
    const RowHead at;
    if (at.none()) return;
    const int lane = threadIdx.x % 32;
    const float step = softplus(widen<RAW>(dt[at.row * dt_stride + at.head]) + widen<BIAS>(bias[at.head]));
    if (lane == 0) g[at.row * HEADS + at.head] = widen<RATE>(rate[at.head]) * step;
    for (int i = lane; i < V; i += 32) v[at.of(HEADS * V) + i] = narrow<ACT>(step * widen<ACT>(x[at.of(x_stride) + i]));
}

// mamba2: out += skip x.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    add_skip(act_t* out, i64 out_stride, const act_t* x, i64 x_stride, const rate_t* skip) {
    const RowHead at;
    if (at.none()) return;
    const float factor = widen<RATE>(skip[at.head]);
    for (int i = threadIdx.x % 32; i < V; i += 32) {
        act_t* const to = out + at.of(out_stride) + i;
        *to = narrow<ACT>(widen<ACT>(*to) + factor * widen<ACT>(x[at.of(x_stride) + i]));
    }
}

// One head, divided by its norm, times `scale`.
__device__ __forceinline__ void normalise(const act_t* from, act_t* to, float scale) {
    float sum = 0;
    for (int i = threadIdx.x % 32; i < V; i += 32) {
        const float x = widen<ACT>(from[i]);
        sum = fmaf(x, x, sum);
    }
#pragma unroll
    for (int bit = 16; bit; bit /= 2) sum += __shfl_xor_sync(ALL, sum, bit);
    scale *= rsqrtf(sum + 1e-6f);
    for (int i = threadIdx.x % 32; i < V; i += 32) to[i] = narrow<ACT>(scale * widen<ACT>(from[i]));
}
// gdn and kda: queries and keys of norm one, queries times `scale`.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    normalised(const act_t* q, i64 q_stride, const act_t* k, i64 k_stride, act_t* unit_q, act_t* unit_k, float scale) {
    const RowHead at;
    if (at.none()) return;
    normalise(q + at.of(q_stride), unit_q + at.of(HEADS * V), scale);
    normalise(k + at.of(k_stride), unit_k + at.of(HEADS * V), 1.f);
}

// gdn: g = -exp(rate_log) softplus(a + bias), beta = sigmoid(b). A block takes a row.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    delta_inputs(const raw_t* a, i64 a_stride, const raw_t* b, i64 b_stride, const rate_t* rate_log,
                 const bias_t* bias, float* g, float* beta) {
    const i64 row = blockIdx.x;
    for (int head = threadIdx.x; head < HEADS; head += 32 * WARPS) {
        const float step = softplus(widen<RAW>(a[row * a_stride + head]) + widen<BIAS>(bias[head]));
        g[row * HEADS + head] = -expf(widen<RATE>(rate_log[head])) * step;
        beta[row * HEADS + head] = 1.f / (1.f + expf(-widen<RAW>(b[row * b_stride + head])));
    }
}
