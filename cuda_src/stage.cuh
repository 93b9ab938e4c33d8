// The flush's copy of a window's raw tokens in shared memory.
#pragma once
#include "fragments.cuh"
#include "window.cuh"

constexpr bool RAW = ACT == BF16 && KIND != KDA;  // keys are operands as they come

// Who sketches. Where keys have to be prepared, a block has a multiprocessor for itself, and mostly room for two states: then
// warps apart move and sketch one while the next is folded. Else the warps that fold do, each its own block of rows.
constexpr int SHARERS = !RAW || NWARPS % 4 == 0 ? 4 : NWARPS % 3 == 0 ? 3 : NWARPS;  // of a group
constexpr int GROUP_BLOCKS = RAW ? SHARERS : NWARPS;

constexpr int BLOCKS = (W + 15) / 16, WP = 16 * BLOCKS;  // the window in operand fragments
constexpr int KEY_ROW = RAW ? K + 16 : K;  // padded where it is an operand's: 4 rows, of which a warp reads at once, lie in different banks
constexpr int GATE_ROWS = KIND == KDA ? WP : 1;  // of WP is what a team leaves there

// Keys (of one key head), log-decays per channel, and the query. All warps read them, one warp at a time brings them. Raw gates come
// into the ends of the rows where their decays will lie.
struct KeyStage {
    alignas(16) act_t k[WP][KEY_ROW];
    alignas(16) act_t q[K];
    alignas(KIND == KDA ? 16 : 4) float g[GATE_ROWS][GATES];
    Delivery delivery;

    __device__ __forceinline__ gate_t* given_gates(int s) {
        return reinterpret_cast<gate_t*>(g[s % GATE_ROWS]) + (sizeof(float) / sizeof(gate_t) - 1) * GATES;
    }
    // Where a channel's log-decay is, or what takes its place: a decay, a product of them, a share of the Gram matrix (prepare.cuh).
    __device__ __forceinline__ float* gate(int s, int channel) { return &g[0][0] + s * GATES + channel; }
    __device__ __forceinline__ const float* gate(int s, int channel) const { return &g[0][0] + s * GATES + channel; }
    // Starts the copies: `buffered` tokens from the ring, then the step's own token if there is one.
    __device__ __forceinline__ void fetch(const Token& token, const Ring& ring, int buffered, bool own) {
        constexpr int KEY = K * sizeof(act_t), GATE = KIND == KDA ? K * sizeof(gate_t) : 0;
        if (KEY_ROW != K) delivery.rows(k, KEY_ROW * sizeof(act_t), ring.k, KEY, buffered, KEY);
        else if (buffered > 0) delivery.stretch<1>(k, 0, ring.k, buffered * KEY);
        if (GATE && RAW_GATE) delivery.blocks(given_gates(0), sizeof(g[0]), ring.g, GATE, buffered, GATE);
        else if (GATE && buffered > 0) delivery.stretch<1>(g, 0, ring.g, buffered * GATE);
        if (own) {
            delivery.rows(k[buffered], 0, token.k, 0, 1, KEY);
            delivery.rows(q, 0, token.q, 0, 1, KEY);
            if (GATE) delivery.rows(given_gates(buffered), 0, token.g, 0, 1, GATE);
        }
        delivery.end();
    }
    // Zeros in places of tokens that are not there: raw operands read all of WP rows. One warp.
    __device__ __forceinline__ void clear(int count) {
        for (int i = count * KEY_ROW + threadIdx.x % 32; i < WP * KEY_ROW; i += 32) (&k[0][0])[i] = 0;
    }
};

// The window's values.
struct ValueStage {
    // Threads that read different tokens meet different banks: rows are turned, or padded.
    alignas(16) act_t v[W][OPERANDS ? V : V + 8];
    Delivery delivery;

    __device__ __forceinline__ void fetch(const Token& token, const Ring& ring, int buffered, bool own) {
        constexpr int VALUES = V * sizeof(act_t);
        if (!OPERANDS) delivery.rows(v, sizeof(v[0]), ring.v, VALUES, buffered, VALUES);
        else if (buffered > 0) delivery.stretch<1>(v, 0, ring.v, buffered * VALUES);
        if (own)
            delivery.rows(v[buffered], 0, token.v, 0, 1, VALUES,
                          [&](int, int byte) { return byte ^ turn_of(buffered) * static_cast<int>(sizeof(act_t)); });
        delivery.end();
    }
    __device__ __forceinline__ float at(int s, int channel) const { return widen<ACT>(v[s % W][channel ^ turn_of(s % W)]); }
};

// Norm of a warp's rows if float32 cannot hold the sum of their squares, or of rows of zeros. Seldom called, so no code of the fold.
__device__ __noinline__ float scaled_norm(StateRows& rows) {
    float most = 0, squares = 0, power = 1;
#pragma unroll 1
    for (int i = 0; i < 2 * STEPS; i++) {
        if (i == STEPS) power = power_for_norm(warp_most(most));
        Piece piece;
        piece.load(rows, i % STEPS);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const float x = power * piece.s[e / 4][e % 4];
            most = fmaxf(most, fabsf(x));
            if (i >= STEPS) squares += x * x;
        }
    }
    squares = warp_sum(squares);
    return squares > 0.f ? squares * rsqrtf(squares) * inverse_of_power(power) : squares;
}

// 16 value rows of the state: one of NWARPS blocks. One warp fetches or stores them.
struct Rows {
    static constexpr int BYTES = StateRows::HALF * sizeof(float), STRIDE = StateRows::SHIFT * sizeof(float);
    StateRows state;
    Delivery delivery;
    float norm;

    __device__ __forceinline__ void fetch(const float* from) {
        delivery.stretch<2>(state.data, STRIDE, from, BYTES);
        delivery.end();
    }
    __device__ __forceinline__ void store(float* to) const { send<2>(to, state.data, STRIDE, BYTES); }
    // Sets the norm, by the warp of the rows. `squares` is a lane's share of the sum of their squares.
    __device__ __forceinline__ void set_norm(float squares) {
        squares = warp_sum(squares);
        const float root = squares > 0x1p-60f && squares < 0x1p126f ? squares * rsqrtf(squares) : scaled_norm(state);
        if (threadIdx.x % 32 == 0) norm = root;
    }
};

// This thread's part of values that are written: rows r and r + 8 of operands, whose columns 2c, 2c+1, 8+2c, 9+2c are tokens of 16:
// the same where keys come as they are, else neighbours.
__device__ __forceinline__ int token_of(int block, int e) {
    return 16 * block + (RAW ? 8 * (e / 2) + 2 * (threadIdx.x % 4) + e % 2 : 4 * (threadIdx.x % 4) + e);
}
struct Values {
    float v[BLOCKS][2][4];
    __device__ __forceinline__ void load(const ValueStage& values, int count) {
        const int first = threadIdx.x / 32 * 16;
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
#pragma unroll
            for (int e = 0; e < 4; e++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int s = token_of(b, e);
                    v[b][half][e] = s < count ? values.at(s, first + value_row(half)) : 0.f;
                }
    }
    // Brings the warp's values into the range of fp16; returns what they are multiples of.
    __device__ __forceinline__ float scale() {
        float most = 0;
#pragma unroll
        for (int i = 0; i < 8 * BLOCKS; i++) most = fmaxf(most, fabsf(v[i / 8][i / 4 % 2][i % 4]));
        const float power = power_for<HALF_EXPONENT>(warp_most(most));
#pragma unroll
        for (int i = 0; i < 8 * BLOCKS; i++) v[i / 8][i / 4 % 2][i % 4] *= power;
        return inverse_of_power(power);
    }
};
