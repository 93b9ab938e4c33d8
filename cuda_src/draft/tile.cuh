// The work tile of a draft read: one row and TILE_HEADS heads, with all tokens of the draft. Its copies, and the warp's
// intermediate results up to the coefficients.
#pragma once
#include "slot/cursor.cuh"
#include "read/sketch.cuh"

// base + index * STEP + more
template <int STEP, class T> DEVICE T* place(T* base, int index, int more) {
    return base + static_cast<i64>(index) * STEP + more;
}

constexpr int GROUP = 4;  // drafts of a row whose outputs are computed together

// The rows of a block's tiles, {slot, cursor word} each, as BlockRows of draft t.
struct DraftRows {
    const int2* rows;
    int first_row, tokens, t;

    DEVICE int2 entry(int row) const { return rows[row - first_row]; }
    // {slot, position} of draft t; no slot if the row has fewer drafts.
    DEVICE int2 of(int row) const {
        const int2 x = entry(row);
        return t < drafted_of(x.y) ? make_int2(x.x, position_of(x.y, W) + t) : make_int2(-1, 0);
    }
};

// pos: number of the window's tokens before the drafts. bytes: the tile's size in shared memory, 0 if nothing is read.
// row: -1 past the last tile.
struct DraftTile {
    int row, index, slot, pos, length, bytes;
    DEVICE bool reads() const { return bytes > 0; }
    DEVICE int head() const { return index * TILE_HEADS; }
};

// Scalar gate and beta of token lane % SPAN, at head lane / SPAN of the tile; 0 past the newest.
struct DraftScalars {
    float g, beta;

    DEVICE void load(const Arguments& arg, const DraftTile& tile) {
        const int lane = threadIdx.x % 32, s = lane % SPAN, head = tile.head() + lane / SPAN;
        g = beta = 0;
        if (s >= tile.pos + tile.length) return;
        const Ring ring(arg.memory, tile.slot, head);
        const Token token = arg.token(tile.row, max(s - tile.pos, 0), head);
        if constexpr (!CHANNEL_DECAYS) g = s < tile.pos ? ring.g[s] : *token.g;
        if (ERASES) beta = s < tile.pos ? ring.beta[s] : *token.beta;
    }
};

// A tile in shared memory, in two halves without gaps, each part in the order and with the swizzle of the ring:
//
//   keys:        keys of all tokens, queries of the drafts (both absent with SHARED_SCORES) | gates of all tokens (kda)
//   value_half:  per head: values of all tokens | sketches of all heads
struct DraftBuffer {
    static constexpr int KEY = TileBuffer::KEY, VALUE = TileBuffer::VALUE, GATE = TileBuffer::GATE;
    // Bytes of one draft in each half.
    static constexpr int NEW_KEYS = (SHARED_SCORES ? 0 : 2 * KEY) + GATE, NEW_VALUES = TILE_HEADS * VALUE;
    char *keys, *value_half;
    int pos, length;

    DEVICE int count() const { return pos + length; }
    DEVICE const act_t* key(int s) const { return reinterpret_cast<const act_t*>(keys + s * KEY); }
    // With SHARED_SCORES: any valid row.
    DEVICE const act_t* query(int t = 0) const {
        return reinterpret_cast<const act_t*>(SHARED_SCORES ? value_half : keys + (count() + t) * KEY);
    }
    DEVICE const gate_t* gates(int s) const {
        return reinterpret_cast<const gate_t*>(keys + gates_at(count(), length) + s * GATE);
    }
    // Offset of head h's value of token s in `value_half`.
    DEVICE int value_at(int h, int s) const { return (h * count() + s) * VALUE; }
    DEVICE int sketches_at() const { return TILE_HEADS * count() * VALUE; }
    DEVICE const sketch_t* sketches() const { return reinterpret_cast<const sketch_t*>(value_half + sketches_at()); }

    static constexpr DEVICE int gates_at(int count, int length) { return SHARED_SCORES ? 0 : (count + length) * KEY; }
    static constexpr DEVICE int bytes(int half, int count, int length, int elements) {
        return (half & KEY_HALF ? gates_at(count, length) + count * GATE : 0) +
               (half & VALUE_HALF
                    ? TILE_HEADS * count * VALUE + elements * static_cast<int>(sizeof(sketch_t))
                    : 0);
    }
};

// Calls move(row, offset) for every 16 bytes of `count` rows, by one lane each. BYTES: length of a row.
template <int BYTES, class Move> DEVICE void for_pieces(int count, const Move& move) {
#pragma unroll 1
    for (int i = threadIdx.x % 32 * 16; i < count * BYTES; i += 512) move(i / BYTES, i % BYTES);
}
template <class T> DEVICE const char* bytes_of(Strided<T> rows, int row) {
    return reinterpret_cast<const char*>(rows.of(row));
}

// Copies `count` rows of BYTES to shared memory; place(row, offset) is where 16 bytes go.
template <int BYTES, class T, class Place> DEVICE void copy_rows(Strided<T> rows, int count, const Place& place) {
    if constexpr (512 % BYTES == 0) {
        const int own = threadIdx.x % 32 * 16, at = own % BYTES;
        const char* from = bytes_of(rows, own / BYTES) + at;
        const i64 ahead = static_cast<i64>(512 / BYTES) * rows.stride;
#pragma unroll 1
        for (int row = own / BYTES; row < count; row += 512 / BYTES, from += ahead) copy_async_16(place(row, at), from);
    } else {
        for_pieces<BYTES>(count, [&](int row, int at) { copy_async_16(place(row, at), bytes_of(rows, row) + at); });
    }
}

// Starts the copies of one half of a tile, or of both: ring and sketches in bulk, the drafts' own rows piece by piece.
template <int HALF>
DEVICE void fetch(const Arguments& arg, const DraftBuffer& buffer, const TileHeads& heads, const DraftTile& tile,
                  WarpCopyBarrier& full) {
    constexpr int KEY = TileBuffer::KEY, VALUE = TileBuffer::VALUE, GATE = TileBuffer::GATE;
    constexpr int NEW =
        (HALF & KEY_HALF ? DraftBuffer::NEW_KEYS : 0) + (HALF & VALUE_HALF ? DraftBuffer::NEW_VALUES : 0);
    const int head = tile.head(), pos = tile.pos, count = pos + tile.length;
    char* const gates = buffer.keys + DraftBuffer::gates_at(count, tile.length);
    bulk_copy(
        [&](auto&& copy) {
            const Ring ring(arg.memory, tile.slot, head);
            if (HALF & KEY_HALF) {
                if (!SHARED_SCORES) copy(buffer.keys, ring.k, pos * KEY);
                if (GATE) copy(gates, ring.g, pos * GATE);
            }
            if (HALF & VALUE_HALF) {
#pragma unroll
                for (int h = 0; h < TILE_HEADS; h++)
                    copy(buffer.value_half + buffer.value_at(h, 0), ring.v + h * W * V, pos * VALUE);
                copy(buffer.value_half + buffer.sketches_at(), arg.memory.sketch.of(tile.slot) + heads.from,
                     heads.elements * static_cast<int>(sizeof(sketch_t)));
            }
        },
        DraftBuffer::bytes(HALF, count, tile.length, heads.elements) - tile.length * NEW, full);
    const Token token = arg.token(tile.row, 0, head);
    const TokenSteps& steps = arg.steps;
    if constexpr ((HALF & KEY_HALF) && !SHARED_SCORES) {
        char *const keys = buffer.keys + pos * KEY, *const queries = buffer.keys + count * KEY;
        copy_rows<KEY>(Strided<const act_t>{token.k, steps.k}, tile.length,
                       [&](int t, int at) { return keys + t * KEY + at; });
        copy_rows<KEY>(Strided<const act_t>{token.q, steps.q}, tile.length,
                       [&](int t, int at) { return queries + t * KEY + at; });
    }
    if constexpr ((HALF & KEY_HALF) && GATE > 0)
        copy_rows<GATE ? GATE : 16>(Strided<const gate_t>{token.g, steps.g}, tile.length,
                                    [&](int t, int at) { return gates + (pos + t) * GATE + at; });
    if constexpr (HALF & VALUE_HALF)
        copy_rows<TILE_HEADS * VALUE>(Strided<const act_t>{token.v, steps.v}, tile.length, [&](int t, int at) {
            const int mask = swizzle(pos + t) * static_cast<int>(sizeof(act_t));
            return buffer.value_half + buffer.value_at(at / VALUE, pos + t) + (at % VALUE ^ mask);
        });
    copy_async_commit();
}

// Waits for the copies of a half or of a tile. LATER: number of `fetch` calls since then.
template <int LATER> DEVICE void wait_for_copies(WarpCopyBarrier& full, int phase) {
    full.wait(phase);
    copy_async_wait<LATER>();
    __syncwarp();
}

// Whether a tile appends the keys of its drafts to the ring, for all tiles of the key head. With SHARED_SCORES,
// NewTokens appends keys.
DEVICE bool appends_keys(const DraftTile& tile) { return !SHARED_SCORES && tile.index % KEY_TILES == 0; }

// Appends the drafts of one half of a tile, or of both, to the ring: values, keys and kda's gates, as they lie in the
// buffer.
template <int HALF> DEVICE void append(const Arguments& arg, const DraftBuffer& buffer, const DraftTile& tile) {
    const int pos = tile.pos, length = tile.length;
    const Ring ring(arg.memory, tile.slot, tile.head(), pos);
    auto copy = [](void* to, const void* from, int bytes) {
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < bytes / 16; i += 32)
            static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
    };
    if (HALF & KEY_HALF) {
        if (appends_keys(tile)) copy(ring.k, buffer.key(pos), length * DraftBuffer::KEY);
        if (DraftBuffer::GATE) copy(ring.g, buffer.gates(pos), length * DraftBuffer::GATE);
    }
    if (HALF & VALUE_HALF)
#pragma unroll
        for (int h = 0; h < TILE_HEADS; h++)
            copy(ring.v + h * W * V, buffer.value_half + buffer.value_at(h, pos), length * DraftBuffer::VALUE);
}

// The same for a tile without sketches, straight from the inputs.
DEVICE void append_inputs(const Arguments& arg, const DraftTile& tile) {
    constexpr int KEY = TileBuffer::KEY, VALUE = TileBuffer::VALUE, GATE = TileBuffer::GATE;
    const int pos = tile.pos;
    const Token token = arg.token(tile.row, 0, tile.head());
    const Ring ring(arg.memory, tile.slot, tile.head(), pos);
    auto move = [](void* to, const char* from) { *static_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from); };
    if (appends_keys(tile))
        for_pieces<KEY>(tile.length, [&](int t, int at) {
            move(reinterpret_cast<char*>(ring.k) + t * KEY + at,
                 bytes_of(Strided<const act_t>{token.k, arg.steps.k}, t) + at);
        });
    if constexpr (GATE > 0)
        for_pieces<GATE ? GATE : 16>(tile.length, [&](int t, int at) {
            move(reinterpret_cast<char*>(ring.g) + t * GATE + at,
                 bytes_of(Strided<const gate_t>{token.g, arg.steps.g}, t) + at);
        });
    for_pieces<TILE_HEADS * VALUE>(tile.length, [&](int t, int at) {
        const int mask = swizzle(pos + t) * static_cast<int>(sizeof(act_t));
        move(reinterpret_cast<char*>(ring.v) + (at / VALUE * W + t) * VALUE + (at % VALUE ^ mask),
             bytes_of(Strided<const act_t>{token.v, arg.steps.v}, t) + at);
    });
}

// Tokens of a window, rounded up to whole operands; room for a head's weights: the coefficients, then the tokens'
// weights (see multiply_draft_values). The rows of two drafts are 8 words apart modulo 32, so that loads for all drafts
// have no bank conflict.
constexpr int TOKEN_ROWS = (W + 15) / 16 * 16;
constexpr int DRAFT_WEIGHTS = 16 + TOKEN_ROWS;
constexpr int DRAFT_COLUMNS = (TILE_HEADS * DRAFT_WEIGHTS + 31) / 32 * 32 + 8;

// Row of the first token among a head's weights. With codes, columns of U fill a whole operand.
DEVICE int first_token_row(int rank) { return CODED && rank > 0 ? 16 : rank; }

// Small intermediate results for a group of drafts in shared memory, one DraftScratch per warp.
// Queries in slices, for residuals (draft/residual.cuh); with SWIZZLED the outputs stay in registers.
template <bool USED> struct DraftResidualScratch {
    union {
        alignas(16) signed char slices[2 * GROUP * K];
        float outputs[SWIZZLED ? 1 : GROUP][SWIZZLED ? 1 : V];
    };
};
template <> struct DraftResidualScratch<false> {};

struct DraftScratch : DraftResidualScratch<(RESIDUAL > 0)> {
    union {
        struct {
            alignas(16) float product[MATRIX && ERASES ? 16 : 1][20];  // <k_s, k_j>; padded against bank conflicts
            float score[MATRIX && ERASES ? GROUP : 1][16];             // <k_s, q_t>
        };
        struct {
            alignas(16) float c[GROUP][DRAFT_COLUMNS];               // per head DRAFT_WEIGHTS; SWIZZLED: in slices
            alignas(16) float y[GROUP][PIVOT_TILES > 1 ? 16 : 8];  // B^T x_t, PIVOT_SLOTS a head
        };
    };
    alignas(16) QuerySlices query[QUERY_SLICED ? GROUP : 1];
    float weight[MATRIX ? 1 : GROUP][W];                       // c_ts; 0 past draft t
    float part[MATRIX && ERASES ? GROUP : 1][TILE_HEADS][16];  // effective query = decay * (q_t - sum_s part_ts k_s)
    float window_decay[GROUP][TILE_HEADS];                     // decay of the window up to draft t

    // Stores a weight of draft t for a tensor-core product: two bf16 slices in one word.
    DEVICE void put(int t, int h, int n, float weight) {
        const float leading = __uint_as_float(__float_as_uint(weight) & 0xffff0000u);
        c[t][h * DRAFT_WEIGHTS + n] = __uint_as_float(floats_to_bf16(weight - leading, leading));
    }
};

// Factors of one column of U: coefficient of draft t = w z_t + F (B^T x_t), times the decay up to t.
struct ColumnFactors {
    int p;
    float w = 1, f[PIVOTS] = {};

    DEVICE ColumnFactors(const DraftBuffer& buffer, const TileHeads& heads, int h, int column)
        : p(pivots_of(heads.rank[h])) {
        const SmallPart<const small_t> small(buffer.sketches() + heads.at[h], heads.rank[h]);
        const float scale = CODED ? widen<SMALL>(small.scale[column]) : 1.f;
        if constexpr (MAP == FACTORS) {
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
    DEVICE float of(const DraftScratch& scratch, int h, int t, float z) const {
        float sum = w * z;
        if constexpr (MAP == FACTORS) {
#pragma unroll
            for (int i = 0; i < PIVOTS; i++)
                if (i < p) sum += f[i] * scratch.y[t][h * PIVOT_SLOTS + i];
        }
        return (TWO_HALVES ? 1.f : scratch.window_decay[t][h]) * sum;
    }
};

// From the products with pivots and maps to coefficients. A lane has the products of draft t with row j of
// each operand tile of eight rows.
struct CoefficientLane {
    int t, j;

    // Coefficient of column first + j of head h.
    DEVICE void put(const DraftBuffer& buffer, const TileHeads& heads, int h, int first, float z,
                    DraftScratch& scratch) const {
        const int column = first + j;
        if constexpr (!SWIZZLED) {  // add_draft_values multiplies with the factors
            if (column < heads.rank[h]) scratch.c[t][column] = z;
            return;
        }
        if (column < heads.rank[h])
            scratch.put(t, h, column, ColumnFactors(buffer, heads, h, column).of(scratch, h, t, z));
        else if (CODED)  // multiply_draft_values needs multiples of 8
            scratch.c[t][h * DRAFT_WEIGHTS + column] = 0;
    }
    // First eight rows of all maps (z) and the pivots (y), then further rows; multiply(rows, head) returns the products
    // of eight rows of a head's map.
    template <class Multiply>
    DEVICE void finish(const Arguments& arg, const DraftBuffer& buffer, const TileHeads& heads,
                       const float (&z)[TILE_HEADS], const float (&y)[PIVOT_TILES + 1], DraftScratch& scratch,
                       const Multiply& multiply) const {
#pragma unroll
        for (int n = 0; n < PIVOT_TILES; n++) scratch.y[t][8 * n + j] = y[n];
        __syncwarp();
#pragma unroll
        for (int h = 0; h < TILE_HEADS; h++) put(buffer, heads, h, 0, z[h], scratch);
#pragma unroll 1
        for (int h = 0; h < TILE_HEADS; h++)
#pragma unroll 1
            for (int first = 8; first < heads.rank[h]; first += 8)
                put(buffer, heads, h, first, multiply(load_map(arg, buffer, heads, h, first), h), scratch);
    }
};
