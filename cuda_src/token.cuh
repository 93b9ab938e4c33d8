// Pointers to one token's inputs.
#pragma once
#include "log_decay.cuh"

// Inputs of one token of a row, at one head.
struct Token {
    const act_t *q, *k, *v;
    const gate_t* g;
    const float* beta;

    __device__ __forceinline__ Token(const act_t* q_, const act_t* k_, const act_t* v_, const gate_t* g_,
                                     const float* beta_, i64 at, int head)
        : q(q_ + (at * KEY_HEADS + head / HEADS_PER_KEY) * K), k(k_ + (at * KEY_HEADS + head / HEADS_PER_KEY) * K),
          v(v_ + (at * HEADS + head) * V), g(g_ + (at * HEADS + head) * GATES), beta(beta_ + at * HEADS + head) {}
};
