// Products of a tile's residuals with the effective queries, on the tensor cores: codes of 8 bits with the query as two
// slices of 8 bits (to 2^-16 of its largest channel). The sums are integers, so they are exact.
#pragma once
#include "read/sketch.cuh"
#include "slot/residual.cuh"

// How a warp's lanes share the outputs of a tile, as in multiply_values: lane (r, c) has channels r and r + 8 of block
// SERVED i + c / TILE_HEADS of 16 rows, of head c % TILE_HEADS of the tile.
struct ResidualShare {
    static constexpr int SERVED = 4 / TILE_HEADS, BLOCKS = V / 16, COUNT = (BLOCKS + SERVED - 1) / SERVED;
    float of[COUNT][2];

    // All channels of a tile of one head.
    DEVICE void store(float* to) const {
        static_assert(TILE_HEADS == 1 || SWIZZLED || SKETCHED_HEADS == 0);
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int first = 16 * (i * SERVED + lane % 4 / TILE_HEADS) + lane / 4;
            if (V % (16 * SERVED) == 0 || first < V) to[first] = of[i][0], to[first + 8] = of[i][1];
        }
    }
};

constexpr float SLICE = 127, NEXT_SLICE = 254;  // largest number of a slice; units of the next slice in a unit
constexpr float LEAST_QUERY = 0x1p-110f;        // a smaller one is taken for 0: the unit's inverse is finite

// The query times the columns' scales, in slices; LK channels a lane. Returns the slices' unit, and the sum of the
// channels in this unit.
DEVICE float2 slice_query(float (&x)[LK], signed char* slices) {
    float most = 0, sum = 0;
#pragma unroll
    for (int n = 0; n < LK; n++) most = fmaxf(most, fabsf(x[n]));
    most = warp_most(most);
    const float inverse = most > LEAST_QUERY ? __fdividef(SLICE, most) : 0.f;
    constexpr int WORDS = (LK + 3) / 4;
    u32 words[2][WORDS] = {};
#pragma unroll
    for (int n = 0; n < LK; n++) {
        // 1.5 * 2^23 has a unit of 1: the low byte of a sum with it is the nearest integer, in two's complement
        const float first = fmaf(x[n], inverse, 0x1.8p23f), high = first - 0x1.8p23f;
        const float second = fmaf(fmaf(x[n], inverse, -high), NEXT_SLICE, 0x1.8p23f), low = second - 0x1.8p23f;
        words[0][n / 4] |= (__float_as_uint(first) & 0xff) << (8 * (n % 4));
        words[1][n / 4] |= (__float_as_uint(second) & 0xff) << (8 * (n % 4));
        sum += high + low * (1 / NEXT_SLICE);
    }
#pragma unroll
    for (int i = 0; i < 2 * WORDS; i++) {
        // channels 16 q + 4 c to 16 q + 4 c + 3 are word q of lanes (r, c)
        const int slice = i / WORDS, channel = threadIdx.x % 32 * LK + 4 * (i % WORDS);
        signed char* const to = slices + slice * K + channel / 4 % 4 * (K / 4) + channel / 16 * 4 + channel % 4;
        if (!has_channels()) continue;
        if constexpr (LK >= 4) *reinterpret_cast<u32*>(to) = words[slice][i % WORDS];
        else *reinterpret_cast<u16*>(to) = static_cast<u16>(words[slice][0]);
    }
    return make_float2(most * (1 / SLICE), warp_sum(sum));
}

// This lane's words of a query's slice, as right operands.
DEVICE void load_slices(uint2 (&query)[K / 32], const signed char* slice) {
    const signed char* const own = slice + threadIdx.x % 4 * (K / 4);
    if constexpr (K % 64 == 0) {
#pragma unroll
        for (int i = 0; i < K / 64; i++) {
            const uint4 four = reinterpret_cast<const uint4*>(own)[i];
            query[2 * i] = make_uint2(four.x, four.y), query[2 * i + 1] = make_uint2(four.z, four.w);
        }
    } else {
#pragma unroll
        for (int i = 0; i < K / 32; i++) query[i] = reinterpret_cast<const uint2*>(own)[i];
    }
}
// d += the codes of a block of 16 rows times the slices.
template <int BITS>
DEVICE void multiply_codes(int (&d)[4], const char* codes, int block, const uint2 (&query)[K / 32]) {
    BlockCodes<BITS> rows;
    rows.load(codes, block);
#pragma unroll
    for (int step = 0; step < K / 32; step++) {
        const u32 a[4] = {rows.of(2 * step), rows.of(ROW_REGISTERS + 2 * step), rows.of(2 * step + 1),
                          rows.of(ROW_REGISTERS + 2 * step + 1)};
        mma_codes(d, a, query[step].x, query[step].y);
    }
}
DEVICE constexpr float level_of_zero(int bits) { return (1 << (bits - 1)) - 0.5f; }  // as a code

// Products of a residual's codes with a query's slices: sums (2 i + half, slice) of the lane's own rows.
template <int BITS>
DEVICE void multiply_blocks(int (&sums)[ResidualShare::COUNT][4], const char* codes, const uint2 (&query)[K / 32]) {
#pragma unroll
    for (int block = 0; block < ResidualShare::BLOCKS; block++) {
        int d[4] = {};
        multiply_codes<BITS>(d, codes, block, query);
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (threadIdx.x % 4 / TILE_HEADS == block % ResidualShare::SERVED)
                sums[block / ResidualShare::SERVED][e] = d[e];
    }
}

// Outputs of a tile's residuals; `query(h, x)` gets this lane's channels of a head's effective query. The code for each
// number of bits is short, as all of a kernel has to stay in the instruction cache.
template <class Buffer, class Query>
DEVICE ResidualShare read_residual(const Buffer& buffer, const TileHeads& heads, ResidualScratch<true>& scratch,
                                   const Query& query) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    ResidualShare out{};
#pragma unroll 1
    for (int h = 0; h < TILE_HEADS; h++) {
        const int bits = heads.bits_of(h);
        if (bits == 0) continue;
        const char* const codes =
            reinterpret_cast<const char*>(buffer.sketches() + heads.at[h]) + residual_at(heads.rank[h]);
        const u16* const scales = scales_of(codes, bits);
        float x[LK];
        query(h, x);
        ChannelShare<BF16> columns;
        columns.load(scales + V);
#pragma unroll
        for (int n = 0; n < LK; n++) x[n] *= columns[n];
        const float2 unit = slice_query(x, scratch.slices);
        __syncwarp();
        uint2 slices[K / 32];  // even columns of the right operand hold the first slice, odd columns the second
        load_slices(slices, scratch.slices + r % 2 * K);
        int sums[ResidualShare::COUNT][4] = {};
        with_bits(bits, [&](auto number) { multiply_blocks<decltype(number)::VALUE>(sums, codes, slices); });
        const float zero = level_of_zero(bits) * unit.y;
#pragma unroll
        for (int i = 0; i < ResidualShare::COUNT; i++) {
            const int first = 16 * (i * ResidualShare::SERVED + c / TILE_HEADS) + r;
            if (c % TILE_HEADS != h || (V % (16 * ResidualShare::SERVED) && first >= V)) continue;
#pragma unroll
            for (int half = 0; half < 2; half++)
                out.of[i][half] = widen<BF16>(scales[first + 8 * half]) * unit.x *
                                  (sums[i][2 * half] + sums[i][2 * half + 1] * (1 / NEXT_SLICE) - zero);
        }
        __syncwarp();  // before the next query is stored
    }
    return out;
}

// This lane's channels of an effective query on the tensor-core path (MATRIX), once the weights are known.
// `query` (K); keys of tokens 0 to `newest` with the query's parts (see Scratch); `decay` of the window.
template <class Buffer>
DEVICE void effective_query(float (&x)[LK], const act_t* query, const Buffer& buffer, const float* parts, int newest,
                            float decay) {
    const int lane = threadIdx.x % 32;
    ChannelShare<ACT> packed;
    packed.load(query);
#pragma unroll
    for (int n = 0; n < LK; n++) x[n] = packed[n];
    if constexpr (ERASES) {
#pragma unroll 4
        for (int s = 0; s <= newest; s++) {
            ChannelShare<ACT> key;
            key.load(buffer.key(s));
#pragma unroll
            for (int n = 0; n < LK; n++) x[n] -= parts[s] * key[n];
        }
    }
#pragma unroll
    for (int n = 0; n < LK; n++) x[n] *= decay;
}
