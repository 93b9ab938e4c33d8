// Key operands that need preparation, and the delta rule's triangular solve (flush/fold.cuh has the algebra).
#pragma once
#include "flush/stages.cuh"

constexpr int TRANSFORM_THREADS = 256;  // threads of all transform warps: at most two per channel
// High ranks leave room for a second state stage only if keys have one stage.
constexpr bool ONE_KEY_STAGE = !RAW_KEYS && (W > 16 || (HIGH_RANKS && RANK_MAX > (SKETCH == BF16 ? 17 : 20)));
constexpr int KEY_STAGES = ONE_KEY_STAGE ? 1 : 2;

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
    alignas(16) float whole[KIND == KDA ? K : 4];
    alignas(16) float query[RAW_KEYS ? 4 : K];
    float unit;  // of `ends`, a power of two

    // Address of `starts` for tokens s and s + 8 of a block of 16, which are neighbours.
    __device__ __forceinline__ float* start(int s, int channel) {
        const int in = channel % 16, i = in % 4 / 2, lane = (s % 8 * 4 + in / 4) ^ (4 * i);
        return reinterpret_cast<float*>(
                   &starts[RAW_KEYS ? 0 : s / 16][RAW_KEYS ? 0 : channel / 16][i][RAW_KEYS ? 0 : lane]) +
               2 * (in % 2);
    }
};
constexpr int PREPARED_STAGES = RAW_KEYS || ONE_KEY_STAGE || MOST_SHARED < 200000 ? 1 : 2;
// One stage more than prepared keys: a transform warp that has waited for operands_empty then knows that the solve
// stage is free, too.
constexpr int SOLVE_STAGES = RAW_KEYS ? 2 : PREPARED_STAGES + 1;

// Values that the transform warps exchange before their named barrier. A block has two copies, because a warp may be
// one tile ahead of another warp.
struct TransformShared {
    // The largest decay of each token in the warp's channels, or 1: see KEPT
    alignas(16) float decays[KIND == KDA ? K / 16 : 1][KIND == KDA ? WP : 1];
    float most[RAW_KEYS ? 1 : TRANSFORM_THREADS / 32];  // the warp's largest key
    int steep[RAW_KEYS ? 1 : TRANSFORM_THREADS / 32];   // whether a channel of the warp decays too fast: see STEEP
};

// Log-decay over 8 tokens. A channel with a larger log-decay keeps more than 2^-6 over half a window. If there is such
// a channel, no token counts as forgotten and the largest decays are set to 1: the range of fp16 suffices.
constexpr float KEPT = -4.16f * 16 / WP;
constexpr int SOLVE_EXPONENT = 12;  // exponent of the largest element of a column of N as an operand

// Lane s returns token s's largest decay, rounded up to a power of two; 0 for a decay of 0.
__device__ __forceinline__ float decay_power(const TransformShared& shared) {
    const int lane = threadIdx.x % 32;
    float most = 0;
#pragma unroll
    for (int i = 0; i < K / 16; i += 32 / WP)
        most = fmaxf(most, shared.decays[KIND == KDA ? i + lane / WP : 0][KIND == KDA ? lane % WP : 0]);
    if (WP < 32) {
        most = fmaxf(most, __shfl_xor_sync(ALL, most, 16));
        if (lane >= WP) most = 1;
    }
    return __uint_as_float((__float_as_uint(most) + 0x7fffffu) & 0x7f800000u);
}

// Operands of N have 8 rows. Rows 16 to, ..., 16 to + 15 and columns 16 from, ..., 16 from + 15 of N are the operands
// operand_of(to, from, 0) and operand_of(to, from, 1); row s of these 16 is row place_in_tile(s) of operand tile_of(s).
__device__ __forceinline__ int operand_of(int to, int from, int t) { return 2 * (to + from) + t; }
__device__ __forceinline__ constexpr int tile_of(int s) { return RAW_KEYS ? s / 8 : s % 4 / 2; }
__device__ __forceinline__ constexpr int place_in_tile(int s) { return RAW_KEYS ? s % 8 : s / 4 * 2 + s % 2; }

// Output of the solver warp: N of the delta rule, and scalar decays. `n` holds in turn the Gram matrix, the decayed
// Gram matrix, and N as operands.
//
// Until the window's end, the write of token s decays by d_s = D_{s+1:n}. With decays per channel, d_s is an upper
// bound: the product of the later tokens' largest decays, each rounded up to a power of two (decay_power). Forgotten
// tokens (small d_s) must not take up the range of fp16. So the operands are Diag(d) N Diag(1 / weight), and the
// right-hand side is Diag(weight) (v - predictions).
struct Solve {
    alignas(16) float n[ERASES ? WP : 1][ERASES ? WP : 4];
    float weight[WP];  // power of two by which a column of Diag(d) N is divided; weight[0] is negative if in_turns
    static constexpr int SCALARS = KIND == KDA ? 1 : WP;
    float upto[SCALARS], after[SCALARS];  // scalar decays D_{1:s} and D_{s+1:n}

    // Whether the fold warps fold the window token by token (flush/fold_turns.cuh): if a beta is above 1.
    __device__ __forceinline__ bool in_turns() const { return ERASES && weight[0] < 0; }
    // N as right operands, stored over the Gram matrix: a lane has columns 2c, 2c+1, 8+2c, 9+2c of row r, in two fp16
    // slices.
    __device__ __forceinline__ uint4 (*operands())[32] { return reinterpret_cast<uint4(*)[32]>(n); }
    __device__ __forceinline__ const uint4 (*operands() const)[32] { return reinterpret_cast<const uint4(*)[32]>(n); }

    // Lane s passes token s's log-decay (0 past the last token) and gets D_{s+1:n}.
    __device__ __forceinline__ float set_decays(float gate) {
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
    __device__ __forceinline__ float whole() const { return upto[SCALARS - 1]; }
};

// Keys of a block of 16 tokens in 16 channels, raw or prepared, as a left operand.
__device__ __forceinline__ LeftOperand load_keys(const KeyStage& stage, const PreparedKeys& m, int block, int step) {
    const int lane = threadIdx.x % 32;
    LeftOperand keys;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if constexpr (RAW_KEYS) {
            keys.set(i, *reinterpret_cast<const uint2*>(
                            &stage.k[16 * block + 8 * i + lane / 4][16 * step + 4 * (lane % 4)]));
        } else {
            const float4 x = m.starts[RAW_KEYS ? 0 : block][RAW_KEYS ? 0 : step][i][RAW_KEYS ? 0 : lane ^ (4 * i)];
            keys.a[i][0] = x.x, keys.a[i][1] = x.y, keys.a[i][2] = x.z, keys.a[i][3] = x.w;
        }
    }
    return keys;
}

// Four neighbouring channels of the query.
__device__ __forceinline__ void load_query(float (&x)[4], const KeyStage& stage, const PreparedKeys& m, int channel) {
    constexpr int TYPE = RAW_KEYS ? ACT : FP32;
    const void* const from = RAW_KEYS ? static_cast<const void*>(&stage.q[channel]) : &m.query[channel];
    Packed<TYPE, 4> packed;
    packed.load(static_cast<const Element<TYPE>::type*>(from));
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = packed[e];
}

// Gram matrix of the raw keys (kinds with scalar decays), in 16 x 16 blocks on and below the diagonal. By one warp.
__device__ __forceinline__ void gram_of_keys(Solve& table, const KeyStage& stage, const PreparedKeys& m) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
#pragma unroll 1
    for (int pair = 0; pair < TOKEN_BLOCKS * (TOKEN_BLOCKS + 1) / 2; pair++) {
        const int to = min(pair, 1), from = pair / 2;
        float sum[2][4] = {}, rest[2][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const LeftOperand rows = load_keys(stage, m, to, step),
                              columns = TOKEN_BLOCKS == 1 ? rows : load_keys(stage, m, from, step);
#pragma unroll
            for (int t = 0; t < 2; t++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    rows.multiply<RAW_KEYS, RAW_KEYS>(i, RAW_KEYS && i ? rest[t] : sum[t], rest[t], columns.a[i][t],
                                                      columns.a[i][2 + t]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
            table.n[ERASES ? 16 * to + r + 8 * (i % 4 / 2) : 0][16 * from + 8 * (i / 4) + 2 * c + i % 2] =
                sum[i / 4][i % 4] + rest[i / 4][i % 4];
    }
    __syncwarp();
}

// Multiplies element (s, j) of the Gram matrix by exp(g_{j+1} + ... + g_s). Lane s passes token s's log-decay. By one
// warp, one column a lane.
__device__ __forceinline__ void decay_gram(Solve& table, float gate) {
    const int lane = threadIdx.x % 32;
    float between = 0;
#pragma unroll
    for (int s = 1; s < WP; s++) {
        const float x = __shfl_sync(ALL, gate, s);
        between += s > lane ? x : 0.f;
        if (lane < s) table.n[ERASES ? s : 0][lane] *= decay(between);
    }
    __syncwarp();
}

// N from the decayed Gram matrix by forward substitution, as operands. Lane s passes token s's beta and d_s. By one
// warp, one column a lane.
__device__ __forceinline__ void substitute(Solve& table, float beta, float left) {
    const int lane = threadIdx.x % 32;
    float n[WP], most = 0;
#pragma unroll
    for (int s = 0; s < WP; s++) {
        float sum[2] = {s == lane ? 1.f : 0.f, 0};
#pragma unroll
        for (int i = 0; i < s; i += 4) {
            const float4 x = *reinterpret_cast<const float4*>(&table.n[ERASES ? s : 0][i]);
            const float row[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (i + j < s) sum[j % 2] -= row[j] * n[i + j];
        }
        n[s] = __shfl_sync(ALL, beta, s) * (sum[0] + sum[1]);
    }
    if (__any_sync(ALL, left != 1.f)) {
#pragma unroll
        for (int s = 0; s < WP; s++) n[s] *= __shfl_sync(ALL, left, s);
    }
#pragma unroll
    for (int s = 0; s < WP; s++) most = fmaxf(most, fabsf(n[s]));
    const float power = power_for<SOLVE_EXPONENT>(most);
    if (lane < WP) table.weight[lane] = inverse_of_power(power);
    __syncwarp();
    const int at = lane % 16, slot = at % 8 / 2 * 8 + at / 8 * 2 + at % 2;  // half-word of a row's four lanes
#pragma unroll
    for (int s = 0; s < WP; s += 2) {
        u32 slices[2];
        half_slices(power * n[s], power * n[s + 1], slices[0], slices[1]);
        if (lane < WP && lane / 16 <= s / 16) {
            u16* const to =
                reinterpret_cast<u16*>(
                    &table.operands()[operand_of(s / 16, lane / 16, tile_of(s % 16))][place_in_tile(s % 16) * 4]) +
                slot;
#pragma unroll
            for (int j = 0; j < 2; j++)
                to[4 * j] = static_cast<u16>(slices[j]), to[32 + 4 * j] = static_cast<u16>(slices[j] >> 16);
        }
    }
    __syncwarp();
}

// The solver warp's work on one tile: scalar decays, and N. Lane s passes token s's log-decay and beta.
__device__ __forceinline__ void solve_window(Solve& solve, const KeyStage& stage, const PreparedKeys& m,
                                             const TransformShared& shared, float gate, float beta) {
    float left;
    if constexpr (KIND == KDA) {
        left = decay_power(shared);
        if (__any_sync(ALL, left != 1.f)) {
            const int lane = threadIdx.x % 32;
            left = __shfl_down_sync(ALL, left, 1);
            if (lane == 31) left = 1;
#pragma unroll 1
            for (int d = 1; d < 32; d *= 2) {
                const float x = __shfl_down_sync(ALL, left, d);
                if (lane + d < 32) left *= x;
            }
        }
    } else {
        left = solve.set_decays(gate);
    }
    if (ERASES && __any_sync(ALL, beta > 1.f)) {
        if (threadIdx.x % 32 == 0) solve.weight[0] = -1;
        __syncwarp();
        return;
    }
    if (ERASES && KIND != KDA) {
        gram_of_keys(solve, stage, m);
        decay_gram(solve, gate);
    }
    if (ERASES) substitute(solve, beta, left);
    __syncwarp();
}
