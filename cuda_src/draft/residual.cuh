// Products of a head's residual with the effective queries of a group of drafts, as in read/residual.cuh. Columns 2 t
// and 2 t + 1 of the right operand hold the two slices of draft t's query.
#pragma once
#include "draft/tile.cuh"
#include "read/residual.cuh"

// Adds the products of head h of a tile, if it has a residual, to sums of 16 channels a block, as
// multiply_draft_values has them: sums[i][0] and sums[i][2] are channels r and r + 8 of draft c. `query(h, t, x)`
// gets this lane's channels of draft t's effective query.
template <class Query>
DEVICE void add_draft_residual(float (&sums)[V / 16][4], const DraftBuffer& buffer, const TileHeads& heads, int h,
                               signed char* slices, const Query& query) {
    const int bits = heads.bits_of(h);
    if (bits == 0) return;
    const char* const codes =
        reinterpret_cast<const char*>(buffer.sketches() + heads.at[h]) + residual_at(heads.rank[h]);
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    const u16* const scales = scales_of(codes, bits);
    ChannelShare<BF16> columns;
    columns.load(scales + V);
    float2 unit{};  // of draft c
#pragma unroll
    for (int t = 0; t < GROUP; t++) {
        float x[LK];
        query(h, t, x);
#pragma unroll
        for (int n = 0; n < LK; n++) x[n] *= columns[n];
        const float2 own = slice_query(x, slices + 2 * t * K);
        if (c == t) unit = own;
    }
    __syncwarp();
    uint2 sliced[K / 32];
    load_slices(sliced, slices + r * K);
    const float zero = level_of_zero(bits) * unit.y;
#pragma unroll
    for (int block = 0; block < V / 16; block++) {
        int d[4] = {};
        with_bits(bits, [&](auto number) { multiply_codes<decltype(number)::VALUE>(d, codes, block, sliced); });
#pragma unroll
        for (int half = 0; half < 2; half++)
            sums[block][2 * half] += widen<BF16>(scales[16 * block + r + 8 * half]) * unit.x *
                                     (d[2 * half] + d[2 * half + 1] * (1 / NEXT_SLICE) - zero);
    }
    __syncwarp();  // before the next queries are stored
}
