// A warp's loop over the tiles of a draft read, and the scores that a block computes for all of its tiles.
//
// The loop is that of read_whole_tiles (read_warp.cuh), for all kinds.
#pragma once
#include "schedule.cuh"
#include "draft_values.cuh"
#include "read_warp.cuh"

constexpr int MAX_SCORES = 128;  // most key heads of a block with SHARED_SCORES, as in read.cu
constexpr int LARGEST_DRAFT =
    DraftBuffer::bytes(W - 1, W - 1 < MAX_DRAFTS ? W - 1 : MAX_DRAFTS,
                       TILE_HEADS * sketch_elements(RANK_MAX, RANK_MAX));

// Scores <k_s, q_t> of a row at one key head, computed once per block (SHARED_SCORES).
struct DraftScores {
    float of[MAX_DRAFTS][16];
    WarpMbarrier full;
};

// Header of a warp's part. After it: room for at least one tile.
struct DraftMemory {
    DraftScratch scratch;
    alignas(128) char tiles[1];
};
constexpr int DRAFTS_OFFSET = (sizeof(DraftMemory) - 1) / 128 * 128;

// Scores of `count` key heads from `first` on. The key heads are divided among `warps` warps; this is number `warp`.
__device__ __forceinline__ void compute_draft_scores(const Arguments& arg, const DraftRows& own_rows, int first,
                                                     int count, int warp, int warps, DraftScores* scores) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    for (int i = warp; i < count; i += warps) {
        const int row = (first + i) / KEY_HEADS, head = (first + i) % KEY_HEADS * HEADS_PER_KEY;
        const int2 entry = own_rows.entry(row);
        const int pos = position_of(entry.y), length = drafted_of(entry.y);
        if (length > 0) {
            const act_t* const ring = Ring(arg.memory, entry.x, head).k;
            auto token = [&](int t) { return arg.token(row, min(t, length - 1), head); };
            TokenRow tokens[2];
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const int s = r + 8 * n;
                tokens[n].load(s < pos ? ring + s * K : token(s - pos).k);
            }
#pragma unroll 1
            for (int from = 0; from < length; from += GROUP) {
                QueryFragment queries;
                load_queries(queries, [&](int t) { return token(from + t).q; });
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    float d[4] = {};
#pragma unroll
                    for (int j = 0; j < KEY_CHUNKS; j++) queries.multiply(d, tokens[n].of(j), j);
                    scores[i].of[from + c][8 * n + r] = QueryFragment::product(d);
                }
            }
        }
        scores[i].full.arrive();
    }
}

// The block's tiles, `begin` to `begin + count - 1`, as in TileReader.
struct DraftReader {
    const Arguments& arg;
    BlockMemory& block;
    const DraftRows own_rows;
    DraftScores* scores;
    int first_key, begin, count, active_warps;
    u32 start;

    __device__ __forceinline__ const TileHeads& heads_of(const DraftTile& tile) const {
        return block.heads[tile.index];
    }
    __device__ __forceinline__ out_t* output(const DraftTile& tile, int h, int t) const {
        return place<HEADS * V>(arg.out.of(tile.row), t, (tile.head() + h) * V);
    }
    __device__ __forceinline__ DraftTile find(int i) const {
        const u32 number = begin + i;
        DraftTile tile{static_cast<int>(number / ROW_TILES), static_cast<int>(number % ROW_TILES), -1, 0, 0, 0};
        if (i >= count) {
            tile.row = -1;
            return tile;
        }
        const int2 entry = own_rows.entry(tile.row);
        const int elements = heads_of(tile).elements;
        tile.slot = entry.x, tile.pos = position_of(entry.y), tile.length = drafted_of(entry.y);
        if (tile.length > 0 && elements > 0)
            tile.bytes = DraftBuffer::bytes(tile.pos + tile.length, tile.length, elements);
        return tile;
    }
    __device__ __forceinline__ DraftTile first() const {
        const DraftTile tile = find(threadIdx.x / 32);
        if (tile.reads()) wait_since(start, threadIdx.x / 32 * tile.bytes / PACE);
        return tile;
    }
    __device__ __forceinline__ DraftTile next() const { return find(active_warps + claim_next(block.next_tile)); }
    // Outputs past the row's last draft.
    __device__ __forceinline__ void write_zeros(const DraftTile& tile) const {
        for (int t = tile.length; t < own_rows.tokens; t++)
            for (int j = threadIdx.x % 32; j < TILE_HEADS * V; j += 32)
                if (heads_of(tile).rank[j / V] > 0) output(tile, 0, t)[j] = narrow<OUT>(0.f);
    }
};

// Outputs of drafts first, first + 1, ... of a tile, GROUP at most.
__device__ __forceinline__ void read_group(const DraftReader& of, const DraftTile& tile, const DraftBuffer& buffer,
                                           const DraftScalars& scalars, int first, DraftScratch& scratch) {
    const TileHeads& own = of.heads_of(tile);
    const Arguments& arg = of.arg;
    const int many = min(tile.length - first, GROUP);
    MapRow first_rows;  // a shared projection's: loaded long before they are needed
    if (MATRIX || (QUERY_SLICED && MAP != DENSE)) first_rows = load_map(arg, buffer, own, 0, 0);
    if constexpr (MATRIX && ERASES) {
        project_drafts_matrix(arg, buffer, own, scalars, first_rows, first, scratch);
    } else if constexpr (MATRIX) {
        DraftScores& products = of.scores[(tile.row * ROW_TILES + tile.index) / KEY_TILES - of.first_key];
        products.full.wait(0);
        __syncwarp();
        project_drafts_query(arg, buffer, own, scalars, first_rows, products.of + first, first, scratch);
    } else {
        GateInput<LK> input;
        input.load(arg.gate_input, tile.index, threadIdx.x % 32 * LK);
        float x[GROUP][LK];
        walk_back_drafts(buffer, scalars, input, first, scratch, x);
        __syncwarp();
        if constexpr (QUERY_SLICED) {
            if (MAP == DENSE) first_rows = load_map(arg, buffer, own, 0, 0);
            project_drafts_slices(arg, buffer, own, first_rows, scratch);
        } else {
            project_drafts_lanes(arg, buffer, own, x, scratch);
        }
    }
    __syncwarp();
    if constexpr (SWIZZLED) {
#pragma unroll 1
        for (int h = 0; h < TILE_HEADS; h++)
            if (own.rank[h] > 0) multiply_draft_values(buffer, own, h, many, of.output(tile, h, first), scratch);
    } else {
        add_draft_values(buffer, own, many, of.output(tile, 0, first), scratch);
    }
    __syncwarp();
}

// A warp's loop over its tiles, in its memory from `lower` to `upper`.
__device__ __forceinline__ void read_drafts(const DraftReader& of, DraftMemory& memory, char* const lower,
                                            char* const upper) {
    WarpCopyBarrier(&full)[2] = of.block.full[threadIdx.x / 32];
    u32 issued = 0, consumed = 0;
    auto buffer_of = [&](u32 number, const DraftTile& tile) {
        return DraftBuffer{number % 2 ? upper - tile.bytes : lower, tile.pos, tile.length};
    };
    auto issue = [&](DraftScalars& scalars, const DraftTile& tile) {
        fetch(of.arg, buffer_of(issued, tile), of.heads_of(tile), tile, full[issued % 2]);
        scalars.load(of.arg, tile);
        issued++;
    };
    DraftScalars next_scalars, scalars;
    DraftTile tile = of.first();
    if (tile.reads()) issue(next_scalars, tile);
    while (tile.row >= 0) {
        const DraftTile next = of.next();
        if (tile.reads()) {
            full[consumed % 2].wait(consumed / 2);
            __syncwarp();
            scalars = next_scalars;
        }
        const bool early = next.reads() && tile.bytes + next.bytes <= upper - lower;
        if (early) issue(next_scalars, next);
        if (tile.reads()) {
            const DraftBuffer buffer = buffer_of(consumed, tile);
#pragma unroll 1
            for (int first = 0; first < tile.length; first += GROUP)
                read_group(of, tile, buffer, scalars, first, memory.scratch);
        }
        of.write_zeros(tile);
        if (next.reads() && !early) issue(next_scalars, next);
        consumed += tile.reads();
        tile = next;
    }
}
