// Work of the transform warps, for keys that are not operands as stored: decays, key operands, and the decayed Gram
// matrix (kda). flush/roles.cuh has the role's barriers.
#pragma once
#include "flush/solve.cuh"

// The largest key of the warp's share, in every lane.
DEVICE float most_of_keys(const KeyStage& stage, int count, int member) {
    constexpr int N = 16 / sizeof(act_t);
    float most = 0;
    for (int i = member; i < count * K / N; i += TRANSFORM_THREADS) {
        Packed<ACT, N> keys;
        keys.load(&stage.k[0][0] + i * N);
#pragma unroll
        for (int n = 0; n < N; n++) most = fmaxf(most, fabsf(keys[n]));
    }
    return warp_most(most);
}

// Kinds with scalar decays (fp16, float32): stores the keys as operands. `member`: number of the transform thread.
DEVICE void copy_keys(PreparedKeys& m, const KeyStage& stage, int count, int member, float power) {
    for (int i = member; i < WP / 2 * K; i += TRANSFORM_THREADS) {
        const int s = i / K / 8 * 16 + i / K % 8, channel = i % K, place = channel / 16 * 16 + place_of(channel % 16);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float x = s + 8 * half < count ? widen<ACT>(stage.k[(s + 8 * half) % W][channel]) : 0.f;
            m.start(s, channel)[half] = x;
            u32 slices[2];
            half_slices(power * x, 0, slices[0], slices[1]);
#pragma unroll
            for (int j = 0; j < 2; j++)
                m.ends[j][RAW_KEYS ? 0 : s / 16][RAW_KEYS ? 0 : place][s % 8 + 8 * half] = static_cast<u16>(slices[j]);
        }
    }
}

// The decayed Gram matrix is computed on the tensor cores (tile_gram), unless a channel keeps less than 2^-40 over 8
// tokens.
constexpr bool TILED_GRAM = CHANNEL_DECAYS && ERASES && WP == 16;
constexpr float STEEP = -27.7f;

// A thread's channel. Two neighbouring threads share a channel and have 8 of each 16 tokens each. A warp has 16
// channels, in the order of PreparedKeys::ends, in which 8 tokens are 16 bytes.
DEVICE int channel_of(int member) {
    const int place = member % 32 / 2;
    return member / 32 * 16 % K + 4 * (place % 8 / 2) + place / 8 * 2 + place % 2;
}

// A thread's tokens of the tile, in registers. Missing tokens have keys of 0 and decays of 1.
struct ChannelTokens {
    float keys[TOKEN_BLOCKS][8], decays[TOKEN_BLOCKS][8];
    float product[TOKEN_BLOCKS], sum;  // product of the decays of each token block; sum of all log-decays

    DEVICE void multiply() {
#pragma unroll
        for (int b = 0; b < TOKEN_BLOCKS; b++) {
            product[b] = decays[b][0];
#pragma unroll
            for (int i = 1; i < 8; i++) product[b] *= decays[b][i];
        }
    }
    // Loads the tokens, and stores the warp's values in TransformShared.
    DEVICE void take(TransformShared& shared, KeyStage& stage, const GateInput<1>& input, int count, int member) {
        const int channel = channel_of(member), half = member % 2;
        float gates[TOKEN_BLOCKS][8];
        auto load = [&](bool all) {
#pragma unroll
            for (int b = 0; b < TOKEN_BLOCKS; b++)
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const int s = 16 * b + 8 * half + i;
                    keys[b][i] = gates[b][i] = 0;
                    if (!all && s >= count) continue;
                    keys[b][i] = widen<ACT>(stage.k[s][channel]);
                    if constexpr (RAW_GATE)
                        gates[b][i] = input.log_decay(widen<GATE_TYPE>(stage.given_gates(s)[channel]), 0);
                    else gates[b][i] = *stage.gate(s, channel);
                }
        };
        if (count == WP) load(true);
        else load(false);
        float most = 0;
        bool steep = false;
        sum = 0;
#pragma unroll
        for (int b = 0; b < TOKEN_BLOCKS; b++) {
            float whole = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                whole += gates[b][i], most = fmaxf(most, fabsf(keys[b][i]));
                // Fast exponentials suffice here, because few decays are multiplied. PreparedKeys::whole multiplies the
                // state and is computed more accurately.
                decays[b][i] = __expf(gates[b][i]);
            }
            sum += whole;
            steep = steep || !(whole > STEEP);
            tell_largest(shared, b, __ballot_sync(ALL, whole > KEPT), member);
        }
        most = warp_most(most), steep = __any_sync(ALL, steep);
        if (member % 32 == 0)
            shared.most[RAW_KEYS ? 0 : member / 32] = most, shared.steep[RAW_KEYS ? 0 : member / 32] = steep;
        multiply();
    }
    // The largest decay of each token of a block, or 1 if a lane with the same tokens keeps more than KEPT.
    DEVICE void tell_largest(TransformShared& shared, int b, u32 kept, int member) const {
        constexpr u32 EVEN = 0x55555555u;
        const int half = member % 2;
        float largest[8];
#pragma unroll
        for (int i = 0; i < 8; i++) largest[i] = 1;
        if ((kept & EVEN) == 0 || (kept & ~EVEN) == 0) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float lower = warp_most(half ? 0.f : decays[b][i]), upper = warp_most(half ? decays[b][i] : 0.f);
                if ((kept & EVEN << half) == 0) largest[i] = half ? upper : lower;
            }
        }
        if (member % 32 >= 2) return;  // the other lanes hold the same values
        float4* const to = reinterpret_cast<float4*>(
            &shared.decays[CHANNEL_DECAYS ? member / 32 : 0][CHANNEL_DECAYS ? 16 * b + 8 * half : 0]);
        to[0] = make_float4(largest[0], largest[1], largest[2], largest[3]);
        to[1] = make_float4(largest[4], largest[5], largest[6], largest[7]);
    }
    // Replaces the log-decays by the decays, or by their running products within the 8 tokens.
    DEVICE void put(KeyStage& stage, int member, bool products) const {
#pragma unroll
        for (int b = 0; b < TOKEN_BLOCKS; b++) {
            float x = 1;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                x = products ? x * decays[b][i] : decays[b][i];
                *stage.gate(16 * b + 8 * (member % 2) + i, channel_of(member)) = x;
            }
        }
    }
    // Keys decayed from the window's start, for variants without tile_gram, which also returns them.
    DEVICE void decay_from_start(PreparedKeys& m, int member) const {
        float before = 1;
#pragma unroll
        for (int b = 0; b < TOKEN_BLOCKS; b++) {
            const float other = __shfl_xor_sync(ALL, product[b], 1);
            float whole = member % 2 ? before * other : before;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                whole *= decays[b][i];
                m.start(16 * b + i, channel_of(member))[member % 2] = whole * keys[b][i];
            }
            before *= product[b] * other;
        }
    }
    // Keys decayed to the window's end, as operands.
    DEVICE void decay_to_end(PreparedKeys& m, const TransformShared& shared, int member, float power) {
        const int half = member % 2;
        const float inverse = inverse_of_power(decay_power(shared));
        if (__any_sync(ALL, inverse != 1.f)) {
#pragma unroll
            for (int b = 0; b < TOKEN_BLOCKS; b++)
#pragma unroll
                for (int i = 0; i < 8; i++) decays[b][i] *= __shfl_sync(ALL, inverse, 16 * b + 8 * half + i);
            multiply();
        }
        float after = power;
#pragma unroll
        for (int b = TOKEN_BLOCKS - 1; b >= 0; b--) {
            const float other = __shfl_xor_sync(ALL, product[b], 1);
            float whole = half ? after : after * other;
            u32 packed[2][4];
#pragma unroll
            for (int i = 7; i > 0; i -= 2) {
                const float odd = whole * keys[b][i];
                whole *= decays[b][i];
                const float even = whole * keys[b][i - 1];
                whole *= decays[b][i - 1];
                half_slices(even, odd, packed[0][i / 2], packed[1][i / 2]);
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
                *reinterpret_cast<uint4*>(
                    &m.ends[i][RAW_KEYS ? 0 : b][RAW_KEYS ? 0 : member / 32 * 16 % K + member % 32 / 2][8 * half]) =
                    make_uint4(packed[i][0], packed[i][1], packed[i][2], packed[i][3]);
            after *= product[b] * other;
        }
    }
};

// A warp's share (16 channels) of the decayed Gram matrix <D_{j+1:s} k_j, k_s>, on the tensor cores. Returns the keys
// of these channels, decayed from the window's start. `stage.g` holds running products of decays from the start of each
// half window. If both keys are in the same half, the later key is multiplied by its product and the earlier key is
// divided by its own product (see STEEP). Otherwise the later key is decayed from the window's start. The share
// replaces the products in `stage.g`.
DEVICE LeftOperand tile_gram(KeyStage& stage, int count, int member) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4, first = member / 32 * 16 % K, channel = first + 4 * c;
    Packed<FP32, 4> before;
    before.load(stage.gate(7, channel));
    LeftOperand keys, own;
    float over[2][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int s = 8 * half + r;
        Packed<FP32, 4> upto;
        upto.load(stage.gate(s, channel));
        Packed<ACT, 4> key;
        key.clear();
        if (s < count) key.load(&stage.k[s][channel]);
        float x[4], y[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            x[e] = key[e] * upto[e];
            y[e] = half ? x[e] * before[e] : x[e];
            over[half][e] = __fdividef(key[e], upto[e]);
        }
        own.set(half, x), keys.set(half, y);
    }
    float sum[2][4] = {}, rest[2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        keys.multiply<false, false>(i, sum[0], rest[0], over[0][2 * i], over[0][2 * i + 1]);
        // second half: only the rows of the later half are used
        own.multiply<false, false>(i, sum[1], rest[1], over[1][2 * i], over[1][2 * i + 1]);
    }
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int t = 0; t <= half; t++)
            *reinterpret_cast<float2*>(stage.gate(8 * half + r, first + (8 * t + 2 * c ^ 8 * (r % 2)))) =
                make_float2(sum[t][2 * half] + rest[t][2 * half], sum[t][2 * half + 1] + rest[t][2 * half + 1]);
    return keys;
}

// Sums the warps' shares, one matrix element a thread.
DEVICE void sum_tiles(Solve& table, const KeyStage& stage, int member) {
    const int s = member / WP, j = member % WP;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < K / 16; i++) sum += *stage.gate(s, 16 * (i ^ s % 2) + (j ^ 8 * (s % 2)));
    table.n[ERASES ? s % WP : 0][j] = sum;
}

// Decayed Gram matrix <D_{j+1:s} k_j, k_s> below the diagonal without quotients (windows of 32, steep decays). The loop
// goes back from token s and multiplies its key by one decay after another. `stage.g` holds decays. Each warp
// alternates between long and short rows, so that all warps finish together.
DEVICE void decayed_gram(Solve& table, const KeyStage& stage, int count, int member) {
    const int lane = threadIdx.x % 32;
    for (int job = member / 32 * 2; job < WP; job += job % 2 ? 2 * (TRANSFORM_THREADS / 32) - 1 : 1) {
        const int s = job % 2 ? job / 2 : WP - 1 - job / 2;
        if (s < count) {
            ChannelShare<ACT> last;
            last.load(stage.k[s]);
            float key[LK];
#pragma unroll
            for (int i = 0; i < LK; i++) key[i] = last[i];
            for (int first = (s - 1) / 8 * 8; first >= 0 && s > 0; first -= 8) {
                const float* const decays = stage.gate(first, 0);
                const act_t* const others = stage.k[first];
                float sums[8];
#pragma unroll
                for (int n = 7; n >= 0; n--) {
                    const int j = first + n;
                    sums[n] = 0;
                    if (j >= s) continue;
                    ChannelShare<FP32> one;
                    ChannelShare<ACT> other;
                    one.load(decays + (n + 1) * GATES), other.load(others + n * KEY_ROW);
#pragma unroll
                    for (int i = 0; i < LK; i++) {
                        key[i] *= one[i];
                        sums[n] += key[i] * other[i];
                    }
                }
                const float sum = warp_sums(sums);
                const int j = first + lane / 4;
                if (lane % 4 == 0 && j < s) table.n[ERASES ? s : 0][j] = sum;
            }
        } else if (lane < s) {
            table.n[ERASES ? s : 0][lane] = 0;  // missing tokens
        }
    }
}

// A transform warp's work on one tile. `gram_ready` is called when the decayed Gram matrix is stored; `wait_empty`
// waits until the last prepared keys of this stage have been used.
template <class GramReady, class WaitEmpty>
DEVICE void transform_keys(PreparedKeys& m, Solve& table, TransformShared& shared, KeyStage& stage,
                           const GateInput<1>& input, int count, int member, GramReady gram_ready,
                           WaitEmpty wait_empty) {
    const bool works = member < 2 * K;  // uniform in a warp
    [[maybe_unused]] ChannelTokens own;
    [[maybe_unused]] LeftOperand starts;
    if constexpr (CHANNEL_DECAYS) {
        if (works) own.take(shared, stage, input, count, member);
        else if (member % 32 == 0)
            shared.most[RAW_KEYS ? 0 : member / 32] = 0, shared.steep[RAW_KEYS ? 0 : member / 32] = 0;
        // the decays stored below overwrite raw gates that other threads read above
        if (RAW_GATE) named_barrier_sync<TRANSFORM_THREADS>(TRANSFORM_BARRIER);
        if (works) {
            if (ERASES) own.put(stage, member, TILED_GRAM);
            __syncwarp();
            if (TILED_GRAM) starts = tile_gram(stage, count, member);
        }
    } else {
        const float most = most_of_keys(stage, count, member);
        if (member % 32 == 0) shared.most[RAW_KEYS ? 0 : member / 32] = most;
    }
    named_barrier_sync<TRANSFORM_THREADS>(TRANSFORM_BARRIER);
    const float power =
        power_for<HALF_EXPONENT>(warp_most(shared.most[RAW_KEYS ? 0 : member % (TRANSFORM_THREADS / 32)]));
    if constexpr (CHANNEL_DECAYS && ERASES) {
        const bool steep = __any_sync(ALL, shared.steep[RAW_KEYS ? 0 : member % (TRANSFORM_THREADS / 32)]);
        if (TILED_GRAM && !steep) {
            sum_tiles(table, stage, member);
        } else {
            if (TILED_GRAM) {
                if (works) own.put(stage, member, false);
                named_barrier_sync<TRANSFORM_THREADS>(TRANSFORM_BARRIER);
            }
            decayed_gram(table, stage, count, member);
        }
    }
    gram_ready();
    wait_empty();
    for (int i = member; i < K; i += TRANSFORM_THREADS) m.query[RAW_KEYS ? 0 : i] = widen<ACT>(stage.q[i]);
    if (member == 0) m.unit = inverse_of_power(power);
    if constexpr (CHANNEL_DECAYS) {
        if (!works) return;
        if (TILED_GRAM) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                m.starts[0][RAW_KEYS ? 0 : member / 32 % STEPS][i][RAW_KEYS ? 0 : member % 32 ^ 4 * i] =
                    make_float4(starts.a[i][0], starts.a[i][1], starts.a[i][2], starts.a[i][3]);
        } else if (ERASES) {
            own.decay_from_start(m, member);
        }
        own.decay_to_end(m, shared, member, power);
        const float all = own.sum + __shfl_xor_sync(ALL, own.sum, 1);
        // Computed from the sum, which is more accurate than the product: the state is multiplied by this factor in
        // every window.
        if (member % 2 == 0) m.whole[CHANNEL_DECAYS ? channel_of(member) : 0] = decay(all);
    } else {
        copy_keys(m, stage, count, member, power);
    }
}
