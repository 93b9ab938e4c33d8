// What folding warps need of a window's tokens and cannot take as it comes: where it lies, and the delta rule's solve (see fold.cuh
// for the algebra).
#pragma once
#include "stage.cuh"

constexpr int TEAM = 256;                            // threads that prepare keys: two for a channel at most
constexpr int KEYS = !RAW && W > 16 ? 1 : 2;  // items whose keys are in shared memory at a time

// Keys that are no operands as they come. D_{1:s} k_s (scalar decays: k_s) lies in float32 in the order of LeftOperand; D_{s+1:n} k_s / d_s
// (k_s), times a power of two, in fp16 slices: a place of 16 channels, then 16 tokens, of which a lane of an operand takes four neighbours.
// See Solve for d_s.
struct PreparedKeys {
    alignas(16) u16 ends[2][RAW ? 1 : BLOCKS][RAW ? 1 : K][16];
    alignas(16) float4 starts[RAW ? 1 : BLOCKS][RAW ? 1 : STEPS][2][RAW ? 1 : 32];  // lane l of half i at l ^ 4i: stores hit all banks
    alignas(16) float whole[KIND == KDA ? K : 4];  // D_{1:n}
    alignas(16) float query[RAW ? 4 : K];
    float unit;  // of `ends`

    // Tokens s and s + 8 of 16, side by side.
    __device__ __forceinline__ float* start(int s, int channel) {
        const int in = channel % 16, i = in % 4 / 2, lane = (s % 8 * 4 + in / 4) ^ (4 * i);
        return reinterpret_cast<float*>(&starts[RAW ? 0 : s / 16][RAW ? 0 : channel / 16][i][RAW ? 0 : lane]) + 2 * (in % 2);
    }
};
constexpr int PREPARED = RAW || W > 16 || MOST_SHARED < 200000 ? 1 : 2;  // items whose prepared keys are in shared memory at a time
// One more than prepared keys: whoever prepares the next one has seen that this one was used.
constexpr int SOLVES = RAW ? 2 : PREPARED + 1;

// What a team's warps tell each other, written before they meet. One may be an item ahead of another.
struct TeamMemory {
    alignas(16) float decays[KIND == KDA ? K / 16 : 1][KIND == KDA ? WP : 1];  // the largest of a token's, or 1, in 16 channels each: see KEPT
    float most[RAW ? 1 : TEAM / 32];  // the largest key of each warp's
    int steep[RAW ? 1 : TEAM / 32];   // whether one of its channels forgets too much: see STEEP
};

// Log-decay over 8 tokens of a channel that keeps more than 2^-6 over half a window. Where there is one nothing is forgotten, and
// largest decays count as 1: fp16 has range enough.
constexpr float KEPT = -4.16f * 16 / WP;
constexpr int SOLVE_EXPONENT = 12;  // of a column's largest element as an operand

// Lane s: the power of two that is next above a token's largest decay; 0 for none.
__device__ __forceinline__ float decay_power(const TeamMemory& team) {
    const int lane = threadIdx.x % 32;
    float most = 0;
#pragma unroll
    for (int i = 0; i < K / 16; i += 32 / WP) most = fmaxf(most, team.decays[KIND == KDA ? i + lane / WP : 0][KIND == KDA ? lane % WP : 0]);
    if (WP < 32) {
        most = fmaxf(most, __shfl_xor_sync(ALL, most, 16));
        if (lane >= WP) most = 1;
    }
    return __uint_as_float((__float_as_uint(most) + 0x7fffffu) & 0x7f800000u);
}

// Which operand holds 8 of rows 16 to .. + 15 of N, columns 16 from .. + 15; and which of them, in which place, row s of the 16 is.
__device__ __forceinline__ int operand_of(int to, int from, int t) { return 2 * (to + from) + t; }
__device__ __forceinline__ constexpr int tile_of(int s) { return RAW ? s / 8 : s % 4 / 2; }
__device__ __forceinline__ constexpr int place_in_tile(int s) { return RAW ? s % 8 : s / 4 * 2 + s % 2; }

// What one warp works out for all: the triangular solve of the delta rule (the Gram matrix, then the decayed one, then N),
// and scalar decays.
//
// What is written for token s counts at the window's end as far as its key has not decayed: by d_s = D_{s+1:n}, and for decays
// per channel at most by the product d_s of powers of two next above what each later token leaves (decay_power). So that tokens which
// have been forgotten leave the range of fp16 to others, the operands are Diag(d) N Diag(1 / weight), and what they multiply is
// Diag(weight) (v - predictions).
struct Solve {
    alignas(16) float n[ERASES ? WP : 1][ERASES ? WP : 4];
    float weight[WP];           // the power of two that its column of Diag(d) N calls for
    static constexpr int SCALARS = KIND == KDA ? 1 : WP;
    float upto[SCALARS], after[SCALARS];  // D_{1:s} and D_{s+1:n}, if they are scalars

    // These as right operands, in the Gram matrix's place: a lane's {2c, 2c+1}, {8+2c, 9+2c} of row r, in two fp16 slices.
    __device__ __forceinline__ uint4 (*operands())[32] { return reinterpret_cast<uint4(*)[32]>(n); }
    __device__ __forceinline__ const uint4 (*operands() const)[32] { return reinterpret_cast<const uint4(*)[32]>(n); }

    // Lane s gives token s's log-decay, 0 past the last, and gets D_{s+1:n}.
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

// Raw keys or prepared ones of a block of 16 tokens, in 16 channels.
__device__ __forceinline__ LeftOperand load_keys(const KeyStage& stage, const PreparedKeys& m, int block, int step) {
    const int lane = threadIdx.x % 32;
    LeftOperand keys;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if constexpr (RAW) {
            keys.set(i, *reinterpret_cast<const uint2*>(&stage.k[16 * block + 8 * i + lane / 4][16 * step + 4 * (lane % 4)]));
        } else {
            const float4 x = m.starts[RAW ? 0 : block][RAW ? 0 : step][i][RAW ? 0 : lane ^ (4 * i)];
            keys.a[i][0] = x.x, keys.a[i][1] = x.y, keys.a[i][2] = x.z, keys.a[i][3] = x.w;
        }
    }
    return keys;
}

// Gram matrix of keys under scalar decays, in blocks of 16 x 16 down to the diagonal; one warp.
__device__ __forceinline__ void gram_of_keys(Solve& table, const KeyStage& stage, const PreparedKeys& m) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
#pragma unroll 1
    for (int pair = 0; pair < BLOCKS * (BLOCKS + 1) / 2; pair++) {
        const int to = min(pair, 1), from = pair / 2;
        float sum[2][4] = {}, rest[2][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const LeftOperand rows = load_keys(stage, m, to, step), columns = BLOCKS == 1 ? rows : load_keys(stage, m, from, step);
#pragma unroll
            for (int t = 0; t < 2; t++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    rows.multiply<RAW, RAW>(i, RAW && i ? rest[t] : sum[t], rest[t], columns.a[i][t], columns.a[i][2 + t]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
            table.n[ERASES ? 16 * to + r + 8 * (i % 4 / 2) : 0][16 * from + 8 * (i / 4) + 2 * c + i % 2] = sum[i / 4][i % 4] + rest[i / 4][i % 4];
    }
    __syncwarp();
}

// Times exp(g_{j+1} + ... + g_s); lane s gives token s's log-decay. One warp, a column a lane.
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

// N from the decayed Gram matrix by forward substitution, a column a lane, as operands; lane s gives token s's beta and d_s. One warp.
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
    const int at = lane % 16, slot = at % 8 / 2 * 8 + at / 8 * 2 + at % 2;  // among the half-words of a row's four lanes
#pragma unroll
    for (int s = 0; s < WP; s += 2) {
        u32 slices[2];
        half_slices(power * n[s], power * n[s + 1], slices[0], slices[1]);
        if (lane < WP && lane / 16 <= s / 16) {
            u16* const to = reinterpret_cast<u16*>(&table.operands()[operand_of(s / 16, lane / 16, tile_of(s % 16))][place_in_tile(s % 16) * 4]) + slot;
#pragma unroll
            for (int j = 0; j < 2; j++) to[4 * j] = static_cast<u16>(slices[j]), to[32 + 4 * j] = static_cast<u16>(slices[j] >> 16);
        }
    }
    __syncwarp();
}

// Scalar decays, and N: from keys for scalar decays, else from their decayed Gram matrix. Lane s gives token s's log-decay
// and beta. One warp.
__device__ __forceinline__ void prepare_solve(Solve& solve, const KeyStage& stage, const PreparedKeys& m, const TeamMemory& team, float gate,
                                              float beta) {
    float left;
    if constexpr (KIND == KDA) {
        left = decay_power(team);
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
    if (ERASES && KIND != KDA) {
        gram_of_keys(solve, stage, m);
        decay_gram(solve, gate);
    }
    if (ERASES) substitute(solve, beta, left);
    __syncwarp();
}
