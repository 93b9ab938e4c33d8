// What folding warps need of a window's tokens and cannot take as it comes: decays, keys as operands, and the delta rule's
// solve (see fold.cuh for the algebra).
#pragma once
#include "stage.cuh"

constexpr int TERMS = RAW ? 1 : 3;                   // slices of a key
constexpr int TEAM = 256;                            // threads that prepare keys: two for a channel at most
constexpr int KEYS = !RAW && W > 16 ? 1 : 2;  // items whose keys are in shared memory at a time

// Keys that are no operands as they come. D_{1:s} k_s (scalar decays: k_s) lies row by row in float32, and D_{s+1:n} k_s
// (k_s) in bf16 slices in the order of operands: a place of 16 channels, then tokens {2c, 2c+1, 8+2c, 9+2c} of 16.
struct PreparedKeys {
    alignas(16) u16 ends[TERMS][RAW ? 1 : BLOCKS][RAW ? 1 : K][16];
    alignas(16) float starts[RAW ? 1 : WP][RAW ? 4 : ROW];
    alignas(16) float whole[KIND == KDA ? K : 4];  // D_{1:n}
    alignas(16) float query[RAW ? 4 : K];
};
constexpr int PREPARED = RAW || W > 16 || MOST_SHARED < 200000 ? 1 : 2;  // items whose prepared keys are in shared memory at a time
constexpr int SOLVES = RAW ? 2 : PREPARED;

// What one warp works out for all: the triangular solve of the delta rule (the Gram matrix, then the decayed one, then N),
// and scalar decays.
struct Solve {
    alignas(16) float n[ERASES ? WP : 1][ERASES ? WP + 8 : 4];  // padded, so that 8-byte reads of 4 rows hit all banks
    float upto[WP], after[WP];  // D_{1:s} and D_{s+1:n}

    // Lane s gives token s's log-decay, 0 past the last.
    __device__ __forceinline__ void set_decays(float gate) {
        const int lane = threadIdx.x % 32;
        float before = gate, behind = __shfl_down_sync(ALL, gate, 1);
        if (lane == 31) behind = 0;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const float x = __shfl_up_sync(ALL, before, d), y = __shfl_down_sync(ALL, behind, d);
            if (lane >= d) before += x;
            if (lane + d < 32) behind += y;
        }
        if (lane < WP) upto[lane] = decay(before), after[lane] = decay(behind);
    }
    __device__ __forceinline__ float whole() const { return upto[WP - 1]; }
};

template <int N> __device__ __forceinline__ void slice_into(float x, u16 (&to)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) to[i] = static_cast<u16>(__float_as_uint(x) >> 16), x = rest(x);
}

// Channels 4c to 4c + 3 of 16 of a token: of raw keys, or of prepared ones.
__device__ __forceinline__ void load_key(float (&key)[4], const KeyStage& stage, const PreparedKeys& m, int token, int first) {
    const int at = first + 4 * (threadIdx.x % 4);
    if constexpr (RAW) {
        const uint2 x = *reinterpret_cast<const uint2*>(&stage.k[token][at]);
        key[0] = __uint_as_float(x.x << 16), key[1] = __uint_as_float(x.x & 0xffff0000u);
        key[2] = __uint_as_float(x.y << 16), key[3] = __uint_as_float(x.y & 0xffff0000u);
    } else {
        const float4 x = *reinterpret_cast<const float4*>(&m.starts[RAW ? 0 : token][at]);
        key[0] = x.x, key[1] = x.y, key[2] = x.z, key[3] = x.w;
    }
}

// Gram matrix of keys under scalar decays in 16 x 8 pieces down to the diagonal; one warp.
__device__ __forceinline__ void gram_of_keys(Solve& table, const KeyStage& stage, const PreparedKeys& m) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
#pragma unroll 1
    for (int piece = 0; piece < BLOCKS * (BLOCKS + 1); piece++) {
        const int rows = piece < 2 ? 0 : 16, columns = 8 * (piece < 2 ? piece : piece - 2);
        float sum[4] = {}, rest[4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            float upper[4], lower[4], other[4];
            load_key(upper, stage, m, rows + r, 16 * step);
            load_key(lower, stage, m, rows + 8 + r, 16 * step);
            load_key(other, stage, m, columns + r, 16 * step);
            if constexpr (RAW) {
#pragma unroll
                for (int i = 0; i < 4; i += 2)
                    mma_tf32(i ? rest : sum, upper[i], lower[i], upper[i + 1], lower[i + 1], other[i], other[i + 1]);
            } else {
                mma_float4(sum, rest, upper, lower, other, false);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) table.n[ERASES ? rows + r + 8 * (i / 2) : 0][columns + 2 * c + i % 2] = sum[i] + rest[i];
    }
    __syncwarp();
}

// Times exp(g_{j+1} + ... + g_s); lane s gives token s's log-decay. One warp, a column a lane.
__device__ __forceinline__ void decay_gram(Solve& table, float gate) {
    const int lane = threadIdx.x % 32;
    float between = 0;
#pragma unroll
    for (int s = 1; s < WP; s++) {
        const float x = __shfl_sync(ALL, gate, s);
        between += s > lane ? x : 0.f;
        if (lane < s) table.n[ERASES ? s : 0][lane] *= decay(between);
    }
    __syncwarp();
}

// N from the decayed Gram matrix by forward substitution, a column a lane; lane s gives token s's beta. One warp.
__device__ __forceinline__ void substitute(Solve& table, float beta) {
    const int lane = threadIdx.x % 32;
    float n[WP];
#pragma unroll
    for (int s = 0; s < WP; s++) {
        float sum[2] = {s == lane ? 1.f : 0.f, 0};
#pragma unroll
        for (int i = 0; i < s; i++) sum[i % 2] -= table.n[ERASES ? s : 0][i] * n[i];
        n[s] = __shfl_sync(ALL, beta, s) * (sum[0] + sum[1]);
    }
    __syncwarp();
#pragma unroll
    for (int s = 0; s < WP; s++)
        if (lane < WP) table.n[ERASES ? s : 0][lane] = n[s];
    __syncwarp();
}

// Keeps a key's decayed channel as an operand of the update.
__device__ __forceinline__ void store_end(PreparedKeys& m, int s, int channel, float x) {
    const int place = channel / 16 * 16 + place_of(channel % 16), token = 4 * (s % 8 / 2) + 2 * (s % 16 / 8) + s % 2;
    u16 parts[TERMS];
    slice_into(x, parts);
#pragma unroll
    for (int i = 0; i < TERMS; i++) m.ends[i][RAW ? 0 : s / 16][RAW ? 0 : place][token] = parts[i];
}

// Scalar decays: keys as they are. A team prepares keys, whose members are numbered from 0.
__device__ __forceinline__ void copy_keys(PreparedKeys& m, const KeyStage& stage, int count, int member) {
    for (int i = member; i < WP * K; i += TEAM) {
        const float x = i / K < count ? widen<ACT>(stage.k[i / K][i % K]) : 0.f;
        m.starts[RAW ? 0 : i / K][i % K] = x;
        store_end(m, i / K, i % K, x);
    }
}

// Decays per channel, in place of their logs: a thread has half of a channel's tokens, and returns the sum of what it took.
// Raw gates are all taken before the first decay is put where they may lie; `input` is of the thread's channel.
template <class Meet>
__device__ __forceinline__ float take_decays(KeyStage& stage, const GateInput<1>& input, int count, int member, Meet meet) {
    constexpr int HALF = WP / 2;
    const int channel = member % K, first = member / K * HALF;
    auto each = [&](auto work) {
#pragma unroll
        for (int i = 0; i < HALF; i++)
            if (member < 2 * K && first + i < count) work(i, stage.g[(first + i) % GATE_ROWS][channel % GATES]);
    };
    float sum = 0;
    if constexpr (RAW_GATE) {
        float taken[HALF];
        each([&](int i, float&) { sum += taken[i] = input.log_decay(widen<GATE_TYPE>(stage.given_gates(first + i)[channel]), 0); });
        meet();
        each([&](int i, float& x) { x = decay(taken[i]); });
    } else {
        each([&](int, float& x) { sum += x, x = decay(x); });
    }
    return sum;
}

// Keys decayed from the window's start by the threads of the first half, to its end by the others. `sum` is of the first
// half's log-decays, the others' stand where their decay will.
__device__ __forceinline__ void decay_keys(PreparedKeys& m, const KeyStage& stage, int count, int member, float sum) {
    const int channel = member % K;
    auto key = [&](int s) { return s < count ? widen<ACT>(stage.k[s % W][channel]) : 0.f; };
    auto gate = [&](int s) { return s < count ? stage.g[s % GATE_ROWS][channel % GATES] : 1.f; };
    float whole = 1;
    if (member < K) {
#pragma unroll 8
        for (int s = 0; s < WP; s++) {
            whole *= gate(s);
            m.starts[RAW ? 0 : s][channel] = whole * key(s);
        }
        float& x = m.whole[KIND == KDA ? channel : 0];
        x = decay(sum + x);  // more exact than the product: states take it up in every window
    } else if (member < 2 * K) {
        const int place = channel / 16 * 16 + place_of(channel % 16);
#pragma unroll 1
        for (int block = BLOCKS - 1; block >= 0; block--) {
            u32 packed[TERMS][8];
#pragma unroll
            for (int s = 14; s >= 0; s -= 2) {
                const float odd = whole * key(16 * block + s + 1);
                whole *= gate(16 * block + s + 1);
                const float even = whole * key(16 * block + s);
                whole *= gate(16 * block + s);
                slices<TERMS>(even, odd, &packed[0][2 * (s % 8 / 2) + s / 8], 8);
            }
#pragma unroll
            for (int i = 0; i < TERMS; i++) {
                uint4* const to = reinterpret_cast<uint4*>(&m.ends[i][RAW ? 0 : block][RAW ? 0 : place][0]);
                to[0] = make_uint4(packed[i][0], packed[i][1], packed[i][2], packed[i][3]);
                to[1] = make_uint4(packed[i][4], packed[i][5], packed[i][6], packed[i][7]);
            }
        }
    }
}

// Decayed Gram matrix <D_{j+1:s} k_j, k_s> below the diagonal, for decays per channel: going back from token s, its key
// takes up one decay after another. `stage.g` holds decays by now. A warp takes a long row and a short one in turn, so
// that all are done together.
__device__ __forceinline__ void decayed_gram(Solve& table, const KeyStage& stage, int count, int member) {
    constexpr int OWN = K / 32;
    const int lane = threadIdx.x % 32;
    for (int job = member / 32 * 2; job < WP; job += job % 2 ? 2 * (TEAM / 32) - 1 : 1) {
        const int s = job % 2 ? job / 2 : WP - 1 - job / 2;
        if (s < count) {
            Packed<ACT, OWN> last;
            last.load(&stage.k[s % W][OWN * lane]);
            float key[OWN];
#pragma unroll
            for (int i = 0; i < OWN; i++) key[i] = last[i];
            for (int first = (s - 1) / 8 * 8; first >= 0 && s > 0; first -= 8) {
                float sums[8];
#pragma unroll
                for (int n = 7; n >= 0; n--) {
                    const int j = first + n;
                    sums[n] = 0;
                    if (j >= s) continue;
                    Packed<FP32, OWN> one;
                    Packed<ACT, OWN> other;
                    one.load(&stage.g[(j + 1) % GATE_ROWS][OWN * lane % GATES]);
                    other.load(&stage.k[j][OWN * lane]);
#pragma unroll
                    for (int i = 0; i < OWN; i++) {
                        key[i] *= one[i];
                        sums[n] += key[i] * other[i];
                    }
                }
                const float sum = warp_sums(sums);
                const int j = first + lane / 4;
                if (lane % 4 == 0 && j < s) table.n[ERASES ? s : 0][j] = sum;
            }
        } else if (lane < s) {
            table.n[ERASES ? s : 0][lane] = 0;  // past the last token
        }
    }
}

// All of it where keys are no operands as they come, but for N. Leaves decays in place of log-decays per channel. `meet` brings
// the team together; at the end it has yet to meet.
template <class Meet>
__device__ __forceinline__ void prepare(PreparedKeys& m, Solve& table, KeyStage& stage, const GateInput<1>& input, int count, int member,
                                        Meet meet) {
    for (int i = member; i < K; i += TEAM) m.query[RAW ? 0 : i] = widen<ACT>(stage.q[i]);
    if constexpr (KIND == KDA) {
        const float sum = take_decays(stage, input, count, member, meet);
        if (member >= K && member < 2 * K) m.whole[KIND == KDA ? member - K : 0] = sum;
        meet();
        decay_keys(m, stage, count, member, sum);
        decayed_gram(table, stage, count, member);
    } else {
        copy_keys(m, stage, count, member);
    }
}

// Scalar decays, and N: from keys for scalar decays, else from their decayed Gram matrix. Lane s gives token s's log-decay
// and beta. One warp.
__device__ __forceinline__ void prepare_solve(Solve& solve, const KeyStage& stage, const PreparedKeys& m, float gate, float beta) {
    if (KIND != KDA) solve.set_decays(gate);
    if (ERASES && KIND != KDA) {
        gram_of_keys(solve, stage, m);
        decay_gram(solve, gate);
    }
    if (ERASES) substitute(solve, beta);
    __syncwarp();
}
