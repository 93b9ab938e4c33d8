// What a read step takes from the window's tokens: effective query and buffer weights of one (row, head).
//
// Going back from the newest token with x = q, token s contributes c_s = beta_s <k_s, x> v_s to the output, and the
// query that is left for the state before it is x <- Diag(exp g_s) (x - c_s k_s): the transposed transition, applied
// one by one. No decay is ever divided by, and no sum of log-decays is subtracted from another.
#pragma once
#include "window.cuh"

// How LANES neighbouring lanes share the value channels: chunks of WIDTH neighbours, lane, lane + LANES, ...
template <int LANES> struct ValueShare {
    static constexpr int WIDTH = V % (8 * LANES) == 0 ? 8 : V % (4 * LANES) == 0 ? 4 : 2;
    static constexpr int COUNT = (V / WIDTH + LANES - 1) / LANES;
    __device__ __forceinline__ static int at(int i) { return WIDTH * (threadIdx.x % LANES + LANES * i); }
};

struct WindowRead {
    float x[LK];   // this lane's channels of the effective query
    float weight;  // lane s: weight of token s (0 after the newest)
};

// What going back needs of each token, in shared memory, one after the other.
struct Tokens {
    const act_t *q, *k;
    const gate_t* g;  // kda
};

// Goes back over tokens 0 to pos, two at a time: half the reductions of one by one, one after the other, for a few products more.
// `gate` and `beta` are token `lane`'s (0 after the newest). Within a block, with x and k_m carried on by the decays in between,
// c_i = beta_i (<k_i, x> - sum over m < i of c_m <k_i, k_m>), i and m counting back.
constexpr int BLOCK = 2;

__device__ __forceinline__ WindowRead read_window(const Tokens& tokens, const GateInput<LK>& input, int pos, float gate,
                                                  float beta) {
    const int lane = threadIdx.x % 32;
    WindowRead window;
    Packed<ACT, LK> query, key[BLOCK], coming[BLOCK];
    Packed<GATE_TYPE, LK> gates[BLOCK], coming_gates[BLOCK];
    auto fetch = [&](int first) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            const int s = first - i;
            coming[i].clear(), coming_gates[i].clear();
            if (s >= 0) coming[i].load(tokens.k + s * K + lane * LK);
            if (KIND == KDA && s >= 0) coming_gates[i].load(tokens.g + s * K + lane * LK);
        }
    };
    query.load(tokens.q + lane * LK);
    fetch(pos);
#pragma unroll
    for (int c = 0; c < LK; c++) window.x[c] = query[c];
    window.weight = 0;
    const float same = KIND == KDA ? 1.f : decay(gate);
#pragma unroll 1
    for (int first = pos; first >= 0; first -= BLOCK) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) key[i] = coming[i], gates[i] = coming_gates[i];
        fetch(first - BLOCK);
        constexpr int DOTS = ERASES ? 4 : BLOCK;  // with x and among themselves, to a power of two
        float dots[DOTS] = {}, carried[BLOCK][LK], one[BLOCK], write[BLOCK];
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            const int s = first - i;
            one[i] = KIND == KDA ? 1.f : __shfl_sync(ALL, same, s & 31);
            write[i] = ERASES ? __shfl_sync(ALL, beta, s & 31) : 1.f;
            if (s < 0) one[i] = 1, write[i] = 0;
        }
#pragma unroll
        for (int c = 0; c < LK; c++) {
            int place = BLOCK;
#pragma unroll
            for (int i = 0; i < BLOCK; i++) {
                const float k = key[i][c], a = KIND != KDA || (RAW_GATE && first < i) ? one[i] : input.quick_decay(gates[i][c], c);
                dots[i] += k * window.x[c];
                window.x[c] *= a;
                if constexpr (ERASES) {
#pragma unroll
                    for (int m = 0; m < i; m++) dots[place++] += k * carried[m][c], carried[m][c] *= a;
                    carried[i][c] = k * a;
                }
            }
        }
        const float sum = group_sums<32>(dots);
        auto dot = [&](int which) { return __shfl_sync(ALL, sum, which * (32 / DOTS)); };
        int place = BLOCK;
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            float weight = dot(i);
            if constexpr (ERASES) {
#pragma unroll
                for (int m = 0; m < i; m++) weight -= write[m] * dot(place++);
                weight *= write[i];
                write[i] = weight;  // c_i from here on
#pragma unroll
                for (int c = 0; c < LK; c++) window.x[c] -= weight * carried[i][c];
            }
            if (lane == first - i) window.weight = weight;
        }
    }
    return window;
}
