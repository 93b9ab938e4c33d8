// Output of heads with a sketch, from the coefficients: o = U c + sum over tokens of w_s v_s.
//
// With bf16 values and sketches (SWIZZLED) this is a tensor-core product. Left operands: the summed rows (columns of U,
// buffered values, the newest value), 16 channels by 16 rows, or by eight rows of each of two heads. Right operands:
// weights as two bf16 slices (to 2^-16), the leading slice in even columns, the second slice in odd columns. A head
// needs two of the eight columns, so up to four groups of 16 channels share an accumulator: each group's weights are in
// the group's own columns, with zeros elsewhere.
#pragma once
#include "read/residual.cuh"

// Coefficients for the columns of a head's U: c = w z + F (B^T x).
struct Coefficients {
    const SmallPart<const small_t> small;
    int p;
    float whole, y[PIVOTS];

    DEVICE Coefficients(const TileBuffer& buffer, const TileHeads& heads, const Scratch& scratch,
                                            int h)
        : small(buffer.sketches() + heads.at[h], heads.rank[h]),
          p(pivots_of(heads.rank[h])), whole(TWO_HALVES ? 1.f : scratch.window_decay[h]) {
        if (MAP == FACTORS)
#pragma unroll
            for (int i = 0; i < PIVOTS; i++) {
                y[i] = scratch.y[h * PIVOT_SLOTS + i];
                if constexpr (CODED)
                    if (i < p) y[i] *= small.pivot_scale[i];
            }
    }
    DEVICE float of(int j, float z) const {
        float own = z;
        if constexpr (MAP == FACTORS) {
            own *= widen<SMALL>(small.w[j]);
#pragma unroll
            for (int i = 0; i < PIVOTS; i++)
                if (i < p) own += widen<SMALL>(small.f[j * p + i]) * y[i];
        }
        if constexpr (CODED) own *= small.scale[j];
        return whole * own;
    }
};

// Adds weights times codes of U: `low` and `high` are words of two groups of eight columns, as `load_transposed`
// returns them. Bytes 2n and 2n + 1 of 16 codes are channels n and n + 8: rows n and n + 8 of the operand.
DEVICE void multiply_codes(float (&sums)[4], u32 low, u32 high, const u32 (&weights)[2]) {
    const u32 x[4] = {widen_codes<false>(low), widen_codes<true>(low), widen_codes<false>(high),
                      widen_codes<true>(high)};
    mma_bf16(sums, x, weights[0], weights[1]);
}

// On the tensor cores. All heads of a tile have as many rows as the longest head. Missing rows repeat the newest value,
// with weight 0.
DEVICE void multiply_values(const TileBuffer& buffer, const TileHeads& heads, const ResidualShare& residual,
                            out_t* output, Scratch& scratch) {
    constexpr int ROWS = 16 / TILE_HEADS,
                  SERVED = 4 / TILE_HEADS;  // rows of a head per product; channel groups per accumulator
    constexpr int APART = 16 * SERVED, SUMS = (V + APART - 1) / APART;  // channels of an accumulator; accumulators
    constexpr int ELEMENT = sizeof(act_t), VALUE = TileBuffer::VALUE;
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4, pos = buffer.pos;
    // A full-state head uses a row of the other head: its own values may be infinite and must not even be multiplied
    // by 0.
    const int h = lane / SPAN, rank = heads.rank[h];
    int tokens = rank;  // row number of the first token. Columns of U come first; with codes they fill whole operands
    if constexpr (CODED) {
#pragma unroll
        for (int i = 0; i < TILE_HEADS; i++) tokens = max(tokens, heads.rank[i]);
        tokens = (tokens + ROWS - 1) / ROWS * ROWS;
    }
    const int rows = rank > 0 ? tokens + pos + 1 : 1;
    int end = rows;
#pragma unroll
    for (int i = 0; i < TILE_HEADS; i++) end = max(end, (CODED ? tokens : heads.rank[i]) + pos + 1);
    end = (end + ROWS - 1) / ROWS * ROWS;
    const Coefficients coefficients(buffer, heads, scratch, h);
#pragma unroll 1
    for (int n = lane % SPAN; n < end; n += SPAN) {
        const int s = min(n - tokens, W - 1);
        float weight = n < rank ? scratch.c[h][n] : CODED && s < 0 ? 0.f : scratch.weight[h][s];
        if (n < rank) weight = coefficients.of(n, weight);
        if (MONITOR && n - tokens > pos) weight = 0;  // token W - 1 may have a weight
        const float leading = __uint_as_float(__float_as_uint(weight) & 0xffff0000u);
        scratch.c[h][n] = __uint_as_float(floats_to_bf16(weight - leading, leading));
    }
    __syncwarp();

    // byte offsets of row 0 of U and of the values, as if the rows of both were numbered through
    const int columns = TileBuffer::sketches_at(pos) + heads.at[h] * ELEMENT, values = (h * pos - tokens) * VALUE;
    const int newest = TileBuffer::newest_at(pos) + (rank > 0 ? h : TILE_HEADS - 1 - h) * VALUE,
              half = lane / 8 % 2 * 16;
    const float* weights = &scratch.c[r / 2 % TILE_HEADS][2 * c];
    float sums[SUMS][4] = {};
    auto load_slices = [&](u32(&slices)[SERVED][2]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float2 pair = *reinterpret_cast<const float2*>(weights + (TILE_HEADS > 1 ? 0 : 8 * i));
            const u32 slice = __byte_perm(__float_as_uint(pair.x), __float_as_uint(pair.y), r % 2 ? 0x5410 : 0x7632);
#pragma unroll
            for (int j = 0; j < SERVED; j++) slices[j][i] = r / 2 == (TILE_HEADS > 1 ? 2 * j + i : j) ? slice : 0;
        }
    };
    int n = TILE_HEADS > 1 ? lane % 8 : lane % 8 + lane / 16 * 8;
    if constexpr (CODED) {
        const int own = rank > 0 ? h : TILE_HEADS - 1 - h;
        const int codes = TileBuffer::sketches_at(pos) + heads.at[own];
#pragma unroll 1
        for (; tokens > 0; tokens -= ROWS, end -= ROWS, n += ROWS, weights += ROWS) {
            u32 slices[SERVED][2];
            load_slices(slices);
            const CodedColumn column(min(n, heads.rank[own] - 1));
#pragma unroll
            for (int channel = 0; channel < V; channel += 32) {
                u32 x[4];
                load_transposed(x, buffer.value_half, codes + column.share(channel, half));
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int at = channel + 16 * i;
                    if (at < V) multiply_codes(sums[at / APART], x[i], x[2 + i], slices[at / 16 % SERVED]);
                }
            }
        }
    }
#pragma unroll 1
    for (; end > 0; end -= ROWS, n += ROWS, weights += ROWS) {
        u32 slices[SERVED][2];
        load_slices(slices);
        const bool last = n >= rows - 1;
        const bool column = !CODED && n < rank;
        const int from = last ? newest : n * VALUE + (column ? columns : values);
        const int mask = swizzle(last ? 0 : column ? n : n - tokens) * ELEMENT ^ half;
#pragma unroll
        for (int channel = 0; channel < V; channel += 16) {
            u32 x[4];
            load_transposed(
                x, buffer.value_half,
                from + channel / SWIZZLE_SPAN * SWIZZLE_SPAN * ELEMENT + (channel % SWIZZLE_SPAN * ELEMENT ^ mask));
            const u32(&own)[2] = slices[channel / 16 % SERVED];
            mma_bf16(sums[channel / APART], x, own[0], own[1]);
        }
    }

    // d[0] + d[1] is channel r, d[2] + d[3] channel r + 8, of the group of 16 and the head that own columns 2c and 2c
    // + 1.
    const int column = OUT == FP32 ? 2 * c : r, of = column / 2 % TILE_HEADS, at = 16 * (column / (2 * TILE_HEADS));
    const bool sketched = TILE_HEADS == 1 || heads.rank[of] > 0;  // one of two heads may have no sketch
    out_t* const to = output + of * V + at + (OUT == FP32 ? r : 8 * (column % 2) + 2 * c);
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        float x = sums[i][0] + sums[i][1], y = sums[i][2] + sums[i][3];
        if (RESIDUAL) x += residual.of[i][0], y += residual.of[i][1];
        const bool own = sketched && (APART * (i + 1) <= V || APART * i + at < V);
        if constexpr (OUT == FP32) {
            if (own) to[APART * i] = x, to[APART * i + 8] = y;
        } else {
            const u32 pair = transpose_8x8(OUT == BF16 ? floats_to_bf16(x, y) : floats_to_halves(x, y));
            if (own) *reinterpret_cast<u32*>(to + APART * i) = pair;
        }
    }
}

// Neighbouring channels of a column of U.
template <int N, bool CODES = CODED> struct ColumnShare : Packed<SKETCH, N> {};
template <int N> struct ColumnShare<N, true> : Codes<N> {};

// Row by row, for other types: outputs of COUNT tokens of a head with `rank` columns in `u`, from their coefficients
// c[t] and the weights of `tokens` tokens with values from `values` on, and from `start(t, channel)`. Output t goes to
// output + t * HEADS * V, for the first `many`.
template <int COUNT, class Coefficients, class Weights, class Start>
DEVICE void add_values(const sketch_t* u, int rank, const void* values, int tokens, int many, out_t* output,
                       const Coefficients& c, const Weights& weights, const Start& start) {
    static_assert(TILE_HEADS == 1 || SWIZZLED || SKETCHED_HEADS == 0);
    typedef ValueShare Own;
    constexpr int UNROLL = COUNT > 1 ? 2 : 4;
    float o[COUNT][Own::COUNT][Own::WIDTH];
#pragma unroll
    for (int t = 0; t < COUNT; t++)
#pragma unroll
        for (int i = 0; i < Own::COUNT; i++)
#pragma unroll
            for (int n = 0; n < Own::WIDTH; n++) o[t][i][n] = Own::at(i) < V ? start(t, Own::at(i) + n) : 0.f;
    auto add = [&](const auto& x, float weight, float (&to)[Own::WIDTH]) {
#pragma unroll
        for (int n = 0; n < Own::WIDTH; n++) to[n] += weight * x[n];
    };
#pragma unroll UNROLL
    for (int j = 0; j < rank; j++)
#pragma unroll
        for (int i = 0; i < Own::COUNT; i++) {
            if (Own::at(i) >= V) continue;
            ColumnShare<Own::WIDTH> x;
            x.load(u + j * V + Own::at(i));
#pragma unroll
            for (int t = 0; t < COUNT; t++) add(x, c[t][j], o[t][i]);
        }
#pragma unroll UNROLL
    for (int s = 0; s < tokens; s++)
#pragma unroll
        for (int i = 0; i < Own::COUNT; i++) {
            if (Own::at(i) >= V) continue;
            Packed<ACT, Own::WIDTH> x;
            x.load(static_cast<const act_t*>(values) + s * V + Own::at(i));
#pragma unroll
            for (int t = 0; t < COUNT; t++) add(x, weights[t][s], o[t][i]);
        }
#pragma unroll
    for (int t = 0; t < COUNT; t++)
#pragma unroll
        for (int i = 0; i < Own::COUNT; i++) {
            if (Own::at(i) >= V || t >= many || rank == 0) continue;
            Packed<OUT, Own::WIDTH> rounded;
            rounded.set(o[t][i]);
            rounded.store(output + t * (HEADS * V) + Own::at(i));
        }
}

DEVICE void read_values(const TileBuffer& buffer, const TileHeads& heads, const ResidualShare& residual, out_t* output,
                        Scratch& scratch) {
    if constexpr (SWIZZLED) {
        multiply_values(buffer, heads, residual, output, scratch);
    } else {
        const Coefficients coefficients(buffer, heads, scratch, 0);
        if (const int j = threadIdx.x % 32; j < heads.rank[0]) scratch.c[0][j] = coefficients.of(j, scratch.c[0][j]);
#if RESIDUAL
        residual.store(scratch.outputs);
        auto start = [&](int, int channel) { return scratch.outputs[channel]; };
#else
        auto start = [](int, int) { return 0.f; };
#endif
        __syncwarp();
        add_values<1>(buffer.sketches(), heads.rank[0], buffer.value_half, buffer.pos + 1, 1, output, scratch.c,
                      scratch.weight, start);
    }
}
