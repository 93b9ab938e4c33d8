// Folds a window's raw tokens into a state tile: S <- D_{1:n} S + sum_s l_s w_s^T with l_s = D_{s+1:n} k_s.
//
// mamba2 writes w_s = v_s. For the delta rule w = N (v - (D_{1:s} k_s)^T S), with N the inverse of the unit lower
// triangle of beta_s <D_{j+1:s} k_j, k_s> times Diag(beta). With scalar decays every factor exp(.) moves from the keys
// to w, so that the keys in the products are the raw activations: exact in one bf16 slice.
// Places past the last token hold zeros and do nothing. Decay is exp of sums over stretches of tokens, all <= 0.
#pragma once
#include "fragments.cuh"
#include "stage.cuh"

constexpr int BLOCKS = (W + 15) / 16, WP = 16 * BLOCKS;  // the window in operand fragments
constexpr int TERMS = ACT == BF16 && KIND != KDA ? 1 : 3;  // slices of a key
constexpr int ROW = K + 16;                                // padded, so that 8-byte reads of 4 rows hit all banks

struct FoldMemory {
    alignas(16) u16 ends[TERMS][BLOCKS][K][16];           // l_s (scalar decays: k_s): [place of channel][s]
    alignas(16) u16 starts[ERASES ? TERMS : 1][ERASES ? WP : 1][ROW];  // D_{1:s} k_s (scalar: k_s): [place of s][channel]
    alignas(16) float table[ERASES ? WP : 1][WP];         // decays, then decayed Gram matrix
    alignas(16) float solve[ERASES ? WP : 1][WP];         // N
    alignas(16) float whole[GATES == 1 ? 4 : K];          // D_{1:n}
    float from_start[WP], to_end[WP], gate[WP], beta[WP];
};

template <int N> __device__ __forceinline__ void slice_into(float x, u16 (&to)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) to[i] = static_cast<u16>(__float_as_uint(x) >> 16), x = rest(x);
}

// Scalars of the window: decays from its start and to its end, and between tokens for the delta rule.
__device__ __forceinline__ void prepare_scalars(FoldMemory& m, const Stage& stage, int count) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp == 0 && lane < WP) m.beta[lane] = ERASES && lane < count ? stage.beta[lane] : 0.f;
    if (KIND == KDA || warp > 1) return;
    const float gate = lane < count ? stage.g[lane][0] : 0.f;
    if (warp == 0) {
        float upto = gate, after = __shfl_down_sync(ALL, gate, 1);
        if (lane == 31) after = 0;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const float x = __shfl_up_sync(ALL, upto, d), y = __shfl_down_sync(ALL, after, d);
            if (lane >= d) upto += x;
            if (lane + d < 32) after += y;
        }
        if (lane < WP) m.from_start[lane] = decay(upto), m.to_end[lane] = decay(after);
        if (lane == 31) m.whole[0] = decay(upto);
    } else if (ERASES) {
        float between = 0;  // g_{lane+1} + ... + g_s
#pragma unroll
        for (int s = 1; s < WP; s++) {
            const float x = __shfl_sync(ALL, gate, s);
            between += s > lane ? x : 0.f;
            if (lane < s) m.table[s][lane] = decay(between);
        }
    }
}

// Keys as operands, for scalar decays: raw.
__device__ __forceinline__ void prepare_keys(FoldMemory& m, const Stage& stage, int count) {
    const int lane = threadIdx.x % 32;
    for (int block = threadIdx.x / 32; block < WP / 8 * STEPS; block += NWARPS) {
        const int s = block / STEPS * 8 + lane / 4, step = block % STEPS, c = lane % 4;
        Packed<ACT, 4> key;
        key.clear();
        if (s < count) key.load(&stage.k[s][16 * step + 4 * c]);
        u16 parts[4][TERMS];
#pragma unroll
        for (int e = 0; e < 4; e++) slice_into(key[e], parts[e]);
#pragma unroll
        for (int i = 0; i < TERMS; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) m.ends[i][s / 16][16 * step + place_of(4 * c + e)][s % 16] = parts[e][i];
            if (ERASES)
                *reinterpret_cast<uint2*>(&m.starts[i][s / 16 * 16 + place_of(s % 16)][16 * step + 4 * c]) =
                    make_uint2(parts[0][i] | parts[1][i] << 16, parts[2][i] | parts[3][i] << 16);
        }
    }
}

// Keys as operands, for decays per channel: decayed from the window's start, and to its end.
__device__ __forceinline__ void prepare_decayed_keys(FoldMemory& m, const Stage& stage, int count) {
    auto key = [&](int s, int channel) { return s < count ? widen<ACT>(stage.k[s % W][channel]) : 0.f; };
    auto gate = [&](int s, int channel) { return s < count ? stage.g[s % W][channel % GATES] : 0.f; };
    for (int task = threadIdx.x; task < 2 * K; task += THREADS) {
        const int channel = task % K, place = channel / 16 * 16 + place_of(channel % 16);
        float log_decay = 0;
        if (task < K) {
            for (int s = 0; s < WP; s++) {
                log_decay += gate(s, channel);
                u16 parts[TERMS];
                slice_into(decay(log_decay) * key(s, channel), parts);
#pragma unroll
                for (int i = 0; i < TERMS; i++) m.starts[i][s / 16 * 16 + place_of(s % 16)][channel] = parts[i];
            }
            m.whole[channel % (GATES == 1 ? 4 : K)] = decay(log_decay);
        } else {
#pragma unroll 1
            for (int block = BLOCKS - 1; block >= 0; block--) {
                u32 packed[TERMS][8];
#pragma unroll
                for (int s = 14; s >= 0; s -= 2) {
                    const float odd = decay(log_decay) * key(16 * block + s + 1, channel);
                    log_decay += gate(16 * block + s + 1, channel);
                    const float even = decay(log_decay) * key(16 * block + s, channel);
                    log_decay += gate(16 * block + s, channel);
                    slices<TERMS>(even, odd, &packed[0][s / 2], 8);
                }
#pragma unroll
                for (int i = 0; i < TERMS; i++) {
                    uint4* const to = reinterpret_cast<uint4*>(&m.ends[i][block][place][0]);
                    to[0] = make_uint4(packed[i][0], packed[i][1], packed[i][2], packed[i][3]);
                    to[1] = make_uint4(packed[i][4], packed[i][5], packed[i][6], packed[i][7]);
                }
            }
        }
    }
}

// Decayed Gram matrix <D_{j+1:s} k_j, k_s> below the diagonal, for decays per channel: going back from token s, its key
// takes up one decay after another. `stage.g` holds decays by now. A warp takes a long row and a short one in turn, so
// that all are done together.
__device__ __forceinline__ void decayed_gram(FoldMemory& m, const Stage& stage, int count) {
    constexpr int OWN = K / 32;
    const int lane = threadIdx.x % 32;
    for (int job = threadIdx.x / 32 * 2; job < WP; job += job % 2 ? 2 * NWARPS - 1 : 1) {
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
                    one.load(&stage.g[j + 1][OWN * lane % GATES]);
                    other.load(&stage.k[j][OWN * lane]);
#pragma unroll
                    for (int i = 0; i < OWN; i++) {
                        key[i] *= one[i];
                        sums[n] += key[i] * other[i];
                    }
                }
                const float sum = warp_sums(sums);
                const int j = first + lane / 4;
                if (lane % 4 == 0 && j < s) m.table[s][j] = sum;
            }
        } else if (lane < s) {
            m.table[s][lane] = 0;  // past the last token
        }
    }
}

// The same for scalar decays, whose factors `table` already holds: times the raw Gram matrix.
__device__ __forceinline__ void scale_by_gram(FoldMemory& m) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    for (int job = threadIdx.x / 32; job < BLOCKS * BLOCKS * 2; job += NWARPS) {
        const int rows = job / (2 * BLOCKS) * 16, columns = job % (2 * BLOCKS) * 8;
        float sum[4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            u32 a[TERMS][4];
            uint2 b[TERMS];
#pragma unroll
            for (int i = 0; i < TERMS; i++) {
                const uint2 x = *reinterpret_cast<const uint2*>(&m.starts[i][rows + r][16 * step + 4 * c]);
                const uint2 y = *reinterpret_cast<const uint2*>(&m.starts[i][rows + 8 + r][16 * step + 4 * c]);
                a[i][0] = x.x, a[i][1] = y.x, a[i][2] = x.y, a[i][3] = y.y;
                b[i] = *reinterpret_cast<const uint2*>(&m.starts[i][columns + r][16 * step + 4 * c]);
            }
#pragma unroll
            for (int i = 0; i < TERMS; i++)
#pragma unroll
                for (int j = 0; i + j < TERMS; j++) mma_bf16(sum, a[i], b[j].x, b[j].y);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = r + 8 * (i / 2), col = columns % 16 + 2 * c + i % 2;
            const int s = rows + column_at(row), j = columns / 16 * 16 + column_at(col);
            if (j < s) m.table[s][j] *= sum[i];
        }
    }
}

// N from the Gram matrix by forward substitution, a column a lane; one warp.
__device__ __forceinline__ void prepare_solve(FoldMemory& m) {
    const int lane = threadIdx.x % 32;
    if (lane >= WP) return;
    float n[WP];
#pragma unroll
    for (int s = 0; s < WP; s++) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < s; i++) sum += m.table[s][i] * n[i];
        n[s] = m.beta[s] * ((s == lane ? 1.f : 0.f) - sum);
        m.solve[s][lane] = n[s];
    }
}

// Everything that the fold needs besides the state, but for N. Leaves decays in place of log-decays per channel. Ends
// with a barrier.
__device__ __forceinline__ void prepare_fold(FoldMemory& m, Stage& stage, int count) {
    prepare_scalars(m, stage, count);
    if constexpr (KIND == KDA) {
        prepare_decayed_keys(m, stage, count);
        __syncthreads();
        for (int i = threadIdx.x; i < count * GATES; i += THREADS) {
            float& gate = stage.g[i / GATES][i % GATES];
            gate = decay(gate);
        }
        __syncthreads();
        decayed_gram(m, stage, count);
    } else {
        prepare_keys(m, stage, count);
        if constexpr (ERASES) {
            __syncthreads();
            scale_by_gram(m);
        }
    }
    __syncthreads();
}

// This thread's values: rows r and r + 8 of the warp, tokens 16 block + 4c to 4c + 3.
struct Values {
    float v[BLOCKS][2][4];
    __device__ __forceinline__ Values(const Stage& stage, int count) {
        const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int s = 16 * b + 4 * (lane % 4) + e;
#pragma unroll
                for (int half = 0; half < 2; half++)
                    v[b][half][e] = s < count ? widen<ACT>(stage.v[s % W][row + 8 * half]) : 0.f;
            }
    }
};

__device__ __forceinline__ void fold(Tile& tile, const FoldMemory& m, Values& values) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    if constexpr (ERASES) {
        float predicted[BLOCKS][2][4] = {}, second[BLOCKS][2][4] = {};  // two chains of products
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const Operand<3> a(tile.s[step][0], tile.s[step][1]);
#pragma unroll
            for (int b = 0; b < BLOCKS; b++)
#pragma unroll
                for (int t = 0; t < 2; t++)
#pragma unroll
                    for (int j = 0; j < TERMS; j++) {
                        const uint2 key = *reinterpret_cast<const uint2*>(&m.starts[j][16 * b + 8 * t + r][16 * step + 4 * c]);
#pragma unroll
                        for (int i = 0; i + j < 3; i++) mma_bf16((i + j) % 2 ? second[b][t] : predicted[b][t], a.a[i], key.x, key.y);
                    }
        }
        float write[BLOCKS][2][4] = {};
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float scale = KIND == KDA ? 1.f : m.from_start[16 * b + 4 * c + e];
#pragma unroll
                for (int half = 0; half < 2; half++) values.v[b][half][e] -= scale * (predicted[b][e / 2][2 * half + e % 2] + second[b][e / 2][2 * half + e % 2]);
            }
            const Operand<3> a(values.v[b][0], values.v[b][1]);
#pragma unroll
            for (int to = b; to < BLOCKS; to++)
#pragma unroll
                for (int t = 0; t < 2; t++) {
                    const float4 n = *reinterpret_cast<const float4*>(&m.solve[16 * to + column_at(8 * t + r)][16 * b + 4 * c]);
                    u32 x[3][2];
                    slices<3>(n.x, n.y, &x[0][0], 2);
                    slices<3>(n.z, n.w, &x[0][1], 2);
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
    u32 a[BLOCKS][3][4];
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        if constexpr (KIND != KDA) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float scale = m.to_end[16 * b + 4 * c + e];
                values.v[b][0][e] *= scale, values.v[b][1][e] *= scale;
            }
        }
        const Operand<3> w(values.v[b][0], values.v[b][1]);
#pragma unroll
        for (int i = 0; i < 12; i++) a[b][i / 4][i % 4] = w.a[i / 4][i % 4];
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        float whole[4];
#pragma unroll
        for (int e = 0; e < 4; e++) whole[e] = KIND == KDA ? m.whole[(16 * step + 4 * c + e) % (GATES == 1 ? 4 : K)] : m.whole[0];
        // Summed apart from the state: the tensor cores round toward zero, which would shrink it at every flush.
        float sum[2][4] = {};
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
#pragma unroll
            for (int j = 0; j < TERMS; j++) {
                uint2 key[2];
#pragma unroll
                for (int t = 0; t < 2; t++) key[t] = *reinterpret_cast<const uint2*>(&m.ends[j][b][16 * step + 8 * t + r][4 * c]);
#pragma unroll
                for (int i = 0; i + j < 3; i++)
#pragma unroll
                    for (int t = 0; t < 2; t++) mma_bf16(sum[t], a[b][i], key[t].x, key[t].y);
            }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int t = i / 4, half = i % 4 / 2, e = i % 2;
            float& s = tile.s[step][half][2 * t + e];
            s = whole[2 * t + e] * s + sum[t][2 * half + e];
        }
    }
}
