// Folds a window's raw tokens into a warp's rows of the state: S <- D_{1:n} S + sum_s l_s w_s^T with l_s = D_{s+1:n} k_s.
//
// mamba2 writes w_s = v_s. For the delta rule w = N (v - (D_{1:s} k_s)^T S), with N the inverse of the unit lower
// triangle of beta_s <D_{j+1:s} k_j, k_s> times Diag(beta). With scalar decays every factor exp(.) moves from the keys
// to w, so that the keys in the products are the activations: raw bf16 needs no preparation at all.
// Places past the last token hold zeros and do nothing. Decay is exp of sums over stretches of tokens, all <= 0.
#pragma once
#include "prepare.cuh"

constexpr int UNROLLED = 2;  // pieces of the state in a stretch of code: more would not fit in the instruction cache

// Predictions from the state at the window's start: S^T k, or S^T D_{1:s} k for decays per channel.
__device__ __forceinline__ void predict(float (&predicted)[BLOCKS][2][4], StateRows& rows, const KeyStage& stage,
                                        const PreparedKeys& keys) {
    const int r = threadIdx.x % 32 / 4;
    float rest[UNROLLED][BLOCKS][2][4] = {};  // other chains of products
#pragma unroll UNROLLED
    for (int step = 0; step < STEPS; step++) {
        Piece piece;
        piece.load(rows, step);
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
#pragma unroll
            for (int t = 0; t < 2; t++) {
                float key[4];
                load_key(key, stage, keys, 16 * b + 8 * t + r, 16 * step);
                mma_float4(predicted[b][t], rest[step % UNROLLED][b][t], piece.s[0], piece.s[1], key, RAW);
            }
    }
#pragma unroll
    for (int i = 0; i < UNROLLED * BLOCKS * 8; i++)
        predicted[i / 8 % BLOCKS][i / 4 % 2][i % 4] += rest[i / (8 * BLOCKS)][i / 8 % BLOCKS][i / 4 % 2][i % 4];
}

// w = N (v - decayed predictions), in place of the values.
__device__ __forceinline__ void erase(Values& values, const float (&predicted)[BLOCKS][2][4], const Solve& solve) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    float write[BLOCKS][2][4] = {};
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float scale = KIND == KDA ? 1.f : solve.upto[token_of(b, e)];
#pragma unroll
            for (int half = 0; half < 2; half++)
                values.v[b][half][e] -= scale * predicted[b][e / 2][2 * half + e % 2];
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

// What the window writes to the warp's rows: w, decayed to the window's end, as operands.
struct Writes {
    u32 a[BLOCKS][3][4];
    float kept;  // of the state; for decays per channel it lies with the keys

    // Keys come from `stage` where they are operands as they are, else from `keys`.
    __device__ __forceinline__ void prepare(StateRows& rows, ValueStage& from, int round, int count, const KeyStage& stage,
                                            const PreparedKeys& keys, const Solve& solve) {
        float predicted[BLOCKS][2][4] = {};
        if constexpr (ERASES) predict(predicted, rows, stage, keys);
        from.delivery.wait(round);
        Values values;
        values.load(from, count);
        if constexpr (ERASES) erase(values, predicted, solve);
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            if constexpr (KIND != KDA) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float scale = solve.after[token_of(b, e)];
                    values.v[b][0][e] *= scale, values.v[b][1][e] *= scale;
                }
            }
            const Operand<3> w(values.v[b][0], values.v[b][1]);
#pragma unroll
            for (int i = 0; i < 12; i++) a[b][i / 4][i % 4] = w.a[i / 4][i % 4];
        }
        kept = KIND == KDA ? 0.f : solve.whole();
    }

    // Folds the window into a piece.
    __device__ __forceinline__ void fold(Piece& piece, int step, const KeyStage& stage, const PreparedKeys& keys) const {
        const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
        // Summed apart from the state: the tensor cores round toward zero, which would shrink it at every flush.
        // Where there are many, in two chains.
        constexpr int CHAINS = TERMS > 1 ? 2 : 1;
        float sums[CHAINS][2][4] = {};
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
#pragma unroll
            for (int j = 0; j < TERMS; j++) {
                uint2 key[2];
                if constexpr (RAW) {  // tokens are rows in memory and columns of the operand
                    const uint2 x = *reinterpret_cast<const uint2*>(&stage.k[16 * b + r][16 * step + 4 * c]);
                    const uint2 y = *reinterpret_cast<const uint2*>(&stage.k[16 * b + 8 + r][16 * step + 4 * c]);
                    key[0] = make_uint2(transpose_8x8(x.x), transpose_8x8(y.x));
                    key[1] = make_uint2(transpose_8x8(x.y), transpose_8x8(y.y));
                } else {
#pragma unroll
                    for (int t = 0; t < 2; t++) {
                        const int place = 16 * step + 8 * t + r;
                        key[t] = *reinterpret_cast<const uint2*>(&keys.ends[j][RAW ? 0 : b][RAW ? 0 : place][4 * c]);
                    }
                }
#pragma unroll
                for (int i = 0; i + j < 3; i++)
#pragma unroll
                    for (int t = 0; t < 2; t++) mma_bf16(sums[i % CHAINS][t], a[b][i], key[t].x, key[t].y);
            }
        float whole[4] = {kept, kept, kept, kept};
        if constexpr (KIND == KDA) {
            const float4 x = *reinterpret_cast<const float4*>(&keys.whole[16 * step + 4 * c]);
            whole[0] = x.x, whole[1] = x.y, whole[2] = x.z, whole[3] = x.w;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int t = i / 4, half = i % 4 / 2, e = i % 2;
            float& s = piece.s[half][2 * t + e];
            const int at = 2 * half + e;
            s = whole[2 * t + e] * s + (CHAINS > 1 ? sums[0][t][at] + sums[CHAINS - 1][t][at] : sums[0][t][at]);
        }
    }
};
