// Coefficients of heads with a sketch: token weights, and products of the effective query with map and pivots.
#pragma once
#include "read/tile.cuh"
#include "lib/warp_mbarrier.cuh"

constexpr int PIVOT_SLOTS = PIVOTS_2 < 2 ? 2 : PIVOTS_2;
// Room for a head's weights, rounded up to whole operand tiles: the map's coefficients (multiples of 8), or with
// SWIZZLED all summed rows (multiples of 16; with codes, columns and tokens are rounded up separately).
constexpr int WEIGHTS = !SWIZZLED ? (RANK_MAX + 7) / 8 * 8
                        : CODED   ? 16 + (NO_READ + 15) / 16 * 16
                                  : (RANK_MAX + NO_READ + 15) / 16 * 16;

// Token-by-token path with bf16 storage: products with map and pivots still use the tensor cores. Rows of map and
// pivots are operands as stored, and the effective query is split into two bf16 slices (to 2^-16).
constexpr bool QUERY_SLICED = TWO_HALVES && SKETCH != FP32;
constexpr int KEY_CHUNKS = K / 32;

// Operand order of this kernel for m16n8k16: lane (r, c) has chunks of 8 channels of row r. Chunk i is the 16-byte
// piece number piece_of(i) of the row. All operands have their channels in the same order, so the sum does not depend
// on the order. With codes, chunks 2i and 2i + 1 are neighbours: one 16-byte load gets the codes of both (unless the
// number of chunks is odd).
constexpr bool PAIRED = CODED && KEY_CHUNKS % 2 == 0;
DEVICE int piece_of(int i) {
    const int c = threadIdx.x % 4;
    return PAIRED ? 8 * (i / 2) + 2 * c + i % 2 : 4 * i + c;
}

struct QuerySlices {
    alignas(16) u32 of[QUERY_SLICED ? 32 * KEY_CHUNKS : 4];

    // The even (odd = 0) or odd words of a slice for lanes (r, c) with this c, in QueryFragment's order of loads.
    DEVICE u32* words(int slice, int odd, int c) { return &of[(8 * slice + 4 * odd + c) * 2 * KEY_CHUNKS]; }

    // Stores the query, LK channels a lane.
    DEVICE void set(const float (&x)[LK]) {
        if (!has_channels()) return;
#pragma unroll
        for (int n = 0; n < LK; n += 2) {
            const int word = (threadIdx.x % 32 * LK + n) / 2, piece = word / 4;
            const int c = PAIRED ? piece / 2 % 4 : piece % 4, i = PAIRED ? piece / 8 * 2 + piece % 2 : piece / 4;
            const u32 low = __float_as_uint(x[n]), high = __float_as_uint(x[n + 1]);
            auto put = [&](int slice, u32 pair) { words(slice, word % 2, c)[i * 2 + word / 2 % 2] = pair; };
            put(0, __byte_perm(low, high, 0x7632));
            put(1, floats_to_bf16(x[n] - __uint_as_float(low & 0xffff0000u),
                                  x[n + 1] - __uint_as_float(high & 0xffff0000u)));
        }
    }
};

// A query in slices, for residuals (read/residual.cuh); with SWIZZLED the outputs stay in registers.
template <bool USED> struct ResidualScratch {
    union {
        alignas(16) signed char slices[2 * K];
        float outputs[SWIZZLED ? 1 : V];
    };
};
template <> struct ResidualScratch<false> {};

// Small intermediate results in shared memory, one per warp.
struct Scratch : ResidualScratch<(RESIDUAL > 0)> {
    union {
        // <k_s, k_j>, last row <k_s, q>; padded against bank conflicts
        alignas(16) float product[MATRIX && ERASES ? 16 : 1][20];
        QuerySlices query;
        struct {
            alignas(16) float c[TILE_HEADS][WEIGHTS];  // map times x; later the coefficients, or all weights
            float y[TILE_HEADS * PIVOT_SLOTS + 8];     // B^T x
        };
    };
    alignas(8) float weight[TILE_HEADS][W];  // c_s; 0 past the newest token
    alignas(8) float beta[TWO_HALVES ? W : 1];
    // gdn: effective query = -decay * sum_s query_part_s k_s (q is k_15, or if 16 tokens leave it no place, apart)
    float query_part[TILE_HEADS][16];
    float window_decay[TILE_HEADS];    // decay of the whole window
};

// Scores <k_s, q> of a row at one key head, computed once per block (SHARED_SCORES).
struct KeyScores {
    float of[16];
    WarpMbarrier full;
};

DEVICE uint4 chunk(const void* row, int i) { return static_cast<const uint4*>(row)[piece_of(i)]; }

// A lane's row of 16-bit numbers, or of codes; codes are widened at each use.
template <bool CODES> struct RowFragment {
    static constexpr int LOADS = CODES ? (KEY_CHUNKS + 1) / 2 : KEY_CHUNKS;
    uint4 x[LOADS];

    DEVICE void load(const void* row) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            if constexpr (!CODES) {
                x[i] = chunk(row, i);
            } else if constexpr (PAIRED) {
                x[i] = static_cast<const uint4*>(row)[4 * i + threadIdx.x % 4];
            } else {
                const uint2* const codes = static_cast<const uint2*>(row);
                const uint2 low = codes[piece_of(2 * i)], high = codes[piece_of(min(2 * i + 1, KEY_CHUNKS - 1))];
                x[i] = make_uint4(low.x, low.y, high.x, high.y);
            }
        }
    }
    DEVICE uint4 of(int i) const {
        if constexpr (!CODES) return x[i];
        else return widen_codes(i % 2 ? make_uint2(x[i / 2].z, x[i / 2].w) : make_uint2(x[i / 2].x, x[i / 2].y));
    }
};
typedef RowFragment<false> TokenRow;
typedef RowFragment<CODED && MAP == DENSE> MapRow;

// Left operand from the lane's rows r and r + 8. multiply: d[m][n] += <row m of this, row n of the other fragment>.
// `none` is 0 at run time, but the compiler does not know this value; with a constant 0, the compiler would move the
// words again for every product.
struct LeftFragment {
    u32 x[2][4];
    DEVICE LeftFragment(const uint4& low, const uint4& high, u32 none)
        : x{{low.x | none, high.x | none, low.y | none, high.y | none},
            {low.z | none, high.z | none, low.w | none, high.w | none}} {}
    DEVICE void multiply(float (&d)[4], const uint4& other) const {
        mma_bf16(d, x[0], other.x, other.y);
        mma_bf16(d, x[1], other.z, other.w);
    }
};

// Scalar decays: `after` the lane's token s up to the newest token, D_{s+1:t}; `whole` also includes token s itself.
struct Decays {
    float after, whole;

    DEVICE explicit Decays(const TokenScalars& gates) {
        const float sum = sum_of_later<SPAN, 16>(gates.g);
        after = decay(sum), whole = decay(sum + gates.g);
    }
};

// Whether the newest token has the query's place among 16 operand rows: in the last read of a window, of a monitor.
DEVICE bool has_query_apart(int pos) { return MONITOR && NO_READ == 16 && pos == 15; }

// Token weights, and the tokens' parts of the effective query, from the products of keys and query. With scalar decays
// D_s after token s, c_s = D_s e_s, where e = beta (<k, q> - sum over later tokens j of <k, k_j> e_j) contains no
// decay.
DEVICE void solve(const float* with_query, const TokenScalars& gates, const Decays& decays, int pos, Scratch& scratch) {
    const int lane = threadIdx.x % 32, s = lane % SPAN, h = lane / SPAN;
    float e = s <= pos ? with_query[s % 16] : 0.f, row[16];
    if (ERASES) {
        load_floats(row, scratch.product[s % 16]);
        e *= gates.beta;
#pragma unroll
        for (int half = 1; half >= 0; half--) {
            if (8 * half > pos) continue;
            // Two tokens at a time: every lane recomputes the earlier token's result from the later token's, so that
            // the two shuffles do not depend on each other.
#pragma unroll
            for (int j = 8 * half + 7; j > 8 * half; j -= 2) {
                const float with_later = gates.beta * row[j], with_earlier = gates.beta * row[j - 1];
                const float later = __shfl_sync(ALL, e, j, SPAN);
                const float earlier =
                    __shfl_sync(ALL, e, j - 1, SPAN) - __shfl_sync(ALL, with_later, j - 1, SPAN) * later;
                if (s < j) e -= with_later * later;
                if (s < j - 1) e -= with_earlier * earlier;
            }
        }
    }
    if (s >= 16) return;
    if (s < W) scratch.weight[h][s] = decays.after * e;
    if (ERASES) scratch.query_part[h][s] = s == 15 && !has_query_apart(pos) ? -1.f : e;
    if (s == 0) scratch.window_decay[h] = decays.whole;
}

// Eight rows of a head's map, from `first` on (0 or 8). A full-state head has no map and loads arbitrary valid rows.
template <class Buffer>
DEVICE MapRow load_map(const Arguments& arg, const Buffer& buffer, const TileHeads& heads, int h, int first) {
    const int rank = heads.rank[h], row = max(min(first + static_cast<int>(threadIdx.x) % 32 / 4, rank - 1), 0);
    MapRow rows;
    const int at = heads.at[h] + rank * V + row * K;
    if (MAP == DENSE) rows.load(buffer.sketches() + (rank ? at : 0));
    else rows.load(arg.projection + heads.projection[h] + row * K);
    return rows;
}
// Eight rows of the map of each head of a tile, as far as the maps have them.
struct MapFragments {
    MapRow of[TILE_HEADS];
    DEVICE void load(const Arguments& arg, const TileBuffer& buffer, const TileHeads& heads, int first) {
#pragma unroll
        for (int h = 0; h < TILE_HEADS; h++)
            if (first == 0 || first < heads.rank[h]) of[h] = load_map(arg, buffer, heads, h, first);
    }
};
// Operand tiles of pivot rows. The pivots of all heads of a work tile are consecutive rows.
constexpr int PIVOT_TILES = MAP == FACTORS ? (TILE_HEADS * PIVOT_SLOTS + 7) / 8 : 0;
template <class Buffer> DEVICE const void* pivot_row(const Buffer& buffer, const TileHeads& heads, int tile) {
    // Places without a pivot load another row; their products are not used.
    const int place = 8 * tile + threadIdx.x % 32 / 4, h = min(place / PIVOT_SLOTS, TILE_HEADS - 1);
    const int rank = heads.rank[h];
    if (TILE_HEADS > 1 && rank == 0) return buffer.query();
    return buffer.sketches() + heads.at[h] + rank * V + min(place % PIVOT_SLOTS, pivots_of(rank) - 1) * K;
}
DEVICE uint4 pivot_chunk(const void* row, int i) {
    if constexpr (CODED) return widen_codes(static_cast<const uint2*>(row)[piece_of(i)]);
    else return chunk(row, i);
}

// The query as right operand, for products with rows that are left operands as stored. The four words of a lane's 16
// bytes are elements (r, c), (r + 8, c), (r, c + 4), (r + 8, c + 4) of the left operand. Even columns of the right
// operand hold words 0 and 2 of the query, odd columns words 1 and 3. So <row r, query> = d[0] + d[3] in each of the
// row's four lanes.
struct QueryFragment {
    u32 x[KEY_CHUNKS][2];
    DEVICE void load(const void* row) {
        const int odd = threadIdx.x / 4 % 2;
#pragma unroll
        for (int i = 0; i < KEY_CHUNKS; i++) {
            const u32* const words = static_cast<const u32*>(row) + 4 * piece_of(i) + odd;
            x[i][0] = words[0], x[i][1] = words[2];
        }
    }
    // The query in two slices: columns 0, 1, 4, 5 hold the leading slice, columns 2, 3, 6, 7 the second.
    DEVICE void load(QuerySlices& slices) {
        const int r = threadIdx.x / 4 % 8;
        load_slice(slices.words(r / 2 % 2, r % 2, threadIdx.x % 4));
    }
    DEVICE void load_slice(const u32* words) {
        if constexpr (KEY_CHUNKS % 2 == 0) {
#pragma unroll
            for (int i = 0; i < KEY_CHUNKS; i += 2) {
                const uint4 four = *reinterpret_cast<const uint4*>(words + 2 * i);
                x[i][0] = four.x, x[i][1] = four.y, x[i + 1][0] = four.z, x[i + 1][1] = four.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < KEY_CHUNKS; i++) {
                const uint2 two = *reinterpret_cast<const uint2*>(words + 2 * i);
                x[i][0] = two.x, x[i][1] = two.y;
            }
        }
    }
    DEVICE void multiply(float (&d)[4], const uint4& row, int i) const {
        const u32 a[4] = {row.x, row.y, row.z, row.w};
        mma_bf16(d, a, x[i][0], x[i][1]);
    }
    // <row r, query>, in all four lanes of r
    static DEVICE float product(const float (&d)[4]) { return d[0] + d[3]; }
};

// Products along K without erasure (mamba2): maps and pivots with the query, eight rows at a time.
DEVICE void project_query(const Arguments& arg, const TileBuffer& buffer, const TileHeads& heads,
                          const TokenScalars& gates, const MapFragments& first_rows, KeyScores& scores,
                          Scratch& scratch) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    const Decays decays(gates);
    QueryFragment query;
    query.load(buffer.query());
    const void* pivots[PIVOT_TILES + 1];
#pragma unroll
    for (int n = 0; n < PIVOT_TILES; n++) pivots[n] = pivot_row(buffer, heads, n);
    float z[TILE_HEADS][4] = {}, y[PIVOT_TILES + 1][4] = {};
#pragma unroll
    for (int i = 0; i < KEY_CHUNKS; i++) {
#pragma unroll
        for (int h = 0; h < TILE_HEADS; h++) query.multiply(z[h], first_rows.of[h].of(i), i);
#pragma unroll
        for (int n = 0; n < PIVOT_TILES; n++) query.multiply(y[n], pivot_chunk(pivots[n], i), i);
    }
    scores.full.wait(0);
    __syncwarp();
    solve(scores.of, gates, decays, buffer.pos, scratch);
#pragma unroll
    for (int h = 0; h < TILE_HEADS; h++)
        if (c == h) scratch.c[h][r] = QueryFragment::product(z[h]);
#pragma unroll
    for (int n = 0; n < PIVOT_TILES; n++)
        if (c == 3 - n) scratch.y[8 * n + r] = QueryFragment::product(y[n]);
#pragma unroll 1
    for (int h = 0; h < TILE_HEADS; h++) {
#pragma unroll 1
        for (int first = 8; first < heads.rank[h]; first += 8) {
            const MapRow rows = load_map(arg, buffer, heads, h, first);
            float d[4] = {};
#pragma unroll
            for (int i = 0; i < KEY_CHUNKS; i++) query.multiply(d, rows.of(i), i);
            if (c == 0) scratch.c[h][first + r] = QueryFragment::product(d);
        }
    }
}

// All products along K with erasure (gdn), in one pass over K. Rows of the left operand: tokens 0 to pos; all other
// rows: the query. Right operands: tokens, maps, pivots. The effective query is never formed: its product with a map
// row is a sum over the products of keys and query with that row.
DEVICE void project_matrix(const Arguments& arg, const TileBuffer& buffer, const TileHeads& heads,
                           const TokenScalars& gates, const MapFragments& first_rows, Scratch& scratch) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4, pos = buffer.pos;
    const u32 none = pos < 0;
    const bool apart = has_query_apart(pos);
    const act_t* const query = buffer.query();
    const act_t *const lower = r <= pos ? buffer.key(r) : query, *const upper =
                                                                     r + 8 <= pos ? buffer.key(r + 8) : query;
    const Decays decays(gates);
    // Operand tiles of eight columns: first eight rows of each head's map | pivots of all heads | second eight rows.
    constexpr int PIVOT = TILE_HEADS, SECOND = TILE_HEADS + PIVOT_TILES,
                  TILES = SECOND + (RANK_MAX > 8 ? TILE_HEADS : 0);
    MapFragments second_rows;  // left unset where the rank is at most 8; those products are not used
    second_rows.load(arg, buffer, heads, 8);
    const void* pivots[PIVOT_TILES + 1];
#pragma unroll
    for (int n = 0; n < PIVOT_TILES; n++) pivots[n] = pivot_row(buffer, heads, n);
    float scores[2][4] = {}, z[TILES][4] = {};
    [[maybe_unused]] float query_scores[4] = {}, query_z[TILES][4] = {};  // of a query apart, in every row
    auto multiply = [&](const LeftFragment& left, float(&products)[TILES][4], int i) {
#pragma unroll
        for (int h = 0; h < TILE_HEADS; h++) left.multiply(products[h], first_rows.of[h].of(i));
#pragma unroll
        for (int n = 0; n < PIVOT_TILES; n++) left.multiply(products[PIVOT + n], pivot_chunk(pivots[n], i));
#pragma unroll
        for (int n = SECOND; n < TILES; n++) left.multiply(products[n], second_rows.of[n - SECOND].of(i));
    };
#pragma unroll
    for (int i = 0; i < KEY_CHUNKS; i++) {
        const uint4 low = chunk(lower, i), high = chunk(upper, i);
        const LeftFragment tokens(low, high, none);
        tokens.multiply(scores[0], low);
        tokens.multiply(scores[1], high);
        multiply(tokens, z, i);
        if (!apart) continue;
        const uint4 x = chunk(query, i);
        tokens.multiply(query_scores, x);
        multiply(LeftFragment(x, x, none), query_z, i);
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const float(&d)[4] = scores[n];
        auto put = [&](int row, float x, float y) {
            *reinterpret_cast<float2*>(&scratch.product[row][8 * n + 2 * c]) = make_float2(x, y);
        };
        put(r, d[0], d[1]), put(r + 8, d[2], d[3]);
    }
    if (apart && c == 0) scratch.query_part[0][r] = query_scores[0], scratch.query_part[0][r + 8] = query_scores[2];
    __syncwarp();
    solve(apart ? scratch.query_part[0] : scratch.product[MATRIX && ERASES ? 15 : 0], gates, decays, pos, scratch);
    __syncwarp();
    float parts[TILE_HEADS][2];  // query_part of rows r and r + 8
#pragma unroll
    for (int h = 0; h < TILE_HEADS; h++)
        parts[h][0] = -scratch.query_part[h][r], parts[h][1] = -scratch.query_part[h][r + 8];
    // Columns 2c and 2c + 1: product with the effective query, up to its decay and the sum over r.
    auto sum = [&](const float (&d)[4], int h, float (&x)[2]) {
        const float upper = h ? parts[TILE_HEADS - 1][0] : parts[0][0],
                    lower = h ? parts[TILE_HEADS - 1][1] : parts[0][1];
        x[0] = upper * d[0] + lower * d[2], x[1] = upper * d[1] + lower * d[3];
    };
    auto put = [&](const float (&x)[2], float* to) {
        if (r == 0) *reinterpret_cast<float2*>(to + 2 * c) = make_float2(x[0], x[1]);
    };
    float x[TILES][2];
#pragma unroll
    for (int n = 0; n < TILES; n++)
        sum(z[n],
            n < PIVOT     ? n
            : n >= SECOND ? n - SECOND
                          : min((8 * (n - PIVOT) + 2 * c) / PIVOT_SLOTS, TILE_HEADS - 1),
            x[n]);
    if (apart && r == 0) {
#pragma unroll
        for (int n = 0; n < TILES; n++) x[n][0] += query_z[n][0], x[n][1] += query_z[n][1];
    }
#pragma unroll
    for (int bit = 4; bit < 32; bit *= 2)  // sums over r; independent chains
#pragma unroll
        for (auto& pair : x)
#pragma unroll
            for (float& y : pair) y += __shfl_xor_sync(ALL, y, bit);
#pragma unroll
    for (int h = 0; h < TILE_HEADS; h++) put(x[h], scratch.c[h]);
#pragma unroll
    for (int n = 0; n < PIVOT_TILES; n++) put(x[PIVOT + n], &scratch.y[8 * n]);
    if constexpr (TILES > SECOND) {
#pragma unroll
        for (int h = 0; h < TILE_HEADS; h++)
            if (heads.rank[h] > 8) put(x[SECOND + h], &scratch.c[h][8]);
    }
}
