// What folding warps need of a window's tokens and cannot take as it comes: decays, keys as operands, and the delta rule's
// solve (see fold.cuh for the algebra).
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
    float most[RAW ? 1 : TEAM / 32];                               // the largest key of each warp's
    int steep[RAW ? 1 : TEAM / 32];                                // whether a channel of the warp's forgets too much for TILED
};

// Log-decay over 8 tokens of a channel that keeps more than 2^-6 over half a window. Where there is one nothing is forgotten, and
// largest decays count as 1: fp16 has range enough.
constexpr float KEPT = -4.16f * 16 / WP;
// The Gram matrix on the tensor cores, where every channel keeps more than 2^-40 over half a window.
constexpr bool TILED = KIND == KDA && WP == 16;
constexpr float STEEP = -27.7f;
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

// The largest of the warp's share of the raw keys, in every lane; decayed ones are no larger.
__device__ __forceinline__ float most_of_keys(const KeyStage& stage, int count, int member) {
    constexpr int N = 16 / sizeof(act_t);
    float most = 0;
    for (int i = member; i < count * K / N; i += TEAM) {
        Packed<ACT, N> keys;
        keys.load(&stage.k[0][0] + i * N);
#pragma unroll
        for (int n = 0; n < N; n++) most = fmaxf(most, fabsf(keys[n]));
    }
    return warp_most(most);
}

// Scalar decays: keys as they are. A team prepares keys, whose members are numbered from 0.
__device__ __forceinline__ void copy_keys(PreparedKeys& m, const KeyStage& stage, int count, int member, float power) {
    for (int i = member; i < WP / 2 * K; i += TEAM) {
        const int s = i / K / 8 * 16 + i / K % 8, channel = i % K, place = channel / 16 * 16 + place_of(channel % 16);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float x = s + 8 * half < count ? widen<ACT>(stage.k[(s + 8 * half) % W][channel]) : 0.f;
            m.start(s, channel)[half] = x;
            u32 slices[2];
            half_slices(power * x, 0, slices[0], slices[1]);
#pragma unroll
            for (int j = 0; j < 2; j++) m.ends[j][RAW ? 0 : s / 16][RAW ? 0 : place][s % 8 + 8 * half] = static_cast<u16>(slices[j]);
        }
    }
}

// A team's thread: its channel, and which half of each 16 tokens it takes. A warp has 16 channels, in the order of `ends`, where a
// thread's 8 tokens are 16 bytes.
__device__ __forceinline__ int channel_of(int member) {
    const int place = member % 32 / 2;
    return member / 32 * 16 % K + 4 * (place % 8 / 2) + place / 8 * 2 + place % 2;
}

// What a thread keeps of its tokens while an item is prepared.
struct ChannelTokens {
    float key[BLOCKS][8], decay_of[BLOCKS][8], product[BLOCKS], sum;  // product of decays in each block, and sum of all log-decays

    __device__ __forceinline__ void multiply() {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            product[b] = decay_of[b][0];
#pragma unroll
            for (int i = 1; i < 8; i++) product[b] *= decay_of[b][i];
        }
    }
    // Tokens that are not there: keys of 0, decays of 1.
    __device__ __forceinline__ void take(TeamMemory& team, KeyStage& stage, const GateInput<1>& input, int count, int member) {
        const int channel = channel_of(member), half = member % 2;
        float gate[BLOCKS][8];
        auto load = [&](bool whole) {
#pragma unroll
            for (int b = 0; b < BLOCKS; b++)
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const int s = 16 * b + 8 * half + i;
                    key[b][i] = gate[b][i] = 0;
                    if (!whole && s >= count) continue;
                    key[b][i] = widen<ACT>(stage.k[s][channel]);
                    if constexpr (RAW_GATE) gate[b][i] = input.log_decay(widen<GATE_TYPE>(stage.given_gates(s)[channel]), 0);
                    else gate[b][i] = stage.g[s % GATE_ROWS][channel % GATES];
                }
        };
        if (count == WP) load(true);
        else load(false);
        float most = 0;
        bool steep = false;
        sum = 0;
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            float whole = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                whole += gate[b][i], most = fmaxf(most, fabsf(key[b][i]));
                decay_of[b][i] = decay(gate[b][i]);
            }
            sum += whole;
            steep = steep || !(whole > STEEP);
            const u32 kept = __ballot_sync(ALL, whole > KEPT);
            float largest[8];
#pragma unroll
            for (int i = 0; i < 8; i++) largest[i] = 1;
            if ((kept & 0x55555555u) == 0 || (kept & 0xaaaaaaaau) == 0) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float lower = warp_most(half ? 0.f : decay_of[b][i]), upper = warp_most(half ? decay_of[b][i] : 0.f);
                    if ((kept & 0x55555555u << half) == 0) largest[i] = half ? upper : lower;
                }
            }
            if (member % 32 < 2) {
                float4* const to = reinterpret_cast<float4*>(&team.decays[KIND == KDA ? member / 32 : 0][KIND == KDA ? 16 * b + 8 * half : 0]);
                to[0] = make_float4(largest[0], largest[1], largest[2], largest[3]);
                to[1] = make_float4(largest[4], largest[5], largest[6], largest[7]);
            }
        }
        most = warp_most(most), steep = __any_sync(ALL, steep);
        if (member % 32 == 0) team.most[RAW ? 0 : member / 32] = most, team.steep[RAW ? 0 : member / 32] = steep;
        multiply();
    }
    // Into the place of log-decays: the decays themselves, or their products from the first of the 8 on.
    __device__ __forceinline__ void put(KeyStage& stage, int member, bool products) const {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            float x = 1;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                x = products ? x * decay_of[b][i] : decay_of[b][i];
                stage.g[(16 * b + 8 * (member % 2) + i) % GATE_ROWS][channel_of(member) % GATES] = x;
            }
        }
    }
    // Keys decayed from the window's start, where they are not made with the Gram matrix.
    __device__ __forceinline__ void decay_from_start(PreparedKeys& m, int member) const {
        float before = 1;
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            const float other = __shfl_xor_sync(ALL, product[b], 1);
            float whole = member % 2 ? before * other : before;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                whole *= decay_of[b][i];
                m.start(16 * b + i, channel_of(member))[member % 2] = whole * key[b][i];
            }
            before *= product[b] * other;
        }
    }
    // Keys decayed to its end, as operands.
    __device__ __forceinline__ void decay_to_end(PreparedKeys& m, const TeamMemory& team, int member, float power) {
        const int half = member % 2;
        const float inverse = inverse_of_power(decay_power(team));
        if (__any_sync(ALL, inverse != 1.f)) {
#pragma unroll
            for (int b = 0; b < BLOCKS; b++)
#pragma unroll
                for (int i = 0; i < 8; i++) decay_of[b][i] *= __shfl_sync(ALL, inverse, 16 * b + 8 * half + i);
            multiply();
        }
        float after = power;
#pragma unroll
        for (int b = BLOCKS - 1; b >= 0; b--) {
            const float other = __shfl_xor_sync(ALL, product[b], 1);
            float whole = half ? after : after * other;
            u32 packed[2][4];
#pragma unroll
            for (int i = 7; i > 0; i -= 2) {
                const float odd = whole * key[b][i];
                whole *= decay_of[b][i];
                const float even = whole * key[b][i - 1];
                whole *= decay_of[b][i - 1];
                half_slices(even, odd, packed[0][i / 2], packed[1][i / 2]);
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
                *reinterpret_cast<uint4*>(&m.ends[i][RAW ? 0 : b][RAW ? 0 : member / 32 * 16 % K + member % 32 / 2][8 * half]) =
                    make_uint4(packed[i][0], packed[i][1], packed[i][2], packed[i][3]);
            after *= product[b] * other;
        }
    }
};

// A warp's share of the decayed Gram matrix <D_{j+1:s} k_j, k_s>, of 16 channels, on the tensor cores; returns keys decayed from the
// window's start as well. Both halves of the window have a point of their own from which decays are taken, its start: a key is decayed from
// there, or divided by that, so no channel may forget too much in half a window (STEEP). The share comes where the decays lie.
__device__ __forceinline__ LeftOperand tile_gram(KeyStage& stage, int count, int member) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4, first = member / 32 * 16 % K, channel = first + 4 * c;
    auto row = [&](int s) -> float* { return &stage.g[s % GATE_ROWS][channel % GATES]; };
    Packed<FP32, 4> before;
    before.load(row(7));
    LeftOperand keys, own;
    float over[2][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int s = 8 * half + r;
        Packed<FP32, 4> upto;
        upto.load(row(s));
        Packed<ACT, 4> key;
        key.clear();
        if (s < count) key.load(&stage.k[s][channel]);
        float x[4], y[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            x[e] = key[e] * upto[e];
            y[e] = half ? x[e] * before[e] : x[e];
            over[half][e] = __fdividef(key[e], upto[e]);
        }
        own.set(half, x), keys.set(half, y);
    }
    float sum[2][4] = {}, rest[2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        keys.multiply<false, false>(i, sum[0], rest[0], over[0][2 * i], over[0][2 * i + 1]);
        own.multiply<false, false>(i, sum[1], rest[1], over[1][2 * i], over[1][2 * i + 1]);  // of rows from 8 on
    }
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int t = 0; t <= half; t++)
            *reinterpret_cast<float2*>(&stage.g[(8 * half + r) % GATE_ROWS][(first + (8 * t + 2 * c ^ 8 * (r % 2))) % GATES]) =
                make_float2(sum[t][2 * half] + rest[t][2 * half], sum[t][2 * half + 1] + rest[t][2 * half + 1]);
    return keys;
}
// The sum of all shares; a thread has a place of the matrix.
__device__ __forceinline__ void sum_tiles(Solve& table, const KeyStage& stage, int member) {
    const int s = member / WP, j = member % WP;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < K / 16; i++) sum += stage.g[s % GATE_ROWS][(16 * (i ^ s % 2) + (j ^ 8 * (s % 2))) % GATES];
    table.n[ERASES ? s % WP : 0][j] = sum;
}

// Decayed Gram matrix <D_{j+1:s} k_j, k_s> below the diagonal, for decays per channel: going back from token s, its key
// takes up one decay after another. `stage.g` holds decays by now. A warp takes a long row and a short one in turn, so
// that all are done together.
__device__ __forceinline__ void decayed_gram(Solve& table, const KeyStage& stage, int count, int member) {
    constexpr int OWN = K / 32;
    const int lane = threadIdx.x % 32;
    for (int job = member / 32 * 2; job < WP; job += job % 2 ? 2 * (TEAM / 32) - 1 : 1) {
        const int s = job % 2 ? job / 2 : WP - 1 - job / 2;
        if (s < count) {
            Packed<ACT, OWN> last;
            last.load(&stage.k[s][OWN * lane]);
            float key[OWN];
#pragma unroll
            for (int i = 0; i < OWN; i++) key[i] = last[i];
            for (int first = (s - 1) / 8 * 8; first >= 0 && s > 0; first -= 8) {
                const float* const decays = &stage.g[0][OWN * lane % GATES] + first * GATES;
                const act_t* const others = &stage.k[first][OWN * lane];
                float sums[8];
#pragma unroll
                for (int n = 7; n >= 0; n--) {
                    const int j = first + n;
                    sums[n] = 0;
                    if (j >= s) continue;
                    Packed<FP32, OWN> one;
                    Packed<ACT, OWN> other;
                    one.load(decays + (n + 1) * GATES), other.load(others + n * KEY_ROW);
#pragma unroll
                    for (int i = 0; i < OWN; i++) {
                        key[i] *= one[i];
                        sums[n] += key[i] * other[i];
                    }
                }
                const float sum = warp_sums(sums);
                const int j = first + lane / 4;
                if (lane % 4 == 0 && j < s) table.n[ERASES ? s : 0][j] = sum;
            }
        } else if (lane < s) {
            table.n[ERASES ? s : 0][lane] = 0;  // past the last token
        }
    }
}

// All of it where keys are no operands as they come, but for N. `meet` brings the team together, `tabled` says that the
// decayed Gram matrix is there, and `free` waits until the last keys have been used.
template <class Meet, class Tabled, class Free>
__device__ __forceinline__ void prepare(PreparedKeys& m, Solve& table, TeamMemory& team, KeyStage& stage, const GateInput<1>& input, int count,
                                        int member, Meet meet, Tabled tabled, Free free) {
    const bool works = member < 2 * K;  // a warp does, or does not
    [[maybe_unused]] ChannelTokens own;
    [[maybe_unused]] LeftOperand starts;
    if constexpr (KIND == KDA) {
        if (works) own.take(team, stage, input, count, member);
        else if (member % 32 == 0) team.most[RAW ? 0 : member / 32] = 0, team.steep[RAW ? 0 : member / 32] = 0;
        if (RAW_GATE) meet();  // decays may lie where raw gates of others are
        if (works) {
            own.put(stage, member, TILED);
            __syncwarp();
            if (TILED) starts = tile_gram(stage, count, member);
        }
    } else {
        const float most = most_of_keys(stage, count, member);
        if (member % 32 == 0) team.most[RAW ? 0 : member / 32] = most;
    }
    meet();
    const float power = power_for<HALF_EXPONENT>(warp_most(team.most[RAW ? 0 : member % (TEAM / 32)]));
    if constexpr (KIND == KDA) {
        const bool steep = __any_sync(ALL, team.steep[RAW ? 0 : member % (TEAM / 32)]);
        if (TILED && !steep) {
            sum_tiles(table, stage, member);
        } else {
            if (TILED) {
                if (works) own.put(stage, member, false);
                meet();
            }
            decayed_gram(table, stage, count, member);
        }
    }
    tabled();
    free();
    for (int i = member; i < K; i += TEAM) m.query[RAW ? 0 : i] = widen<ACT>(stage.q[i]);
    if (member == 0) m.unit = inverse_of_power(power);
    if constexpr (KIND == KDA) {
        if (!works) return;
        const int lane = member % 32;
        if (TILED) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                m.starts[0][RAW ? 0 : member / 32 % STEPS][i][RAW ? 0 : lane ^ 4 * i] = make_float4(starts.a[i][0], starts.a[i][1], starts.a[i][2], starts.a[i][3]);
        } else {
            own.decay_from_start(m, member);
        }
        own.decay_to_end(m, team, member, power);
        const float all = own.sum + __shfl_xor_sync(ALL, own.sum, 1);
        if (member % 2 == 0) m.whole[KIND == KDA ? channel_of(member) : 0] = decay(all);  // more exact than the product: states take it up in every window
    } else {
        copy_keys(m, stage, count, member, power);
    }
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
