// All parts of the slots' memory; for kernels with read.cu's -D constants.
#pragma once
#include "slot/sketch_layout.cuh"
#include "slot/token.cuh"

// Arrays of a slot: state (heads, V, K); ring: keys (key_heads, W, K), values (heads, W, V), gates (heads, W, 1 or K),
// betas (heads, W); sketch (slot/sketch_layout.cuh); cursor word.
struct Memory {
    Strided<state_t> state;
    Strided<act_t> keys, values;
    Strided<gate_t> gates;
    Strided<float> betas;
    Strided<sketch_t> sketch;
    Strided<int> cursor;
};

// A kernel's parameters for the memory, and the memory made from them.
#define MEMORY_PARAMETERS                                                                                             \
    state_t *state, int state_stride, act_t *ring_keys, int ring_keys_stride, act_t *ring_values,                      \
        int ring_values_stride, gate_t *ring_gates, int ring_gates_stride, float *ring_betas, int ring_betas_stride,  \
        sketch_t *sketch, int sketch_stride, int *cursor, int cursor_stride
#define MEMORY                                                                                                        \
    Memory {                                                                                                          \
        {state, state_stride}, {ring_keys, ring_keys_stride}, {ring_values, ring_values_stride},                      \
            {ring_gates, ring_gates_stride}, {ring_betas, ring_betas_stride}, {sketch, sketch_stride}, \
            {cursor, cursor_stride}                                                                                   \
    }
