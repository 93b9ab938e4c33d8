// The work tile of a draft read: one row and TILE_HEADS heads, with all tokens of the draft.
#pragma once
#include "cursor.cuh"
#include "read_sketch.cuh"

// base + index * STEP + more
template <int STEP, class T> __device__ __forceinline__ T* place(T* base, int index, int more) {
    return base + static_cast<i64>(index) * STEP + more;
}

constexpr int GROUP = 4;  // drafts of a row whose outputs are computed together

// The rows of a block's tiles, {slot, cursor word} each, as BlockRows of draft t.
struct DraftRows {
    const int2* rows;
    int first_row, tokens, t;

    __device__ __forceinline__ int2 entry(int row) const { return rows[row - first_row]; }
    // {slot, position} of draft t; no slot if the row has fewer drafts.
    __device__ __forceinline__ int2 of(int row) const {
        const int2 x = entry(row);
        return t < drafted_of(x.y) ? make_int2(x.x, position_of(x.y) + t) : make_int2(-1, 0);
    }
};

// bytes: the tile's size in shared memory, 0 if nothing is read. row: -1 past the last tile.
struct DraftTile {
    int row, index, slot, pos, length, bytes;
    __device__ __forceinline__ bool reads() const { return bytes > 0; }
    __device__ __forceinline__ int head() const { return index * TILE_HEADS; }
};

// Scalar gate and beta of token lane % SPAN, at head lane / SPAN of the tile; 0 past the newest.
struct DraftScalars {
    static_assert(TURNS == 1, "one head for each SPAN lanes");
    float g, beta;

    __device__ __forceinline__ void load(const Arguments& arg, const DraftTile& tile) {
        const int lane = threadIdx.x % 32, s = lane % SPAN, head = tile.head() + lane / SPAN;
        g = beta = 0;
        if (s >= tile.pos + tile.length) return;
        const Ring ring(arg.memory, tile.slot, head);
        const Token token = arg.token(tile.row, max(s - tile.pos, 0), head);
        if constexpr (KIND != KDA) g = s < tile.pos ? ring.g[s] : *token.g;
        if (ERASES) beta = s < tile.pos ? ring.beta[s] : *token.beta;
    }
};

// A tile in shared memory, without gaps:
//
//   keys of all tokens (absent with SHARED_SCORES) | queries of the drafts | gates of all tokens (kda)
//   per head: buffered values | per draft: values of all heads | sketches of all heads
struct DraftBuffer {
    static constexpr int KEY = TileBuffer::KEY, VALUE = TileBuffer::VALUE, GATE = TileBuffer::GATE;
    char* data;
    int pos, length;

    __device__ __forceinline__ int count() const { return pos + length; }
    __device__ __forceinline__ const act_t* key(int s) const { return reinterpret_cast<const act_t*>(data + s * KEY); }
    __device__ __forceinline__ const act_t* query(int t = 0) const {
        return reinterpret_cast<const act_t*>(data + queries_at(count()) + t * KEY);
    }
    __device__ __forceinline__ const gate_t* gates(int s) const {
        return reinterpret_cast<const gate_t*>(data + gates_at(count(), length) + s * GATE);
    }
    // Offset of head h's value of token s.
    __device__ __forceinline__ int value_at(int h, int s) const {
        const int row = s < pos ? h * pos + s : TILE_HEADS * s + h;
        return values_at(count(), length) + row * VALUE;
    }
    __device__ __forceinline__ int sketches_at() const {
        return values_at(count(), length) + TILE_HEADS * count() * VALUE;
    }
    __device__ __forceinline__ const sketch_t* sketches() const {
        return reinterpret_cast<const sketch_t*>(data + sketches_at());
    }

    static constexpr __device__ __forceinline__ int queries_at(int count) { return SHARED_SCORES ? 0 : count * KEY; }
    static constexpr __device__ __forceinline__ int gates_at(int count, int length) {
        return queries_at(count) + length * KEY;
    }
    static constexpr __device__ __forceinline__ int values_at(int count, int length) {
        return gates_at(count, length) + count * GATE;
    }
    static constexpr __device__ __forceinline__ int bytes(int count, int length, int elements) {
        return values_at(count, length) + TILE_HEADS * count * VALUE + elements * static_cast<int>(sizeof(sketch_t));
    }
};

// Starts the copies of a tile.
__device__ __forceinline__ void fetch(const Arguments& arg, const DraftBuffer& buffer, const TileHeads& heads,
                                      const DraftTile& tile, WarpCopyBarrier& full) {
    constexpr int KEY = TileBuffer::KEY, VALUE = TileBuffer::VALUE, GATE = TileBuffer::GATE;
    const int head = tile.head(), pos = tile.pos, count = pos + tile.length;
    char* const queries = buffer.data + DraftBuffer::queries_at(count);
    char* const gates = buffer.data + DraftBuffer::gates_at(count, tile.length);
    bulk_copy(
        [&](auto&& copy) {
            const Ring ring(arg.memory, tile.slot, head);
            if (!SHARED_SCORES) copy(buffer.data, ring.k, pos * KEY);
            if (GATE) copy(gates, ring.g, pos * GATE);
#pragma unroll
            for (int h = 0; h < TILE_HEADS; h++)
                copy(buffer.data + buffer.value_at(h, 0), Ring(arg.memory, tile.slot, head + h).v, pos * VALUE);
            copy(buffer.data + buffer.sketches_at(), arg.memory.sketch.of(tile.slot) + heads.from,
                 heads.elements * static_cast<int>(sizeof(sketch_t)));
            for (int t = 0; t < tile.length; t++) {
                const Token token = arg.token(tile.row, t, head);
                if (!SHARED_SCORES) copy(buffer.data + (pos + t) * KEY, token.k, KEY);
                copy(queries + t * KEY, token.q, KEY);
                if (GATE) copy(gates + (pos + t) * GATE, token.g, GATE);
                copy(buffer.data + buffer.value_at(0, pos + t), token.v, TILE_HEADS * VALUE);
            }
        },
        tile.bytes, full);
}

// Small intermediate results for a group of drafts in shared memory, one DraftScratch per warp.
struct DraftScratch {
    union {
        struct {
            alignas(16) float product[MATRIX && ERASES ? 16 : 1][20];  // <k_s, k_j>; padded against bank conflicts
            float score[MATRIX && ERASES ? GROUP : 1][16];             // <k_s, q_t>
        };
        struct {
            alignas(16) float c[GROUP][TILE_HEADS][WEIGHTS];  // map times x_t; then coefficients, or all weights
            float y[GROUP][TILE_HEADS * PIVOT_SLOTS + 8];     // B^T x_t
        };
    };
    alignas(16) QuerySlices query[QUERY_SLICED ? GROUP : 1];
    alignas(8) float weight[GROUP][TILE_HEADS][W];         // c_ts; 0 past draft t
    float part[MATRIX && ERASES ? GROUP : 1][TILE_HEADS][16];  // effective query = decay * (q_t - sum_s part_ts k_s)
    float window_decay[GROUP][TILE_HEADS];                 // decay of the window up to draft t
};

// Calls multiply(rows, to, stride) for all operand tiles of eight rows: the pivots of all heads, then each head's map.
// multiply stores the results of draft t at to + t * stride. The next map rows are loaded ahead, because a shared
// projection is in global memory.
template <class Multiply>
__device__ __forceinline__ void for_operand_tiles(const Arguments& arg, const DraftBuffer& buffer,
                                                  const TileHeads& heads, const MapRow& first_rows,
                                                  DraftScratch& scratch, const Multiply& multiply) {
#pragma unroll
    for (int n = 0; n < PIVOT_TILES; n++) {
        PivotRow pivots;
        pivots.load(pivot_row(buffer, heads, n));
        multiply(pivots, &scratch.y[0][8 * n], static_cast<int>(sizeof scratch.y[0] / sizeof(float)), -1, 8 * n);
    }
    MapRow rows = first_rows;
    int h = 0, first = 0;
    while (h < TILE_HEADS) {
        const int own = h, from = first;
        first += 8;
        if (first >= heads.rank[h]) first = 0, h++;
        MapRow next = rows;
        if (h < TILE_HEADS) next = load_map(arg, buffer, heads, h, first);
        multiply(rows, &scratch.c[0][own][from], TILE_HEADS * WEIGHTS, own, 0);
        rows = next;
    }
}
