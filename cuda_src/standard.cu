// Standard decode: every token reads and writes the whole state (equations `update` and `read`).
//
// A warp owns ROWS value rows of the state, keeps them in registers over all tokens of the call, and holds all their loads in
// flight at once. With s = Diag(a) S the state after decay, the delta rule needs s^T k before it can write, but not before
// it can read: o = s^T q + w (k . q), so both products come from one reduction. Rows lie side by side, LANES lanes to
// each, which sum a product in few steps and then all know it.
//
// -D constants besides common.cuh's: ROWS (even, at most 32; divides V).
#include "token.cuh"

constexpr int WARPS = 4;                      // of a block, at most
constexpr int LANES = 16, SIDE = 32 / LANES;  // of a row, and rows side by side
constexpr int SETS = ROWS / SIDE;             // of them
constexpr int CHUNKS = K / (4 * LANES);       // a lane's channels: fours, and 4 LANES further the next
static_assert(SETS <= LANES, "a lane's output for each set");

__device__ __forceinline__ int channel(int chunk) { return 4 * (threadIdx.x % LANES + LANES * chunk); }

// The warp's share: value rows from `value` on, of one head of a row.
struct Share {
    int value, head;
    i64 row;

    __device__ __forceinline__ Share() {
        const i64 task = static_cast<i64>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
        value = task % (V / ROWS) * ROWS, head = task / (V / ROWS) % HEADS;
        row = task / (V / ROWS * HEADS);
    }
    // The lane's row of the first set.
    __device__ __forceinline__ int own() const { return value + threadIdx.x % 32 / LANES; }
};

// A token's inputs at one head: what they are to this lane.
struct Inputs {
    Packed<ACT, 4> q[CHUNKS], k[CHUNKS];
    Packed<GATE_TYPE, 4> g[KIND == KDA ? CHUNKS : 1];
    float v[SETS], gate, beta;

    __device__ __forceinline__ void load(const Token& token, int own) {
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) {
            q[j].load(token.q + channel(j));
            k[j].load(token.k + channel(j));
            if (KIND == KDA) g[KIND == KDA ? j : 0].load(token.g + channel(j));
        }
#pragma unroll
        for (int i = 0; i < SETS; i++) v[i] = widen<ACT>(token.v[own + SIDE * i]);
        gate = KIND == KDA ? 0.f : widen<GATE_TYPE>(*token.g);
        beta = ERASES ? *token.beta : 1.f;
    }
};

// What a lane needs of raw gates.
struct Gates {
    GateInput<4> input[KIND == KDA ? CHUNKS : 1];

    __device__ __forceinline__ Gates(const float* packed, int head) {
#pragma unroll
        for (int j = 0; j < CHUNKS; j++)
            if (KIND == KDA) input[KIND == KDA ? j : 0].load(packed, head, channel(j));
    }
};

// Of its row in each set all lanes know the output; lane i of them writes that of set i.
struct Output {
    out_t* at;

    __device__ __forceinline__ Output(out_t* out, const Share& share, int tokens)
        : at(out + (share.row * tokens * HEADS + share.head) * V + share.own() + SIDE * (threadIdx.x % LANES)) {}
    __device__ __forceinline__ void put(int t, float x) const {
        if (threadIdx.x % LANES < SETS) at[static_cast<i64>(t) * HEADS * V] = narrow<OUT>(x);
    }
};

// The lane's part of the warp's rows.
struct StateRows {
    Packed<FP32, 4> s[SETS][CHUNKS];

    __device__ __forceinline__ void load(const float* home) {
#pragma unroll
        for (int i = 0; i < SETS; i++)
#pragma unroll
            for (int j = 0; j < CHUNKS; j++) s[i][j].load(home + i * SIDE * K + channel(j));
    }
    // `streaming`: past the caches (measured on H200, with other work between two steps).
    __device__ __forceinline__ void store(float* home, bool streaming) const {
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
    // Takes a token in; returns the output of the row whose set is the lane's number.
    __device__ __forceinline__ float take(const Inputs& token, const Gates& gates) {
        const float same = KIND == KDA ? 1.f : decay(token.gate);
        float predicted[SETS] = {}, read[SETS] = {}, key_query = 0;
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) {
            const int own = KIND == KDA ? j : 0;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float a = KIND == KDA ? decay(gates.input[own].log_decay(token.g[own][e], e)) : same;
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
            if (threadIdx.x % LANES == i) result = whole;
        }
        return result;
    }
};

// A launch's arguments, and what its warps do.
struct Standard {
    float* state;
    i64 slot_stride;
    const float* gate_input;
    const act_t *q, *k, *v;
    const gate_t* g;
    const float* beta;
    out_t* out;
    const i64* slots;
    int batch, tokens;

    __device__ __forceinline__ Token token(const Share& share, int t) const {
        return Token(q, k, v, g, beta, share.row * tokens + t, share.head);
    }
    // The row's slot; less than 0 where there is nothing (more) to do.
    __device__ __forceinline__ i64 slot_of(const Share& share) const {
        if (share.row >= batch) return -1;
        const i64 slot = slots[share.row];
        if (slot < 0)
            for (int t = 0; t < tokens; t++) Output(out, share, tokens).put(t, 0.f);
        return slot;
    }
    // All of the call's tokens.
    __device__ __forceinline__ void decode(const Share& share, i64 slot) const {
        float* const home = state + slot * slot_stride + (static_cast<i64>(share.head) * V + share.own()) * K;
        StateRows rows;
        rows.load(home);
        start_kernel_after();
        Inputs inputs;
        inputs.load(token(share, 0), share.own());
        const Gates gates(gate_input, share.head);
        const Output output(out, share, tokens);
        for (int t = 0; t < tokens; t++) {
            if (t > 0) inputs.load(token(share, t), share.own());
            output.put(t, rows.take(inputs, gates));
        }
        // Where few rows leave the caches room, what was written had better not take it.
        rows.store(home, ERASES && static_cast<i64>(batch) * HEADS * V * K < (1 << 26));
    }
};

// On a multiprocessor at least, or 0 to leave it to the compiler: the registers that it then takes were fastest on H200, by up to a percent.
constexpr int BLOCKS = KIND == GDN ? 1 : 0;

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) standard_step(
    float* state, i64 slot_stride, const float* gate_input, const act_t* q, const act_t* k, const act_t* v,
    const gate_t* g, const float* beta, out_t* out, const i64* slots, int batch, int tokens) {
    wait_for_kernel_before();
    const Standard step{state, slot_stride, gate_input, q, k, v, g, beta, out, slots, batch, tokens};
    const Share share;
    const i64 slot = step.slot_of(share);
    if (slot >= 0) step.decode(share, slot);
}
