// Products along K on the token-by-token path (TWO_HALVES): the effective query by a backward pass over the tokens,
// then its products with the coefficient map and the pivots.
#pragma once
#include "read/sketch.cuh"

// Token weights, and this lane's channels of the effective query, for one head. Needs only the key half of the tile.
DEVICE void walk_back(const TileBuffer& buffer, const TokenScalars& gates, const GateInput<LK>& input, Scratch& scratch,
                      float (&x)[LK]) {
    const int lane = threadIdx.x % 32;
    if (lane < W && lane > buffer.pos) scratch.weight[0][lane] = 0;
    __syncwarp();
    read_window(TokenPointers{buffer.query(), buffer.key(0), buffer.gates(), scratch.beta}, input, buffer.pos,
                gates.g, x, scratch.weight[0]);
    if constexpr (QUERY_SLICED) scratch.query.set(x);
}

// N rows of a map or of the pivots, stored in float32, LK channels a lane.
template <int N> struct LaneRows {
    ChannelShare<SMALL> of[N];

    // Rows first, first + 1, ... of `count` > 0; indices past the end load the last row.
    DEVICE void load(const small_t* rows, int first, int count) {
#pragma unroll
        for (int j = 0; j < N; j++) of[j].load(rows + min(first + j, count - 1) * K);
    }
    // Products of the rows with the effective query.
    DEVICE void multiply(const float (&x)[LK], float* to) const {
        float sums[N] = {};
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int n = 0; n < LK; n++) sums[j] += of[j][n] * x[n];
        const float sum = group_sums<32>(sums);
        if (threadIdx.x % (32 / N) == 0) to[threadIdx.x % 32 / (32 / N)] = sum;
    }
};

// Rows of a head's map: the shared projection, or the map of this state.
template <class Buffer>
DEVICE const small_t* map_of(const Arguments& arg, const Buffer& buffer, const TileHeads& heads) {
    const void* const rows = MAP == DENSE ? static_cast<const void*>(buffer.sketches() + heads.rank[0] * V)
                                        : arg.projection + heads.projection[0];
    return static_cast<const small_t*>(rows);
}

// Products of COUNT queries x[t] with maps and pivots that are stored in float32.
template <int COUNT, class Buffer, class X, class C, class Y>
DEVICE void project_lanes(const Arguments& arg, const Buffer& buffer, const TileHeads& heads, const X& x, C& c, Y&& y) {
    const int rank = heads.rank[0];
    LaneRows<8> rows;
    rows.load(map_of(arg, buffer, heads), 0, rank);
#pragma unroll 1
    for (int first = 0; first < rank; first += 8) {
        const LaneRows<8> own = rows;
        if (first + 8 < rank) rows.load(map_of(arg, buffer, heads), first + 8, rank);
#pragma unroll
        for (int t = 0; t < COUNT; t++) own.multiply(x[t], c[t] + first);
    }
    if (MAP == FACTORS) {
        LaneRows<PIVOTS_2> pivots;
        pivots.load(static_cast<const small_t*>(static_cast<const void*>(buffer.sketches() + rank * V)), 0,
                    pivots_of(rank));
#pragma unroll
        for (int t = 0; t < COUNT; t++) pivots.multiply(x[t], y[t]);
    }
}

// The same on the tensor cores, for bf16 storage. The caller has loaded the map's first and second eight rows, if the
// map has them.
DEVICE void project_slices(const TileBuffer& buffer, const TileHeads& heads, const MapRow& first_rows,
                           const MapRow& second_rows, Scratch& scratch) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    QueryFragment query;
    query.load(scratch.query);
    __syncwarp();  // the results below overwrite the query's slices (a union in Scratch)
    float z[4] = {}, y[4] = {};
#pragma unroll
    for (int i = 0; i < KEY_CHUNKS; i++) query.multiply(z, first_rows.of(i), i);
    if constexpr (MAP == FACTORS) {
        static_assert(PIVOT_SLOTS <= 8, "one operand has them all");
        const void* const pivots = pivot_row(buffer, heads, 0);
#pragma unroll
        for (int i = 0; i < KEY_CHUNKS; i++) query.multiply(y, pivot_chunk(pivots, i), i);
    }
    // Even c: product with the leading slice of the query. Odd c: product with the second slice.
    auto whole = [](float x) { return x + __shfl_xor_sync(ALL, x, 1); };
    const float sum = whole(c < 2 ? QueryFragment::product(z) : QueryFragment::product(y));
    if (c % 2 == 0) (c == 0 ? scratch.c[0] : scratch.y)[r] = sum;
    if (RANK_MAX <= 8 || heads.rank[0] <= 8) return;
    float d[4] = {};
#pragma unroll
    for (int i = 0; i < KEY_CHUNKS; i++) query.multiply(d, second_rows.of(i), i);
    const float more = whole(QueryFragment::product(d));
    if (c == 0) scratch.c[0][8 + r] = more;
}
