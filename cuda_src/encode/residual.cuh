// Codes and scales of what a stored sketch leaves of its state (sketchssm/reference/residual.py).
#pragma once
#include "encode/basis.cuh"

// As in sketchssm/layer/residual.py: distance of levels in standard deviations, and factor of the levels.
DEVICE constexpr float level_distance(int bits) { return bits == 1 ? 1.596f : bits == 2 ? 0.996f : 0.586f; }
DEVICE constexpr float level_gain(int bits) { return bits == 1 ? 1.571f : bits == 2 ? 1.135f : 1.039f; }

DEVICE float inverse_or_zero(float scale) { return scale < 0x1p-120f ? 0.f : 1.f / scale; }

// state -= U B as stored. The left operand has -U times the scales in two bf16 slices, columns 0 to 7 the first slices
// of BASIS_GROUP columns, 8 to 15 the second.
DEVICE void subtract_sketch(const EncodeMemory& m, StateRows& state, int rank) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4, row = threadIdx.x / 32 * 16 + r;
#pragma unroll 1
    for (int first = 0; first < rank; first += BASIS_GROUP) {
        u32 a[4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int g = first + 2 * c + e;
                x[e] = g < rank ? -m.columns[g][row + 8 * half] * m.scale[g] : 0.f;
            }
            a[half] = floats_to_bf16(x[0], x[1]), a[2 + half] = second_slice(x[0], x[1], a[half]);
        }
#pragma unroll
        for (int q = 0; q < K / 16; q++) {
            const uint2 basis = m.basis[first + r][4 * q + c];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 b = transpose_8x8(h ? basis.y : basis.x);
                float* const s[2] = {&state.of[0][4 * q + 2 * h], &state.of[1][4 * q + 2 * h]};
                float d[4] = {s[0][0], s[0][1], s[1][0], s[1][1]};
                if constexpr (SKETCH == FP32) {
                    const uint2 more = m.more[first + r][4 * q + c];
                    const u32 second = transpose_8x8(h ? more.y : more.x);
                    mma_bf16(d, a, second, second);
                }
                mma_bf16(d, a, b, b);
                s[0][0] = d[0], s[0][1] = d[1], s[1][0] = d[2], s[1][1] = d[3];
            }
        }
    }
}

// Sums of N values (a power of two times 8) over the lanes (0, c) to (7, c): lane (r, c) returns those of values
// N / 8 r, ... in the first places of x.
template <int N, int BIT = 16> DEVICE void sum_over_rows(float (&x)[N]) {
    if constexpr (BIT >= 4) {
        constexpr int HALF = N * BIT / 32;
        const bool upper = threadIdx.x & BIT;
#pragma unroll
        for (int i = 0; i < HALF; i++) {
            const float keep = upper ? x[i + HALF] : x[i], send = upper ? x[i] : x[i + HALF];
            x[i] = keep + __shfl_xor_sync(ALL, send, BIT);
        }
        sum_over_rows<N, BIT / 2>(x);
    }
}

// The residual of a head with its stored sketch. `codes`: where the residual is stored.
template <int BITS> DEVICE void encode_residual(EncodeMemory& m, StateRows& state, char* codes, int rank) {
    constexpr float DISTANCE = level_distance(BITS), GAIN = level_gain(BITS), HALF = 1 << (BITS - 1);
    constexpr int PART = 8;  // columns of a lane whose sums are made together
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4, warp = threadIdx.x / 32;
    u16* const scales = scales_of(codes, BITS);
    subtract_sketch(m, state, rank);
    float unit = 1;
    if (state.power < 0x1p-40f || state.power > 0x1p40f) {  // float32 does not hold the squares
        unit = inverse_of(state.power);
#pragma unroll
        for (int i = 0; i < K / 2; i++) state.of[i / (K / 4)][i % (K / 4)] *= state.power;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < K / 4; i++) sum += state.of[half][i] * state.of[half][i];
        const u16 scale = narrow<BF16>(DISTANCE * GAIN * sqrtf(group_sum<4>(sum) / K));
        const float inverse = GAIN * inverse_or_zero(widen<BF16>(scale));
        if (c == 0)
            scales[16 * warp + r + 8 * half] = inverse == 0.f ? 0 : narrow<BF16>(widen<BF16>(scale) * unit);
#pragma unroll
        for (int i = 0; i < K / 4; i++) state.of[half][i] *= inverse;
    }
#pragma unroll
    for (int part = 0; part < K / 4; part += PART) {
        float squares[PART];
#pragma unroll
        for (int i = 0; i < PART; i++)
            squares[i] = state.of[0][part + i] * state.of[0][part + i] + state.of[1][part + i] * state.of[1][part + i];
        sum_over_rows(squares);
#pragma unroll
        for (int i = 0; i < PART / 8; i++) {
            const int own = part + PART / 8 * r + i;
            m.squares[warp][own / 4 * 16 + 4 * c + own % 4] = squares[i];
        }
    }
    sync_encoders();
    for (int k = threadIdx.x; k < K; k += 32 * ENCODERS) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < ENCODERS; w++) sum += m.squares[w][k];
        const u16 scale = narrow<BF16>(DISTANCE * sqrtf(sum / V));
        const float inverse = inverse_or_zero(widen<BF16>(scale));
        m.across[k] = inverse / (2 * HALF);
        scales[V + k] = inverse == 0.f ? 0 : scale;
    }
    sync_encoders();
    BlockCodes<BITS> block;
    block.clear();
#pragma unroll
    for (int q = 0; q < K / 16; q++) {
        const float4 four = load_four(m.across, q);
        const float across[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 bits[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                // floor of a number from 0 to 2 HALF, which 2^23 has as its low bits; NaN becomes code 0
                const float x = __saturatef(fmaf(state.of[half][4 * q + n], across[n], 0.5f));
                bits[n] = __float_as_uint(__fmaf_rd(x, 2 * HALF - 1e-6f, 0x1p23f));
            }
            block.set(half * ROW_REGISTERS + q, __byte_perm(__byte_perm(bits[0], bits[1], 0x0040),
                                                            __byte_perm(bits[2], bits[3], 0x0040), 0x5410));
        }
    }
    block.store(codes, warp);
}

// The same for a head's bits, if there are any.
DEVICE void encode_residual(EncodeMemory& m, StateRows& own, sketch_t* packed, const int4& info) {
    char* const codes = reinterpret_cast<char*>(packed) + residual_at(info.x);
    with_bits(info.z, [&](auto bits) { encode_residual<decltype(bits)::VALUE>(m, own, codes, info.x); });
}
