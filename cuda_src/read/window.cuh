// Effective query and token weights of one (row, head), from the window's tokens.
//
// The pass goes back from the newest token t to token 0, one transposed transition at a time:
//
//   x = q_t;   for s = t, ..., 0:   c_s = beta_s <k_s, x>,   x <- Diag(exp g_s) (x - c_s k_s)
//
// The output of the tokens is the sum of c_s v_s, and the last x is the effective query. There is no division by a
// decay and no difference of sums of log-decays.
#pragma once
#include "slot/ring.cuh"

// How the lanes share the value channels: lane l has chunks l, l + 32, ... of WIDTH neighbours.
struct ValueShare {
    static constexpr int WIDTH = V % 128 == 0 ? 4 : 2, COUNT = (V / WIDTH + 31) / 32;
    DEVICE static int at(int i) { return WIDTH * (threadIdx.x % 32 + 32 * i); }
};

// Inputs of the window's tokens in shared memory, token after token.
struct TokenPointers {
    const act_t *q, *k;
    const gate_t* g;    // kda
    const float* beta;  // aligned to 8 bytes
};

// Goes back over tokens pos to 0, two tokens at a time (the newest alone if their number is odd). This halves the
// number of reductions and adds a few products. `gate` is the log-decay of token number `lane`. Results: this lane's
// channels of the effective query in x, the tokens' weights in shared memory at `weights` (aligned to 8 bytes).
//
// In a pair of tokens (0, 1), the later token has c_1 = beta_1 <k_1, x>. With x and k_1 decayed by token 1, the earlier
// token has c_0 = beta_0 (<k_0, x> - c_1 <k_0, k_1>).
DEVICE void read_window(const TokenPointers& tokens, const GateInput<LK>& input, int pos, float gate, float (&x)[LK],
                        float* weights) {
    const int lane = threadIdx.x % 32;
    const float same = CHANNEL_DECAYS ? 1.f : decay(gate);
    // This lane's channels of a token, as stored.
    struct Coming {
        ChannelShare<ACT> key;
        ChannelShare<GATE_TYPE> gates;
    } coming[2];
    auto load = [&](int i, int s) {
        coming[i].key.load(tokens.k + s * K);
        if (CHANNEL_DECAYS) coming[i].gates.load(tokens.g + s * K);
    };
    auto unpack = [&](int i, int s, float(&key)[LK], float(&decays)[LK]) {
        const float one = CHANNEL_DECAYS ? 1.f : __shfl_sync(ALL, same, s);
#pragma unroll
        for (int c = 0; c < LK; c++) {
            key[c] = coming[i].key[c];
            decays[c] = CHANNEL_DECAYS ? input.quick_decay(coming[i].gates[c], c) : one;
        }
    };
    ChannelShare<ACT> query;
    query.load(tokens.q);
    load(0, pos);
#pragma unroll
    for (int c = 0; c < LK; c++) x[c] = query[c];
    int s = pos;
    if (pos % 2 == 0) {
        float key[LK], decays[LK], dot = 0;
        unpack(0, s, key, decays);
        load(0, max(s - 1, 0));
#pragma unroll
        for (int c = 0; c < LK; c++) dot += key[c] * x[c];
        const float weight = (ERASES ? tokens.beta[s] : 1.f) * warp_sum(dot);
#pragma unroll
        for (int c = 0; c < LK; c++) x[c] = decays[c] * (ERASES ? x[c] - weight * key[c] : x[c]);
        if (lane == 0) weights[s] = weight;
        s--;
    }
    load(1, max(s - 1, 0));
    const bool upper = lane & 16, odd = lane & 8;
#pragma unroll 1
    for (; s > 0; s -= 2) {
        float later[LK], later_decays[LK], key[LK], decays[LK], dots[3] = {};
        unpack(0, s, later, later_decays), unpack(1, s - 1, key, decays);
        const int next = max(s - 2, 1);
        load(0, next), load(1, next - 1);
#pragma unroll
        for (int c = 0; c < LK; c++) {
            dots[0] += later[c] * x[c];
            x[c] *= later_decays[c];
            dots[1] += key[c] * x[c];
            if (!ERASES) continue;
            later[c] *= later_decays[c];
            dots[2] += key[c] * later[c];
        }
        // All three sums in one reduction: lanes 0, 8 and 16 hold dots 0, 1 and 2.
        const float first = (upper ? dots[2] : dots[0]) + __shfl_xor_sync(ALL, upper ? dots[0] : dots[2], 16);
        const float second = (upper ? 0.f : dots[1]) + __shfl_xor_sync(ALL, upper ? dots[1] : 0.f, 16);
        const float sum = group_sum<8>((odd ? second : first) + __shfl_xor_sync(ALL, odd ? first : second, 8));
        float2 weight = make_float2(__shfl_sync(ALL, sum, 8), __shfl_sync(ALL, sum, 0));  // earlier token, later token
        if constexpr (ERASES) {
            const float2 beta = *reinterpret_cast<const float2*>(tokens.beta + s - 1);
            weight.y *= beta.y;
            weight.x = beta.x * (weight.x - weight.y * __shfl_sync(ALL, sum, 16));
        }
#pragma unroll
        for (int c = 0; c < LK; c++)
            x[c] = decays[c] * (ERASES ? x[c] - weight.y * later[c] - weight.x * key[c] : x[c]);
        if (lane == 0) *reinterpret_cast<float2*>(weights + s - 1) = weight;
    }
}
