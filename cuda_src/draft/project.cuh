// Products along K for a group of drafts on the tensor cores (MATRIX): token weights c_ts, map times x_t, B^T x_t.
//
// The group's drafts share the keys, the map and the pivots; each draft t has its own query and its own last token,
// `last` + t. Drafts past the row's last draft repeat the last draft, and their results are not used.
#pragma once
#include "draft/tile.cuh"

// Scores <k_s, q_t> of a row at one key head, computed once per block (SHARED_SCORES).
struct DraftScores {
    float of[MAX_DRAFTS][16];
    WarpMbarrier full;
};

// Right operand for products with rows that are left operands as stored (see QueryFragment), here with GROUP queries.
// Columns 2t and 2t + 1 hold the two halves of query t, so that <row r, query t> is `product` in lane (r, t). `row(t)`
// is query t.
template <class Row> DEVICE void load_queries(QueryFragment& to, const Row& row) {
    const int column = threadIdx.x % 32 / 4;
    const u32* const words = reinterpret_cast<const u32*>(row(column / 2)) + column % 2;
#pragma unroll
    for (int i = 0; i < KEY_CHUNKS; i++)
        to.x[i][0] = words[4 * piece_of(i)], to.x[i][1] = words[4 * piece_of(i) + 2];
}

// Token weights of each draft, and the tokens' parts of its effective query, as in `solve` (read/sketch.cuh). The
// triangular system is the same for all drafts; draft t's right-hand side ends at its last token. The weights become
// rows from first_token_row on of scratch.c, up to TOKEN_ROWS.
DEVICE void solve_drafts(const float (*with_query)[16], const TileHeads& heads, const DraftScalars& gates, int last,
                         int newest, DraftScratch& scratch) {
    const int lane = threadIdx.x % 32, s = lane % SPAN, h = lane / SPAN;
    auto score = [&](int t) { return s <= last + t ? with_query[t][s % 16] : 0.f; };
    float e[ERASES ? GROUP : 1];
    // Log-decays from token s to the first draft; no differences, which would be NaN for gates of -inf.
    const float sum = sum_of_later<SPAN, 16>(s <= last ? gates.g : 0.f), same = decay(gates.g);
    if constexpr (ERASES) {
        float row[16];
        load_floats(row, scratch.product[s % 16]);
#pragma unroll
        for (int t = 0; t < GROUP; t++) e[t] = gates.beta * score(t);
#pragma unroll
        for (int half = 1; half >= 0; half--) {
            if (8 * half > newest) continue;
#pragma unroll
            for (int j = 8 * half + 7; j > 8 * half; j -= 2) {
                const float with_later = gates.beta * row[j], with_earlier = gates.beta * row[j - 1];
                const float between = __shfl_sync(ALL, with_later, j - 1, SPAN);
#pragma unroll
                for (int t = 0; t < GROUP; t++) {
                    const float later = __shfl_sync(ALL, e[t], j, SPAN);
                    const float earlier = __shfl_sync(ALL, e[t], j - 1, SPAN) - between * later;
                    if (s < j) e[t] -= with_later * later;
                    if (s < j - 1) e[t] -= with_earlier * earlier;
                }
            }
        }
        __syncwarp();  // the weights replace the products
    }
    const int row = first_token_row(h < TILE_HEADS ? heads.rank[h] : 0) + s;
    float after = decay(sum);  // decay from token s to draft t
#pragma unroll
    for (int t = 0; t < GROUP; t++) {
        if (t > 0) {
            const float next = __shfl_sync(ALL, same, min(last + t, 15), SPAN);
            if (s < last + t) after *= next;
        }
        if (s >= 16) continue;
        if constexpr (ERASES) scratch.put(t, h, row, after * e[t]), scratch.part[t][h][s] = e[t];
        else scratch.put(t, h, row, after * score(t));
        if (s == 0) scratch.window_decay[t][h] = after * same;
    }
}

// Without erasure (mamba2): eight rows with all queries of the group at a time. query(t): draft t's query.
template <class Query>
DEVICE void project_drafts_query(const Arguments& arg, const DraftBuffer& buffer, const TileHeads& heads,
                                 const DraftScalars& gates, const MapRow (&first_rows)[TILE_HEADS], DraftScores& shared,
                                 int first, const Query& query, DraftScratch& scratch) {
    QueryFragment queries;
    load_queries(queries, query);
    shared.full.wait(0);
    __syncwarp();
    solve_drafts(shared.of + first, heads, gates, buffer.pos + first, buffer.count() - 1, scratch);
    float z[TILE_HEADS][4] = {}, y[PIVOT_TILES + 1][4] = {};
    const void* pivots[PIVOT_TILES + 1];
#pragma unroll
    for (int n = 0; n < PIVOT_TILES; n++) pivots[n] = pivot_row(buffer, heads, n);
#pragma unroll
    for (int i = 0; i < KEY_CHUNKS; i++) {
#pragma unroll
        for (int h = 0; h < TILE_HEADS; h++) queries.multiply(z[h], first_rows[h].of(i), i);
#pragma unroll
        for (int n = 0; n < PIVOT_TILES; n++) queries.multiply(y[n], pivot_chunk(pivots[n], i), i);
    }
    float with_map[TILE_HEADS], with_pivots[PIVOT_TILES + 1];
#pragma unroll
    for (int h = 0; h < TILE_HEADS; h++) with_map[h] = QueryFragment::product(z[h]);
#pragma unroll
    for (int n = 0; n < PIVOT_TILES; n++) with_pivots[n] = QueryFragment::product(y[n]);
    const int lane = threadIdx.x % 32;
    CoefficientLane{lane % 4, lane / 4}.finish(arg, buffer, heads, with_map, with_pivots, scratch,
                                               [&](const MapRow& rows, int) {
                                                   float d[4] = {};
#pragma unroll
                                                   for (int i = 0; i < KEY_CHUNKS; i++)
                                                       queries.multiply(d, rows.of(i), i);
                                                   return QueryFragment::product(d);
                                               });
}

// Sums x[n] over the eight lanes (r, c) with this c: lane (r, c) returns the sum of x[r].
DEVICE float sum_over_rows(float (&x)[8]) {
#pragma unroll
    for (int half = 4, bit = 16; half > 0; half /= 2, bit /= 2) {
        const bool upper = threadIdx.x & bit;
#pragma unroll
        for (int i = 0; i < half; i++) {
            const float keep = upper ? x[i + half] : x[i], send = upper ? x[i] : x[i + half];
            x[i] = keep + __shfl_xor_sync(ALL, send, bit);
        }
    }
    return x[0];
}

// With erasure (gdn): products of all tokens, and of the queries, with the rows. As in project_matrix, effective
// queries are never formed.
DEVICE void project_drafts_matrix(const Arguments& arg, const DraftBuffer& buffer, const TileHeads& heads,
                                  const DraftScalars& gates, const MapRow (&first_rows)[TILE_HEADS], int first,
                                  DraftScratch& scratch) {
    constexpr int TILES = TILE_HEADS + PIVOT_TILES;  // first eight rows of each head's map | pivots of all heads
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4, count = buffer.count();
    const u32 none = count < 0;
    // Missing tokens load the newest one.
    const void *const lower = buffer.key(min(r, count - 1)), *const upper = buffer.key(min(r + 8, count - 1));
    const void* const query = buffer.query(min(first + r / 2, buffer.length - 1));
    const void* pivots[PIVOT_TILES + 1];
#pragma unroll
    for (int n = 0; n < PIVOT_TILES; n++) pivots[n] = pivot_row(buffer, heads, n);
    QueryFragment queries;
    float products[2][4] = {}, scores[4] = {}, z[TILES][4] = {}, own[TILES][4] = {};  // z: tokens, own: queries
#pragma unroll
    for (int i = 0; i < KEY_CHUNKS; i++) {
        const uint4 low = chunk(lower, i), high = chunk(upper, i), x = chunk(query, i);
        const LeftFragment tokens(low, high, none);
        queries.x[i][0] = r % 2 ? x.y : x.x, queries.x[i][1] = r % 2 ? x.w : x.z;  // as in load_queries
        tokens.multiply(products[0], low);
        tokens.multiply(products[1], high);
        tokens.multiply(scores, x);
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            uint4 rows;
            if (n < TILE_HEADS) rows = first_rows[n < TILE_HEADS ? n : 0].of(i);
            else rows = pivot_chunk(pivots[n - TILE_HEADS], i);
            tokens.multiply(z[n], rows);
            queries.multiply(own[n], rows, i);
        }
    }
    __syncwarp();  // the results of the group before are in the same memory
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const float(&d)[4] = products[n];
        *reinterpret_cast<float2*>(&scratch.product[r][8 * n + 2 * c]) = make_float2(d[0], d[1]);
        *reinterpret_cast<float2*>(&scratch.product[r + 8][8 * n + 2 * c]) = make_float2(d[2], d[3]);
    }
    scratch.score[c][r] = scores[0], scratch.score[c][r + 8] = scores[2];
    __syncwarp();
    solve_drafts(scratch.score, heads, gates, buffer.pos + first, count - 1, scratch);
    __syncwarp();
    // Query minus the sum over the tokens, for the lane's draft r / 2 and row 2c + r % 2. Rows 2c and 2c + 1 belong to
    // head h.
    const int source = 4 * (2 * c + r % 2) + r / 2;
    auto sum = [&](const float (&z)[4], const float (&own)[4], int h) {
        const float whole = __shfl_sync(ALL, QueryFragment::product(own), source);
        float sums[2 * GROUP];
#pragma unroll
        for (int t = 0; t < GROUP; t++) {
            const float low = scratch.part[t][h][r], high = scratch.part[t][h][r + 8];
#pragma unroll
            for (int e = 0; e < 2; e++) sums[2 * t + e] = low * z[e] + high * z[2 + e];
        }
        return whole - sum_over_rows(sums);
    };
    float with_map[TILE_HEADS], with_pivots[PIVOT_TILES + 1];
#pragma unroll
    for (int h = 0; h < TILE_HEADS; h++) with_map[h] = sum(z[h], own[h], h);
#pragma unroll
    for (int n = 0; n < PIVOT_TILES; n++)
        with_pivots[n] =
            sum(z[TILE_HEADS + n], own[TILE_HEADS + n], min((8 * n + 2 * c) / PIVOT_SLOTS, TILE_HEADS - 1));
    CoefficientLane{r / 2, 2 * c + r % 2}.finish(
        arg, buffer, heads, with_map, with_pivots, scratch, [&](const MapRow& rows, int h) {
            float z[4] = {}, own[4] = {};
#pragma unroll
            for (int i = 0; i < KEY_CHUNKS; i++) {
                LeftFragment(chunk(lower, i), chunk(upper, i), none).multiply(z, rows.of(i));
                queries.multiply(own, rows.of(i), i);
            }
            return sum(z, own, h);
        });
}
