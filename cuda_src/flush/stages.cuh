// Pipeline stages of the flush in shared memory:
//
//   KeyStage     keys and log-decays (kda) of the window's tokens, and the query
//   ValueStage   values of the window's tokens
//   StateStage   one row block (16 value rows) of a state
//
// flush/roles.cuh has the diagram of all roles, buffers and barriers.
#pragma once
#include "flush/fragments.cuh"
#include "slot/ring.cuh"
#include "slot/sketch_layout.cuh"

constexpr bool RAW_KEYS = ACT == BF16 && KIND != KDA;  // keys are operands as stored: no transform warps

// Warps that sketch form groups of GROUP_WARPS. With FOLD_WARPS_SKETCH the fold warps sketch, each its own row block.
// Otherwise a block has the multiprocessor to itself, and one group of extra warps (the sketch warps) sketches a state
// while the fold warps work on the next state. With raw keys there are sketch warps if V = 128 and the sketch's
// workspace leaves no room for a second block.
constexpr bool FOLD_WARPS_SKETCH =
    RAW_KEYS && !(HIGH_RANKS && ROW_BLOCKS == 8 && RANK_MAX > 21 && SKETCH == BF16 && STATE == FP32);
// With high ranks all fold warps are one group, because a group's sums take as much memory as the map.
constexpr int GROUP_WARPS = !RAW_KEYS               ? 4
                            : HIGH_RANKS            ? ROW_BLOCKS
                            : ROW_BLOCKS % 4 == 0   ? 4
                            : ROW_BLOCKS % 3 == 0   ? 3
                                                    : ROW_BLOCKS;
constexpr int GROUP_BLOCKS = FOLD_WARPS_SKETCH ? GROUP_WARPS : ROW_BLOCKS;

// Largest shared memory of a block if `blocks` fit on one multiprocessor. 128 bytes of a block remain for static shared
// memory (STATIC_SHARED on the host), and 1024 for the system.
constexpr int block_shared(int blocks) { return (MOST_SHARED + 1024) / blocks - 1024 - 128; }
// Blocks on a multiprocessor, if shared memory has room: see BLOCKS (flush/tiles.cuh).
constexpr int WANTED_BLOCKS = !FOLD_WARPS_SKETCH                  ? 1
                              : !HIGH_RANKS || MIN_BLOCKS < 2     ? MIN_BLOCKS
                              : ROW_BLOCKS == 8 && RANK_MAX > 24 ? 1
                                                                  : 2;

// Numbers of named barriers: of the transform warps, and of the first group of warps that sketch.
constexpr int TRANSFORM_BARRIER = 1, FIRST_GROUP_BARRIER = 2;

constexpr int TOKEN_BLOCKS = (W + 15) / 16, WP = 16 * TOKEN_BLOCKS;  // the window in operand fragments
// Rows of RAW_KEYS are operands: padded so that the four rows that a warp reads at once are in different banks.
constexpr int KEY_ROW = RAW_KEYS ? K + 16 : K;
constexpr int GATE_ROWS = KIND == KDA ? WP : 1;  // the transform warps store WP rows of decays

// Keys of one key head, log-decays per channel (kda), and the query. Raw gates are copied to the end of a row of `g`,
// and their decays then overwrite the row.
struct KeyStage {
    alignas(16) act_t k[WP][KEY_ROW];
    alignas(16) act_t q[K];
    alignas(KIND == KDA ? 16 : 4) float g[GATE_ROWS][GATES];
    CopyBarrier full;

    __device__ __forceinline__ gate_t* given_gates(int s) {
        return reinterpret_cast<gate_t*>(g[s % GATE_ROWS]) + (sizeof(float) / sizeof(gate_t) - 1) * GATES;
    }
    // Address of a channel's log-decay. Later the same address holds a decay, then a product of decays, then a share of
    // the Gram matrix (flush/transform_keys.cuh).
    __device__ __forceinline__ float* gate(int s, int channel) { return &g[0][0] + s * GATES + channel; }
    __device__ __forceinline__ const float* gate(int s, int channel) const { return &g[0][0] + s * GATES + channel; }
    // Starts the copies: `buffered` tokens from the ring, then the step's own token if there is one.
    __device__ __forceinline__ void fetch(const Token& token, const Ring& ring, int buffered, bool own) {
        constexpr int KEY = K * sizeof(act_t), GATE = KIND == KDA ? K * sizeof(gate_t) : 0;
        full.expect(buffered * ((KEY_ROW == K ? KEY : 0) + GATE));
        if (KEY_ROW != K) full.copy_rows(k, KEY_ROW * sizeof(act_t), ring.k, KEY, buffered, KEY);
        else if (buffered > 0) full.copy_contiguous<1>(k, 0, ring.k, buffered * KEY);
        if (GATE && RAW_GATE) full.copy_row_per_lane(given_gates(0), sizeof(g[0]), ring.g, GATE, buffered, GATE);
        else if (GATE && buffered > 0) full.copy_contiguous<1>(g, 0, ring.g, buffered * GATE);
        if (own) {
            full.copy_rows(k[buffered], 0, token.k, 0, 1, KEY);
            full.copy_rows(q, 0, token.q, 0, 1, KEY);
            if (GATE) full.copy_rows(given_gates(buffered), 0, token.g, 0, 1, GATE);
        }
        full.commit();
    }
    // Zeros for missing tokens, because RAW_KEYS operands read all WP rows. Copies of later tiles overwrite them. By one
    // warp.
    __device__ __forceinline__ void clear(int count) {
        for (int i = count * KEY_ROW + threadIdx.x % 32; i < WP * KEY_ROW; i += 32) (&k[0][0])[i] = 0;
        fence_async_proxy();
    }
};

// Two if sketch warps let the fold warps go on to the next tile at once, and shared memory has room.
constexpr int VALUE_STAGES = RAW_KEYS && !FOLD_WARPS_SKETCH && W <= 16 && RANK_MAX <= 40 ? 2 : 1;
// Values of the window's tokens.
struct ValueStage {
    // Swizzled or padded, so that threads that read different tokens access different banks.
    alignas(16) act_t v[W][SWIZZLED ? V : V + 8];
    CopyBarrier full;

    __device__ __forceinline__ void fetch(const Token& token, const Ring& ring, int buffered, bool own) {
        constexpr int VALUES = V * sizeof(act_t);
        full.expect(SWIZZLED ? buffered * VALUES : 0);
        if (!SWIZZLED) full.copy_rows(v, sizeof(v[0]), ring.v, VALUES, buffered, VALUES);
        else if (buffered > 0) full.copy_contiguous<1>(v, 0, ring.v, buffered * VALUES);
        if (own)
            full.copy_rows(v[buffered], 0, token.v, 0, 1, VALUES,
                          [&](int, int byte) { return byte ^ swizzle(buffered) * static_cast<int>(sizeof(act_t)); });
        full.commit();
    }
    __device__ __forceinline__ float at(int s, int channel) const {
        return widen<ACT>(v[s % W][channel ^ swizzle(s % W)]);
    }
};

// Norm of a warp's rows if float32 cannot hold the sum of their squares, or if the rows are zeros. Rarely called, so
// not inlined.
__device__ __noinline__ float scaled_norm(StateBlock& rows) {
    float most = 0, squares = 0, power = 1;
#pragma unroll 1
    for (int i = 0; i < 2 * STEPS; i++) {
        if (i == STEPS) power = power_for_norm(warp_most(most));
        StateFragment fragment;
        fragment.load(rows, i % STEPS);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const float x = power * fragment.s[e / 4][e % 4];
            most = fmaxf(most, fabsf(x));
            if (i >= STEPS) squares += x * x;
        }
    }
    squares = warp_sum(squares);
    return squares > 0.f ? squares * rsqrtf(squares) * inverse_of_power(power) : squares;
}

// A row block: 16 value rows of the state. One warp loads or stores it.
struct StateStage {
    static constexpr int BYTES = StateBlock::PART * sizeof(state_t), STRIDE = StateBlock::SHIFT * sizeof(state_t);
    StateBlock state;
    CopyBarrier full;
    float norm;

    __device__ __forceinline__ void fetch(const state_t* from) {
        full.expect(PARTS * BYTES);
        full.copy_contiguous<PARTS>(state.data, STRIDE, from, BYTES);
        full.commit();
    }
    __device__ __forceinline__ void store(state_t* to) const { bulk_store<PARTS>(to, state.data, STRIDE, BYTES); }
    // By the fold warp of the rows. `squares`: the lane's share of the sum of squares.
    __device__ __forceinline__ void set_norm(float squares) {
        squares = warp_sum(squares);
        const float root = squares > 0x1p-60f && squares < 0x1p126f ? squares * rsqrtf(squares) : scaled_norm(state);
        if (threadIdx.x % 32 == 0) norm = root;
    }
};

// Lane map of the values to write. A thread has columns 2c, 2c+1, 8+2c, 9+2c of rows r and r + 8 of an operand.
// token_of maps them (e = 0 to 3) to tokens of the block of 16: the same numbers with RAW_KEYS, otherwise 4c to 4c+3.
__device__ __forceinline__ int token_of(int block, int e) {
    return 16 * block + (RAW_KEYS ? 8 * (e / 2) + 2 * (threadIdx.x % 4) + e % 2 : 4 * (threadIdx.x % 4) + e);
}
struct Values {
    float v[TOKEN_BLOCKS][2][4];
    __device__ __forceinline__ void load(const ValueStage& values, int count) {
        const int first = threadIdx.x / 32 * 16;
#pragma unroll
        for (int b = 0; b < TOKEN_BLOCKS; b++)
#pragma unroll
            for (int e = 0; e < 4; e++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int s = token_of(b, e);
                    v[b][half][e] = s < count ? values.at(s, first + value_row(half)) : 0.f;
                }
    }
    // Scales the warp's values into the range of fp16; returns the unit, value = unit * scaled value.
    __device__ __forceinline__ float scale() {
        float most = 0;
#pragma unroll
        for (int i = 0; i < 8 * TOKEN_BLOCKS; i++) most = fmaxf(most, fabsf(v[i / 8][i / 4 % 2][i % 4]));
        const float power = power_for<HALF_EXPONENT>(warp_most(most));
#pragma unroll
        for (int i = 0; i < 8 * TOKEN_BLOCKS; i++) v[i / 8][i / 4 % 2][i % 4] *= power;
        return inverse_of_power(power);
    }
};
