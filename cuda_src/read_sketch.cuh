// State read and buffer output of heads with a sketch, from shared memory: o = U c + sum over tokens of w_s v_s.
#pragma once
#include "read_item.cuh"

constexpr int PIVOT_SLOTS = PIVOTS_2 < 2 ? 2 : PIVOTS_2;
constexpr int RANKS = (RANK_MAX + 7) / 8 * 8;

// Small results that the lanes of a warp exchange.
struct Scratch {
    alignas(16) float product[MATRIX ? 16 : 1][20];  // of tokens and the query (row 15), padded against bank conflicts
    float weight[TOGETHER][W];                       // c_s
    float part[TOGETHER][16];                        // gdn: the query that is left is -sum_s part_s k_s, times decay
    float c[TOGETHER][RANKS];                        // rows of the map times x, then the coefficients
    float y[TOGETHER * PIVOT_SLOTS + 8];             // B^T x
    float whole[TOGETHER];                           // decay of the whole window
};

// Rows of the map against x: the projection of the whole head, or this state's own map.
__device__ __forceinline__ const sketch_t* map_rows(const Arguments& arg, const sketch_t* sketch, int rank, int projection) {
    return MAP == OWN ? sketch + rank * V : arg.projection + projection;
}

// A lane's part of a row as an operand of m16n8k16: channels 32 i + 8 c to 32 i + 8 c + 7, whose places among 16 are
// the same in all operands.
struct Row {
    u32 x[K / 32][4];
    __device__ __forceinline__ void load(const void* row) {
#pragma unroll
        for (int i = 0; i < K / 32; i++) {
            const uint4 y = static_cast<const uint4*>(row)[4 * i + threadIdx.x % 4];
            x[i][0] = y.x, x[i][1] = y.y, x[i][2] = y.z, x[i][3] = y.w;
        }
    }
};

// d[m][n] = <row m of `low` and `high`, row n of `other`>.
__device__ __forceinline__ void multiply(float (&d)[4], const Row& low, const Row& high, const Row& other) {
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int i = 0; i < K / 32; i++) {
        const u32 first[4] = {low.x[i][0], high.x[i][0], low.x[i][1], high.x[i][1]};
        const u32 second[4] = {low.x[i][2], high.x[i][2], low.x[i][3], high.x[i][3]};
        mma_bf16(even, first, other.x[i][0], other.x[i][1]);
        mma_bf16(odd, second, other.x[i][2], other.x[i][3]);
    }
#pragma unroll
    for (int n = 0; n < 4; n++) d[n] = even[n] + odd[n];
}

// Weights of the tokens, and parts of the effective query, from products of keys and query. With scalar decays D_s
// after token s, c_s = D_s e_s, where e = beta (<k, q> - sum over later tokens j of <k, k_j> e_j) has no decays in it.
__device__ __forceinline__ void solve(Scratch& scratch, const Gates& gates, int pos) {
    const int lane = threadIdx.x % 32, s = lane % SPAN;
    float e[TURNS], row[16];
    if (ERASES) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float4 x = *reinterpret_cast<const float4*>(&scratch.product[s % 16][4 * n]);
            row[4 * n] = x.x, row[4 * n + 1] = x.y, row[4 * n + 2] = x.z, row[4 * n + 3] = x.w;
        }
    }
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        e[i] = s <= pos ? scratch.product[15][s % 16] : 0.f;
        if (!ERASES) continue;
        e[i] *= gates.beta[i];
        float other[W - 1];
#pragma unroll
        for (int j = 1; j < W - 1; j++) other[j] = s < j ? gates.beta[i] * row[j] : 0.f;
#pragma unroll
        for (int j = W - 2; j > 0; j--)
            if (j <= pos) e[i] -= __shfl_sync(ALL, e[i], j, SPAN) * other[j];
    }
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        float after = __shfl_down_sync(ALL, gates.g[i], 1, SPAN);  // sum of later tokens' gates
        if (s == SPAN - 1) after = 0;
#pragma unroll
        for (int d = 1; d < 16; d *= 2) {
            const float y = __shfl_down_sync(ALL, after, d, SPAN);
            if (s + d < SPAN) after += y;
        }
        const int h = lane / SPAN + i * HEADS_AT_ONCE;
        if (h >= TOGETHER || s >= 16) continue;
        if (s < W) scratch.weight[h][s] = decay(after) * e[i];
        if (ERASES) scratch.part[h][s] = s == 15 ? -1.f : e[i];
        if (s == 0) scratch.whole[h] = decay(after + gates.g[i]);
    }
}

// All products along K by tensor cores. Rows are those of tokens 0 to pos and, in all other places, the query.
__device__ __forceinline__ void project_matrix(const Arguments& arg, const Item& item, const Heads& heads, const Gates& gates, Scratch& scratch) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4, pos = item.pos;
    Row low, high;
    auto load = [&](Row& row, int s) { row.load(item.key(s <= pos ? s : pos + 1)); };
    float d[4];
    if (ERASES) {
        load(low, r), load(high, r + 8);
    } else {
        load(low, 15), high = low;
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
        if (8 * n > pos) break;
        Row keys;
        if (!ERASES) load(keys, r + 8 * n);
        multiply(d, low, high, ERASES ? n ? high : low : keys);
        if (ERASES) *reinterpret_cast<float2*>(&scratch.product[r][8 * n + 2 * c]) = make_float2(d[0], d[1]);
        if (ERASES || r == 0) *reinterpret_cast<float2*>(&scratch.product[ERASES ? r + 8 : 15][8 * n + 2 * c]) = make_float2(d[2], d[3]);
    }
    __syncwarp();
    solve(scratch, gates, pos);
    __syncwarp();
    // Of 8 rows of a map, columns 2c and 2c + 1 of d: what they make of the effective query, but for its decay.
    auto against = [&](const Row& rows, int h, float* to) {
        multiply(d, low, high, rows);
        float x = d[0], y = d[1];
        if (ERASES) {
            const float upper = -scratch.part[h][r], lower = -scratch.part[h][r + 8];
            x = upper * d[0] + lower * d[2], y = upper * d[1] + lower * d[3];
#pragma unroll
            for (int bit = 4; bit < 32; bit *= 2) x += __shfl_xor_sync(ALL, x, bit), y += __shfl_xor_sync(ALL, y, bit);
        }
        if (r == 0) *reinterpret_cast<float2*>(to + 2 * c) = make_float2(x, y);
    };
    const sketch_t* sketch = item.sketches();
#pragma unroll
    for (int h = 0; h < TOGETHER; h++) {
        const int rank = heads.rank[h];
        for (int first = 0; first < rank; first += 8) {
            Row rows;
            rows.load(map_rows(arg, sketch, rank, heads.projection[h]) + min(first + r, rank - 1) * K);
            against(rows, h, &scratch.c[h][first]);
        }
        sketch += sketch_elements(rank);
    }
    if (MAP != FACTORS) return;
#pragma unroll
    for (int first = 0; first < TOGETHER * PIVOT_SLOTS; first += 8) {
        // rows that a head or an item does not have are some other row, and their products nobody's
        const int place = min(first + r, TOGETHER * PIVOT_SLOTS - 1), h = place / PIVOT_SLOTS;
        const sketch_t* own = item.sketches();
        int rank = heads.rank[0];
#pragma unroll
        for (int n = 1; n < TOGETHER; n++)
            if (n <= h) own += sketch_elements(rank), rank = heads.rank[n];
        Row rows;
        if (rank > 0) rows.load(own + rank * V + min(place % PIVOT_SLOTS, pivots_of(rank) - 1) * K);
        else rows = low;
        against(rows, min((first + 2 * c) / PIVOT_SLOTS, TOGETHER - 1), &scratch.y[first]);
    }
}

// The same by each lane's share of the effective query, for one head.
__device__ __forceinline__ void project(const Arguments& arg, const Item& item, const Heads& heads, const Gates& gates, Scratch& scratch) {
    const int lane = threadIdx.x % 32, pos = item.pos, rank = heads.rank[0], p = pivots_of(rank);
    const Tokens tokens{item.key(pos + 1), item.key(0), item.key(pos), item.gates(), item.gates() + pos * K};
    const WindowRead window = read_window(tokens, pos, gates.g[0], gates.beta[0]);
    if (lane < W) scratch.weight[0][lane] = window.weight;
    if (lane == 0) scratch.whole[0] = 1;
    auto against = [&](const sketch_t* rows, int count, float* to) {
        for (int first = 0; first < count; first += 8) {
            float sums[8];
#pragma unroll
            for (int j = 0; j < 8; j++) {
                Packed<SKETCH, LK> row;
                row.load(rows + min(first + j, count - 1) * K + lane * LK);
                sums[j] = 0;
#pragma unroll
                for (int n = 0; n < LK; n++) sums[j] += row[n] * window.x[n];
            }
            const float sum = group_sums<32>(sums);
            if (lane % 4 == 0) to[first + lane / 4] = sum;
        }
    };
    against(map_rows(arg, item.sketches(), rank, heads.projection[0]), rank, scratch.c[0]);
    if (MAP == FACTORS) against(item.sketches() + rank * V, p, scratch.y);
}

// One item, whose bytes are there.
__device__ __forceinline__ void read_sketched(const Arguments& arg, const Item& item, const Heads& heads, const Gates& gates, int first,
                                              i64 row, Scratch& scratch) {
    if constexpr (MATRIX) project_matrix(arg, item, heads, gates, scratch);
    else project(arg, item, heads, gates, scratch);
    __syncwarp();

    const int h = threadIdx.x % 32 / LANES, pos = item.pos;
    const sketch_t* u = item.sketches();
    int rank = heads.rank[0];
#pragma unroll
    for (int n = 1; n < TOGETHER; n++)
        if (n <= h) u += sketch_elements(rank), rank = heads.rank[n];
    const int p = pivots_of(rank);
    const sketch_t *const f = u + rank * V + p * K, *const w = f + rank * p;
    for (int j = threadIdx.x % LANES; j < rank; j += LANES) {  // c = w z + F (B^T x)
        float own = scratch.c[h][j];
        if (MAP == FACTORS) {
            own *= widen<SKETCH>(w[j]);
#pragma unroll
            for (int i = 0; i < PIVOTS; i++)
                if (i < p) own += widen<SKETCH>(f[j * p + i]) * scratch.y[h * PIVOT_SLOTS + i];
        }
        scratch.c[h][j] = scratch.whole[h] * own;
    }
    __syncwarp();

    typedef ValueShare<LANES> Share;
    float o[Share::COUNT][Share::WIDTH] = {};
#pragma unroll 4
    for (int j = 0; j < rank; j++) {
        const float weight = scratch.c[h][j];
#pragma unroll
        for (int i = 0; i < Share::COUNT; i++) {
            if (Share::at(i) >= V) continue;
            Packed<SKETCH, Share::WIDTH> x;
            x.load(u + j * V + Share::at(i));
#pragma unroll
            for (int n = 0; n < Share::WIDTH; n++) o[i][n] += weight * x[n];
        }
    }
    const act_t* const values = item.values(h);
#pragma unroll 4
    for (int s = 0; s <= pos; s++) {
        const float weight = scratch.weight[h][s];
#pragma unroll
        for (int i = 0; i < Share::COUNT; i++) {
            if (Share::at(i) >= V) continue;
            Packed<ACT, Share::WIDTH> x;
            x.load(values + s * V + Share::at(i));
#pragma unroll
            for (int n = 0; n < Share::WIDTH; n++) o[i][n] += weight * x[n];
        }
    }
    if (rank == 0) return;
#pragma unroll
    for (int i = 0; i < Share::COUNT; i++) {
        if (Share::at(i) >= V) continue;
        Packed<OUT, Share::WIDTH> rounded;
        rounded.set(o[i]);
        rounded.store(arg.out + (row * HEADS + first + h) * V + Share::at(i));
    }
}
