// Products along K of items that come in halves: back over the tokens, then what maps and pivots make of the query that is left.
#pragma once
#include "read_sketch.cuh"

// What keys alone give: weights of the tokens, and each lane's share of the effective query, for one head.
__device__ __forceinline__ void look_back(const Item& item, const Gates& gates, const GateInput<LK>& input, Scratch& scratch,
                                          float (&x)[LK]) {
    const int lane = threadIdx.x % 32;
    if (lane < W && lane > item.pos) scratch.weight[0][lane] = 0;
    __syncwarp();
    read_window(Tokens{item.query(), item.key(0), item.gates(), scratch.beta}, input, item.pos, gates.g[0], x, scratch.weight[0]);
    if constexpr (SLICED) scratch.query.set(x);
}

// N rows of a map or of pivots, LK channels a lane.
template <int N> struct LaneRows {
    Packed<SKETCH, LK> of[N];

    // Those from `first` on, of `count` (not none).
    __device__ __forceinline__ void load(const sketch_t* rows, int first, int count) {
#pragma unroll
        for (int j = 0; j < N; j++) of[j].load(rows + min(first + j, count - 1) * K + threadIdx.x % 32 * LK);
    }
    // What they make of the effective query.
    __device__ __forceinline__ void multiply(const float (&x)[LK], float* to) const {
        float sums[N] = {};
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int n = 0; n < LK; n++) sums[j] += of[j][n] * x[n];
        const float sum = group_sums<32>(sums);
        if (threadIdx.x % (32 / N) == 0) to[threadIdx.x % 32 / (32 / N)] = sum;
    }
};

// Rows of a head's map: of the projection of all its states, or the state's own.
__device__ __forceinline__ const sketch_t* map_of(const Arguments& arg, const Item& item, const Heads& heads) {
    return MAP == OWN ? item.sketches() + heads.rank[0] * V : arg.projection + heads.projection[0];
}

// What maps and pivots in float32 make of the effective query.
__device__ __forceinline__ void project_lanes(const Arguments& arg, const Item& item, const Heads& heads, const float (&x)[LK],
                                              Scratch& scratch) {
    const int rank = heads.rank[0];
    LaneRows<8> rows;
    rows.load(map_of(arg, item, heads), 0, rank);
#pragma unroll 1
    for (int first = 0; first < rank; first += 8) {
        const LaneRows<8> own = rows;
        if (first + 8 < rank) rows.load(map_of(arg, item, heads), first + 8, rank);
        own.multiply(x, scratch.c[0] + first);
    }
    if (MAP == FACTORS) {
        LaneRows<PIVOTS_2> pivots;
        pivots.load(item.sketches() + rank * V, 0, pivots_of(rank));
        pivots.multiply(x, scratch.y);
    }
}

// The same on the tensor cores, of those in bf16; the map's first and second eight rows are there, as far as it has them.
__device__ __forceinline__ void project_slices(const Arguments& arg, const Item& item, const Heads& heads, const Row& first_rows,
                                               const Row& second_rows, Scratch& scratch) {
    const int rank = heads.rank[0], lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    Query query;
    query.load(scratch.query);
    __syncwarp();  // others put what follows in its place
    float z[4] = {}, y[4] = {};
#pragma unroll
    for (int i = 0; i < KEY_CHUNKS; i++) query.multiply(z, first_rows.x[i], i);
    if constexpr (MAP == FACTORS) {
        static_assert(PIVOT_SLOTS <= 8, "one operand has them all");
        const void* const pivots = pivot_row(item, heads, 0);
#pragma unroll
        for (int i = 0; i < KEY_CHUNKS; i++) query.multiply(y, chunk(pivots, i), i);
    }
    // Products with the leading slice are in lanes of even c, those with the rest in their neighbours.
    auto whole = [](float x) { return x + __shfl_xor_sync(ALL, x, 1); };
    const float sum = whole(c < 2 ? Query::product(z) : Query::product(y));
    if (c % 2 == 0) (c == 0 ? scratch.c[0] : scratch.y)[r] = sum;
#pragma unroll 1
    for (int first = 8; first < rank; first += 8) {
        Row rows = second_rows;
        if (first > 8) rows = load_map(arg, item, heads, 0, first);
        float d[4] = {};
#pragma unroll
        for (int i = 0; i < KEY_CHUNKS; i++) query.multiply(d, rows.x[i], i);
        const float more = whole(Query::product(d));
        if (c == 0) scratch.c[0][first + r] = more;
    }
}
