// What heads with a sketch need for their output, from shared memory: weights of the tokens, and what maps and pivots make of the query.
#pragma once
#include "read_item.cuh"
#include "warp_latch.cuh"

constexpr int PIVOT_SLOTS = PIVOTS_2 < 2 ? 2 : PIVOTS_2;
// Of a head, with room for whole tiles: coefficients, eight at a time, and where rows are operands weights of all of them, 16 at a time.
constexpr int WEIGHTS = OPERANDS ? (RANK_MAX + W - 1 + 15) / 16 * 16 : (RANK_MAX + 7) / 8 * 8;

// Whether maps and pivots meet an effective query on the tensor cores, though tokens do not: rows as they lie in memory, the query
// in two bf16 slices (2^-16), the leading one and the rest.
constexpr bool SLICED = SPLIT && SKETCH == BF16;
constexpr int KEY_CHUNKS = K / 32;
struct QuerySlices {
    alignas(16) u32 of[SLICED ? 32 * KEY_CHUNKS : 4];

    // Of a slice, the even words or the odd ones that lanes take which have this c (Query).
    __device__ __forceinline__ u32* words(int slice, int odd, int c) { return &of[(8 * slice + 4 * odd + c) * 2 * KEY_CHUNKS]; }

    // LK channels a lane.
    __device__ __forceinline__ void set(const float (&x)[LK]) {
#pragma unroll
        for (int n = 0; n < LK; n += 2) {
            const int word = (threadIdx.x % 32 * LK + n) / 2;
            const u32 low = __float_as_uint(x[n]), high = __float_as_uint(x[n + 1]);
            auto put = [&](int slice, u32 pair) { words(slice, word % 2, word / 4 % 4)[word / 16 * 2 + word / 2 % 2] = pair; };
            put(0, __byte_perm(low, high, 0x7632));
            put(1, floats_to_bf16(x[n] - __uint_as_float(low & 0xffff0000u), x[n + 1] - __uint_as_float(high & 0xffff0000u)));
        }
    }
};

// Small results that the lanes of a warp exchange.
struct Scratch {
    union {
        alignas(16) float product[MATRIX && ERASES ? 16 : 1][20];  // of tokens and the query (last row); padded: bank conflicts
        QuerySlices query;
        struct {
            alignas(16) float c[TOGETHER][WEIGHTS];   // rows of the map times x, then the coefficients or all weights
            float y[TOGETHER * PIVOT_SLOTS + 8];      // B^T x
        };
    };
    alignas(8) float weight[TOGETHER][W];            // c_s; 0 after the newest
    alignas(8) float beta[SPLIT ? W : 1];
    float part[TOGETHER][16];                        // gdn: the query that is left is -sum_s part_s k_s, times decay
    float whole[TOGETHER];                           // decay of the whole window
};

// Products of a row's tokens with its query at one key head, where the block works them out.
struct Scores {
    float of[16];
    WarpLatch known;
};

// A lane's part of a row as an operand of m16n8k16: channels 32 i + 8 c to 32 i + 8 c + 7, whose places among 16 are
// the same in all operands.
__device__ __forceinline__ uint4 chunk(const void* row, int i) {
    return static_cast<const uint4*>(row)[4 * i + threadIdx.x % 4];
}
struct Row {
    uint4 x[KEY_CHUNKS];
    __device__ __forceinline__ void load(const void* row) {
#pragma unroll
        for (int i = 0; i < KEY_CHUNKS; i++) x[i] = chunk(row, i);
    }
};

// Two rows of a lane as a left operand over a chunk, r and r + 8; d[m][n] += <row m, row n> with row r of another.
// `none` is 0, but not to the compiler: words that are merely moved it would move once more for every product.
struct Left {
    u32 x[2][4];
    __device__ __forceinline__ Left(const uint4& low, const uint4& high, u32 none)
        : x{{low.x | none, high.x | none, low.y | none, high.y | none},
            {low.z | none, high.z | none, low.w | none, high.w | none}} {}
    __device__ __forceinline__ void multiply(float (&d)[4], const uint4& other) const {
        mma_bf16(d, x[0], other.x, other.y);
        mma_bf16(d, x[1], other.z, other.w);
    }
};

// Scalar decays of a lane's tokens: from each to the newest, and of the window up to each.
struct Decays {
    float after[TURNS], whole[TURNS];

    __device__ __forceinline__ explicit Decays(const Gates& gates) {
        const int s = threadIdx.x % SPAN;
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            float sum = __shfl_down_sync(ALL, gates.g[i], 1, SPAN);  // of later tokens' gates
            if (s == SPAN - 1) sum = 0;
#pragma unroll
            for (int d = 1; d < 16; d *= 2) {
                const float y = __shfl_down_sync(ALL, sum, d, SPAN);
                if (s + d < SPAN) sum += y;
            }
            after[i] = decay(sum), whole[i] = decay(sum + gates.g[i]);
        }
    }
};

// Weights of the tokens, and parts of the effective query, from products of keys and query. With scalar decays D_s
// after token s, c_s = D_s e_s, where e = beta (<k, q> - sum over later tokens j of <k, k_j> e_j) has no decays in it.
__device__ __forceinline__ void solve(const float* with_query, const Gates& gates, const Decays& decays, int pos, Scratch& scratch) {
    const int lane = threadIdx.x % 32, s = lane % SPAN;
    float e[TURNS], row[16];
#pragma unroll
    for (int i = 0; i < TURNS; i++) e[i] = s <= pos ? with_query[s % 16] : 0.f;
    if (ERASES) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float4 x = *reinterpret_cast<const float4*>(&scratch.product[s % 16][4 * n]);
            row[4 * n] = x.x, row[4 * n + 1] = x.y, row[4 * n + 2] = x.z, row[4 * n + 3] = x.w;
        }
#pragma unroll
        for (int i = 0; i < TURNS; i++) e[i] *= gates.beta[i];
#pragma unroll
        for (int half = 1; half >= 0; half--) {
            if (8 * half > pos) continue;
            // Two tokens at a time: every lane takes the later one out of the earlier one itself, so that their shuffles do not follow
            // one another.
#pragma unroll
            for (int j = 8 * half + 7; j > 8 * half; j -= 2)
#pragma unroll
                for (int i = 0; i < TURNS; i++) {
                    const float with_later = gates.beta[i] * row[j], with_earlier = gates.beta[i] * row[j - 1];
                    const float later = __shfl_sync(ALL, e[i], j, SPAN);
                    const float earlier = __shfl_sync(ALL, e[i], j - 1, SPAN) - __shfl_sync(ALL, with_later, j - 1, SPAN) * later;
                    if (s < j) e[i] -= with_later * later;
                    if (s < j - 1) e[i] -= with_earlier * earlier;
                }
        }
    }
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        const int h = lane / SPAN + i * HEADS_AT_ONCE;
        if (h >= TOGETHER || s >= 16) continue;
        if (s < W) scratch.weight[h][s] = decays.after[i] * e[i];
        if (ERASES) scratch.part[h][s] = s == 15 ? -1.f : e[i];
        if (s == 0) scratch.whole[h] = decays.whole[i];
    }
}

// Eight rows of a head's map; a dense head has none, and gets some other ones.
__device__ __forceinline__ Row load_map(const Arguments& arg, const Item& item, const Heads& heads, int h, int first) {
    const int rank = heads.rank[h], row = max(min(first + static_cast<int>(threadIdx.x) % 32 / 4, rank - 1), 0);
    Row rows;
    if (MAP == OWN) rows.load(rank ? item.sketches() + heads.at[h] + rank * V + row * K : item.sketches());
    else rows.load(arg.projection + heads.projection[h] + row * K);
    return rows;
}
// The eight rows of each head of an item, where there are any.
struct MapRows {
    Row of[TOGETHER];
    __device__ __forceinline__ void load(const Arguments& arg, const Item& item, const Heads& heads, int first) {
#pragma unroll
        for (int h = 0; h < TOGETHER; h++)
            if (first == 0 || first < heads.rank[h]) of[h] = load_map(arg, item, heads, h, first);
    }
};
// Rows that a tile of the pivots' products has: those of all heads of an item, one after the other.
constexpr int PIVOT_TILES = MAP == FACTORS ? (TOGETHER * PIVOT_SLOTS + 7) / 8 : 0;
__device__ __forceinline__ const void* pivot_row(const Item& item, const Heads& heads, int tile) {
    // rows that a head or an item does not have are some other row, and their products nobody's
    const int place = 8 * tile + threadIdx.x % 32 / 4, h = min(place / PIVOT_SLOTS, TOGETHER - 1);
    const int rank = heads.rank[h];
    if (TOGETHER > 1 && rank == 0) return item.query();
    return item.sketches() + heads.at[h] + rank * V + min(place % PIVOT_SLOTS, pivots_of(rank) - 1) * K;
}

// The query as the right operand for rows that are left ones as they lie in memory: a row's four words stand in places
// (r, c), (r + 8, c), (r, c + 4) and (r + 8, c + 4), even columns have the query's words 0 and 2, odd ones 1 and 3.
// Every even column of the upper half of a product, and every odd one of the lower half, has a part of it.
struct Query {
    u32 x[KEY_CHUNKS][2];
    __device__ __forceinline__ void load(const void* row) {
        const int odd = threadIdx.x / 4 % 2;
#pragma unroll
        for (int i = 0; i < KEY_CHUNKS; i++) {
            const u32* const words = static_cast<const u32*>(row) + 16 * i + threadIdx.x % 4 * 4 + odd;
            x[i][0] = words[0], x[i][1] = words[2];
        }
    }
    // One in slices: every other pair of columns has the rest.
    __device__ __forceinline__ void load(QuerySlices& slices) {
        const int r = threadIdx.x / 4 % 8;
        const u32* const words = slices.words(r / 2 % 2, r % 2, threadIdx.x % 4);
#pragma unroll
        for (int i = 0; i < KEY_CHUNKS; i += 2) {
            const uint4 four = *reinterpret_cast<const uint4*>(words + 2 * i);
            x[i][0] = four.x, x[i][1] = four.y, x[i + 1][0] = four.z, x[i + 1][1] = four.w;
        }
    }
    __device__ __forceinline__ void multiply(float (&d)[4], const uint4& row, int i) const {
        const u32 a[4] = {row.x, row.y, row.z, row.w};
        mma_bf16(d, a, x[i][0], x[i][1]);
    }
    // of row r, in all of its four lanes
    static __device__ __forceinline__ float product(const float (&d)[4]) { return d[0] + d[3]; }
};

// Products along K without erasure: of maps and pivots with the query, eight rows at a time.
__device__ __forceinline__ void project_query(const Arguments& arg, const Item& item, const Heads& heads,
                                              const Gates& gates, const MapRows& first_rows, Scores& scores,
                                              Scratch& scratch) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    const Decays decays(gates);
    Query query;
    query.load(item.query());
    const void* pivots[PIVOT_TILES + 1];
#pragma unroll
    for (int n = 0; n < PIVOT_TILES; n++) pivots[n] = pivot_row(item, heads, n);
    float z[TOGETHER][4] = {}, y[PIVOT_TILES + 1][4] = {};
#pragma unroll
    for (int i = 0; i < KEY_CHUNKS; i++) {
#pragma unroll
        for (int h = 0; h < TOGETHER; h++) query.multiply(z[h], first_rows.of[h].x[i], i);
#pragma unroll
        for (int n = 0; n < PIVOT_TILES; n++) query.multiply(y[n], chunk(pivots[n], i), i);
    }
    scores.known.wait(0);
    __syncwarp();
    solve(scores.of, gates, decays, item.pos, scratch);
#pragma unroll
    for (int h = 0; h < TOGETHER; h++)
        if (c == h) scratch.c[h][r] = Query::product(z[h]);
#pragma unroll
    for (int n = 0; n < PIVOT_TILES; n++)
        if (c == 3 - n) scratch.y[8 * n + r] = Query::product(y[n]);
#pragma unroll 1
    for (int h = 0; h < TOGETHER; h++) {
#pragma unroll 1
        for (int first = 8; first < heads.rank[h]; first += 8) {
            const Row rows = load_map(arg, item, heads, h, first);
            float d[4] = {};
#pragma unroll
            for (int i = 0; i < KEY_CHUNKS; i++) query.multiply(d, rows.x[i], i);
            if (c == 0) scratch.c[h][first + r] = Query::product(d);
        }
    }
}

// All products along K with erasure, in one pass over K. Rows of the left operand are tokens 0 to pos and, in all
// other places, the query; the right ones are tokens, maps and pivots. The effective query is never formed: what a map
// makes of it is a sum of what it makes of keys and query.
__device__ __forceinline__ void project_matrix(const Arguments& arg, const Item& item, const Heads& heads,
                                               const Gates& gates, const MapRows& first_rows, Scratch& scratch) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4, pos = item.pos;
    const u32 none = pos < 0;
    const act_t* const query = item.query();
    const act_t *const lower = r <= pos ? item.key(r) : query, *const upper = r + 8 <= pos ? item.key(r + 8) : query;
    const Decays decays(gates);
    // Tiles of eight columns: the first eight rows of each head's map, the pivots of all, the second eight rows.
    constexpr int PIVOT = TOGETHER, SECOND = TOGETHER + PIVOT_TILES, TILES = SECOND + (RANK_MAX > 8 ? TOGETHER : 0);
    MapRows second_rows;  // where a rank has none, products with what is there are nobody's
    second_rows.load(arg, item, heads, 8);
    const void* pivots[PIVOT_TILES + 1];
#pragma unroll
    for (int n = 0; n < PIVOT_TILES; n++) pivots[n] = pivot_row(item, heads, n);
    float scores[2][4] = {}, z[TILES][4] = {};
#pragma unroll
    for (int i = 0; i < KEY_CHUNKS; i++) {
        const uint4 low = chunk(lower, i), high = chunk(upper, i);
        const Left tokens(low, high, none);
        tokens.multiply(scores[0], low);
        tokens.multiply(scores[1], high);
#pragma unroll
        for (int h = 0; h < TOGETHER; h++) tokens.multiply(z[h], first_rows.of[h].x[i]);
#pragma unroll
        for (int n = 0; n < PIVOT_TILES; n++) tokens.multiply(z[PIVOT + n], chunk(pivots[n], i));
#pragma unroll
        for (int n = SECOND; n < TILES; n++) tokens.multiply(z[n], second_rows.of[n - SECOND].x[i]);
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const float(&d)[4] = scores[n];
        auto put = [&](int row, float x, float y) {
            *reinterpret_cast<float2*>(&scratch.product[row][8 * n + 2 * c]) = make_float2(x, y);
        };
        put(r, d[0], d[1]), put(r + 8, d[2], d[3]);
    }
    __syncwarp();
    solve(scratch.product[MATRIX && ERASES ? 15 : 0], gates, decays, pos, scratch);
    __syncwarp();
    float parts[TOGETHER][2];  // of the thread's rows r and r + 8
#pragma unroll
    for (int h = 0; h < TOGETHER; h++) parts[h][0] = -scratch.part[h][r], parts[h][1] = -scratch.part[h][r + 8];
    // Columns 2c and 2c + 1 of 8 rows' products: what the effective query makes of them, but for its decay.
    auto sum = [&](const float (&d)[4], int h, float (&x)[2]) {
        const float upper = h ? parts[TOGETHER - 1][0] : parts[0][0], lower = h ? parts[TOGETHER - 1][1] : parts[0][1];
        x[0] = upper * d[0] + lower * d[2], x[1] = upper * d[1] + lower * d[3];
    };
    auto put = [&](const float (&x)[2], float* to) {
        if (r == 0) *reinterpret_cast<float2*>(to + 2 * c) = make_float2(x[0], x[1]);
    };
    auto add_lanes = [&](auto& x) {  // chains side by side
#pragma unroll
        for (int bit = 4; bit < 32; bit *= 2)
#pragma unroll
            for (auto& pair : x)
#pragma unroll
                for (float& y : pair) y += __shfl_xor_sync(ALL, y, bit);
    };
    float x[TILES][2];
#pragma unroll
    for (int n = 0; n < TILES; n++)
        sum(z[n], n < PIVOT ? n : n >= SECOND ? n - SECOND : min((8 * (n - PIVOT) + 2 * c) / PIVOT_SLOTS, TOGETHER - 1), x[n]);
    add_lanes(x);
#pragma unroll
    for (int h = 0; h < TOGETHER; h++) put(x[h], scratch.c[h]);
#pragma unroll
    for (int n = 0; n < PIVOT_TILES; n++) put(x[PIVOT + n], &scratch.y[8 * n]);
#pragma unroll
    for (int h = 0; h < TOGETHER; h++) {
        if constexpr (TILES > SECOND)
            if (heads.rank[h] > 8) put(x[SECOND + h], &scratch.c[h][8]);
#pragma unroll 1
        for (int first = 16; first < heads.rank[h]; first += 8) {
            const Row rows = load_map(arg, item, heads, h, first);
            float d[4] = {}, more[1][2];
#pragma unroll
            for (int i = 0; i < KEY_CHUNKS; i++) Left(chunk(lower, i), chunk(upper, i), none).multiply(d, rows.x[i]);
            sum(d, h, more[0]);
            add_lanes(more);
            put(more[0], &scratch.c[h][first]);
        }
    }
}
