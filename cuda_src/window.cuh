// The window's buffered tokens, as a read step needs them: effective query and buffer weights of one (row, head).
//
// Going back from the newest token with x = q, token s contributes c_s = beta_s <k_s, x> v_s to the output, and the
// query that is left for the state before it is x <- Diag(exp g_s) (x - c_s k_s): the transposed transition, applied
// one by one. No decay is ever divided by, and no sum of log-decays is subtracted from another.
//
// A group of LANES lanes works on one (row, head); a warp holds 32 / LANES heads of one row.
#pragma once
#include "common.cuh"

// Ring of raw inputs, one entry per slot: k (key_heads, W, K), v (heads, W, V), g (heads, W, 1 or K), beta (heads, W).
struct Ring {
    act_t *k, *v;
    float *g, *beta;

    __device__ __forceinline__ Ring(act_t* k_, act_t* v_, float* g_, float* beta_, i64 slot, int head)
        : k(k_ + (slot * KEY_HEADS + head / GROUP) * W * K), v(v_ + (slot * HEADS + head) * W * V),
          g(g_ + (slot * HEADS + head) * W * GATES), beta(beta_ + (slot * HEADS + head) * W) {}
};

// One row's newest token, at one head.
struct Token {
    const act_t *q, *k, *v;
    const float *g, *beta;

    __device__ __forceinline__ Token(const act_t* q_, const act_t* k_, const act_t* v_, const float* g_,
                                     const float* beta_, i64 at, int head)
        : q(q_ + (at * KEY_HEADS + head / GROUP) * K), k(k_ + (at * KEY_HEADS + head / GROUP) * K),
          v(v_ + (at * HEADS + head) * V), g(g_ + (at * HEADS + head) * GATES), beta(beta_ + at * HEADS + head) {}
};

// How a group shares the value channels: chunks of WIDTH neighbours, lane, lane + LANES, ...
template <int LANES> struct ValueShare {
    static constexpr int WIDTH = V % (8 * LANES) == 0 ? 8 : V % (4 * LANES) == 0 ? 4 : 2;
    static constexpr int COUNT = (V / WIDTH + LANES - 1) / LANES;
    __device__ __forceinline__ static int at(int i) { return WIDTH * (threadIdx.x % LANES + LANES * i); }
};

// Puts the newest token into ring place `pos`. Readers of the same step take it from the inputs.
template <int LANES>
__device__ __forceinline__ void append(const Token& token, const Ring& ring,
                                       const Packed<ACT, ValueShare<LANES>::WIDTH> (&values)[ValueShare<LANES>::COUNT],
                                       int pos, int head) {
    constexpr int OWN = K / LANES;
    typedef ValueShare<LANES> Share;
    const int lane = threadIdx.x % LANES;
    if (head % GROUP == 0) {
        Packed<ACT, OWN> key;
        key.load(token.k + lane * OWN);
        key.store(ring.k + pos * K + lane * OWN);
    }
#pragma unroll
    for (int i = 0; i < Share::COUNT; i++) {
        if (Share::at(i) < V) values[i].store(ring.v + pos * V + Share::at(i));
    }
    if constexpr (KIND == KDA) {
        Packed<FP32, OWN> gate;
        gate.load(token.g + lane * OWN);
        gate.store(ring.g + pos * K + lane * OWN);
    } else if (lane == 0) {
        ring.g[pos] = *token.g;
    }
    if (ERASES && lane == 0) ring.beta[pos] = *token.beta;
}

template <int LANES> struct WindowRead {
    float x[K / LANES];  // this lane's channels of the effective query
    float weight;        // lane s: weight of token s (0 after the newest)
};

constexpr int CHUNK = W - 1 < 8 ? 4 : 8;  // ring tokens that go through a reduction, or a fetch of gates, together
constexpr int CHUNKS = (W - 1 + CHUNK - 1) / CHUNK;

// Scores <k_s, q> of a block's groups that share key heads: each group computes some tokens' for all.
template <int LANES> __device__ __forceinline__ void share_scores(const Token& token, const Ring& ring, int pos, float* scores) {
    constexpr int OWN = K / LANES;
    const int lane = threadIdx.x % LANES;
    Packed<ACT, OWN> query;
    query.load(token.q + lane * OWN);
    constexpr int GROUPS_OF_BLOCK = 128 / LANES, EACH = (W + GROUPS_OF_BLOCK - 1) / GROUPS_OF_BLOCK;
    Packed<ACT, OWN> keys[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int s = threadIdx.x / LANES + GROUPS_OF_BLOCK * i;
        keys[i].clear();
        if (s <= pos) keys[i].load((s < pos ? ring.k + s * K : token.k) + lane * OWN);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int s = threadIdx.x / LANES + GROUPS_OF_BLOCK * i;
        float sum = 0;
#pragma unroll
        for (int c = 0; c < OWN; c++) sum += keys[i][c] * query[c];
        sum = group_sum<LANES>(sum);
        if (lane == 0 && s <= pos) scores[s] = sum;
    }
}

// `scores` holds <k_s, q> of all tokens where the block has computed them together (mamba2), else null.
template <int LANES>
__device__ __forceinline__ WindowRead<LANES> read_window(const Token& token, const Ring& ring, int pos,
                                                         const float* scores = nullptr) {
    static_assert(W <= LANES, "lane s keeps the scalars of token s");
    constexpr int OWN = K / LANES;
    const int lane = threadIdx.x % LANES;
    WindowRead<LANES> window;
    constexpr int HELD = ERASES ? CHUNKS : 1;  // the delta rule needs keys twice, far apart: all stay in registers
    Packed<ACT, OWN> query, newest, keys[HELD][CHUNK];
    auto fetch = [&](int n, Packed<ACT, OWN>(&into)[CHUNK]) {
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            into[i].clear();
            if (n * CHUNK + i < pos) into[i].load(ring.k + (n * CHUNK + i) * K + lane * OWN);
        }
    };
    query.load(token.q + lane * OWN);
    if (ERASES || !scores) {
        newest.load(token.k + lane * OWN);
#pragma unroll
        for (int n = 0; n < HELD; n++) fetch(n, keys[n]);
    }
    float gate = 0, beta = 0;  // of token `lane`
    if (KIND != KDA) gate = lane < pos ? ring.g[lane] : lane == pos ? *token.g : 0.f;
    if (ERASES) beta = lane < pos ? ring.beta[lane] : lane == pos ? *token.beta : 0.f;
#pragma unroll
    for (int c = 0; c < OWN; c++) window.x[c] = query[c];
    window.weight = 0;

    if constexpr (!ERASES) {
        // c_s = exp(g_{s+1} + ... + g_t) <k_s, q>: all tokens at once
        float after = __shfl_down_sync(ALL, gate, 1, LANES);
        if (lane == LANES - 1) after = 0;
#pragma unroll
        for (int d = 1; d < LANES; d *= 2) {
            const float y = __shfl_down_sync(ALL, after, d, LANES);
            if (lane + d < LANES) after += y;
        }
        float dot = 0;
        if (scores) {
            if (lane <= pos) dot = scores[lane];
        } else {
#pragma unroll 1
            for (int n = 0; n * CHUNK < pos; n++) {
                if (n) fetch(n, keys[0]);
                float sums[CHUNK];
#pragma unroll
                for (int i = 0; i < CHUNK; i++) {
                    sums[i] = 0;
#pragma unroll
                    for (int c = 0; c < OWN; c++) sums[i] += keys[0][i][c] * window.x[c];
                }
                const float sum = group_sums<LANES>(sums);
                const float y = __shfl_sync(ALL, sum, lane % CHUNK * (LANES / CHUNK), LANES);
                if (lane / CHUNK == n) dot = y;
            }
            float own = 0;
#pragma unroll
            for (int c = 0; c < OWN; c++) own += newest[c] * window.x[c];
            own = group_sum<LANES>(own);
            if (lane == pos) dot = own;
        }
        window.weight = lane <= pos ? decay(after) * dot : 0.f;
        const float whole = decay(__shfl_sync(ALL, after + gate, 0, LANES));
#pragma unroll
        for (int c = 0; c < OWN; c++) window.x[c] *= whole;
    } else {
        const float same = KIND == KDA ? 1.f : decay(gate);  // of token `lane`
        auto back = [&](int s, const Packed<ACT, OWN>& key, const float* gates) {
            float product = 0;
#pragma unroll
            for (int c = 0; c < OWN; c++) product += key[c] * window.x[c];
            const float weight = __shfl_sync(ALL, beta, s, LANES) * group_sum<LANES>(product);
            const float one = __shfl_sync(ALL, same, s, LANES);
            if (lane == s) window.weight = weight;
#pragma unroll
            for (int c = 0; c < OWN; c++)
                window.x[c] = (KIND == KDA ? decay(gates[c]) : one) * (window.x[c] - weight * key[c]);
        };
        constexpr int FETCH = KIND == KDA ? CHUNK : 1;
        float gates[FETCH][OWN];
        if constexpr (KIND == KDA) {
            Packed<FP32, OWN> packed;
            packed.load(token.g + lane * OWN);
#pragma unroll
            for (int c = 0; c < OWN; c++) gates[0][c] = packed[c];
        }
        back(pos, newest, gates[0]);
#pragma unroll
        for (int n = CHUNKS - 1; n >= 0; n--) {
            if (n * CHUNK >= pos) continue;
            if constexpr (KIND == KDA) {
#pragma unroll
                for (int i = 0; i < CHUNK; i++) {
                    Packed<FP32, OWN> packed;
                    packed.clear();
                    if (n * CHUNK + i < pos) packed.load(ring.g + (n * CHUNK + i) * K + lane * OWN);
#pragma unroll
                    for (int c = 0; c < OWN; c++) gates[i % FETCH][c] = packed[c];
                }
            }
#pragma unroll
            for (int i = CHUNK - 1; i >= 0; i--)
                if (n * CHUNK + i < pos) back(n * CHUNK + i, keys[n][i], gates[i % FETCH]);
        }
    }
    return window;
}
