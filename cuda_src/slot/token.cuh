// Inputs of a step: the caller's arrays, and pointers to one token.
#pragma once
#include "lib/log_decay.cuh"
#include "lib/strided.cuh"

// Inputs of one token of each row: q, k (key_heads, K), v (heads, V), g (heads, 1 or K), beta (heads).
struct Inputs {
    Strided<const act_t> q, k, v;
    Strided<const gate_t> g;
    Strided<const float> beta;
};

// The inputs made from a kernel's parameters.
#define INPUTS                                                                            \
    Inputs {                                                                              \
        {q, q_stride}, {k, k_stride}, {v, v_stride}, {g, g_stride}, { beta, beta_stride } \
    }

// Bytes from a row's token to the row's next token, for kernels that take several tokens.
struct TokenSteps {
    int q, k, v, g, beta;
};
#define TOKEN_STEPS \
    TokenSteps { q_step, k_step, v_step, g_step, beta_step }

// Inputs of one token of a row, at one head.
struct Token {
    const act_t *q, *k, *v;
    const gate_t* g;
    const float* beta;

    DEVICE Token(const Inputs& inputs, int row, int head)
        : q(inputs.q.of(row) + head / HEADS_PER_KEY * K), k(inputs.k.of(row) + head / HEADS_PER_KEY * K),
          v(inputs.v.of(row) + head * V), g(inputs.g.of(row) + head * GATES), beta(inputs.beta.of(row) + head) {}
    DEVICE Token(const act_t* q_, const act_t* k_, const act_t* v_, const gate_t* g_,
                                     const float* beta_)
        : q(q_), k(k_), v(v_), g(g_), beta(beta_) {}
    // Moves `count` tokens ahead.
    DEVICE void move(const TokenSteps& by, int count) {
        q = Strided<const act_t>{q, by.q}.of(count), k = Strided<const act_t>{k, by.k}.of(count);
        v = Strided<const act_t>{v, by.v}.of(count), g = Strided<const gate_t>{g, by.g}.of(count);
        beta = Strided<const float>{beta, by.beta}.of(count);
    }
};
