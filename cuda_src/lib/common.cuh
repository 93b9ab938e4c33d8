// Constants of a variant, element types, and reductions over a warp.
//
// -D constants of every kernel: ERASES and CHANNEL_DECAYS (of the layer's kind), HEADS, KEY_HEADS, K, V; ACT, OUT and
// STATE (types of activations, outputs and states; sketchssm/cuda/constants.py has the numbers). Constants of one
// operation are explained in its own file.
#pragma once
#include "constants.cuh"
#include "lib/ptx.cuh"

constexpr int HEADS_PER_KEY = HEADS / KEY_HEADS;  // value heads that share a key head
constexpr int GATES = CHANNEL_DECAYS ? K : 1;     // log-decays of a head and token
constexpr u32 ALL = 0xffffffffu;

template <int TYPE> struct Element { typedef u16 type; };
template <> struct Element<FP32> { typedef float type; };
template <> struct Element<INT8> { typedef unsigned char type; };
typedef Element<ACT>::type act_t;
typedef Element<OUT>::type out_t;
typedef Element<STATE>::type state_t;

template <int TYPE> DEVICE float widen(typename Element<TYPE>::type x) {
    if constexpr (TYPE == FP32) return x;
    else if constexpr (TYPE == FP16) return half_to_float(x);
    else return __uint_as_float(static_cast<u32>(x) << 16);
}

template <int TYPE> DEVICE typename Element<TYPE>::type narrow(float x) {
    if constexpr (TYPE == FP32) return x;
    else if constexpr (TYPE == FP16) return float_to_half(x);
    else return float_to_bf16(x);
}

// N neighbouring elements as stored: loaded by one instruction, widened at each use.
template <int TYPE, int N> struct Packed {
    static constexpr int BYTES = N * sizeof(typename Element<TYPE>::type);
    static constexpr int WORDS = BYTES < 4 ? 1 : BYTES / 4;
    u32 word[WORDS];

    DEVICE void load(const typename Element<TYPE>::type* from) {
        if constexpr (WORDS % 4 == 0) {
#pragma unroll
            for (int i = 0; i < WORDS; i += 4) {
                const uint4 x = reinterpret_cast<const uint4*>(from)[i / 4];
                word[i] = x.x, word[i + 1] = x.y, word[i + 2] = x.z, word[i + 3] = x.w;
            }
        } else if constexpr (WORDS == 2) {
            const uint2 x = *reinterpret_cast<const uint2*>(from);
            word[0] = x.x, word[1] = x.y;
        } else {
            word[0] = *reinterpret_cast<const u32*>(from);
        }
    }
    DEVICE void store(typename Element<TYPE>::type* to) const {
        if constexpr (WORDS % 4 == 0) {
#pragma unroll
            for (int i = 0; i < WORDS; i += 4)
                reinterpret_cast<uint4*>(to)[i / 4] = make_uint4(word[i], word[i + 1], word[i + 2], word[i + 3]);
        } else if constexpr (WORDS == 2) {
            *reinterpret_cast<uint2*>(to) = make_uint2(word[0], word[1]);
        } else {
            *reinterpret_cast<u32*>(to) = word[0];
        }
    }
    // The same, bypassing the caches.
    DEVICE void store_streaming(typename Element<TYPE>::type* to) const {
        static_assert(WORDS == 4 || WORDS == 2);
        const Packed& x = *this;
        if constexpr (TYPE == FP32) __stcs(reinterpret_cast<float4*>(to), make_float4(x[0], x[1], x[2], x[3]));
        else __stcs(reinterpret_cast<uint2*>(to), make_uint2(word[0], word[1]));
    }
    // Rounds N floats.
    DEVICE void set(const float (&x)[N]) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            if constexpr (TYPE == FP32) word[i] = __float_as_uint(x[i]);
            else word[i] = narrow<TYPE>(x[2 * i]) | static_cast<u32>(narrow<TYPE>(x[2 * i + 1])) << 16;
        }
    }
    // The same for a state, with instructions that convert pairs.
    DEVICE void set_state(const float (&x)[N]) {
        if constexpr (TYPE == FP32) {
            set(x);
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; i++)
                word[i] = TYPE == FP16 ? floats_to_halves(x[2 * i], x[2 * i + 1])
                                       : floats_to_bf16(x[2 * i], x[2 * i + 1]);
        }
    }
    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < WORDS; i++) word[i] = 0;
    }
    DEVICE float operator[](int i) const {
        if constexpr (TYPE == FP32) return __uint_as_float(word[i]);
        else return widen<TYPE>(static_cast<u16>(word[i / 2] >> (16 * (i % 2))));
    }
};

// How the lanes of a warp share a key's channels: lane l has the LK channels from LK l on, as far as the key has them.
constexpr int LK = K <= 64 ? 2 : K <= 128 ? 4 : 8, CHANNEL_LANES = K / LK;
static_assert(K % LK == 0 && CHANNEL_LANES <= 32, "every lane has all of its channels or none");
DEVICE bool has_channels() { return CHANNEL_LANES == 32 || threadIdx.x % 32 < CHANNEL_LANES; }
// The lane's first channel; where the lane has none, those of the last lane that has some.
DEVICE int first_channel() { return LK * min(static_cast<int>(threadIdx.x % 32), CHANNEL_LANES - 1); }
// A lane's channels of a row of K elements; zeros where the lane has none.
template <int TYPE> struct ChannelShare : Packed<TYPE, LK> {
    DEVICE void load(const typename Element<TYPE>::type* row) {
        if (has_channels()) Packed<TYPE, LK>::load(row + LK * (threadIdx.x % 32));
        else this->clear();
    }
    DEVICE void store(typename Element<TYPE>::type* row) const {
        if (has_channels()) Packed<TYPE, LK>::store(row + LK * (threadIdx.x % 32));
    }
};

// Loads N neighbouring floats, four at a time.
template <int N> DEVICE void load_floats(float (&x)[N], const float* from) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const float4 y = *reinterpret_cast<const float4*>(from + i);
        x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
    }
}

// Sums over each group of LANES neighbouring lanes.
template <int LANES> DEVICE float group_sum(float x) {
#pragma unroll
    for (int bit = LANES / 2; bit; bit /= 2) x += __shfl_xor_sync(ALL, x, bit);
    return x;
}
DEVICE float warp_sum(float x) { return group_sum<32>(x); }
// The largest absolute value in the warp.
DEVICE float warp_most(float x) { return __uint_as_float(__reduce_max_sync(ALL, __float_as_uint(fabsf(x)))); }

template <int HALF, int BIT> DEVICE void exchange(float* x) {
    if constexpr (HALF > 0) {
        const bool upper = threadIdx.x & BIT;
#pragma unroll
        for (int i = 0; i < HALF; i++) {
            const float keep = upper ? x[i + HALF] : x[i];
            const float send = upper ? x[i] : x[i + HALF];
            x[i] = keep + __shfl_xor_sync(ALL, send, BIT);
        }
        exchange<HALF / 2, BIT / 2>(x);
    } else if constexpr (BIT > 0) {
        x[0] += __shfl_xor_sync(ALL, x[0], BIT);
        exchange<0, BIT / 2>(x);
    }
}

// Sums N values (a power of two) over a group of lanes, with about N instead of N log2(LANES) shuffles: lane l of the
// group returns the sum of x[l / (LANES / N)].
template <int LANES, int N> DEVICE float group_sums(float (&x)[N]) {
    static_assert(N <= LANES, "one value a lane at the end");
    exchange<N / 2, LANES / 2>(x);
    return x[0];
}
template <int N> DEVICE float warp_sums(float (&x)[N]) { return group_sums<32>(x); }

// Sum over the lanes behind this lane in its group of LANES; the groups' first TOKENS lanes may be other than 0.
template <int LANES, int TOKENS = LANES> DEVICE float sum_of_later(float own) {
    const int s = threadIdx.x % LANES;
    float sum = __shfl_down_sync(ALL, own, 1, LANES);
    if (s == LANES - 1) sum = 0;
#pragma unroll
    for (int d = 1; d < TOKENS; d *= 2) {
        const float y = __shfl_down_sync(ALL, sum, d, LANES);
        if (s + d < LANES) sum += y;
    }
    return sum;
}

// exp of a log-decay or of a sum of log-decays: at most 1, and 0 for -inf.
DEVICE float decay(float log_decay) { return expf(log_decay); }
