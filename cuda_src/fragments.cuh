// Matrix products that keep float32 accuracy on tensor cores of fewer bits, and the order in which operands lie.
//
// A float32 number is exactly the sum of three bf16 numbers (its mantissa in three slices of 8 bits): its product with a
// raw bf16 activation is three exact ones. Where neither factor is one, both are scaled by powers of two into the range of
// fp16, of which two hold 22 bits: three products, to about 2^-22 of the largest numbers that share a power.
// A warp owns 16 value rows of the state, in shared memory, and takes 16 channels of them at a time to registers, as they
// lie in accumulators of m16n8k16: what is added to them comes as it lies. They are right operands of tf32 products as they are.
// Columns are assigned so that a thread's four of 16 are neighbours in memory.
#pragma once
#include "common.cuh"

constexpr int STEPS = K / 16;        // operand fragments along K
constexpr int NWARPS = V / 16;

// Place of a column of 16: a thread's places 2c, 2c+1, 8+2c, 8+2c+1 hold columns 4c to 4c+3.
__device__ __forceinline__ int place_of(int column) { return 8 * (column % 4 / 2) + 2 * (column / 4) + column % 2; }

// Upper halves of two floats, the first in the low half-word: their leading bf16 slices, by truncation.
__device__ __forceinline__ u32 upper_halves(float x, float y) {
    return __byte_perm(__float_as_uint(x), __float_as_uint(y), 0x7632);
}
__device__ __forceinline__ float rest(float x) { return x - __uint_as_float(__float_as_uint(x) & 0xffff0000u); }

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

// The power of two that brings a number of this size to between 2^EXPONENT and twice that, and the inverse of such a power.
template <int EXPONENT> __device__ __forceinline__ float power_for(float most) {
    const int exponent = static_cast<int>(__float_as_uint(most) >> 23);
    return __uint_as_float(static_cast<u32>(min(max(254 + EXPONENT - exponent, 1), 253)) << 23);
}
__device__ __forceinline__ float inverse_of_power(float x) { return __uint_as_float((254u << 23) - __float_as_uint(x)); }
// The power of two that brings a norm to between 1 and 2, so that float32 holds squares; the bound keeps 1 / norm finite.
__device__ __forceinline__ float power_for_norm(float norm) { return fminf(power_for<0>(norm), 0x1p116f); }
constexpr int HALF_EXPONENT = 14;  // where scaled numbers are to lie: less than half of fp16's range

// Two fp16 slices of a pair. What they leave out is 2^-23 of a number, or 2^-39 of one that is twice 2^HALF_EXPONENT.
__device__ __forceinline__ void half_slices(float x, float y, u32& high, u32& low) {
    high = floats_to_halves(x, y);
    const float2 taken = halves_to_floats(high);
    low = floats_to_halves(x - taken.x, y - taken.y);
}

// 16 rows of 16 channels as left operands of two tf32 products: the channels 4c + {0, 1} and 4c + {2, 3} of rows r and r + 8.
// The same registers are right operands of 8 of the rows.
struct LeftOperand {
    float a[2][4];

    // The thread's channels of row r (half 0) or r + 8.
    __device__ __forceinline__ void set(int half, const float (&x)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i / 2][half + i % 2 * 2] = x[i];
    }
    __device__ __forceinline__ void set(int half, const uint2& bf16) {
        const float x[4] = {__uint_as_float(bf16.x << 16), __uint_as_float(bf16.x & 0xffff0000u), __uint_as_float(bf16.y << 16),
                            __uint_as_float(bf16.y & 0xffff0000u)};
        set(half, x);
    }
    // sum + rest += product i with the right operand (x, y), to about 2^-22. SHORT: tf32 holds all that counts of this operand;
    // SHORT_RIGHT: of the other.
    template <bool SHORT, bool SHORT_RIGHT>
    __device__ __forceinline__ void multiply(int i, float (&sum)[4], [[maybe_unused]] float (&rest)[4], float x, float y) const {
        const float(&k)[4] = a[i];
        mma_tf32(sum, k[0], k[1], k[2], k[3], x, y);
        if (!SHORT_RIGHT) mma_tf32(rest, k[0], k[1], k[2], k[3], below_tf32(x), below_tf32(y));
        if (!SHORT) mma_tf32(rest, below_tf32(k[0]), below_tf32(k[1]), below_tf32(k[2]), below_tf32(k[3]), x, y);
    }
};

// Which of the warp's value rows a thread has as rows r (half 0) and r + 8 (half 1) of an operand: rows 0 to 7 for even
// r, 8 to 15 for odd ones. These lie 64 bytes apart from a multiple of 128, so that reading a piece meets no bank twice.
__device__ __forceinline__ int value_row(int half) {
    const int r = threadIdx.x % 32 / 4;
    return 8 * (r % 2) + r / 2 + 4 * half;
}

// The value row in column 2c + e of an accumulator whose right operand was the state, rows `half` of it.
__device__ __forceinline__ int value_at(int half, int e) { return 8 * e + threadIdx.x % 4 + 4 * half; }

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
