// Sketches in codes (SKETCH INT8): conversion of codes to bf16 operands, and of floats to codes.
//
// A code is one byte: sign and magnitude, -127 to 127. bf16 holds code * CODE_UNIT exactly. A word of four codes
// becomes two pairs of bf16: bytes 0 and 2, and bytes 1 and 3. The code's bits are first placed at a bf16 number's
// sign, low exponent and mantissa bits. The result is too small by a power of two (and mostly subnormal); one
// multiplication corrects it. The conversion takes three instructions a pair on all architectures.
#pragma once
#include "slot/ring.cuh"

constexpr float CODE_UNIT = 0x1p-6f, LARGEST_CODE = 127;  // CODE_UNIT: the bf16 number of code 1

// Codes 0 and 2 (odd: 1 and 3) of a word as a pair of bf16.
template <bool ODD> DEVICE u32 widen_codes(u32 codes) {
    const u32 x = ODD ? extend_bytes_1_3(codes) : extend_bytes_0_2(codes);
    return fma_bf16(x & 0x807f807f, 0x7f007f00, 0x80008000);  // times 2^127, minus zero
}
// Eight channels of a row of a map as an operand. Words of codes hold channels 0, 2, 1, 3.
DEVICE uint4 widen_codes(const uint2& codes) {
    return make_uint4(widen_codes<false>(codes.x), widen_codes<true>(codes.x), widen_codes<false>(codes.y),
                      widen_codes<true>(codes.y));
}

// N neighbouring codes (2, 4 or 8), widened.
template <int N> struct Codes {
    u32 pairs[N < 4 ? 1 : N / 2];

    DEVICE void load(const sketch_t* from) {
        if constexpr (N == 2) {
            pairs[0] = widen_codes<false>(__byte_perm(*reinterpret_cast<const u16*>(from), 0, 0x4140));
        } else {
#pragma unroll
            for (int i = 0; i < N / 4; i++) {
                const u32 word = reinterpret_cast<const u32*>(from)[i];
                pairs[2 * i] = widen_codes<false>(word), pairs[2 * i + 1] = widen_codes<true>(word);
            }
        }
    }
    DEVICE float operator[](int i) const {
        const u32 pair = pairs[N == 2 ? 0 : i / 4 * 2 + i % 2];
        return __uint_as_float((N == 2 ? i : i / 2 % 2) ? pair & 0xffff0000u : pair << 16);
    }
};

// Codes of four numbers times `unit`. The products are at most LARGEST_CODE. Ties go to even.
DEVICE u32 codes_of(const float (&x)[4], float unit) {
    // 1.5 * 2^23 has a unit of 1: the low byte of a sum with it is the nearest integer, in two's complement.
    auto integer = [&](float y) { return __float_as_uint(fmaf(y, unit, 0x1.8p23f)); };
    const u32 integers = __byte_perm(__byte_perm(integer(x[0]), integer(x[1]), 0x0040),
                                     __byte_perm(integer(x[2]), integer(x[3]), 0x0040), 0x5410);
    const u32 minus = integers >> 7 & 0x01010101;
    return (integers ^ minus * 0x7f) + minus;  // sign and magnitude
}
// A row's scale and the inverse, by which its numbers are multiplied, from its largest magnitude. If a number is not
// finite, the scale is NaN. Codes of a row below 2^-110 are 0: float32 does not hold the inverse of every such scale.
DEVICE float scale_of(float largest) { return fmaf(largest, 0.f, largest * (1.f / (LARGEST_CODE * CODE_UNIT))); }
DEVICE float inverse_scale(float largest) { return largest > 0x1p-110f ? __fdividef(LARGEST_CODE, largest) : 0.f; }

// Column g of U in a head's codes. Byte n is stored at `at` + (n ^ mask).
struct CodedColumn {
    int at, mask;

    DEVICE explicit CodedColumn(int g) : at(g * V), mask(code_swizzle(g)) {}
    // Address of 16 bytes for `load_transposed`: 16 channels from `channel` + `half` on (0 or 16).
    DEVICE int share(int channel, int half) const {
        return at + channel / CODE_SPAN * CODE_SPAN + (channel % CODE_SPAN ^ mask ^ half);
    }
};

// Stores a row of LENGTH numbers as codes, by one warp, and returns the row's scale. `load(n, x)` gets the four numbers
// of word n. Word n is stored at byte 4 n ^ mask. Lane l has EACH neighbouring words, from EACH l on.
template <int LENGTH, class Load> DEVICE float store_codes(sketch_t* to, int mask, const Load& load) {
    constexpr int EACH = (LENGTH / 4 + 31) / 32;
    static_assert(LENGTH / 4 % EACH == 0, "a lane has all of its words or none");
    const int first = EACH * (threadIdx.x % 32);
    const bool own = first < LENGTH / 4;
    float x[EACH][4] = {};
    u32 most = 0;  // bits of the largest magnitude; the bits of NaN exceed those of any number
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (own) load(first + i, x[i]);
#pragma unroll
        for (int e = 0; e < 4; e++) most = max(most, __float_as_uint(fabsf(x[i][e])));
    }
    const float largest = __uint_as_float(__reduce_max_sync(ALL, most));
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (own) *reinterpret_cast<u32*>(to + (4 * (first + i) ^ mask)) = codes_of(x[i], inverse_scale(largest));
    return scale_of(largest);
}

// The numbers of word n of a column of U, in the order that `load_transposed` needs (see multiply_codes), or unchanged.
DEVICE void load_column_word(float (&x)[4], const float* column, int n) {
    const float* const from = column + (SWIZZLED ? n / 4 * 16 + n % 4 * 2 : 4 * n);
    const float2 low = *reinterpret_cast<const float2*>(from),
                 high = *reinterpret_cast<const float2*>(from + (SWIZZLED ? 8 : 2));
    x[0] = low.x, x[1] = SWIZZLED ? high.x : low.y, x[2] = SWIZZLED ? low.y : high.x, x[3] = high.y;
}
DEVICE void store_column_word(float* column, int n, const float (&x)[4]) {
    float* const to = column + (SWIZZLED ? n / 4 * 16 + n % 4 * 2 : 4 * n);
    *reinterpret_cast<float2*>(to) = make_float2(x[0], x[SWIZZLED ? 2 : 1]);
    *reinterpret_cast<float2*>(to + (SWIZZLED ? 8 : 2)) = make_float2(x[SWIZZLED ? 1 : 2], x[3]);
}
// Stores a column of U as column `g` of the codes.
DEVICE float store_column_codes(const float* column, int g, sketch_t* packed) {
    const CodedColumn as(g);
    return store_codes<V>(packed + as.at, as.mask, [&](int n, float(&x)[4]) { load_column_word(x, column, n); });
}
// Stores a map's row as codes. `load(channel, x)` gets four neighbouring channels; they are stored in the order
// 0, 2, 1, 3.
template <class Load> DEVICE float store_row_codes(sketch_t* to, const Load& load) {
    return store_codes<K>(to, 0, [&](int n, float(&x)[4]) {
        float four[4];
        load(4 * n, four);
        x[0] = four[0], x[1] = four[2], x[2] = four[1], x[3] = four[3];
    });
}
