// Key operands that need preparation, and the delta rule's triangular solve (flush/fold.cuh has the algebra).
#pragma once
#include "flush/config.cuh"

// Log-decay over 8 tokens. A channel with a larger log-decay keeps more than 2^-6 over half a window. If there is such
// a channel, no token counts as forgotten and the largest decays are set to 1: the range of fp16 suffices.
constexpr float KEPT = -4.16f * 16 / WP;
constexpr int SOLVE_EXPONENT = 12;  // exponent of the largest element of a column of N as an operand

// Lane s returns token s's largest decay, rounded up to a power of two; 0 for a decay of 0.
DEVICE float decay_power(const TransformShared& shared) {
    const int lane = threadIdx.x % 32;
    float most = 0;
#pragma unroll
    for (int i = 0; i < K / 16; i += 32 / WP)
        most = fmaxf(most, shared.decays[CHANNEL_DECAYS ? i + lane / WP : 0][CHANNEL_DECAYS ? lane % WP : 0]);
    if (WP < 32) {
        most = fmaxf(most, __shfl_xor_sync(ALL, most, 16));
        if (lane >= WP) most = 1;
    }
    return __uint_as_float((__float_as_uint(most) + 0x7fffffu) & 0x7f800000u);
}

// Operands of N have 8 rows. Rows 16 to, ..., 16 to + 15 and columns 16 from, ..., 16 from + 15 of N are the operands
// operand_of(to, from, 0) and operand_of(to, from, 1); row s of these 16 is row place_in_tile(s) of operand tile_of(s).
DEVICE int operand_of(int to, int from, int t) { return 2 * (to + from) + t; }
DEVICE constexpr int tile_of(int s) { return RAW_KEYS ? s / 8 : s % 4 / 2; }
DEVICE constexpr int place_in_tile(int s) { return RAW_KEYS ? s % 8 : s / 4 * 2 + s % 2; }

// Keys of a block of 16 tokens in 16 channels, raw or prepared, as a left operand.
DEVICE LeftOperand load_keys(const KeyStage& stage, const PreparedKeys& m, int block, int step) {
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

// The query: as given, or in float32 among the prepared keys.
constexpr int QUERY = RAW_KEYS ? ACT : FP32;
DEVICE const Element<QUERY>::type* query_of(const KeyStage& stage, const PreparedKeys& m) {
    const void* const query = RAW_KEYS ? static_cast<const void*>(stage.q) : m.query;
    return static_cast<const Element<QUERY>::type*>(query);
}
// Four neighbouring channels of the query.
DEVICE void load_query(float (&x)[4], const KeyStage& stage, const PreparedKeys& m, int channel) {
    Packed<QUERY, 4> packed;
    packed.load(query_of(stage, m) + channel);
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = packed[e];
}

// Gram matrix of the raw keys (kinds with scalar decays), in 16 x 16 blocks on and below the diagonal. By one warp.
DEVICE void gram_of_keys(Solve& table, const KeyStage& stage, const PreparedKeys& m) {
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
DEVICE void decay_gram(Solve& table, float gate) {
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
DEVICE void substitute(Solve& table, float beta, float left) {
    const int lane = threadIdx.x % 32;
    float n[WP], most = 0;
#pragma unroll
    for (int s = 0; s < WP; s++) {
        float sum[2] = {s == lane ? 1.f : 0.f, 0};
#pragma unroll
        for (int i = 0; i < s; i += 4) {
            float row[4];
            load_floats(row, &table.n[ERASES ? s : 0][i]);
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
DEVICE void solve_window(Solve& solve, const KeyStage& stage, const PreparedKeys& m, const TransformShared& shared,
                         float gate, float beta) {
    float left;
    if constexpr (CHANNEL_DECAYS) {
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
        if (!ERASES && threadIdx.x % 32 < WP) solve.after[ERASES ? 0 : threadIdx.x % 32] = left;
    } else {
        left = solve.set_decays(gate);
    }
    if (ERASES && __any_sync(ALL, beta > 1.f)) {
        if (threadIdx.x % 32 == 0) solve.weight[0] = -1;
        __syncwarp();
        return;
    }
    if (ERASES && !CHANNEL_DECAYS) {
        gram_of_keys(solve, stage, m);
        decay_gram(solve, gate);
    }
    if (ERASES) substitute(solve, beta, left);
    __syncwarp();
}
