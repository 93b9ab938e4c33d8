// Products of a head's residual with the effective queries of a group of drafts, as in read/residual.cuh. Columns 2 t
// and 2 t + 1 of the right operand hold the two slices of draft t's query.
#pragma once
#include "draft/tile.cuh"
#include "read/residual.cuh"

// Adds the products to sums of 16 channels a block, as multiply_draft_values has them: sums[i][0] and sums[i][2] are
// channels r and r + 8 of draft c.
template <int BITS>
DEVICE void multiply_draft_residual(float (&sums)[V / 16][4], const char* codes, float (&x)[GROUP][LK],
                                    signed char* slices) {
    constexpr int STEPS = K / 32;
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    const u16* const scales = scales_of(codes, BITS);
    ChannelShare<BF16> columns;
    columns.load(scales + V);
    float2 unit{};  // of draft c
#pragma unroll
    for (int t = 0; t < GROUP; t++) {
#pragma unroll
        for (int n = 0; n < LK; n++) x[t][n] *= columns[n];
        const float2 own = slice_query(x[t], slices + 2 * t * K);
        if (c == t) unit = own;
    }
    __syncwarp();
    uint2 query[STEPS];
    load_slices(query, slices + r * K);
    const float zero = level_of_zero(BITS) * unit.y;
#pragma unroll
    for (int block = 0; block < V / 16; block++) {
        int d[4] = {};
        multiply_codes<BITS>(d, codes, block, query);
#pragma unroll
        for (int half = 0; half < 2; half++)
            sums[block][2 * half] += widen<BF16>(scales[16 * block + r + 8 * half]) * unit.x *
                                     (d[2 * half] + d[2 * half + 1] * (1 / NEXT_SLICE) - zero);
    }
    __syncwarp();  // before the next queries are stored
}

// The same for head h of a tile, if it has a residual; `query(h, t, x)` gets this lane's channels of draft t's
// effective query.
template <class Query>
DEVICE void add_draft_residual(float (&sums)[V / 16][4], const DraftBuffer& buffer, const TileHeads& heads, int h,
                               signed char* slices, const Query& query) {
    const char* const codes =
        reinterpret_cast<const char*>(buffer.sketches() + heads.at[h]) + residual_at(heads.rank[h]);
    with_bits(heads.bits_of(h), [&](auto bits) {
        float x[GROUP][LK];
#pragma unroll
        for (int t = 0; t < GROUP; t++) query(h, t, x[t]);
        multiply_draft_residual<decltype(bits)::VALUE>(sums, codes, x, slices);
    });
}
