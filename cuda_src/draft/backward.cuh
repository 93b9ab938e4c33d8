// The backward pass over a window for a group of drafts: read_window with GROUP queries that share keys and decays.
#pragma once
#include "draft/tile.cuh"
#include "read/backward.cuh"

// Effective queries of the drafts whose last tokens are `last`, `last` + 1, ..., `newest`, this lane's channels in
// x[t]; x holds the queries at first. key(s) and gates(s) are this lane's channels of token s; lane s of `gate` and
// `beta` has that token's scalars. put(s, c) gets the weights c[t] of token s (garbage for drafts that end before s).
template <class Key, class Gates, class Put>
DEVICE void read_window_drafts(const Key& key, const Gates& gates, const GateInput<LK>& input, float gate, float beta,
                               int last, int newest, float (&x)[GROUP][LK], const Put& put) {
    const float same = CHANNEL_DECAYS ? 1.f : decay(gate);
    struct Coming {
        ChannelShare<ACT> key;
        ChannelShare<GATE_TYPE> gates;
    } coming[2];
    auto load = [&](int i, int s) {
        coming[i].key.load(key(s));
        if constexpr (CHANNEL_DECAYS) coming[i].gates.load(gates(s));
    };
    auto unpack = [&](int i, int s, float(&k)[LK], float(&decays)[LK]) {
        const float one = CHANNEL_DECAYS ? 1.f : __shfl_sync(ALL, same, s);
#pragma unroll
        for (int c = 0; c < LK; c++) {
            k[c] = coming[i].key[c];
            decays[c] = CHANNEL_DECAYS ? input.quick_decay(coming[i].gates[c], c) : one;
        }
    };
    // One token at a time: tokens that not all drafts see, and one more token if the number of the others is odd.
    int s = newest;
    load(0, s);
#pragma unroll 1
    for (; s > last || (s >= 0 && s % 2 == 0); s--) {
        float k[LK], decays[LK], dots[GROUP] = {};
        unpack(0, s, k, decays);
        load(0, max(s - 1, 0));
#pragma unroll
        for (int t = 0; t < GROUP; t++)
#pragma unroll
            for (int c = 0; c < LK; c++) dots[t] += k[c] * x[t][c];
        const float sum = warp_sums(dots), erased = ERASES ? __shfl_sync(ALL, beta, s) : 1.f;
        float weight[GROUP];
#pragma unroll
        for (int t = 0; t < GROUP; t++) {
            weight[t] = erased * __shfl_sync(ALL, sum, 32 / GROUP * t);
            if (last + t < s) continue;
#pragma unroll
            for (int c = 0; c < LK; c++) x[t][c] = decays[c] * (ERASES ? x[t][c] - weight[t] * k[c] : x[t][c]);
        }
        put(s, weight);
    }
    load(1, max(s - 1, 0));
#pragma unroll 1
    for (; s > 0; s -= 2) {
        float later[LK], later_decays[LK], k[LK], decays[LK], dots[2 * GROUP] = {}, between = 0;
        unpack(0, s, later, later_decays), unpack(1, s - 1, k, decays);
        const int next = max(s - 2, 1);
        load(0, next), load(1, next - 1);
#pragma unroll
        for (int t = 0; t < GROUP; t++)
#pragma unroll
            for (int c = 0; c < LK; c++) {
                dots[2 * t] += later[c] * x[t][c];
                x[t][c] *= later_decays[c];
                dots[2 * t + 1] += k[c] * x[t][c];
            }
        if constexpr (ERASES) {
#pragma unroll
            for (int c = 0; c < LK; c++) {
                later[c] *= later_decays[c];
                between += k[c] * later[c];
            }
            between = warp_sum(between);
        }
        const float sum = warp_sums(dots);
        const float erased = ERASES ? __shfl_sync(ALL, beta, s) : 1.f;
        const float before = ERASES ? __shfl_sync(ALL, beta, s - 1) : 1.f;
        float weight[GROUP], earlier[GROUP];
#pragma unroll
        for (int t = 0; t < GROUP; t++) {
            weight[t] = erased * __shfl_sync(ALL, sum, 32 / (2 * GROUP) * 2 * t);
            earlier[t] = __shfl_sync(ALL, sum, 32 / (2 * GROUP) * (2 * t + 1));
            if (ERASES) earlier[t] = before * (earlier[t] - weight[t] * between);
#pragma unroll
            for (int c = 0; c < LK; c++)
                x[t][c] = decays[c] * (ERASES ? x[t][c] - weight[t] * later[c] - earlier[t] * k[c] : x[t][c]);
        }
        put(s, weight), put(s - 1, earlier);
    }
}

// Effective queries and token weights of a group from a tile's buffer.
DEVICE void walk_back_drafts(const DraftBuffer& buffer, const DraftScalars& gates, const GateInput<LK>& input,
                             int first, DraftScratch& scratch, float (&x)[GROUP][LK]) {
    const int lane = threadIdx.x % 32, last = buffer.pos + first, newest = min(last + GROUP, buffer.count()) - 1;
#pragma unroll
    for (int t = 0; t < GROUP; t++) {
        if (lane < W && lane > last + t) scratch.weight[t][lane] = 0;
        ChannelShare<ACT> query;
        query.load(buffer.query(min(first + t, buffer.length - 1)));
#pragma unroll
        for (int c = 0; c < LK; c++) x[t][c] = query[c];
    }
    read_window_drafts([&](int s) { return buffer.key(s); },
                       [&](int s) { return buffer.gates(s); }, input, gates.g, gates.beta, last, newest, x,
                       [&](int s, const float(&weight)[GROUP]) {
#pragma unroll
                           for (int t = 0; t < GROUP; t++)
                               if (lane == 0 && last + t >= s) scratch.weight[t][s] = weight[t];
                       });
    if constexpr (QUERY_SLICED) {
#pragma unroll
        for (int t = 0; t < GROUP; t++) scratch.query[t].set(x[t]);
    }
}

// Products of the effective queries with maps and pivots, for bf16 storage: rows are left operands as stored, and a
// right operand has the two slices of two queries, slice p % 2 of query p / 2 in columns 2p and 2p + 1. Lanes with even
// c finish the first two drafts, the others the last two.
DEVICE void project_drafts_slices(const Arguments& arg, const DraftBuffer& buffer, const TileHeads& heads,
                                  const MapRow& first_rows, DraftScratch& scratch) {
    static_assert(GROUP == 4, "two operands with two queries each");
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    QueryFragment queries[GROUP / 2];
#pragma unroll
    for (int f = 0; f < GROUP / 2; f++) queries[f].load_slice(scratch.query[2 * f + r / 4].words(r / 2 % 2, r % 2, c));
    // Token weights for multiply_draft_values: lane (s, t) has every other draft of token s.
    const int tokens = first_token_row(heads.rank[0]);
#pragma unroll
    for (int i = lane; SWIZZLED && i < GROUP * TOKEN_ROWS; i += 32) {
        const int t = i / TOKEN_ROWS, s = i % TOKEN_ROWS;
        scratch.put(t, 0, tokens + s, s < W ? scratch.weight[t][s % W] : 0.f);
    }
    auto multiply = [&](const auto& chunk_of) {
        float d[GROUP / 2][4] = {};
#pragma unroll
        for (int i = 0; i < KEY_CHUNKS; i++) {
            const uint4 chunk = chunk_of(i);
#pragma unroll
            for (int f = 0; f < GROUP / 2; f++) queries[f].multiply(d[f], chunk, i);
        }
        const float a = QueryFragment::product(d[0]), b = QueryFragment::product(d[1]);
        const float keep = c % 2 ? b : a, send = c % 2 ? a : b;
        return keep + __shfl_xor_sync(ALL, send, 1);
    };
    float z[TILE_HEADS], y[PIVOT_TILES + 1];
    z[0] = multiply([&](int i) { return first_rows.of(i); });
#pragma unroll
    for (int n = 0; n < PIVOT_TILES; n++) {
        const void* const pivots = pivot_row(buffer, heads, n);
        y[n] = multiply([&](int i) { return pivot_chunk(pivots, i); });
    }
    CoefficientLane{c % 2 * 2 + c / 2, r}.finish(
        arg, buffer, heads, z, y, scratch,
        [&](const MapRow& rows, int) { return multiply([&](int i) { return rows.of(i); }); });
}
