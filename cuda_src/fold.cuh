// Folds a window's raw tokens into a state tile: S <- D_{1:n} S + sum_s l_s w_s^T with l_s = D_{s+1:n} k_s.
//
// mamba2 writes w_s = v_s. For the delta rule w = N (v - (D_{1:s} k_s)^T S), with N the inverse of the unit lower
// triangle of beta_s <D_{j+1:s} k_j, k_s> times Diag(beta). With scalar decays every factor exp(.) moves from the keys
// to w, so that the keys in the products are the activations: raw bf16 needs no preparation at all.
// Places past the last token hold zeros and do nothing. Decay is exp of sums over stretches of tokens, all <= 0.
#pragma once
#include "stage.cuh"

constexpr bool RAW = ACT == BF16 && KIND != KDA;     // keys are operands as they come
constexpr int TERMS = RAW ? 1 : 3;                   // slices of a key
constexpr int TEAM = 192;                            // threads that prepare keys
constexpr int KEYS = !RAW ? 1 : ERASES ? 3 : 2;      // items whose keys are in shared memory at a time
typedef u16 KeyRows[WP][ROW];                        // one slice of the window's keys

// Keys that are no operands as they come, in slices: D_{s+1:n} k_s, and for decays per channel also D_{1:s} k_s.
struct PreparedKeys {
    alignas(16) u16 ends[TERMS][RAW ? 1 : WP][ROW];
    alignas(16) u16 starts[TERMS][KIND == KDA ? WP : 1][ROW];
    alignas(16) float whole[KIND == KDA ? K : 4];  // D_{1:n}
    alignas(16) float query[RAW ? 4 : K];
};
constexpr int PREPARED = RAW || W > 16 ? 1 : 2;  // items whose prepared keys are in shared memory at a time
constexpr int SOLVES = RAW ? 2 : PREPARED;

// The triangular solve of the delta rule: the Gram matrix, then the decayed one, then N.
struct Solve {
    alignas(16) float n[ERASES ? WP : 1][WP + 8];  // padded, so that 8-byte reads of 4 rows hit all banks
};

// A window's scalar decays: lane s keeps token s's. Fetched when they are needed, as registers are short.
struct Decays {
    float upto, after;

    // Lane s gives token s's log-decay, 0 past the last.
    __device__ __forceinline__ explicit Decays(float gate) : upto(gate), after(__shfl_down_sync(ALL, gate, 1)) {
        const int lane = threadIdx.x % 32;
        if (lane == 31) after = 0;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const float x = __shfl_up_sync(ALL, upto, d), y = __shfl_down_sync(ALL, after, d);
            if (lane >= d) upto += x;
            if (lane + d < 32) after += y;
        }
        upto = decay(upto), after = decay(after);
    }
    __device__ __forceinline__ float from_start(int token) const { return __shfl_sync(ALL, upto, token); }
    __device__ __forceinline__ float to_end(int token) const { return __shfl_sync(ALL, after, token); }
    __device__ __forceinline__ float whole() const { return __shfl_sync(ALL, upto, 31); }
};

constexpr int GATE_ROWS = KIND == KDA ? W : 1;

template <int N> __device__ __forceinline__ void slice_into(float x, u16 (&to)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) to[i] = static_cast<u16>(__float_as_uint(x) >> 16), x = rest(x);
}

// Gram matrix of the keys in 16 x 8 pieces down to the diagonal; one warp.
__device__ __forceinline__ void gram_of_keys(Solve& table, const KeyRows* keys) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
#pragma unroll 1
    for (int piece = 0; piece < BLOCKS * (BLOCKS + 1); piece++) {
        const int rows = piece < 2 ? 0 : 16, columns = 8 * (piece < 2 ? piece : piece - 2);
        float sum[4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            u32 a[TERMS][4];
            uint2 b[TERMS];
#pragma unroll
            for (int i = 0; i < TERMS; i++) {
                const uint2 x = *reinterpret_cast<const uint2*>(&keys[i][rows + r][16 * step + 4 * c]);
                const uint2 y = *reinterpret_cast<const uint2*>(&keys[i][rows + 8 + r][16 * step + 4 * c]);
                a[i][0] = x.x, a[i][1] = y.x, a[i][2] = x.y, a[i][3] = y.y;
                b[i] = *reinterpret_cast<const uint2*>(&keys[i][columns + r][16 * step + 4 * c]);
            }
#pragma unroll
            for (int i = 0; i < TERMS; i++)
#pragma unroll
                for (int j = 0; i + j < TERMS; j++) mma_bf16(sum, a[i], b[j].x, b[j].y);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) table.n[ERASES ? rows + r + 8 * (i / 2) : 0][columns + 2 * c + i % 2] = sum[i];
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

// Slices of keys, for scalar decays. A team prepares keys, whose members are numbered from 0.
__device__ __forceinline__ void slice_keys(KeyRows* to, const KeyStage& stage, int member) {
    for (int i = member; i < WP * K; i += TEAM) {
        u16 parts[TERMS];
        slice_into(widen<ACT>(stage.k[i / K][i % K]), parts);
#pragma unroll
        for (int t = 0; t < TERMS; t++) to[t][i / K][i % K] = parts[t];
    }
}

// Keys as operands, for decays per channel: decayed from the window's start, and to its end.
__device__ __forceinline__ void decay_keys(PreparedKeys& m, const KeyStage& stage, int count, int member) {
    auto key = [&](int s, int channel) { return s < count ? widen<ACT>(stage.k[s % W][channel]) : 0.f; };
    auto gate = [&](int s, int channel) { return s < count ? stage.g[s % GATE_ROWS][channel % GATES] : 0.f; };
    for (int task = member; task < 2 * K; task += TEAM) {
        const int channel = task % K;
        float log_decay = 0;
        if (task < K) {
            for (int s = 0; s < WP; s++) {
                log_decay += gate(s, channel);
                u16 parts[TERMS];
                slice_into(decay(log_decay) * key(s, channel), parts);
#pragma unroll
                for (int i = 0; i < TERMS; i++) m.starts[i][KIND == KDA ? s : 0][channel] = parts[i];
            }
            m.whole[KIND == KDA ? channel : 0] = decay(log_decay);
        } else {
            for (int s = WP - 1; s >= 0; s--) {
                u16 parts[TERMS];
                slice_into(decay(log_decay) * key(s, channel), parts);
#pragma unroll
                for (int i = 0; i < TERMS; i++) m.ends[i][RAW ? 0 : s][channel] = parts[i];
                log_decay += gate(s, channel);
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
__device__ __forceinline__ void prepare(PreparedKeys& m, Solve& table, KeyStage& stage, int count, int member, Meet meet) {
    for (int i = member; i < K; i += TEAM) m.query[RAW ? 0 : i] = widen<ACT>(stage.q[i]);
    if constexpr (KIND == KDA) {
        decay_keys(m, stage, count, member);
        meet();
        for (int i = member; i < count * GATES; i += TEAM) {
            float& x = stage.g[i / GATES][i % GATES];
            x = decay(x);
        }
        meet();
        decayed_gram(table, stage, count, member);
    } else {
        slice_keys(reinterpret_cast<KeyRows*>(m.ends), stage, member);
    }
}

// N, from keys for scalar decays, else from their decayed Gram matrix. Lane s gives token s's log-decay and beta. One warp.
__device__ __forceinline__ void prepare_solve(Solve& solve, const KeyRows* keys, float gate, float beta) {
    if (KIND != KDA) {
        gram_of_keys(solve, keys);
        decay_gram(solve, gate);
    }
    substitute(solve, beta);
}

// `starts` and `ends` hold TERMS slices each, `whole` D_{1:n} where decays are per channel, `decays` the scalar ones.
__device__ __forceinline__ void fold(Tile& tile, const Rows& rows, int count, const KeyRows* starts, const KeyRows* ends, const Solve& solve,
                                     const Decays& decays, const float* whole) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    Values values;
    if constexpr (ERASES) {
        float predicted[BLOCKS][2][4] = {}, second[BLOCKS][2][4] = {};  // two chains of products
        if constexpr (RAW) {  // keys are exact in tf32, states in two pieces of it
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                __syncwarp();  // keeps the loads of later steps from being moved up here, where registers are short
                uint2 key[BLOCKS][2];
#pragma unroll
                for (int b = 0; b < BLOCKS; b++)
#pragma unroll
                    for (int t = 0; t < 2; t++) key[b][t] = *reinterpret_cast<const uint2*>(&starts[0][16 * b + 8 * t + r][16 * step + 4 * c]);
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    const float(&x)[2][4] = tile.s[step];
                    float rest[2][2];
#pragma unroll
                    for (int n = 0; n < 4; n++) rest[n / 2][n % 2] = below_tf32(x[n / 2][i + n % 2]);
#pragma unroll
                    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
                        for (int t = 0; t < 2; t++) {
                            const u32 pair = i ? key[b][t].y : key[b][t].x;
                            const float k0 = __uint_as_float(pair << 16), k1 = __uint_as_float(pair & 0xffff0000u);
                            mma_tf32(predicted[b][t], x[0][i], x[1][i], x[0][i + 1], x[1][i + 1], k0, k1);
                            mma_tf32(second[b][t], rest[0][0], rest[1][0], rest[0][1], rest[1][1], k0, k1);
                        }
                }
            }
        } else {
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const Operand<3> a(tile.s[step][0], tile.s[step][1]);
#pragma unroll
                for (int b = 0; b < BLOCKS; b++)
#pragma unroll
                    for (int t = 0; t < 2; t++)
#pragma unroll
                        for (int j = 0; j < TERMS; j++) {
                            const uint2 key = *reinterpret_cast<const uint2*>(&starts[j][16 * b + 8 * t + r][16 * step + 4 * c]);
#pragma unroll
                            for (int i = 0; i + j < 3; i++) mma_bf16((i + j) % 2 ? second[b][t] : predicted[b][t], a.a[i], key.x, key.y);
                        }
            }
        }
        values.load(rows, count);
        float write[BLOCKS][2][4] = {};
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float scale = KIND == KDA ? 1.f : decays.from_start(token_of(b, e));
#pragma unroll
                for (int half = 0; half < 2; half++) values.v[b][half][e] -= scale * (predicted[b][e / 2][2 * half + e % 2] + second[b][e / 2][2 * half + e % 2]);
            }
            const Operand<3> a(values.v[b][0], values.v[b][1]);
#pragma unroll
            for (int to = b; to < BLOCKS; to++)
#pragma unroll
                for (int t = 0; t < 2; t++) {
                    const float* const n = &solve.n[16 * to + 8 * t + r][16 * b + 2 * c];
                    const float2 lower = *reinterpret_cast<const float2*>(n), upper = *reinterpret_cast<const float2*>(n + 8);
                    u32 x[3][2];
                    slices<3>(lower.x, lower.y, &x[0][0], 2);
                    slices<3>(upper.x, upper.y, &x[0][1], 2);
#pragma unroll
                    for (int i = 0; i < 3; i++)
#pragma unroll
                        for (int j = 0; i + j < 3; j++) mma_bf16(write[to][t], a.a[i], x[j][0], x[j][1]);
                }
        }
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int e = 0; e < 4; e++) values.v[b][half][e] = write[b][e / 2][2 * half + e % 2];
    }
    if (!ERASES) values.load(rows, count);
    u32 a[BLOCKS][3][4];
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        if constexpr (KIND != KDA) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float scale = decays.to_end(token_of(b, e));
                values.v[b][0][e] *= scale, values.v[b][1][e] *= scale;
            }
        }
        const Operand<3> w(values.v[b][0], values.v[b][1]);
#pragma unroll
        for (int i = 0; i < 12; i++) a[b][i / 4][i % 4] = w.a[i / 4][i % 4];
    }
    const float all = KIND == KDA ? 0.f : decays.whole();
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        float kept[4];
#pragma unroll
        for (int e = 0; e < 4; e++) kept[e] = KIND == KDA ? whole[16 * step + 4 * c + e] : all;
        // Summed apart from the state: the tensor cores round toward zero, which would shrink it at every flush.
        float sum[2][4] = {};
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
#pragma unroll
            for (int j = 0; j < TERMS; j++) {
                // tokens are rows in memory and columns of the operand
                const uint2 x = *reinterpret_cast<const uint2*>(&ends[j][16 * b + r][16 * step + 4 * c]);
                const uint2 y = *reinterpret_cast<const uint2*>(&ends[j][16 * b + 8 + r][16 * step + 4 * c]);
                const u32 key[2][2] = {{transpose_8x8(x.x), transpose_8x8(y.x)}, {transpose_8x8(x.y), transpose_8x8(y.y)}};
#pragma unroll
                for (int i = 0; i + j < 3; i++)
#pragma unroll
                    for (int t = 0; t < 2; t++) mma_bf16(sum[t], a[b][i], key[t][0], key[t][1]);
            }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int t = i / 4, half = i % 4 / 2, e = i % 2;
            float& s = tile.s[step][half][2 * t + e];
            s = kept[2 * t + e] * s + sum[t][2 * half + e];
        }
    }
}
