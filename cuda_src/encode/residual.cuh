// Codes and scales of what a stored sketch leaves of its state (sketchssm/reference/residual.py).
#pragma once
#include "encode/basis.cuh"

// As in sketchssm/layer/residual.py: distance of levels in standard deviations, and factor of the levels.
DEVICE constexpr float level_distance(int bits) { return bits == 1 ? 1.596f : bits == 2 ? 0.996f : 0.586f; }
DEVICE constexpr float level_gain(int bits) { return bits == 1 ? 1.571f : bits == 2 ? 1.135f : 1.039f; }

constexpr u32 BF16_ONES = 0x3f803f80;

DEVICE float inverse_or_zero(float scale) { return scale < 0x1p-120f ? 0.f : __fdividef(1, scale); }

// state -= factor U B, as stored, with at most GROUPS groups of columns; returns the sum of squares of this lane's part
// of rows r and r + 8. The left operand of a group has -factor U times the scales in two bf16 slices: columns 0 to 7
// have the first slices, 8 to 15 the second.
template <int GROUPS, class Rows>
DEVICE float2 subtract_sketch(const EncodeMemory& m, Rows& state, int rank, float factor) {
    const int lane = encoder_thread() % 32, r = lane / 4, c = lane % 4, row = encoder_thread() / 32 * 16 + r;
    u32 a[GROUPS][4];
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; i++) {
        const int group = i / 2, half = i % 2;
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int g = BASIS_GROUP * group + 2 * c + e;
            x[e] = g < rank ? -factor * m.scale[g] * m.columns[g][row + 8 * half] : 0.f;
        }
        a[group][half] = floats_to_bf16(x[0], x[1]);
        a[group][2 + half] = second_slice(x[0], x[1], a[group][half]);
    }
    float squares[2] = {};
#pragma unroll
    for (int q = 0; q < K / 16; q++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float d[4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 x = state.of[half][q][h];
                d[2 * half] = __uint_as_float(x << 16), d[2 * half + 1] = __uint_as_float(x & 0xffff0000u);
            }
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                const int g = BASIS_GROUP * group + r;
                if constexpr (SKETCH == FP32) {
                    const u32* const more = &m.more[g][4 * q + c].x;
                    const u32 second = transpose_8x8(more[h]);
                    mma_bf16(d, a[group], second, second);
                }
                const u32* const basis = &m.basis[g][4 * q + c].x;
                const u32 b = transpose_8x8(basis[h]);
                mma_bf16(d, a[group], b, b);
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                squares[half] += d[2 * half] * d[2 * half] + d[2 * half + 1] * d[2 * half + 1];
                state.of[half][q][h] = floats_to_bf16(d[2 * half], d[2 * half + 1]);
            }
        }
    return make_float2(squares[0], squares[1]);
}

// Sums of N pairs in bf16 (a power of two times 8) over the lanes (0, c) to (7, c): lane (r, c) returns those of pairs
// N / 8 r, ... in the first places of x.
template <int N, int BIT = 16> DEVICE void sum_over_rows(u32 (&x)[N]) {
    if constexpr (BIT >= 4) {
        constexpr int HALF = N * BIT / 32;
        const bool upper = encoder_thread() & BIT;
#pragma unroll
        for (int i = 0; i < HALF; i++) {
            const u32 keep = upper ? x[i + HALF] : x[i], send = upper ? x[i] : x[i + HALF];
            x[i] = fma_bf16(keep, BF16_ONES, __shfl_xor_sync(ALL, send, BIT));
        }
        sum_over_rows<N, BIT / 2>(x);
    }
}

// Stores at `codes` the residual of a head with its stored sketch. Rows are in bf16, and their squares are summed in
// bf16 over the rows of a warp: a number at the edge of two levels may get the other code than in float32.
template <int BITS, class Rows>
DEVICE void encode_residual(EncodeMemory& m, Rows& state, char* codes, int rank) {
    constexpr float DISTANCE = level_distance(BITS), GAIN = level_gain(BITS), HALF = 1 << (BITS - 1);
    constexpr int PAIRS = K / 8;  // of a lane's columns
    constexpr int SUMMED = round_up(PAIRS, 8);  // with zeros past them
    const int lane = encoder_thread() % 32, r = lane / 4, c = lane % 4, warp = encoder_thread() / 32;
    u16* const scales = scales_of(codes, BITS);
    float factor = 1;
    if (state.power < 0x1p-40f || state.power > 0x1p40f) {  // float32 does not hold the squares
        factor = state.power;
        const u32 pair = floats_to_bf16(factor, factor);
#pragma unroll
        for (int i = 0; i < 2 * PAIRS; i++) {
            u32& x = state.of[i / PAIRS][i / 2 % (K / 16)][i % 2];
            x = fma_bf16(x, pair, 0);
        }
    }
    const float2 sums = rank <= BASIS_GROUP ? subtract_sketch<1>(m, state, rank, factor)
                                            : subtract_sketch<BASIS_ROWS / BASIS_GROUP>(m, state, rank, factor);
    u32 squares[SUMMED] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u16 scale = narrow<BF16>(DISTANCE * GAIN * sqrtf(group_sum<4>(half ? sums.y : sums.x) / K));
        const float inverse = GAIN * inverse_or_zero(widen<BF16>(scale));
        if (c == 0)
            scales[16 * warp + r + 8 * half] =
                inverse == 0.f ? 0 : narrow<BF16>(widen<BF16>(scale) * inverse_of(factor));
        const u32 pair = floats_to_bf16(inverse, inverse);
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            u32& x = state.of[half][i / 2][i % 2];
            x = fma_bf16(x, pair, 0);
            squares[i] = fma_bf16(x, x, half ? squares[i] : 0);
        }
    }
    sum_over_rows(squares);
#pragma unroll
    for (int i = 0; i < SUMMED / 8; i++) {
        const int own = SUMMED / 8 * r + i;
        if (SUMMED > PAIRS && own >= PAIRS) continue;
        *reinterpret_cast<float2*>(&m.squares[warp][own / 2 * 16 + 4 * c + own % 2 * 2]) =
            make_float2(__uint_as_float(squares[i] << 16), __uint_as_float(squares[i] & 0xffff0000u));
    }
    sync_encoders();
    for (int k = encoder_thread(); k < K; k += 32 * ENCODERS) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < ENCODERS; w++) sum += m.squares[w][k];
        const u16 scale = narrow<BF16>(DISTANCE * sqrtf(sum / V));
        const float inverse = inverse_or_zero(widen<BF16>(scale));
        reinterpret_cast<u16*>(m.across)[k] = narrow<BF16>(inverse);
        scales[V + k] = inverse == 0.f ? 0 : scale;
    }
    sync_encoders();
    const u32 middle = floats_to_bf16(HALF - 0.5f, HALF - 0.5f), last = floats_to_bf16(2 * HALF - 1, 2 * HALF - 1);
    BlockCodes<BITS> block;
    block.clear();
#pragma unroll
    for (int q = 0; q < K / 16; q++) {
        const uint2 across = m.across[4 * q + c];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 bits[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                // 128 has a unit of 1 in bf16; NaN becomes the last code
                const u32 level = fma_relu_bf16(state.of[half][q][h], h ? across.y : across.x, middle);
                bits[h] = fma_bf16(smaller_bf16(level, last), BF16_ONES, 0x43004300);
            }
            block.set(half * ROW_REGISTERS + q, __byte_perm(bits[0], bits[1], 0x6420));
        }
    }
    block.store(codes, warp);
}

// Stores sketch and residual of a head's state in `packed`; info is {rank, offset, bits, basis}, and `basis` has all
// heads' operands. at(row, channel) is the address of four numbers of the warp's 16 rows; `release` is called when the
// rows have been read.
template <class At, class Release>
DEVICE void encode_state(EncodeMemory& m, const At& at, const uint2* basis, sketch_t* packed, const int4& info,
                         Release release) {
    const OmegaGroup omega(basis + info.w);
    StateRows<At> rows(at);
    if (SKETCH != FP32) release();
    adapt_basis(m, rows, basis + info.w, omega, packed, info.x);
    multiply_basis(m, rows, info.x);
    if (SKETCH == FP32) release();
    sync_encoders();
    store_columns(m, packed, info.x);
    char* const codes = reinterpret_cast<char*>(packed) + residual_at(info.x);
    with_bits(info.z, [&](auto bits) { encode_residual<decltype(bits)::VALUE>(m, rows, codes, info.x); });
}
