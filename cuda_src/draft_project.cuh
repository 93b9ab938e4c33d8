// Products along K for a group of drafts on the tensor cores (MATRIX): token weights c_ts, map times x_t, B^T x_t.
//
// The group's drafts share the keys, the map and the pivots; each draft t has its own query and its own last token,
// `last` + t. Drafts past the row's last draft repeat the last draft, and their results are not used.
#pragma once
#include "draft_tile.cuh"

// Right operand for products with rows that are left operands as stored (see QueryFragment), here with GROUP queries.
// Columns 2t and 2t + 1 hold the two halves of query t, so that <row r, query t> is `product` in lane (r, t). `row(t)`
// is query t.
template <class Row> __device__ __forceinline__ void load_queries(QueryFragment& to, const Row& row) {
    const int column = threadIdx.x % 32 / 4;
    const u32* const words = reinterpret_cast<const u32*>(row(column / 2)) + column % 2;
#pragma unroll
    for (int i = 0; i < KEY_CHUNKS; i++)
        to.x[i][0] = words[4 * piece_of(i)], to.x[i][1] = words[4 * piece_of(i) + 2];
}

// Token weights of each draft, and the tokens' parts of its effective query, as in `solve` (read_sketch.cuh). The
// triangular system is the same for all drafts; draft t's right-hand side ends at its last token.
__device__ __forceinline__ void solve_drafts(const float (*with_query)[16], const DraftScalars& gates, int last,
                                             int newest, DraftScratch& scratch) {
    const int lane = threadIdx.x % 32, s = lane % SPAN;
    float after[GROUP], whole[GROUP], e[GROUP];
    // Log-decays from token s to the draft's last token; no differences, which would be NaN for gates of -inf.
    const float own = s <= last ? gates.g : 0.f;
    float sum = __shfl_down_sync(ALL, own, 1, SPAN);
    if (s == SPAN - 1) sum = 0;
#pragma unroll
    for (int d = 1; d < 16; d *= 2) {
        const float y = __shfl_down_sync(ALL, sum, d, SPAN);
        if (s + d < SPAN) sum += y;
    }
#pragma unroll
    for (int t = 0; t < GROUP; t++) {
        if (t > 0) {
            const float gate = __shfl_sync(ALL, gates.g, min(last + t, 15), SPAN);
            if (s < last + t) sum += gate;
        }
        after[t] = decay(sum), whole[t] = decay(sum + gates.g);
        e[t] = s <= last + t ? with_query[t][s % 16] : 0.f;
    }
    if (ERASES) {
        float row[16];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float4 x = *reinterpret_cast<const float4*>(&scratch.product[s % 16][4 * n]);
            row[4 * n] = x.x, row[4 * n + 1] = x.y, row[4 * n + 2] = x.z, row[4 * n + 3] = x.w;
        }
#pragma unroll
        for (int t = 0; t < GROUP; t++) e[t] *= gates.beta;
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
    }
    const int h = lane / SPAN;
#pragma unroll
    for (int t = 0; t < GROUP; t++) {
        if (s >= 16) continue;
        if (s < W) scratch.weight[t][h][s] = after[t] * e[t];
        if constexpr (ERASES) scratch.part[t][h][s] = e[t];
        if (s == 0) scratch.window_decay[t][h] = whole[t];
    }
}

// Without erasure (mamba2): eight rows with all queries of the group at a time.
__device__ __forceinline__ void project_drafts_query(const Arguments& arg, const DraftBuffer& buffer,
                                                     const TileHeads& heads, const DraftScalars& gates,
                                                     const MapRow& first_rows, const float (*scores)[16],
                                                     int first, DraftScratch& scratch) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    QueryFragment queries;
    load_queries(queries, [&](int t) { return buffer.query(min(first + t, buffer.length - 1)); });
    solve_drafts(scores, gates, buffer.pos + first, buffer.count() - 1, scratch);
    for_operand_tiles(arg, buffer, heads, first_rows, scratch,
                      [&](const auto& rows, float* to, int stride, int, int) {
                          float d[4] = {};
#pragma unroll
                          for (int i = 0; i < KEY_CHUNKS; i++) queries.multiply(d, rows.of(i), i);
                          to[c * stride + r] = QueryFragment::product(d);
                      });
}

// Sums x[n] over the eight lanes (r, c) with this c: lane (r, c) returns the sum of x[r].
__device__ __forceinline__ float sum_over_rows(float (&x)[8]) {
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
__device__ __forceinline__ void project_drafts_matrix(const Arguments& arg, const DraftBuffer& buffer,
                                                      const TileHeads& heads, const DraftScalars& gates,
                                                      const MapRow& first_rows, int first,
                                                      DraftScratch& scratch) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4, count = buffer.count();
    const u32 none = count < 0;
    // Missing tokens load the newest one.
    const void *const lower = buffer.key(min(r, count - 1)), *const upper = buffer.key(min(r + 8, count - 1));
    const void* const query = buffer.query(min(first + r % GROUP, buffer.length - 1));
    float products[2][4] = {}, scores[4] = {};
#pragma unroll
    for (int i = 0; i < KEY_CHUNKS; i++) {
        const uint4 low = chunk(lower, i), high = chunk(upper, i);
        const LeftFragment tokens(low, high, none);
        tokens.multiply(products[0], low);
        tokens.multiply(products[1], high);
        tokens.multiply(scores, chunk(query, i));
    }
    __syncwarp();  // the results of the group before are in the same memory
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const float(&d)[4] = products[n];
        *reinterpret_cast<float2*>(&scratch.product[r][8 * n + 2 * c]) = make_float2(d[0], d[1]);
        *reinterpret_cast<float2*>(&scratch.product[r + 8][8 * n + 2 * c]) = make_float2(d[2], d[3]);
    }
    if (2 * c < GROUP) {
        scratch.score[2 * c][r] = scores[0], scratch.score[2 * c + 1][r] = scores[1];
        scratch.score[2 * c][r + 8] = scores[2], scratch.score[2 * c + 1][r + 8] = scores[3];
    }
    __syncwarp();
    solve_drafts(scratch.score, gates, buffer.pos + first, count - 1, scratch);
    __syncwarp();
    float parts[GROUP][TILE_HEADS][2];  // of tokens r and r + 8
#pragma unroll
    for (int t = 0; t < GROUP; t++)
#pragma unroll
        for (int h = 0; h < TILE_HEADS; h++)
            parts[t][h][0] = scratch.part[t][h][r], parts[t][h][1] = scratch.part[t][h][r + 8];
    for_operand_tiles(arg, buffer, heads, first_rows, scratch,
                      [&](const auto& rows, float* to, int stride, int head, int place) {
                          float z[4] = {}, own[4] = {};  // tokens, queries
#pragma unroll
                          for (int i = 0; i < KEY_CHUNKS; i++) {
                              const uint4 x = chunk(query, i);
                              LeftFragment(chunk(lower, i), chunk(upper, i), none).multiply(z, rows.of(i));
                              LeftFragment(x, x, none).multiply(own, rows.of(i));
                          }
                          // Columns 2c and 2c + 1 belong to one head.
                          const int h = head >= 0 ? head : min((place + 2 * c) / PIVOT_SLOTS, TILE_HEADS - 1);
                          float sums[2 * GROUP];
#pragma unroll
                          for (int t = 0; t < GROUP; t++) {
                              const float low = h ? parts[t][TILE_HEADS - 1][0] : parts[t][0][0];
                              const float high = h ? parts[t][TILE_HEADS - 1][1] : parts[t][0][1];
#pragma unroll
                              for (int e = 0; e < 2; e++)
                                  sums[2 * t + e] = (r == t ? own[e] : 0.f) - low * z[e] - high * z[2 + e];
                          }
                          to[r / 2 * stride + 2 * c + r % 2] = sum_over_rows(sums);
                      });
}
