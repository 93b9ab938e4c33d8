// Standard decode: every token reads and writes the whole state (equations `update` and `read`).
//
// A warp owns ROWS value rows of one head's state, keeps them in registers over all tokens of the call, and holds
// all their loads in flight at once. With s = Diag(a) S the state after decay, the delta rule needs s^T k before it
// can write, but not before it can read: o = s^T q + w (k . q), so both products come from one reduction.
//
// -D constants besides common.cuh's: ROWS (4, 8 or 16; divides V).
#include "log_decay.cuh"

constexpr int WARPS = 4;

extern "C" __global__ void __launch_bounds__(32 * WARPS) standard_step(
    float* state, i64 slot_stride, const float* gate_input, const act_t* q, const act_t* k, const act_t* v,
    const gate_t* g, const float* beta, out_t* out, const i64* slots, int batch, int tokens) {
    wait_for_kernel_before();
    const int lane = threadIdx.x % 32;
    const i64 task = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / 32;
    const int part = task % (V / ROWS), head = task / (V / ROWS) % HEADS;
    const i64 row = task / (V / ROWS * HEADS);
    if (row >= batch) return;
    const i64 slot = slots[row];
    // After warp_sums over 2 ROWS values, this lane answers for one value row.
    constexpr int SHARE = 32 / (2 * ROWS) ? 32 / (2 * ROWS) : 1;
    const int mine = lane / SHARE % ROWS, value = part * ROWS + mine;
    const bool writes = lane % SHARE == 0 && lane < SHARE * ROWS;
    if (slot < 0) {
        for (int t = 0; t < tokens; t++)
            if (writes) out[((row * tokens + t) * HEADS + head) * V + value] = narrow<OUT>(0.f);
        return;
    }
    float* const home = state + slot * slot_stride + (static_cast<i64>(head) * V + part * ROWS) * K + lane * LK;
    Packed<FP32, LK> tile[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) tile[i].load(home + i * K);
    start_kernel_after();
    GateInput<LK> input;
    input.load(gate_input, head, lane * LK);
    float s[ROWS][LK];
    for (int t = 0; t < tokens; t++) {
        const i64 at = row * tokens + t, key_at = (at * KEY_HEADS + head / GROUP) * K + lane * LK;
        Packed<ACT, LK> query, key;
        query.load(q + key_at);
        key.load(k + key_at);
        const float write_value = widen<ACT>(v[(at * HEADS + head) * V + value]);
        float a[LK];
        if constexpr (KIND == KDA) {
            Packed<GATE_TYPE, LK> gate;
            gate.load(g + (at * HEADS + head) * K + lane * LK);
#pragma unroll
            for (int c = 0; c < LK; c++) a[c] = decay(input.log_decay(gate[c], c));
        } else {
            a[0] = decay(g[at * HEADS + head]);
#pragma unroll
            for (int c = 1; c < LK; c++) a[c] = a[0];
        }
        if (t == 0) {
#pragma unroll
            for (int i = 0; i < ROWS; i++)
#pragma unroll
                for (int c = 0; c < LK; c++) s[i][c] = tile[i][c];
        }
        float sums[2 * ROWS], key_query = 0;  // s^T k, then s^T q
#pragma unroll
        for (int c = 0; c < LK; c++) key_query += key[c] * query[c];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            sums[i] = sums[ROWS + i] = 0;
#pragma unroll
            for (int c = 0; c < LK; c++) {
                s[i][c] *= a[c];
                if (ERASES) sums[i] += s[i][c] * key[c];
                sums[ROWS + i] += s[i][c] * query[c];
            }
        }
        key_query = warp_sum(key_query);
        const float sum = warp_sums(sums), other = __shfl_xor_sync(ALL, sum, 16);
        const float predicted = lane < 16 ? sum : other, read = lane < 16 ? other : sum;
        const float write = ERASES ? beta[at * HEADS + head] * (write_value - predicted) : write_value;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const float w = __shfl_sync(ALL, write, i * SHARE);
#pragma unroll
            for (int c = 0; c < LK; c++) s[i][c] += key[c] * w;
        }
        if (writes) out[(at * HEADS + head) * V + value] = narrow<OUT>(read + write * key_query);
    }
    // Where few rows leave the caches room, what was written had better not take it: measured on H200, with other work
    // between two steps.
    const bool streaming = ERASES && static_cast<i64>(batch) * HEADS * V * K < (1 << 26);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
        for (int c = 0; c < LK; c++) tile[i].word[c] = __float_as_uint(s[i][c]);
        if (!streaming) tile[i].store(home + i * K);
        else if constexpr (LK == 4) __stcs(reinterpret_cast<float4*>(home + i * K), make_float4(s[i][0], s[i][1], s[i][2], s[i][3]));
        else __stcs(reinterpret_cast<float2*>(home + i * K), make_float2(s[i][0], s[i][1]));
    }
}
