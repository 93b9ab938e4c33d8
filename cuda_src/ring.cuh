// The ring of buffered tokens in global memory, and the swizzle of its values; for kernels with read.cu's -D constants.
#pragma once
#include "token.cuh"

// With bf16 values and sketches, reads multiply rows of values and of U on the tensor cores: ldmatrix takes 16 bytes of
// each of eight rows. Rows come to shared memory by bulk copies, as stored, so those 16-byte pieces would all be in the
// same banks. Therefore the rows are stored swizzled in global memory: pieces of 16 bytes are exchanged within
// SWIZZLE_SPAN channels, differently in neighbouring rows.
constexpr bool SWIZZLED = ACT == BF16 && SKETCH == BF16 && SKETCHED_HEADS > 0;
constexpr int SWIZZLE_SPAN = V % 64 == 0 ? 64 : V % 32 == 0 ? 32 : 16;

// Channel n of ring place `row`, or of column `row` of U, is stored at n ^ swizzle(row).
__device__ __forceinline__ constexpr int swizzle(u32 row) {
    return SWIZZLED ? row / (64 / SWIZZLE_SPAN) % (SWIZZLE_SPAN / 8) * 8 : 0;
}

// Ring of raw inputs, one entry per slot: k (key_heads, W, K), v (heads, W, V), g (heads, W, 1 or K), beta (heads, W).
struct Ring {
    act_t *k, *v;
    gate_t* g;
    float* beta;

    __device__ __forceinline__ Ring(act_t* k_, act_t* v_, gate_t* g_, float* beta_, i64 slot, int head)
        : k(k_ + (slot * KEY_HEADS + head / HEADS_PER_KEY) * W * K), v(v_ + (slot * HEADS + head) * W * V),
          g(g_ + (slot * HEADS + head) * W * GATES), beta(beta_ + (slot * HEADS + head) * W) {}
};
