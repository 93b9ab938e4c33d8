// Outputs of a group of drafts from their coefficients: o_t = U c_t + sum over tokens of w_ts v_s, as in
// read_values.cuh. On the tensor cores, the eight columns of a right operand are two slices of the weights of GROUP
// drafts; left operands are 16 rows of one head.
//
// Products with weight 0 are not left out: a value that is not finite makes its channel's outputs not finite in all
// drafts of the group, also in the drafts before the value.
#pragma once
#include "draft_backward.cuh"
#include "draft_project.cuh"
#include "read_values.cuh"

// Factors of one column of U: coefficient of draft t = w z_t + F (B^T x_t), times the decay up to t.
struct ColumnFactors {
    float w = 1, f[PIVOTS] = {};

    __device__ __forceinline__ ColumnFactors(const DraftBuffer& buffer, const TileHeads& heads, int h, int column) {
        const SmallPart<const small_t> small(buffer.sketches() + heads.at[h], heads.rank[h], heads.wide(h));
        const float scale = CODED ? widen<SMALL>(small.scale[column]) : 1.f;
        if constexpr (MAP == FACTORS) {
            const int p = pivots_of(heads.rank[h]);
            w = scale * widen<SMALL>(small.w[column]);
#pragma unroll
            for (int i = 0; i < PIVOTS; i++)
                if (i < p)
                    f[i] = scale * widen<SMALL>(small.f[column * p + i]) *
                           (CODED ? widen<SMALL>(small.pivot_scale[i]) : 1.f);
        } else if (CODED) {
            w = scale;
        }
    }
    __device__ __forceinline__ float of(const DraftScratch& scratch, int h, int t, float z) const {
        float sum = w * z;
        if constexpr (MAP == FACTORS) {
#pragma unroll
            for (int i = 0; i < PIVOTS; i++)
                if (f[i] != 0.f) sum += f[i] * scratch.y[t][h * PIVOT_SLOTS + i];
        }
        return (TWO_HALVES ? 1.f : scratch.window_decay[t][h]) * sum;
    }
};

// One head on the tensor cores. Draft t of the `many` in the group goes to output + t * HEADS * V.
__device__ __forceinline__ void multiply_draft_values(const DraftBuffer& buffer, const TileHeads& heads, int h,
                                                      int many, out_t* output, DraftScratch& scratch) {
    constexpr int ELEMENT = sizeof(act_t), VALUE = TileBuffer::VALUE;
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4, pos = buffer.pos, rank = heads.rank[h];
    const int tokens = CODED ? (rank + 15) / 16 * 16 : rank;  // number of the first token's row, as in read_values.cuh
    const int rows = tokens + buffer.count(), end = (rows + 15) / 16 * 16;
#pragma unroll 1
    for (int n = lane; n < end; n += 32) {
        float weight[GROUP];
        if (n < rank) {
            const ColumnFactors factors(buffer, heads, h, n);
#pragma unroll
            for (int t = 0; t < GROUP; t++) weight[t] = factors.of(scratch, h, t, scratch.c[t][h][n]);
        } else {
            const int s = min(n - tokens, W - 1);
#pragma unroll
            for (int t = 0; t < GROUP; t++) weight[t] = CODED && s < 0 ? 0.f : scratch.weight[t][h][s];
        }
#pragma unroll
        for (int t = 0; t < GROUP; t++) {
            const float leading = __uint_as_float(__float_as_uint(weight[t]) & 0xffff0000u);
            scratch.c[t][h][n] = __uint_as_float(floats_to_bf16(weight[t] - leading, leading));
        }
    }
    __syncwarp();

    const int columns = buffer.sketches_at() + heads.at[h] * ELEMENT, half = lane / 8 % 2 * 16;
    const float* weights = &scratch.c[r / 2][h][2 * c];
    float sums[V / 16][4] = {};
    auto load_slices = [&](u32(&slices)[2]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float2 pair = *reinterpret_cast<const float2*>(weights + 8 * i);
            slices[i] = __byte_perm(__float_as_uint(pair.x), __float_as_uint(pair.y), r % 2 ? 0x5410 : 0x7632);
        }
    };
    int first = 0;
    if constexpr (CODED) {
        const int codes = buffer.sketches_at() + heads.at[h], wide = heads.wide(h);
#pragma unroll 1
        for (; first < tokens; first += 16, weights += 16) {
            u32 slices[2];
            load_slices(slices);
            const CodedColumn column(min(first + lane % 8 + lane / 16 * 8, rank - 1), wide);
            const NarrowMasks narrow(first + 2 * c, wide, first + 2 * c + 8, wide);
#pragma unroll
            for (int channel = 0; channel < V; channel += 32) {
                u32 x[4];
                load_transposed(x, buffer.data, codes + column.share(channel, half));
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (channel + 16 * i < V)
                        multiply_codes(sums[channel / 16 + i], x[i], x[2 + i], narrow, i > 0, slices);
            }
        }
    }
#pragma unroll 1
    for (; first < end; first += 16, weights += 16) {
        u32 slices[2];
        load_slices(slices);
        // Missing rows are the newest value, with weight 0.
        const int n = min(first + lane % 8 + lane / 16 * 8, rows - 1), s = n - tokens;
        const bool column = !CODED && s < 0;
        const int from = column ? columns + n * VALUE : buffer.value_at(h, s);
        const int turn = swizzle(column ? n : s < pos ? s : 0) * ELEMENT ^ half;
#pragma unroll
        for (int channel = 0; channel < V; channel += 16) {
            u32 x[4];
            load_transposed(
                x, buffer.data,
                from + channel / SWIZZLE_SPAN * SWIZZLE_SPAN * ELEMENT + (channel % SWIZZLE_SPAN * ELEMENT ^ turn));
            mma_bf16(sums[channel / 16], x, slices[0], slices[1]);
        }
    }
    // d[0] + d[1] is channel r of 16 for draft c, d[2] + d[3] is channel r + 8.
#pragma unroll
    for (int i = 0; i < V / 16; i++) {
        const float x = sums[i][0] + sums[i][1], y = sums[i][2] + sums[i][3];
        if constexpr (OUT == FP32) {
            out_t* const to = place<HEADS * V>(output, c, 16 * i + r);
            if (c < many) to[0] = x, to[8] = y;
        } else {
            const u32 pair = transpose_8x8(OUT == BF16 ? floats_to_bf16(x, y) : floats_to_halves(x, y));
            out_t* const to = place<HEADS * V>(output, r / 2, 16 * i + 8 * (r % 2) + 2 * c);
            if (r / 2 < many) *reinterpret_cast<u32*>(to) = pair;
        }
    }
}

// Row by row, for other types; tiles of one head.
__device__ __forceinline__ void add_draft_values(const DraftBuffer& buffer, const TileHeads& heads, int many,
                                                 out_t* output, DraftScratch& scratch) {
    const int rank = heads.rank[0];
    for (int j = threadIdx.x % 32; j < rank; j += 32) {
        const ColumnFactors factors(buffer, heads, 0, j);
#pragma unroll
        for (int t = 0; t < GROUP; t++) scratch.c[t][0][j] = factors.of(scratch, 0, t, scratch.c[t][0][j]);
    }
    __syncwarp();

    typedef ValueShare<32> Own;
    float o[GROUP][Own::COUNT][Own::WIDTH] = {};
    auto add = [&](const auto& x, int t, float weight, int i) {
#pragma unroll
        for (int n = 0; n < Own::WIDTH; n++) o[t][i][n] += weight * x[n];
    };
    const sketch_t* const u = buffer.sketches() + heads.at[0];
    const int wide = heads.wide(0);
#pragma unroll 2
    for (int j = 0; j < rank; j++)
#pragma unroll
        for (int i = 0; i < Own::COUNT; i++) {
            if (Own::at(i) >= V) continue;
            ColumnShare<Own::WIDTH> x;
            x.load(u + column_at(j, wide), Own::at(i), j >= wide);
#pragma unroll
            for (int t = 0; t < GROUP; t++) add(x, t, scratch.c[t][0][j], i);
        }
#pragma unroll 2
    for (int s = 0; s < buffer.count(); s++)
#pragma unroll
        for (int i = 0; i < Own::COUNT; i++) {
            if (Own::at(i) >= V) continue;
            Packed<ACT, Own::WIDTH> x;
            x.load(reinterpret_cast<const act_t*>(buffer.data + buffer.value_at(0, s)) + Own::at(i));
#pragma unroll
            for (int t = 0; t < GROUP; t++) add(x, t, scratch.weight[t][0][s], i);
        }
#pragma unroll
    for (int t = 0; t < GROUP; t++)
#pragma unroll
        for (int i = 0; i < Own::COUNT; i++) {
            if (Own::at(i) >= V || t >= many) continue;
            Packed<OUT, Own::WIDTH> rounded;
            rounded.set(o[t][i]);
            rounded.store(place<HEADS * V>(output, t, Own::at(i)));
        }
}
