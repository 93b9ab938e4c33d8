// Matrix products that keep float32 accuracy on bf16 tensor cores, and the order in which operands lie.
//
// A float32 number is exactly the sum of three bf16 numbers (its mantissa in three slices of 8 bits), so a product of
// two needs the six partial products above 2^-24; if one factor is a raw bf16 activation, three are exact.
// The flush's state tile lives in accumulator fragments of m16n8k16: a warp owns 16 value rows and all K channels.
// Two neighbouring accumulator tiles are one operand fragment, so the tile enters products without moving.
// Columns are assigned so that a thread's four of 16 are neighbours in memory: place p of 16 holds column spread(p).
#pragma once
#include "common.cuh"

constexpr int STEPS = K / 16;        // operand fragments along K
constexpr int NWARPS = V / 16;
constexpr int THREADS = 32 * NWARPS;

// Column of 16 that stands at a place: a thread's places 2c, 2c+1, 8+2c, 8+2c+1 hold columns 4c to 4c+3.
__device__ __forceinline__ int column_at(int place) { return 4 * (place % 8 / 2) + 2 * (place / 8) + place % 2; }
// The inverse of column_at.
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

// The warp's part of the state: rows r and r + 8, columns 16 step + 4c to 4c + 3 for every step.
struct Tile {
    float s[STEPS][2][4];

    // The warp's rows lie in shared memory as they do in the state: 16 rows of K, one after the other.
    __device__ __forceinline__ static float* at(float* rows, int i) {
        const int lane = threadIdx.x % 32;
        return rows + (lane / 4 + 8 * (i % 2)) * K + 16 * (i / 2) + 4 * (lane % 4);
    }
    __device__ __forceinline__ void load(float* rows) {
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++) {
            const float4 x = *reinterpret_cast<const float4*>(at(rows, i));
            s[i / 2][i % 2][0] = x.x, s[i / 2][i % 2][1] = x.y, s[i / 2][i % 2][2] = x.z, s[i / 2][i % 2][3] = x.w;
        }
    }
    __device__ __forceinline__ void store(float* rows) const {
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++) {
            const float* x = s[i / 2][i % 2];
            *reinterpret_cast<float4*>(at(rows, i)) = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
};
