// The ring of buffered tokens in global memory, and the swizzle of its values; for kernels with read.cu's -D constants.
#pragma once
#include "slot/memory.cuh"

// With bf16 values and sketches, reads multiply rows of values and of U on the tensor cores: ldmatrix takes 16 bytes of
// each of eight rows. Bulk copies bring rows to shared memory as stored, so without a swizzle these eight 16-byte
// pieces would be in the same banks. Therefore rows are stored swizzled in global memory: pieces of 16 bytes are
// exchanged within SWIZZLE_SPAN channels, differently in neighbouring rows.
constexpr bool SWIZZLED = ACT == BF16 && SKETCH != FP32 && SKETCHED_HEADS > 0;
constexpr int SWIZZLE_SPAN = V % 64 == 0 ? 64 : V % 32 == 0 ? 32 : 16;

// Channel n of token `row` of a window, or of column `row` of U, is stored at n ^ swizzle(row).
DEVICE constexpr int swizzle(u32 row) { return SWIZZLED ? row / (64 / SWIZZLE_SPAN) % (SWIZZLE_SPAN / 8) * 8 : 0; }

// Codes (slot/codes.cuh) have half the bytes: 16 bytes of a row are 16 channels. Byte n of column `row` of U is stored
// at n ^ code_swizzle(row).
constexpr int CODE_SPAN = V % 128 == 0 ? 128 : V % 64 == 0 ? 64 : V % 32 == 0 ? 32 : 16;
DEVICE constexpr int code_swizzle(u32 row) { return SWIZZLED ? row / (128 / CODE_SPAN) % (CODE_SPAN / 16) * 16 : 0; }

// A slot's ring of raw inputs from token `first` on, at one head.
struct Ring {
    act_t *k, *v;
    gate_t* g;
    float* beta;

    DEVICE Ring(const Memory& memory, int slot, int head, int first = 0)
        : k(memory.keys.of(slot) + head / HEADS_PER_KEY * W * K + first * K),
          v(memory.values.of(slot) + head * W * V + first * V),
          g(memory.gates.of(slot) + head * W * GATES + first * GATES),
          beta(memory.betas.of(slot) + head * W + first) {}
};
