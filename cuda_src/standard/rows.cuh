// A warp's share of a state in standard decode, for kernels with standard.cu's -D constants.
#pragma once
#include "slot/token.cuh"

constexpr int ROW_LANES = K % 64 == 0 ? 16 : 8, SIDE = 32 / ROW_LANES;  // lanes of a row; rows side by side
constexpr int ROW_SETS = ROWS / SIDE;                 // sets of rows side by side
constexpr int CHUNKS = K / (4 * ROW_LANES);           // a lane's chunks of four channels, 4 ROW_LANES apart
static_assert(K % (4 * ROW_LANES) == 0 && ROWS % SIDE == 0, "whole chunks of a row, whole sets of rows");
static_assert(ROW_SETS <= ROW_LANES, "a lane's output for each set");

DEVICE int channel(int chunk) { return 4 * (threadIdx.x % ROW_LANES + ROW_LANES * chunk); }

// Number of a warp among all: 32 bits where the compiler, with 64, would load q, k and v after the first decays.
template <bool SHORT> struct WarpNumber { typedef i64 type; };
template <> struct WarpNumber<true> { typedef u32 type; };
constexpr bool SHORT_NUMBERS = CHANNEL_DECAYS && (HEADS & (HEADS - 1));

// The warp's value rows, from `value` on, of one head of a row of the batch.
struct WarpRows {
    int value, head, row;

    DEVICE WarpRows() {
        const WarpNumber<SHORT_NUMBERS>::type first = blockIdx.x, task = first * (blockDim.x / 32) + threadIdx.x / 32;
        value = task % (V / ROWS) * ROWS, head = task / (V / ROWS) % HEADS;
        row = static_cast<int>(task / (V / ROWS * HEADS));
    }
    // The lane's value row in the first set.
    DEVICE int first_row() const { return value + threadIdx.x % 32 / ROW_LANES; }
};

// A lane's share of a token's inputs at one head.
struct TokenInputs {
    Packed<ACT, 4> q[CHUNKS], k[CHUNKS];
    Packed<GATE_TYPE, 4> g[CHANNEL_DECAYS ? CHUNKS : 1];
    float v[ROW_SETS], gate, beta;

    DEVICE void load(const Token& token, int own) {
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) {
            q[j].load(token.q + channel(j));
            k[j].load(token.k + channel(j));
            if (CHANNEL_DECAYS) g[CHANNEL_DECAYS ? j : 0].load(token.g + channel(j));
        }
#pragma unroll
        for (int i = 0; i < ROW_SETS; i++) v[i] = widen<ACT>(token.v[own + SIDE * i]);
        gate = CHANNEL_DECAYS ? 0.f : widen<GATE_TYPE>(*token.g);
        beta = ERASES ? *token.beta : 1.f;
    }
};

// A lane's gate parameters (raw gates).
struct GateInputs {
    GateInput<4> input[CHANNEL_DECAYS ? CHUNKS : 1];

    DEVICE GateInputs(const float* packed, int head) {
#pragma unroll
        for (int j = 0; j < CHUNKS; j++)
            if (CHANNEL_DECAYS) input[CHANNEL_DECAYS ? j : 0].load(packed, head, channel(j));
    }
};

// All lanes of a row know its output; lane i of a row stores the output of set i.
struct Output {
    out_t* at;

    DEVICE Output(const Strided<out_t>& out, const WarpRows& part)
        : at(out.of(part.row) + part.head * V + part.first_row() + SIDE * (threadIdx.x % ROW_LANES)) {}
    DEVICE void put(int t, float x) const {
        if (threadIdx.x % ROW_LANES < ROW_SETS) at[static_cast<i64>(t) * HEADS * V] = narrow<OUT>(x);
    }
};

// The lane's share of the warp's rows, in registers.
struct StateRegisters {
    Packed<FP32, 4> s[ROW_SETS][CHUNKS];
    Packed<STATE, 4> rounded[ROW_SETS][CHUNKS];  // the rows as in memory, for states of 16 bits

    // Calls `f` with the lane's registers (float32, as in memory) and their offset in memory.
    template <class F> DEVICE void for_each(F f) {
#pragma unroll
        for (int i = 0; i < ROW_SETS; i++)
#pragma unroll
            for (int j = 0; j < CHUNKS; j++) {
                const int at = i * SIDE * K + channel(j);
                if constexpr (STATE == FP32) f(s[i][j], s[i][j], at);
                else f(s[i][j], rounded[i][j], at);
            }
    }
    DEVICE void load(const state_t* home) {
        for_each([&](auto&, auto& stored, int at) { stored.load(home + at); });
    }
    DEVICE void widen() {
        if constexpr (STATE != FP32)
            for_each([](auto& x, auto& stored, int) { x.set({stored[0], stored[1], stored[2], stored[3]}); });
    }
    DEVICE void round() {
        if constexpr (STATE != FP32)
            for_each([](auto& x, auto& stored, int) { stored.set_state({x[0], x[1], x[2], x[3]}); });
    }
    // `streaming`: stores bypass the caches (measured on H200, with other work between two steps).
    DEVICE void store(state_t* home, bool streaming) {
        for_each([&](auto&, auto& stored, int at) {
            if (streaming) stored.store_streaming(home + at);
            else stored.store(home + at);
        });
    }
    // Applies one token; returns the output of the row of set number `lane`.
    DEVICE float take(const TokenInputs& token, const GateInputs& gates) {
        const float same = CHANNEL_DECAYS ? 1.f : decay(token.gate);
        float predicted[ROW_SETS] = {}, read[ROW_SETS] = {}, key_query = 0;
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) {
            const int own = CHANNEL_DECAYS ? j : 0;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float a = CHANNEL_DECAYS ? decay(gates.input[own].log_decay(token.g[own][e], e)) : same;
                const float key = token.k[j][e], query = token.q[j][e];
                key_query += key * query;
#pragma unroll
                for (int i = 0; i < ROW_SETS; i++) {
                    const float x = s[i][j][e] * a;
                    if (ERASES) predicted[i] += x * key;
                    read[i] += x * query;
                    s[i][j].word[e] = __float_as_uint(x);
                }
            }
        }
        key_query = group_sum<ROW_LANES>(key_query);
        float result = 0;
#pragma unroll
        for (int i = 0; i < ROW_SETS; i++) {
            const float write = ERASES ? token.beta * (token.v[i] - group_sum<ROW_LANES>(predicted[i])) : token.v[i];
#pragma unroll
            for (int j = 0; j < CHUNKS; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) s[i][j].word[e] = __float_as_uint(s[i][j][e] + token.k[j][e] * write);
            const float whole = group_sum<ROW_LANES>(read[i]) + write * key_query;
            if (threadIdx.x % ROW_LANES == i) result = whole;
        }
        return result;
    }
};

// Least blocks of STANDARD_WARPS warps per multiprocessor, or 0 for the compiler's choice. For kda with four rows the
// compiler chooses 64 registers and loads q, k and v only after the decays: batch 512 on an H100 took 822 us instead of
// 729. The other numbers were the fastest on H200, by up to 1%.
constexpr int MIN_BLOCKS = CHANNEL_DECAYS ? (ROWS == 4 ? 7 : 0) : ERASES;
