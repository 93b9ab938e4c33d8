// Outputs of a group of drafts from their coefficients: o_t = U c_t + sum over tokens of w_ts v_s, as in
// read/values.cuh. On the tensor cores, the eight columns of a right operand are two slices of the weights of GROUP
// drafts; left operands are 16 rows of one head.
//
// Products with weight 0 are not left out: a value that is not finite makes its channel's outputs not finite in all
// drafts of the group, also in the drafts before the value.
#pragma once
#include "draft/backward.cuh"
#include "draft/project.cuh"
#include "draft/residual.cuh"
#include "read/values.cuh"

// All heads of the tile on the tensor cores, side by side. Draft t of the `many` in the group goes to
// output + t * HEADS * V. Sums of a full-state head are not stored. `query(h, t, x)`: see add_draft_residual.
template <class Query>
DEVICE void multiply_draft_values(const DraftBuffer& buffer, const TileHeads& heads, int many, out_t* output,
                                  DraftScratch& scratch, [[maybe_unused]] const Query& query) {
    constexpr int ELEMENT = sizeof(act_t), VALUE = TileBuffer::VALUE;
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4, half = lane / 8 % 2 * 16;
    const int place = lane % 8 + lane / 16 * 8;  // row of an operand that the lane loads
    const float* const weights = &scratch.c[r / 2][2 * c];
    float sums[TILE_HEADS][V / 16][4] = {};
#if RESIDUAL
#pragma unroll
    for (int h = 0; h < TILE_HEADS; h++) add_draft_residual(sums[h], buffer, heads, h, scratch.slices, query);
#endif
    // Slices of the weights of rows n to n + 15; 0 from `end` on.
    auto load_slices = [&](int h, int n, int end, u32(&slices)[2]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float2 pair = *reinterpret_cast<const float2*>(weights + h * DRAFT_WEIGHTS + n + 8 * i);
            slices[i] = __byte_perm(__float_as_uint(pair.x), __float_as_uint(pair.y), r % 2 ? 0x5410 : 0x7632);
            if (n + 8 * i + 2 * c >= end) slices[i] = 0;
        }
    };
    int end = 0;  // rows of the head with the most rows, from the first token's operand with codes
#pragma unroll
    for (int h = 0; h < TILE_HEADS; h++) end = max(end, (CODED ? 0 : heads.rank[h]) + buffer.count());
    if constexpr (CODED) {
#pragma unroll 1
        for (int h = 0; h < TILE_HEADS; h++) {
            const int codes = buffer.sketches_at() + heads.at[h], rank = heads.rank[h];
            if (rank == 0) continue;
            u32 slices[2];
            load_slices(h, 0, (rank + 7) / 8 * 8, slices);
            const CodedColumn column(min(place, rank - 1));
#pragma unroll
            for (int channel = 0; channel < V; channel += 32) {
                u32 x[4];
                load_transposed(x, buffer.value_half, codes + column.share(channel, half));
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (channel + 16 * i < V)
#pragma unroll
                        for (int own = 0; own < TILE_HEADS; own++)
                            if (own == h) multiply_codes(sums[own][channel / 16 + i], x[i], x[2 + i], slices);
            }
        }
    }
#pragma unroll 1
    for (int first = 0; first < end; first += 16) {
#pragma unroll
        for (int h = 0; h < TILE_HEADS; h++) {
            const int rank = CODED ? 0 : heads.rank[h], rows = rank + buffer.count();
            u32 slices[2];
            const int from = first + (CODED ? first_token_row(heads.rank[h]) : 0);
            load_slices(h, from, from - first + rows, slices);
            // Missing rows are the newest value, with weight 0.
            const int n = min(first + place, rows - 1), s = n - rank;
            const bool column = !CODED && s < 0;
            const int at = column ? buffer.sketches_at() + heads.at[h] * ELEMENT + n * VALUE : buffer.value_at(h, s);
            const int mask = swizzle(column ? n : s) * ELEMENT ^ half;
#pragma unroll
            for (int channel = 0; channel < V; channel += 16) {
                u32 x[4];
                load_transposed(
                    x, buffer.value_half,
                    at + channel / SWIZZLE_SPAN * SWIZZLE_SPAN * ELEMENT + (channel % SWIZZLE_SPAN * ELEMENT ^ mask));
                mma_bf16(sums[h][channel / 16], x, slices[0], slices[1]);
            }
        }
    }
    // d[0] + d[1] is channel r of 16 for draft c, d[2] + d[3] is channel r + 8. After the transposition a lane has two
    // neighbouring channels of draft r / 2.
    constexpr bool PAIRS = OUT != FP32;
    const int draft = PAIRS ? r / 2 : c;
    out_t* const to = ::place<HEADS * V>(output, draft, PAIRS ? 8 * (r % 2) + 2 * c : r);
#pragma unroll
    for (int h = 0; h < TILE_HEADS; h++) {
        u32 pairs[V / 16];
        if constexpr (PAIRS) {
#pragma unroll
            for (int i = 0; i < V / 16; i++) {
                const float x = sums[h][i][0] + sums[h][i][1], y = sums[h][i][2] + sums[h][i][3];
                pairs[i] = transpose_8x8(OUT == BF16 ? floats_to_bf16(x, y) : floats_to_halves(x, y));
            }
        }
        if (heads.rank[h] == 0 || draft >= many) continue;
#pragma unroll
        for (int i = 0; i < V / 16; i++) {
            const float(&d)[4] = sums[h][i];
            if constexpr (PAIRS) *reinterpret_cast<u32*>(to + h * V + 16 * i) = pairs[i];
            else to[h * V + 16 * i] = d[0] + d[1], to[h * V + 16 * i + 8] = d[2] + d[3];
        }
    }
}

// Row by row, for other types.
template <class Query>
DEVICE void add_draft_values(const DraftBuffer& buffer, const TileHeads& heads, int many, out_t* output,
                             DraftScratch& scratch, [[maybe_unused]] const Query& query) {
    const int rank = heads.rank[0];
#if RESIDUAL
    const int lane = threadIdx.x % 32;
    float sums[V / 16][4] = {};
    add_draft_residual(sums, buffer, heads, 0, scratch.slices, query);
#pragma unroll
    for (int i = 0; i < V / 8; i++)
        scratch.outputs[lane % 4][8 * i + lane / 4] = sums[i / 2][i % 2 * 2];
    auto start = [&](int t, int channel) { return scratch.outputs[t][channel]; };
#else
    auto start = [](int, int) { return 0.f; };
#endif
    if (const int j = threadIdx.x % 32; j < rank) {
        const ColumnFactors factors(buffer, heads, 0, j);
#pragma unroll
        for (int t = 0; t < GROUP; t++) scratch.c[t][j] = factors.of(scratch, 0, t, scratch.c[t][j]);
    }
    __syncwarp();
    add_values<GROUP>(buffer.sketches(), rank, buffer.value_half, buffer.count(), many, output, scratch.c,
                      scratch.weight, start);
}
