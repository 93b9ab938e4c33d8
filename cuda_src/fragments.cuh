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

    // Offset of a thread's first element in a head's state.
    __device__ __forceinline__ static int home() {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        return (16 * warp + lane / 4) * K + 4 * (lane % 4);
    }
    // Starts the copy of the warp's rows into its part of shared memory. Odd rows are turned by 64 bytes, so that the
    // four lanes of one row and the four of the next read from different banks.
    __device__ __forceinline__ static void prefetch(float (*buffer)[K], const float* head_state, Arrival& arrival) {
        constexpr int ROW = K * sizeof(float), TURN = 64 / sizeof(float);
        const int first = threadIdx.x / 32 * 16;
        const float* const from = head_state + first * K;
        if (threadIdx.x % 32 == 0) arrival.expect(16 * ROW);
        __syncwarp();
        copy_rows(buffer[first], from, 8, ROW, 2 * ROW, arrival);
        copy_rows(buffer[first + 1] + TURN, from + K, 8, ROW - 64, 2 * ROW, arrival);
        copy_rows(buffer[first + 1], from + 2 * K - TURN, 8, 64, 2 * ROW, arrival);
    }
    __device__ __forceinline__ void load(const float (*buffer)[K]) {
        const int lane = threadIdx.x % 32, r = lane / 4, row = threadIdx.x / 32 * 16 + r, turn = r % 2 * 16;
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++) {
            const int column = i / 2 + 1 < STEPS ? 16 * (i / 2) + turn : (16 * (i / 2) + turn) % K;
            const float4 x = *reinterpret_cast<const float4*>(&buffer[row + 8 * (i % 2)][column + 4 * (lane % 4)]);
            s[i / 2][i % 2][0] = x.x, s[i / 2][i % 2][1] = x.y, s[i / 2][i % 2][2] = x.z, s[i / 2][i % 2][3] = x.w;
        }
    }
    __device__ __forceinline__ void store(float* head_state) const {
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++) {
            const float* x = s[i / 2][i % 2];
            // written once and not read again soon
            __stcs(reinterpret_cast<float4*>(head_state + home() + 16 * (i / 2) + 8 * K * (i % 2)), make_float4(x[0], x[1], x[2], x[3]));
        }
    }
};
