// Standard decode: every token reads and writes the whole state (equations `update` and `read`).
//
// A warp owns ROWS value rows of one head's state, keeps them in registers over all tokens of the call, and holds
// all their loads in flight at once. With s = Diag(a) S the state after decay, the delta rule needs s^T k before it
// can write, but not before it can read: o = s^T q + w (k . q), so both products come from one reduction. Rows lie side by
// side, LANES lanes to each, which sum a product in few steps and then all know it.
//
// -D constants besides common.cuh's: ROWS (even, at most 32; divides V).
#include "log_decay.cuh"

constexpr int WARPS = 4;
constexpr int LANES = 16, SIDE = 32 / LANES;  // of a row, and rows side by side
constexpr int SETS = ROWS / SIDE;             // of them
constexpr int CHUNKS = K / (4 * LANES);       // a lane's channels: fours, and 4 LANES further the next
static_assert(SETS <= LANES, "a lane's output for each set");

__device__ __forceinline__ int channel(int chunk) { return 4 * (threadIdx.x % LANES + LANES * chunk); }

// A token's inputs at one head: what they are to this lane.
struct Inputs {
    Packed<ACT, 4> q[CHUNKS], k[CHUNKS];
    Packed<GATE_TYPE, 4> g[KIND == KDA ? CHUNKS : 1];
    float v[SETS], gate, beta;

    // `at` numbers tokens of all rows; `value` is the warp's first.
    __device__ __forceinline__ void load(const act_t* from_q, const act_t* from_k, const act_t* from_v, const gate_t* from_g,
                                         const float* from_beta, i64 at, int head, int value) {
        const i64 own = at * HEADS + head, key = (at * KEY_HEADS + head / GROUP) * K;
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) {
            q[j].load(from_q + key + channel(j));
            k[j].load(from_k + key + channel(j));
            if (KIND == KDA) g[KIND == KDA ? j : 0].load(from_g + own * GATES + channel(j));
        }
#pragma unroll
        for (int i = 0; i < SETS; i++) v[i] = widen<ACT>(from_v[own * V + value + SIDE * i + threadIdx.x % 32 / LANES]);
        gate = KIND == KDA ? 0.f : widen<GATE_TYPE>(from_g[KIND == KDA ? 0 : own]);
        beta = ERASES ? from_beta[own] : 1.f;
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) standard_step(
    float* state, i64 slot_stride, const float* gate_input, const act_t* q, const act_t* k, const act_t* v,
    const gate_t* g, const float* beta, out_t* out, const i64* slots, int batch, int tokens) {
    wait_for_kernel_before();
    const int lane = threadIdx.x % 32, r = lane / LANES, c = lane % LANES;
    const i64 task = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / 32;
    const int value = task % (V / ROWS) * ROWS, head = task / (V / ROWS) % HEADS;
    const i64 row = task / (V / ROWS * HEADS);
    if (row >= batch) return;
    const i64 slot = slots[row];
    // Of its row in each set all lanes know the output; lane i of them writes that of set i.
    out_t* const output = out + (row * tokens * HEADS + head) * V + value + SIDE * c + r;
    if (slot < 0) {
        for (int t = 0; t < tokens; t++)
            if (c < SETS) output[static_cast<i64>(t) * HEADS * V] = narrow<OUT>(0.f);
        return;
    }
    float* const home = state + slot * slot_stride + (static_cast<i64>(head) * V + value + r) * K;
    Packed<FP32, 4> s[SETS][CHUNKS];
#pragma unroll
    for (int i = 0; i < SETS; i++)
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) s[i][j].load(home + i * SIDE * K + channel(j));
    start_kernel_after();
    Inputs token;
    token.load(q, k, v, g, beta, row * tokens, head, value);
    GateInput<4> input[KIND == KDA ? CHUNKS : 1];
#pragma unroll
    for (int j = 0; j < CHUNKS; j++)
        if (KIND == KDA) input[KIND == KDA ? j : 0].load(gate_input, head, channel(j));
    for (int t = 0; t < tokens; t++) {
        if (t > 0) token.load(q, k, v, g, beta, row * tokens + t, head, value);
        const float same = KIND == KDA ? 1.f : decay(token.gate);
        float predicted[SETS] = {}, read[SETS] = {}, key_query = 0;
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) {
            const int own = KIND == KDA ? j : 0;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float a = KIND == KDA ? decay(input[own].log_decay(token.g[own][e], e)) : same;
                const float key = token.k[j][e], query = token.q[j][e];
                key_query += key * query;
#pragma unroll
                for (int i = 0; i < SETS; i++) {
                    const float x = s[i][j][e] * a;
                    if (ERASES) predicted[i] += x * key;
                    read[i] += x * query;
                    s[i][j].word[e] = __float_as_uint(x);
                }
            }
        }
        key_query = group_sum<LANES>(key_query);
        float result = 0;
#pragma unroll
        for (int i = 0; i < SETS; i++) {
            const float write = ERASES ? token.beta * (token.v[i] - group_sum<LANES>(predicted[i])) : token.v[i];
#pragma unroll
            for (int j = 0; j < CHUNKS; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) s[i][j].word[e] = __float_as_uint(s[i][j][e] + token.k[j][e] * write);
            const float whole = group_sum<LANES>(read[i]) + write * key_query;
            if (c == i) result = whole;
        }
        if (c < SETS) output[static_cast<i64>(t) * HEADS * V] = narrow<OUT>(result);
    }
    // Where few rows leave the caches room, what was written had better not take it: measured on H200, with other work
    // between two steps.
    const bool streaming = ERASES && static_cast<i64>(batch) * HEADS * V * K < (1 << 26);
#pragma unroll
    for (int i = 0; i < SETS; i++)
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) {
            float* const to = home + i * SIDE * K + channel(j);
            const Packed<FP32, 4>& x = s[i][j];
            if (streaming) __stcs(reinterpret_cast<float4*>(to), make_float4(x[0], x[1], x[2], x[3]));
            else x.store(to);
        }
}
