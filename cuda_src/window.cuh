// The window's buffered tokens, as they lie in memory; for kernels with read.cu's -D constants.
#pragma once
#include "token.cuh"

// Where values and sketches are bf16, reads multiply rows of values and of U on the tensor cores. These take eight rows at a time from
// shared memory, 16 bytes of each, and rows come there as they lie: all eight would meet the same banks. So rows are
// turned: pieces of 16 bytes change places within TURNED channels, differently in neighbouring rows.
constexpr bool OPERANDS = ACT == BF16 && SKETCH == BF16 && SKETCHED_HEADS > 0;
constexpr int TURNED = V % 64 == 0 ? 64 : V % 32 == 0 ? 32 : 16;

// Channel n of the value in that place of the ring, or of that column of U, lies at n ^ turn_of(row).
__device__ __forceinline__ constexpr int turn_of(u32 row) { return OPERANDS ? row / (64 / TURNED) % (TURNED / 8) * 8 : 0; }

// Ring of raw inputs, one entry per slot: k (key_heads, W, K), v (heads, W, V), g (heads, W, 1 or K), beta (heads, W).
struct Ring {
    act_t *k, *v;
    gate_t* g;
    float* beta;

    __device__ __forceinline__ Ring(act_t* k_, act_t* v_, gate_t* g_, float* beta_, i64 slot, int head)
        : k(k_ + (slot * KEY_HEADS + head / GROUP) * W * K), v(v_ + (slot * HEADS + head) * W * V),
          g(g_ + (slot * HEADS + head) * W * GATES), beta(beta_ + (slot * HEADS + head) * W) {}
};
