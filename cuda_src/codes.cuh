// Sketches in codes of 8 bits (SKETCH INT8 or FP8): conversion of codes to bf16 operands, and of floats to codes.
//
// A code is one byte: sign and magnitude (INT8, -127 to 127), or e4m3 (FP8). bf16 holds code * CODE_UNIT exactly. A
// word of four codes becomes two pairs of bf16: bytes 0 and 2, and bytes 1 and 3. The code's bits are first placed at a
// bf16 number's sign, low exponent and mantissa bits. The result is too small by a power of two (and mostly subnormal);
// one multiplication corrects it. The conversion takes three (INT8) or four (FP8) instructions a pair on all
// architectures; sm_80 has no instruction that converts e4m3.
#pragma once
#include "ring.cuh"

constexpr float CODE_UNIT = SKETCH == INT8 ? 0x1p-6f : 1.f;  // the bf16 number of code 1
constexpr float LARGEST_CODE = SKETCH == INT8 ? 127.f : 448.f;

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

// N neighbouring codes (2, 4 or 8), widened.
template <int N> struct Codes {
    u32 pairs[N < 4 ? 1 : N / 2];

    __device__ __forceinline__ void load(const sketch_t* from) {
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
    __device__ __forceinline__ float operator[](int i) const {
        const u32 pair = pairs[N == 2 ? 0 : i / 4 * 2 + i % 2];
        return __uint_as_float((N == 2 ? i : i / 2 % 2) ? pair & 0xffff0000u : pair << 16);
    }
};

// Code of a number in the low byte; other bytes are arbitrary. |x| is at most LARGEST_CODE. Ties go to even.
__device__ __forceinline__ u32 code_of(float x) {
    const float most = fabsf(x);
    const u32 sign = __float_as_uint(x) >> 24 & 0x80;
    if constexpr (SKETCH == FP8) {
        const u32 bits = __float_as_uint(most);
        // 2^14 has a unit of 2^-9, the least e4m3 number; the exponent of e4m3 is 120 less than that of float32
        const u32 small = __float_as_uint(most + 0x1p14f) & 0xf, other = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
        return sign | (most < 0x1p-6f ? small : min(other - 120 * 8, 0x7eu));
    } else {
        return sign | (__float_as_uint(most + 0x1p23f) & 0x7f);
    }
}
__device__ __forceinline__ u32 codes_of(const float (&x)[4]) {
    return __byte_perm(__byte_perm(code_of(x[0]), code_of(x[1]), 0x0040),
                       __byte_perm(code_of(x[2]), code_of(x[3]), 0x0040),
                       0x5410);
}

// Stores a row of LENGTH numbers as codes, by one warp, and returns the row's scale. `load(n, x)` gets the four numbers
// of word n. Word n is stored at byte 4 n ^ turn.
template <int LENGTH, class Load>
__device__ __forceinline__ float store_codes(sketch_t* to, int turn, const Load& load) {
    static_assert(LENGTH / 4 <= 32, "one word a lane");
    const int lane = threadIdx.x % 32;
    const bool own = lane < LENGTH / 4;
    float x[4] = {};
    if (own) load(lane, x);
    u32 most = 0;  // bits of the largest magnitude; the bits of NaN exceed those of any number
#pragma unroll
    for (int e = 0; e < 4; e++) most = max(most, __float_as_uint(fabsf(x[e])));
    const float largest = __uint_as_float(__reduce_max_sync(ALL, most));
    const float inverse = largest > 0.f ? __fdividef(LARGEST_CODE, largest) : 0.f;
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] *= inverse;
    if (own) *reinterpret_cast<u32*>(to + (4 * lane ^ turn)) = codes_of(x);
    return fmaf(largest, 0.f, largest * (1.f / (LARGEST_CODE * CODE_UNIT)));  // NaN if a number is not finite
}
// Stores column `g` of U as codes, in the order that `load_transposed` needs (see multiply_codes), or unchanged.
__device__ __forceinline__ float store_column_codes(const float* column, int g, sketch_t* packed) {
    return store_codes<V>(packed + g * V, code_swizzle(g), [&](int n, float(&x)[4]) {
        const float* const from = column + (SWIZZLED ? n / 4 * 16 + n % 4 * 2 : 4 * n);
        const float2 low = *reinterpret_cast<const float2*>(from),
                     high = *reinterpret_cast<const float2*>(from + (SWIZZLED ? 8 : 2));
        x[0] = low.x, x[1] = SWIZZLED ? high.x : low.y, x[2] = SWIZZLED ? low.y : high.x, x[3] = high.y;
    });
}
// Stores a map's row as codes. `load(channel, x)` gets four neighbouring channels; they are stored in the order
// 0, 2, 1, 3.
template <class Load> __device__ __forceinline__ float store_row_codes(sketch_t* to, const Load& load) {
    return store_codes<K>(to, 0, [&](int n, float(&x)[4]) {
        float four[4];
        load(4 * n, four);
        x[0] = four[0], x[1] = four[2], x[2] = four[1], x[3] = four[3];
    });
}
