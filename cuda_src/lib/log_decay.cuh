// Log-decays: given in float32, or computed from kda's raw gate inputs, which have the activations' type.
//
// -D constant: RAW_GATE (0: log-decays; 1: g = rate softplus(a + bias), rate = -exp(A_log); 2: g = bound sigmoid(-rate
// (a + bias))). The host packs biases (HEADS, K), then rates (HEADS), then the bound.
#pragma once
#include "lib/common.cuh"

constexpr int GATE_TYPE = RAW_GATE ? ACT : FP32;
typedef Element<GATE_TYPE>::type gate_t;
static_assert(!RAW_GATE || CHANNEL_DECAYS, "raw gates are decays per channel");

// Polynomial with these coefficients, the constant first.
template <int N> DEVICE float horner(const float (&coefficients)[N], float x) {
    float sum = coefficients[N - 1];
#pragma unroll
    for (int i = N - 2; i >= 0; i--) sum = fmaf(sum, x, coefficients[i]);
    return sum;
}

// log(1 + exp x) with e = exp(-|x|): relative error 2e-7, besides e's own. log(1 + e) / e is a minimax polynomial in e
// on [0, 1] (3e-8).
DEVICE float softplus(float x, float e) {
    constexpr float SERIES[] = {0.99999994f, -0.499994934f, 0.333190978f, -0.24842982f,  0.191060066f,
                                -0.136632442f, 0.078225933f, -0.0295052268f, 0.0052326913f};
    return fmaf(horner(SERIES, e), e, fmaxf(x, 0.f));
}

constexpr float LOG2_E = 1.44269504f;

// exp of x <= 0 in five instructions, relative error about 3e-7 (6e-7 if the result is tiny): 2^t for the rounded
// t = x / log 2, times a correction for the rounding. The remainder is NaN for x = -inf (2^t is 0), hence fminf.
DEVICE float exp_of_negative(float x) {
    const float t = LOG2_E * x, y = exp2f(t);
    return fmaf(y, fminf(fmaf(-0.693147181f, t, x), 1e-4f), y);
}

// A thread's gate parameters for N neighbouring channels of a head.
template <int N> struct GateInput {
    float rate, bound, bias[N];

    DEVICE void load(const float* packed, int head, int channel) {
        if constexpr (RAW_GATE) {
            rate = packed[HEADS * K + head];
            bound = RAW_GATE == 2 ? packed[HEADS * K + HEADS] : 0.f;
            Packed<FP32, N> biases;
            biases.load(packed + head * K + channel);
#pragma unroll
            for (int i = 0; i < N; i++) bias[i] = biases[i];
        }
    }
    // Log-decay of channel i, to float32 rounding.
    DEVICE float log_decay(float given, int i) const {
        const float x = RAW_GATE ? given + bias[i] : given;
        if constexpr (RAW_GATE == 0) return x;
        else if constexpr (RAW_GATE == 2) return bound / (1.f + expf(rate * x));
        else return rate * softplus(x, exp_of_negative(-fabsf(x)));
    }
    // Decay of channel i, to about 4e-6. For reads only; states and sketches use exact decays. Computed in powers of 2.
    // The softplus is accurate to 8e-6, because a rate may be large.
    DEVICE float quick_decay(float given, int i) const {
        if constexpr (RAW_GATE == 0) {
            return __expf(given);
        } else if constexpr (RAW_GATE == 2) {
            return __expf(__fdividef(bound, 1.f + __expf(rate * (given + bias[i]))));
        } else {
            constexpr float SERIES[] = {1.44268286f,   -0.720426142f, 0.469174057f,
                                        -0.303036213f, 0.146032885f,  -0.0344359055f};
            const float x = LOG2_E * (given + bias[i]), e = exp2f(-fabsf(x));
            return exp2f(rate * fmaf(horner(SERIES, e), e, fmaxf(x, 0.f)));
        }
    }
};
