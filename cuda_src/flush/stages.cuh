// Pipeline stages of the flush in shared memory:
//
//   KeyStage     keys and log-decays (kda) of the window's tokens, and the query
//   ValueStage   values of the window's tokens
//   StateStage   one row block (16 value rows) of a state
//   PreparedKeys, TransformShared   what the transform warps make of keys
//   Solve        what the solver makes of a window
//
// flush/roles.cuh has the diagram of all roles, buffers and barriers. Included by flush/config.cuh.
#pragma once

// Rows of RAW_KEYS are operands: padded so that the four rows that a warp reads at once are in different banks.
constexpr int KEY_ROW = RAW_KEYS ? K + 16 : K;
constexpr int GATE_ROWS = CHANNEL_DECAYS ? WP : 1;  // the transform warps store WP rows of decays

// Keys of one key head, log-decays per channel (kda), and the query. Raw gates are copied to the end of a row of `g`,
// and their decays then overwrite the row.
struct KeyStage {
    alignas(16) act_t k[WP][KEY_ROW];
    alignas(16) act_t q[K];
    alignas(CHANNEL_DECAYS ? 16 : 4) float g[GATE_ROWS][GATES];
    CopyBarrier full;

    DEVICE gate_t* given_gates(int s) {
        return reinterpret_cast<gate_t*>(g[s % GATE_ROWS]) + (sizeof(float) / sizeof(gate_t) - 1) * GATES;
    }
    // Address of a channel's log-decay. Later the same address holds a decay, then a product of decays, then a share of
    // the Gram matrix (flush/transform_keys.cuh).
    DEVICE float* gate(int s, int channel) { return &g[0][0] + s * GATES + channel; }
    DEVICE const float* gate(int s, int channel) const { return &g[0][0] + s * GATES + channel; }
    // Starts the copies: `buffered` tokens from the ring, then the step's own token if there is one.
    DEVICE void fetch(const Token& token, const Ring& ring, int buffered, bool own) {
        constexpr int KEY = K * sizeof(act_t), GATE = CHANNEL_DECAYS ? K * sizeof(gate_t) : 0;
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
    // Zeros for the rows past the last token, because RAW_KEYS operands read all WP rows. Copies of later tiles
    // overwrite them. By one warp.
    DEVICE void clear(int count) {
        for (int i = count * KEY_ROW + threadIdx.x % 32; i < WP * KEY_ROW; i += 32) (&k[0][0])[i] = 0;
        fence_async_proxy();
    }
};

// Values of the window's tokens.
struct ValueStage {
    // Swizzled or padded, so that threads that read different tokens access different banks.
    alignas(16) act_t v[W][SWIZZLED ? V : V + 8];
    CopyBarrier full;

    DEVICE void fetch(const Token& token, const Ring& ring, int buffered, bool own) {
        constexpr int VALUES = V * sizeof(act_t);
        full.expect(SWIZZLED ? buffered * VALUES : 0);
        if (!SWIZZLED) full.copy_rows(v, sizeof(v[0]), ring.v, VALUES, buffered, VALUES);
        else if (buffered > 0) full.copy_contiguous<1>(v, 0, ring.v, buffered * VALUES);
        if (own)
            full.copy_rows(v[buffered], 0, token.v, 0, 1, VALUES,
                          [&](int, int byte) { return byte ^ swizzle(buffered) * static_cast<int>(sizeof(act_t)); });
        full.commit();
    }
    DEVICE float at(int s, int channel) const { return widen<ACT>(v[s % W][channel ^ swizzle(s % W)]); }
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

    DEVICE void fetch(const state_t* from) {
        full.expect(PARTS * BYTES);
        full.copy_contiguous<PARTS>(state.data, STRIDE, from, BYTES);
        full.commit();
    }
    DEVICE void store(state_t* to) const { bulk_store<PARTS>(to, state.data, STRIDE, BYTES); }
    // Rounds the rows to bf16, to a shadow.
    DEVICE void shade(u16* to) {
#pragma unroll 4
        for (int row = 0; row < 16; row++, to += K) {
            ChannelShare<STATE> exact;
            exact.load(state.at(row, 0));
            float x[LK];
#pragma unroll
            for (int c = 0; c < LK; c++) x[c] = exact[c];
            ChannelShare<BF16> rounded;
            rounded.set_state(x);
            rounded.store(to);
        }
    }
    // By the fold warp of the rows. `squares`: the lane's share of the sum of squares.
    DEVICE void set_norm(float squares) {
        squares = warp_sum(squares);
        const float root = squares > 0x1p-60f && squares < 0x1p126f ? squares * rsqrtf(squares) : scaled_norm(state);
        if (threadIdx.x % 32 == 0) norm = root;
    }
};

// Output of the transform warps (not RAW_KEYS), for a window of n tokens:
//
//            kda                       scalar decays   stored as
//   starts   D_{1:s} k_s               k_s             float32, in the order of LeftOperand
//   ends     D_{s+1:n} k_s / d_s       k_s             fp16, two slices, in units of `unit`
//   whole    D_{1:n}                   -               float32
//
// Solve explains d_s. Lane l of half i of `starts` is at l ^ 4i, so that stores hit all banks. `ends` has 16 tokens for
// each channel; a lane of an operand loads four neighbouring tokens.
struct PreparedKeys {
    alignas(16) u16 ends[2][RAW_KEYS ? 1 : TOKEN_BLOCKS][RAW_KEYS ? 1 : K][16];
    alignas(16) float4 starts[RAW_KEYS ? 1 : TOKEN_BLOCKS][RAW_KEYS ? 1 : STEPS][2][RAW_KEYS ? 1 : 32];
    alignas(16) float whole[CHANNEL_DECAYS ? K : 4];
    alignas(16) float query[RAW_KEYS ? 4 : K];
    float unit;  // of `ends`, a power of two

    // Address of `starts` for tokens s and s + 8 of a block of 16, which are neighbours.
    DEVICE float* start(int s, int channel) {
        const int in = channel % 16, i = in % 4 / 2, lane = (s % 8 * 4 + in / 4) ^ (4 * i);
        return reinterpret_cast<float*>(
                   &starts[RAW_KEYS ? 0 : s / 16][RAW_KEYS ? 0 : channel / 16][i][RAW_KEYS ? 0 : lane]) +
               2 * (in % 2);
    }
};

// Values that the transform warps exchange before their named barrier. A block has two copies, because a warp may be
// one tile ahead of another warp.
struct TransformShared {
    // The largest decay of each token in the warp's channels, or 1: see KEPT
    alignas(16) float decays[CHANNEL_DECAYS ? K / 16 : 1][CHANNEL_DECAYS ? WP : 1];
    float most[RAW_KEYS ? 1 : TRANSFORM_THREADS / 32];  // the warp's largest key
    int steep[RAW_KEYS ? 1 : TRANSFORM_THREADS / 32];   // whether a channel of the warp decays too fast: see STEEP
};

// Output of the solver warp: N of the delta rule, and scalar decays. `n` holds in turn the Gram matrix, the decayed
// Gram matrix, and N as operands.
//
// Until the window's end, the write of token s decays by d_s = D_{s+1:n}. With decays per channel, d_s is an upper
// bound: the product of the later tokens' largest decays, each rounded up to a power of two (decay_power). Forgotten
// tokens (small d_s) must not take up the range of fp16. So the operands are Diag(d) N Diag(1 / weight), and the
// right-hand side is Diag(weight) (v - predictions).
struct Solve {
    alignas(16) float n[ERASES ? WP : 1][ERASES ? WP : 4];
    float weight[WP];  // power of two by which a column of Diag(d) N is divided; weight[0] is negative if by_token
    static constexpr int SCALARS = CHANNEL_DECAYS ? 1 : WP;
    float upto[SCALARS];                             // scalar decays D_{1:s}
    float after[CHANNEL_DECAYS && ERASES ? 1 : WP];  // scalar decays D_{s+1:n}; of gla: d_s

    // Whether the fold warps fold the window token by token (flush/fold_tokens.cuh): if a beta is above 1.
    DEVICE bool by_token() const { return ERASES && weight[0] < 0; }
    // N as right operands, stored over the Gram matrix: a lane has columns 2c, 2c+1, 8+2c, 9+2c of row r, in two fp16
    // slices.
    DEVICE uint4 (*operands())[32] { return reinterpret_cast<uint4(*)[32]>(n); }
    DEVICE const uint4 (*operands() const)[32] { return reinterpret_cast<const uint4(*)[32]>(n); }

    // Lane s passes token s's log-decay (0 past the last token) and gets D_{s+1:n}.
    DEVICE float set_decays(float gate) {
        const int lane = threadIdx.x % 32;
        float before = gate, behind = __shfl_down_sync(ALL, gate, 1);
        if (lane == 31) behind = 0;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const float x = __shfl_up_sync(ALL, before, d), y = __shfl_down_sync(ALL, behind, d);
            if (lane >= d) before += x;
            if (lane + d < 32) behind += y;
        }
        const float left = decay(behind);
        if (lane < SCALARS) upto[lane] = decay(before), after[lane] = left;
        return left;
    }
    DEVICE float whole() const { return upto[SCALARS - 1]; }
};
