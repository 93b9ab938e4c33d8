// Sketches in codes (SKETCH INT8, FP8 or INT8_INT4): conversion of codes to bf16 operands, and of floats to codes.
//
// A code is one byte: sign and magnitude (INT8, -127 to 127), or e4m3 (FP8). bf16 holds code * CODE_UNIT exactly. A
// word of four codes becomes two pairs of bf16: bytes 0 and 2, and bytes 1 and 3. The code's bits are first placed at a
// bf16 number's sign, low exponent and mantissa bits. The result is too small by a power of two (and mostly subnormal);
// one multiplication corrects it. The conversion takes three (INT8) or four (FP8) instructions a pair on all
// architectures; sm_80 has no instruction that converts e4m3.
//
// INT8_INT4 also has codes of 4 bits: sign and magnitude, -7 to 7. They are in the order of codes of 8 bits, and two
// pieces of 16 bytes are packed into one: piece 2i has the lower four bits of each byte, piece 2i + 1 the upper four.
#pragma once
#include "ring.cuh"

constexpr float CODE_UNIT = SKETCH == FP8 ? 1.f : 0x1p-6f;  // the bf16 number of code 1
constexpr float LARGEST_CODE = SKETCH == FP8 ? 448.f : 127.f;

// Codes 0 and 2 (odd: 1 and 3) of a word as a pair of bf16.
template <bool ODD> __device__ __forceinline__ u32 widen_codes(u32 codes) {
    constexpr u32 MINUS_ZERO = 0x80008000;
    const u32 x = ODD ? extend_bytes_1_3(codes) : extend_bytes_0_2(codes);
    if constexpr (SKETCH == FP8) return fma_bf16(x << 4 & 0x87f087f0, 0x7b807b80, MINUS_ZERO);  // 2^120
    else return fma_bf16(x & 0x807f807f, 0x7f007f00, MINUS_ZERO);                               // 2^127
}
// Eight channels of a row of a map as an operand. Words of codes hold channels 0, 2, 1, 3.
__device__ __forceinline__ uint4 widen_codes(const uint2& codes) {
    return make_uint4(widen_codes<false>(codes.x), widen_codes<true>(codes.x), widen_codes<false>(codes.y),
                      widen_codes<true>(codes.y));
}

// A word of 8-bit codes: bytes where `narrow` has ones are unpacked from their lower or upper four bits.
__device__ __forceinline__ u32 unpack_codes(u32 x, u32 narrow, bool upper) {
    const u32 half = upper ? x >> 4 : x;
    return (x & ~narrow) | (((half & 0x07070707) | (half << 4 & 0x80808080)) & narrow);
}

// N neighbouring codes (2, 4 or 8), widened.
template <int N> struct Codes {
    u32 pairs[N < 4 ? 1 : N / 2];

    // Codes from `channel` on, of a column that is stored without a swizzle.
    __device__ __forceinline__ void load(const sketch_t* column, int channel, bool narrow) {
        const sketch_t* const from = column + (MIXED && narrow ? channel / 32 * 16 + channel % 16 : channel);
        auto codes = [&](u32 x) { return MIXED ? unpack_codes(x, narrow ? ALL : 0, channel / 16 % 2) : x; };
        if constexpr (N == 2) {
            pairs[0] = widen_codes<false>(__byte_perm(codes(*reinterpret_cast<const u16*>(from)), 0, 0x4140));
        } else {
#pragma unroll
            for (int i = 0; i < N / 4; i++) {
                const u32 word = codes(reinterpret_cast<const u32*>(from)[i]);
                pairs[2 * i] = widen_codes<false>(word), pairs[2 * i + 1] = widen_codes<true>(word);
            }
        }
    }
    __device__ __forceinline__ float operator[](int i) const {
        const u32 pair = pairs[N == 2 ? 0 : i / 4 * 2 + i % 2];
        return __uint_as_float((N == 2 ? i : i / 2 % 2) ? pair & 0xffff0000u : pair << 16);
    }
};

// Code of a number in the low byte (FP8); other bytes are arbitrary. |x| is at most LARGEST_CODE. Ties go to even.
__device__ __forceinline__ u32 e4m3_of(float x) {
    const float most = fabsf(x);
    const u32 bits = __float_as_uint(most);
    // 2^14 has a unit of 2^-9, the least e4m3 number; the exponent of e4m3 is 120 less than that of float32
    const u32 small = __float_as_uint(most + 0x1p14f) & 0xf, other = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
    return (__float_as_uint(x) >> 24 & 0x80) | (most < 0x1p-6f ? small : min(other - 120 * 8, 0x7eu));
}
__device__ __forceinline__ u32 low_bytes(u32 a, u32 b, u32 c, u32 d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}
// Codes of four numbers times `unit`. The products are at most LARGEST_CODE. Ties go to even.
__device__ __forceinline__ u32 codes_of(const float (&x)[4], float unit) {
    if constexpr (SKETCH == FP8) {
#if __CUDA_ARCH__ >= 890
        return floats_to_e4m3(x[0] * unit, x[1] * unit) | floats_to_e4m3(x[2] * unit, x[3] * unit) << 16;
#else
        return low_bytes(e4m3_of(x[0] * unit), e4m3_of(x[1] * unit), e4m3_of(x[2] * unit), e4m3_of(x[3] * unit));
#endif
    } else {
        // 1.5 * 2^23 has a unit of 1: the low byte of a sum with it is the nearest integer, in two's complement.
        auto integer = [&](float y) { return __float_as_uint(fmaf(y, unit, 0x1.8p23f)); };
        const u32 integers = low_bytes(integer(x[0]), integer(x[1]), integer(x[2]), integer(x[3]));
        const u32 minus = integers >> 7 & 0x01010101;
        return (integers ^ minus * 0x7f) + minus;  // sign and magnitude
    }
}
// A row's scale and the inverse, by which its numbers are multiplied, from its largest magnitude. If a number is not
// finite, the scale is NaN.
__device__ __forceinline__ float scale_of(float largest) {
    return fmaf(largest, 0.f, largest * (1.f / (LARGEST_CODE * CODE_UNIT)));
}
__device__ __forceinline__ float inverse_scale(float largest) {
    return largest > 0.f ? __fdividef(LARGEST_CODE, largest) : 0.f;
}

// Column g of U in a head's codes. Byte n is stored at `at` + (n ^ turn).
struct CodedColumn {
    bool narrow;  // whether the column has codes of 4 bits
    int at, turn;

    __device__ __forceinline__ CodedColumn(int g, int wide)
        : narrow(MIXED && g >= wide), at(column_at(g, wide)),
          turn(narrow ? narrow_swizzle(g - wide) : code_swizzle(g)) {}
    // Address of 16 bytes for `load_transposed`, which loads 32 channels from `channel` on. In codes of 8 bits these
    // are two pieces, one for each `half` (0 or 16). In codes of 4 bits both halves load the same piece.
    __device__ __forceinline__ int share(int channel, int half) const {
        const int byte = narrow ? channel / 2 : channel, own = narrow ? turn : turn ^ half;
        return at + byte / CODE_SPAN * CODE_SPAN + (byte % CODE_SPAN ^ own);
    }
};

// Stores a row of LENGTH numbers as codes of 4 bits, by one warp. Returns the row's scale, which has the least squared
// error of eight scales. Lane n has the four numbers of word n. Words n and n + 4 are packed into the word at byte
// (16 (n / 8) ^ turn) + 4 (n % 4).
template <int LENGTH>
__device__ __forceinline__ float store_narrow_codes(sketch_t* to, int turn, float (&x)[4], float largest) {
    constexpr float MOST = 7;
    constexpr int SHRINKS = 8;  // scales of 1 - i / 16 times the largest
    const int lane = threadIdx.x % 32;
    const float unit = largest > 0.f ? __fdividef(MOST, largest) : 0.f;
    float errors[SHRINKS] = {};
#pragma unroll
    for (int e = 0; e < 4; e++) {
        x[e] *= unit;
        const float most = fabsf(x[e]);
#pragma unroll
        for (int i = 0; i < SHRINKS; i++) {
            const float code = fminf(most * (16.f / (16 - i)), MOST) + 0x1p23f - 0x1p23f;  // the nearest integer
            const float rest = fmaf(-(1 - i / 16.f), code, most);
            errors[i] += rest * rest;
        }
    }
    const u32 error = __float_as_uint(warp_sums(errors));  // lane n: error of scale n / 4
    const u32 least = __reduce_min_sync(ALL, error);
    const float steps = 16 - (__ffs(__ballot_sync(ALL, error == least)) - 1) / (32 / SHRINKS);
    const float inverse = __fdividef(16.f, steps);
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = fmaxf(fminf(x[e] * inverse, MOST), -MOST);
    const u32 codes = codes_of(x, 1.f), half = (codes & 0x07070707) | (codes >> 4 & 0x08080808);
    const u32 other = __shfl_down_sync(ALL, half, 4);
    if (lane < LENGTH / 4 && lane / 4 % 2 == 0)
        *reinterpret_cast<u32*>(to + (lane / 8 * 16 ^ turn) + lane % 4 * 4) = half | other << 4;
    return fmaf(largest, 0.f, largest * steps * (1.f / (16 * MOST * CODE_UNIT)));
}

// Stores a row of LENGTH numbers as codes, by one warp, and returns the row's scale. `load(n, x)` gets the four numbers
// of word n. Word n is stored at byte 4 n ^ turn.
template <int LENGTH, class Load>
__device__ __forceinline__ float store_codes(sketch_t* to, int turn, bool narrow, const Load& load) {
    static_assert(LENGTH / 4 <= 32, "one word a lane");
    const int lane = threadIdx.x % 32;
    const bool own = lane < LENGTH / 4;
    float x[4] = {};
    if (own) load(lane, x);
    u32 most = 0;  // bits of the largest magnitude; the bits of NaN exceed those of any number
#pragma unroll
    for (int e = 0; e < 4; e++) most = max(most, __float_as_uint(fabsf(x[e])));
    const float largest = __uint_as_float(__reduce_max_sync(ALL, most));
    if (MIXED && narrow) return store_narrow_codes<LENGTH>(to, turn, x, largest);
    if (own) *reinterpret_cast<u32*>(to + (4 * lane ^ turn)) = codes_of(x, inverse_scale(largest));
    return scale_of(largest);
}

// The numbers of word n of a column of U, in the order that `load_transposed` needs (see multiply_codes), or unchanged.
__device__ __forceinline__ void load_column_word(float (&x)[4], const float* column, int n) {
    const float* const from = column + (SWIZZLED ? n / 4 * 16 + n % 4 * 2 : 4 * n);
    const float2 low = *reinterpret_cast<const float2*>(from),
                 high = *reinterpret_cast<const float2*>(from + (SWIZZLED ? 8 : 2));
    x[0] = low.x, x[1] = SWIZZLED ? high.x : low.y, x[2] = SWIZZLED ? low.y : high.x, x[3] = high.y;
}
__device__ __forceinline__ void store_column_word(float* column, int n, const float (&x)[4]) {
    float* const to = column + (SWIZZLED ? n / 4 * 16 + n % 4 * 2 : 4 * n);
    *reinterpret_cast<float2*>(to) = make_float2(x[0], x[SWIZZLED ? 2 : 1]);
    *reinterpret_cast<float2*>(to + (SWIZZLED ? 8 : 2)) = make_float2(x[SWIZZLED ? 1 : 2], x[3]);
}
// Stores a column of U as column `g` of the codes.
__device__ __forceinline__ float store_column_codes(const float* column, int g, int wide, sketch_t* packed) {
    const CodedColumn as(g, wide);
    return store_codes<V>(packed + as.at, as.turn, as.narrow,
                          [&](int n, float(&x)[4]) { load_column_word(x, column, n); });
}
// Stores a map's row as codes. `load(channel, x)` gets four neighbouring channels; they are stored in the order
// 0, 2, 1, 3.
template <class Load>
__device__ __forceinline__ float store_row_codes(sketch_t* to, bool narrow, const Load& load) {
    return store_codes<K>(to, 0, narrow, [&](int n, float(&x)[4]) {
        float four[4];
        load(4 * n, four);
        x[0] = four[0], x[1] = four[2], x[2] = four[1], x[3] = four[3];
    });
}
