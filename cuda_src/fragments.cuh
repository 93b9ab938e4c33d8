// Matrix products that keep float32 accuracy on bf16 tensor cores, and the order in which operands lie.
//
// A float32 number is exactly the sum of three bf16 numbers (its mantissa in three slices of 8 bits), so a product of
// two needs the six partial products above 2^-24; if one factor is a raw bf16 activation, three are exact.
// A warp owns 16 value rows of the state, in shared memory, and takes 16 channels of them at a time to registers, as they
// lie in accumulators of m16n8k16. Two neighbouring accumulators are one operand, so a piece enters products without moving.
// Columns are assigned so that a thread's four of 16 are neighbours in memory: place p of 16 holds column_at(p).
#pragma once
#include "common.cuh"

constexpr int STEPS = K / 16;        // operand fragments along K
constexpr int NWARPS = V / 16;

// Column of 16 that stands at a place: a thread's places 2c, 2c+1, 8+2c, 8+2c+1 hold columns 4c to 4c+3.
__device__ __forceinline__ int column_at(int place) { return 4 * (place % 8 / 2) + 2 * (place / 8) + place % 2; }
// The inverse of column_at.
__device__ __forceinline__ int place_of(int column) { return 8 * (column % 4 / 2) + 2 * (column / 4) + column % 2; }

// Upper halves of two floats, the first in the low half-word: their leading bf16 slices, by truncation.
__device__ __forceinline__ u32 upper_halves(float x, float y) {
    return __byte_perm(__float_as_uint(x), __float_as_uint(y), 0x7632);
}
__device__ __forceinline__ float rest(float x) { return x - __uint_as_float(__float_as_uint(x) & 0xffff0000u); }

// A pair rounded to bf16, the first in the low half-word.
__device__ __forceinline__ u32 round_pair(float x, float y) { return float_to_bf16(x) | static_cast<u32>(float_to_bf16(y)) << 16; }

// What tf32 leaves of a float: 13 more bits.
__device__ __forceinline__ float below_tf32(float x) { return x - __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

// TERMS bf16 slices of a pair.
template <int TERMS> __device__ __forceinline__ void slices(float x, float y, u32* to, int stride) {
#pragma unroll
    for (int i = 0; i < TERMS; i++) {
        to[i * stride] = upper_halves(x, y);
        if (i + 1 < TERMS) x = rest(x), y = rest(y);
    }
}

// An operand fragment (16 x 16) of a thread's four columns in rows r and r + 8, in TERMS slices.
template <int TERMS> struct Operand {
    u32 a[TERMS][4];
    __device__ __forceinline__ Operand(const float (&upper)[4], const float (&lower)[4]) {
        slices<TERMS>(upper[0], upper[1], &a[0][0], 4);
        slices<TERMS>(lower[0], lower[1], &a[0][1], 4);
        slices<TERMS>(upper[2], upper[3], &a[0][2], 4);
        slices<TERMS>(lower[2], lower[3], &a[0][3], 4);
    }
};

// Products of 4 neighbouring channels of 16 of a, rows r and r + 8, with those of b, row r: to about 2^-22, as sum + rest.
__device__ __forceinline__ void mma_float4(float (&sum)[4], float (&rest)[4], const float (&upper)[4], const float (&lower)[4],
                                           const float (&b)[4], bool b_exact) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        mma_tf32(sum, upper[i], lower[i], upper[i + 1], lower[i + 1], b[i], b[i + 1]);
        mma_tf32(rest, below_tf32(upper[i]), below_tf32(lower[i]), below_tf32(upper[i + 1]), below_tf32(lower[i + 1]), b[i], b[i + 1]);
        if (!b_exact) mma_tf32(rest, upper[i], lower[i], upper[i + 1], lower[i + 1], below_tf32(b[i]), below_tf32(b[i + 1]));
    }
}

// Which of the warp's value rows a thread has as rows r (half 0) and r + 8 (half 1) of an operand: rows 0 to 7 for even
// r, 8 to 15 for odd ones. These lie 64 bytes apart from a multiple of 128, so that reading a piece meets no bank twice.
__device__ __forceinline__ int value_row(int half) {
    const int r = threadIdx.x % 32 / 4;
    return 8 * (r % 2) + r / 2 + 4 * half;
}

// The warp's value rows as they lie in shared memory: two halves of 8.
struct StateRows {
    static constexpr int HALF = 8 * K, SHIFT = HALF + 16;
    alignas(16) float data[SHIFT + HALF];
    __device__ __forceinline__ float* at(int row, int channel) { return &data[row / 8 * SHIFT + row % 8 * K + channel]; }
};

// 16 channels of them: columns 4c to 4c + 3 of rows r and r + 8.
struct Piece {
    float s[2][4];

    __device__ __forceinline__ void load(StateRows& rows, int step) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float4 x = *reinterpret_cast<const float4*>(rows.at(value_row(half), 16 * step + 4 * (threadIdx.x % 4)));
            s[half][0] = x.x, s[half][1] = x.y, s[half][2] = x.z, s[half][3] = x.w;
        }
    }
    __device__ __forceinline__ void store(StateRows& rows, int step) const {
#pragma unroll
        for (int half = 0; half < 2; half++)
            *reinterpret_cast<float4*>(rows.at(value_row(half), 16 * step + 4 * (threadIdx.x % 4))) =
                make_float4(s[half][0], s[half][1], s[half][2], s[half][3]);
    }
};
