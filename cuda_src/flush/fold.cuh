// Folds a window's raw tokens into a warp's row block: S <- D_{1:n} S + sum_s l_s w_s^T with l_s = D_{s+1:n} k_s.
//
// mamba2 writes w_s = v_s. The delta rule writes w = N (v - (D_{1:s} k_s)^T S), where N = (I + L)^-1 Diag(beta) and L
// is the strictly lower triangle of beta_s <D_{j+1:s} k_j, k_s>. With scalar decays all factors exp(.) move from the
// keys to w. The keys in the products are then the activations, and raw bf16 keys need no preparation. Missing tokens
// are zeros and have no effect. A decay is the exponential of a sum of log-decays over consecutive tokens, at most 1.
#pragma once
#include "flush/transform_keys.cuh"

// Unrolling of loops over fragments. With transform and sketch warps on the multiprocessor, more code would not fit in
// the instruction cache.
constexpr int UNROLLED = RAW_KEYS ? 2 : 1;

// Lane map of the values to write. A thread has columns 2c, 2c+1, 8+2c, 9+2c of rows r and r + 8 of an operand.
// token_of maps them (e = 0 to 3) to tokens of the block of 16: the same numbers with RAW_KEYS, otherwise 4c to 4c+3.
DEVICE int token_of(int block, int e) {
    return 16 * block + (RAW_KEYS ? 8 * (e / 2) + 2 * (threadIdx.x % 4) + e % 2 : 4 * (threadIdx.x % 4) + e);
}
struct Values {
    float v[TOKEN_BLOCKS][2][4];
    DEVICE void load(const ValueStage& values, int count) {
        const int first = threadIdx.x / 32 * 16;
#pragma unroll
        for (int b = 0; b < TOKEN_BLOCKS; b++)
#pragma unroll
            for (int e = 0; e < 4; e++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int s = token_of(b, e);
                    v[b][half][e] = s < count ? values.at(s, first + value_row(half)) : 0.f;
                }
    }
    // Scales the warp's values into the range of fp16; returns the unit, value = unit * scaled value.
    DEVICE float scale() {
        float most = 0;
#pragma unroll
        for (int i = 0; i < 8 * TOKEN_BLOCKS; i++) most = fmaxf(most, fabsf(v[i / 8][i / 4 % 2][i % 4]));
        const float power = power_for<HALF_EXPONENT>(warp_most(most));
#pragma unroll
        for (int i = 0; i < 8 * TOKEN_BLOCKS; i++) v[i / 8][i / 4 % 2][i % 4] *= power;
        return inverse_of_power(power);
    }
};

// Predictions from the state at the window's start: k_s^T S, or k_s^T D_{1:s} S with decays per channel. The state is
// the right operand as stored in shared memory.
DEVICE void predict(float (&predicted)[TOKEN_BLOCKS][2][4], StateBlock& rows, const KeyStage& stage,
                    const PreparedKeys& keys) {
    float rest[UNROLLED][TOKEN_BLOCKS][2][4] = {};  // independent accumulator chains
#pragma unroll UNROLLED
    for (int step = 0; step < STEPS; step++) {
        if constexpr (RAW_KEYS && STATE == BF16) {
            const int lane = threadIdx.x % 32;
            const uint2 state[2] = {StateFragment::words(rows, 0, step), StateFragment::words(rows, 1, step)};
#pragma unroll
            for (int b = 0; b < TOKEN_BLOCKS; b++) {
                StoredOperand key;
#pragma unroll
                for (int i = 0; i < 2; i++)
                    key.set(i, *reinterpret_cast<const uint2*>(
                                   &stage.k[16 * b + 8 * i + lane / 4][16 * step + 4 * (lane % 4)]));
#pragma unroll
                for (int t = 0; t < 2; t++) key.multiply(step % 2 ? rest[0][b][t] : predicted[b][t], state[t]);
            }
            continue;
        }
        StateFragment fragment;
        fragment.load(rows, step);
#pragma unroll
        for (int b = 0; b < TOKEN_BLOCKS; b++) {
            const LeftOperand key = load_keys(stage, keys, b, step);
#pragma unroll
            for (int t = 0; t < 2; t++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    key.multiply<RAW_KEYS, STATE != FP32>(i, predicted[b][t], rest[step % UNROLLED][b][t],
                                                          fragment.s[t][2 * i], fragment.s[t][2 * i + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < UNROLLED * TOKEN_BLOCKS * 8; i++)
        predicted[i / 8 % TOKEN_BLOCKS][i / 4 % 2][i % 4] +=
            rest[i / (8 * TOKEN_BLOCKS)][i / 8 % TOKEN_BLOCKS][i / 4 % 2][i % 4];
}

// w = N (v - decayed predictions), decayed to the window's end and scaled: see Solve. Returns the unit of the results,
// which are at most 2^15.
DEVICE float erase(Values& writes, const ValueStage& values, int count, float (&predicted)[TOKEN_BLOCKS][2][4],
                   const Solve& solve) {
    const int first = threadIdx.x / 32 * 16;
    float most = 0;
#pragma unroll
    for (int b = 0; b < TOKEN_BLOCKS; b++)
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int s = 16 * b + 8 * (e / 2) + threadIdx.x % 32 / 4;
                float& x = predicted[b][t][e];
                const float value = s < count ? values.at(s, first + value_at(t, e % 2)) : 0.f;
                x = solve.weight[s] * (value - (CHANNEL_DECAYS ? 1.f : solve.upto[s]) * x);
                most = fmaxf(most, fabsf(x));
            }
    const float power = power_for<HALF_EXPONENT>(warp_most(most));
    float write[TOKEN_BLOCKS][2][4] = {};
#pragma unroll
    for (int b = 0; b < TOKEN_BLOCKS; b++) {
        u32 a[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float* const pair = &predicted[b][i % 2][i / 2 * 2];
            half_slices(power * pair[0], power * pair[1], a[0][i], a[1][i]);
            a[0][i] = transpose_8x8(a[0][i]), a[1][i] = transpose_8x8(a[1][i]);
        }
#pragma unroll
        for (int to = b; to < TOKEN_BLOCKS; to++)
#pragma unroll
            for (int t = 0; t < 2; t++) {
                const uint4 n = solve.operands()[operand_of(to, b, t)][threadIdx.x % 32];
                mma_half(write[to][t], a[1], n.x, n.y);
                mma_half(write[to][t], a[0], n.z, n.w);
                mma_half(write[to][t], a[0], n.x, n.y);
            }
    }
    // The results are sums of WP products.
    constexpr float UNIT = 1 << (SOLVE_EXPONENT + 1 + (TOKEN_BLOCKS == 1 ? 4 : 5));
#pragma unroll
    for (int b = 0; b < TOKEN_BLOCKS; b++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int e = 0; e < 4; e++) writes.v[b][half][e] = write[b][e / 2][2 * half + e % 2] * (1 / UNIT);
    return UNIT * inverse_of_power(power);
}

// The window's writes w to the warp's rows, decayed to the window's end, as left operands.
struct Writes {
    static constexpr int WRITE_SLICES = RAW_KEYS ? 3 : 2;  // of bf16; of fp16
    u32 a[TOKEN_BLOCKS][WRITE_SLICES][4];
    float kept;  // decay of the state; for decays per channel see PreparedKeys::whole
    float unit;  // of products with prepared keys

    // Keys come from `stage` (RAW_KEYS) or from `keys`. `wait_solve` waits for `solve`; it is called after the
    // predictions, which do not need `solve`. Of a window that is folded token by token, nothing here is used: to
    // return early would take more registers.
    template <class Wait>
    DEVICE void prepare(StateBlock& rows, ValueStage& from, int phase, int count, const KeyStage& stage,
                        const PreparedKeys& keys, const Solve& solve, Wait wait_solve) {
        Values values;
        unit = 1;
        if constexpr (ERASES) {
            float predicted[TOKEN_BLOCKS][2][4] = {};
            predict(predicted, rows, stage, keys);
            wait_solve();
            from.full.wait(phase);
            unit = erase(values, from, count, predicted, solve);
        } else {
            wait_solve();
            from.full.wait(phase);
            values.load(from, count);
#pragma unroll
            for (int i = 0; i < 8 * TOKEN_BLOCKS; i++)
                values.v[i / 8][i / 4 % 2][i % 4] *= solve.after[token_of(i / 8, i % 4)];
            if constexpr (!RAW_KEYS) unit = values.scale();
        }
#pragma unroll
        for (int b = 0; b < TOKEN_BLOCKS; b++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* const pair = &values.v[b][i % 2][i / 2 * 2];
                if constexpr (RAW_KEYS) slices<3>(unit * pair[0], unit * pair[1], &a[b][0][i], 4);
                else half_slices(pair[0], pair[1], a[b][0][i], a[b][1][i]);
            }
        kept = CHANNEL_DECAYS ? 0.f : solve.whole();
        if constexpr (!RAW_KEYS) unit *= keys.unit;
    }

    // Folds the window into 16 channels of the rows.
    DEVICE void fold(StateFragment& fragment, int step, const KeyStage& stage, const PreparedKeys& keys) const {
        const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
        // The update is summed apart from the state: tensor cores round toward zero, so a sum that includes the state
        // would shrink the state at every flush.
        float sums[2][4] = {};
#pragma unroll
        for (int b = 0; b < TOKEN_BLOCKS; b++) {
            if constexpr (RAW_KEYS) {  // tokens are rows in memory, but columns of the operand
                const uint2 x = *reinterpret_cast<const uint2*>(&stage.k[16 * b + r][16 * step + 4 * c]);
                const uint2 y = *reinterpret_cast<const uint2*>(&stage.k[16 * b + 8 + r][16 * step + 4 * c]);
                const uint2 key[2] = {make_uint2(transpose_8x8(x.x), transpose_8x8(y.x)),
                                      make_uint2(transpose_8x8(x.y), transpose_8x8(y.y))};
#pragma unroll
                for (int i = 0; i < 3; i++)
#pragma unroll
                    for (int t = 0; t < 2; t++) mma_bf16(sums[t], a[b][i], key[t].x, key[t].y);
            } else {
                uint2 key[2][2];
#pragma unroll
                for (int j = 0; j < 2; j++)
#pragma unroll
                    for (int t = 0; t < 2; t++)
                        key[j][t] = *reinterpret_cast<const uint2*>(
                            &keys.ends[j][RAW_KEYS ? 0 : b][RAW_KEYS ? 0 : 16 * step + 8 * t + r][4 * c]);
                // slices 0 x 1, 1 x 0, 0 x 0: the largest products last
#pragma unroll
                for (int i = 0; i < 3; i++)
#pragma unroll
                    for (int t = 0; t < 2; t++) mma_half(sums[t], a[b][i == 1], key[i == 0][t].x, key[i == 0][t].y);
            }
        }
        float whole[4] = {kept, kept, kept, kept};
        if constexpr (CHANNEL_DECAYS) load_floats(whole, &keys.whole[16 * step + 4 * c]);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int t = i / 4, half = i % 4 / 2, e = i % 2;
            float& s = fragment.s[half][2 * t + e];
            const float sum = sums[t][2 * half + e];
            s = RAW_KEYS ? whole[2 * t + e] * s + sum : whole[2 * t + e] * s + unit * sum;
        }
    }
};
