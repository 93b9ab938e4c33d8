// The output of heads with a sketch, once maps and pivots have met the query: o = U c + sum over tokens of w_s v_s.
//
// Where values and sketches are bf16, the rows that are summed (columns of U, buffered values, the newest one) are left operands of
// products: 16 channels of 16 rows, or of eight rows of each of two heads. Weights are right ones, in two bf16 slices (2^-16): even
// columns have the leading slice, odd ones the rest. A head takes two columns, and so do other channels: products with zeros in
// all columns but their own go to one accumulator.
#pragma once
#include "read_sketch.cuh"

// Coefficients of the columns of a head's U: c = w z + F (B^T x).
struct Coefficients {
    const sketch_t *f, *w;
    int p;
    float whole, y[PIVOTS];

    __device__ __forceinline__ Coefficients(const Item& item, const Heads& heads, const Scratch& scratch, int h)
        : p(pivots_of(heads.rank[h])), whole(SPLIT ? 1.f : scratch.whole[h]) {
        const int rank = heads.rank[h];
        f = item.sketches() + heads.at[h] + rank * V + p * K, w = f + rank * p;
        if (MAP == FACTORS)
#pragma unroll
            for (int i = 0; i < PIVOTS; i++) y[i] = scratch.y[h * PIVOT_SLOTS + i];
    }
    __device__ __forceinline__ float of(int j, float z) const {
        float own = z;
        if constexpr (MAP == FACTORS) {
            own *= widen<SKETCH>(w[j]);
#pragma unroll
            for (int i = 0; i < PIVOTS; i++)
                if (i < p) own += widen<SKETCH>(f[j * p + i]) * y[i];
        }
        return whole * own;
    }
};

// By products. Rows after the newest are that one again, without weight: a head takes as many as the one that has most.
__device__ __forceinline__ void multiply_values(const Item& item, const Heads& heads, out_t* output, Scratch& scratch) {
    constexpr int ROWS = 16 / TOGETHER, SERVED = 4 / TOGETHER;  // rows of a head in a product; products with columns of their own
    constexpr int APART = 16 * SERVED, SUMS = (V + APART - 1) / APART;  // channels of an accumulator, and how many there are
    constexpr int ELEMENT = sizeof(act_t), VALUE = Item::VALUE;
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4, pos = item.pos;
    // A dense head stands in with one row of the other: what its own hold is not multiplied, not even by 0.
    const int h = lane / LANES, rank = heads.rank[h], rows = rank > 0 ? rank + pos + 1 : 1;
    int end = rows;
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) end = max(end, heads.rank[i] + pos + 1);
    end = (end + ROWS - 1) / ROWS * ROWS;
    const Coefficients coefficients(item, heads, scratch, h);
#pragma unroll 1
    for (int n = lane % LANES; n < end; n += LANES) {
        float weight = n < rank ? scratch.c[h][n] : scratch.weight[h][min(n - rank, W - 1)];
        if (n < rank) weight = coefficients.of(n, weight);
        const float leading = __uint_as_float(__float_as_uint(weight) & 0xffff0000u);
        scratch.c[h][n] = __uint_as_float(floats_to_bf16(weight - leading, leading));
    }
    __syncwarp();

    const int columns = Item::sketches_at(pos) + heads.at[h] * ELEMENT, values = (h * pos - rank) * VALUE;  // where row 0 is, or would be
    const int newest = Item::newest_at(pos) + (rank > 0 ? h : TOGETHER - 1 - h) * VALUE, half = lane / 8 % 2 * 16;
    const float* weights = &scratch.c[r / 2 % TOGETHER][2 * c];
    float sums[SUMS][4] = {};
#pragma unroll 1
    for (int n = TOGETHER > 1 ? lane % 8 : lane % 8 + lane / 16 * 8; end > 0; end -= ROWS, n += ROWS, weights += ROWS) {
        u32 slices[SERVED][2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float2 pair = *reinterpret_cast<const float2*>(weights + (TOGETHER > 1 ? 0 : 8 * i));
            const u32 slice = __byte_perm(__float_as_uint(pair.x), __float_as_uint(pair.y), r % 2 ? 0x5410 : 0x7632);
#pragma unroll
            for (int j = 0; j < SERVED; j++) slices[j][i] = r / 2 == (TOGETHER > 1 ? 2 * j + i : j) ? slice : 0;
        }
        const bool last = n >= rows - 1;
        const int from = last ? newest : n * VALUE + (n < rank ? columns : values);
        const int turn = turn_of(last ? 0 : n < rank ? n : n - rank) * ELEMENT ^ half;
#pragma unroll
        for (int channel = 0; channel < V; channel += 16) {
            u32 x[4];
            load_transposed(x, item.rest, from + channel / TURNED * TURNED * ELEMENT + (channel % TURNED * ELEMENT ^ turn));
            const u32(&own)[2] = slices[channel / 16 % SERVED];
            mma_bf16(sums[channel / APART], x, own[0], own[1]);
        }
    }

    // d[0] + d[1] is channel r of 16, and d[2] + d[3] the one eight on: of the 16 and the head that have columns 2c and 2c + 1
    const int column = OUT == FP32 ? 2 * c : r, of = column / 2 % TOGETHER, at = 16 * (column / (2 * TOGETHER));
    const bool sketched = TOGETHER == 1 || heads.rank[of] > 0;  // of two heads one may be dense
    out_t* const to = output + of * V + at + (OUT == FP32 ? r : 8 * (column % 2) + 2 * c);
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        const float x = sums[i][0] + sums[i][1], y = sums[i][2] + sums[i][3];
        const bool own = sketched && (APART * (i + 1) <= V || APART * i + at < V);
        if constexpr (OUT == FP32) {
            if (own) to[APART * i] = x, to[APART * i + 8] = y;
        } else {
            const u32 pair = transpose_8x8(OUT == BF16 ? floats_to_bf16(x, y) : floats_to_halves(x, y));
            if (own) *reinterpret_cast<u32*>(to + APART * i) = pair;
        }
    }
}

// Row by row, for other types.
__device__ __forceinline__ void add_values(const Item& item, const Heads& heads, out_t* output, Scratch& scratch) {
    const int h = threadIdx.x % 32 / LANES, pos = item.pos, rank = heads.rank[h];
    const Coefficients coefficients(item, heads, scratch, h);
    for (int j = threadIdx.x % LANES; j < rank; j += LANES) scratch.c[h][j] = coefficients.of(j, scratch.c[h][j]);
    __syncwarp();

    typedef ValueShare<LANES> Own;
    float o[Own::COUNT][Own::WIDTH] = {};
    auto add = [&](const auto& x, float weight, int i) {
#pragma unroll
        for (int n = 0; n < Own::WIDTH; n++) o[i][n] += weight * x[n];
    };
    const sketch_t* const u = item.sketches() + heads.at[h];
#pragma unroll 4
    for (int j = 0; j < rank; j++) {
#pragma unroll
        for (int i = 0; i < Own::COUNT; i++) {
            if (Own::at(i) >= V) continue;
            Packed<SKETCH, Own::WIDTH> x;
            x.load(u + j * V + Own::at(i));
            add(x, scratch.c[h][j], i);
        }
    }
    const act_t* const values = item.values(h);
#pragma unroll 4
    for (int s = 0; s < pos; s++) {
#pragma unroll
        for (int i = 0; i < Own::COUNT; i++) {
            if (Own::at(i) >= V) continue;
            Packed<ACT, Own::WIDTH> x;
            x.load(values + s * V + Own::at(i));
            add(x, scratch.weight[h][s], i);
        }
    }
#pragma unroll
    for (int i = 0; i < Own::COUNT; i++) {
        if (Own::at(i) >= V || rank == 0) continue;
        Packed<ACT, Own::WIDTH> x;
        x.load(item.newest(h) + Own::at(i));
        add(x, scratch.weight[h][pos], i);
        Packed<OUT, Own::WIDTH> rounded;
        rounded.set(o[i]);
        rounded.store(output + h * V + Own::at(i));
    }
}

__device__ __forceinline__ void read_values(const Item& item, const Heads& heads, out_t* output, Scratch& scratch) {
    if constexpr (OPERANDS) multiply_values(item, heads, output, scratch);
    else add_values(item, heads, output, scratch);
}
