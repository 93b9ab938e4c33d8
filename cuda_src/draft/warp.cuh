// A warp's loop over the tiles of a draft read, and the scores that a block computes for all of its tiles.
//
// The loops are those of read/warp.cuh. A warp that reads a tile also appends the tile's drafts to the ring.
#pragma once
#include "slot/schedule.cuh"
#include "draft/values.cuh"
#include "read/warp.cuh"

constexpr int LARGEST_DRAFT =
    DraftBuffer::bytes(BOTH_HALVES, W - 1, W - 1 < MAX_DRAFTS ? W - 1 : MAX_DRAFTS,
                       TILE_HEADS * sketch_elements(RANK_MAX, MAX_BITS));

typedef PartHeader<DraftScratch> DraftMemory;
constexpr int DRAFTS_OFFSET = (sizeof(DraftMemory) - 1) / 128 * 128;

// Scores of `count` key heads from `first` on. The key heads are divided among `warps` warps; this is number `warp`.
DEVICE void compute_draft_scores(const Arguments& arg, const DraftRows& own_rows, int first, int count, int warp,
                                 int warps, DraftScores* scores) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    for (int i = warp; i < count; i += warps) {
        const int row = (first + i) / KEY_HEADS, head = (first + i) % KEY_HEADS * HEADS_PER_KEY;
        const int2 entry = own_rows.entry(row);
        const int pos = position_of(entry.y, W), length = drafted_of(entry.y);
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

// The block's tiles, `begin` to `end` - 1, as in TileReader. Warp i starts with tile `begin` + i.
struct DraftReader {
    const Arguments& arg;
    ReadMemory& block;
    const DraftRows own_rows;
    DraftScores* scores;  // as if those of key head 0 of row 0 came first
    int begin, first_claimed, end;
    u32 start;

    DEVICE const TileHeads& heads_of(const DraftTile& tile) const { return block.heads[tile.index]; }
    DEVICE DraftScores& scores_of(const DraftTile& tile) const {
        return scores[(tile.row * ROW_TILES + tile.index) / KEY_TILES];
    }
    DEVICE out_t* output(const DraftTile& tile, int h, int t) const {
        return place<HEADS * V>(arg.out.of(tile.row), t, (tile.head() + h) * V);
    }
    DEVICE DraftTile find(u32 number) const {
        DraftTile tile{static_cast<int>(number / ROW_TILES), static_cast<int>(number % ROW_TILES), -1, 0, 0, 0};
        if (number >= static_cast<u32>(end)) {
            tile.row = -1;
            return tile;
        }
        const int2 entry = own_rows.entry(tile.row);
        const int elements = heads_of(tile).elements;
        tile.slot = entry.x, tile.pos = position_of(entry.y, W), tile.length = drafted_of(entry.y);
        if (tile.length > 0 && elements > 0)
            tile.bytes = DraftBuffer::bytes(BOTH_HALVES, tile.pos + tile.length, tile.length, elements);
        return tile;
    }
    DEVICE DraftTile first() const {
        const DraftTile tile = find(begin + threadIdx.x / 32);
        if (tile.reads()) wait_since(start, threadIdx.x / 32 * tile.bytes / PACE);
        return tile;
    }
    DEVICE DraftTile next() const { return find(first_claimed + claim_next(block.next_tile)); }
    // Outputs past the row's last draft.
    DEVICE void write_zeros(const DraftTile& tile) const {
        for (int t = tile.length; t < own_rows.tokens; t++)
            for (int j = threadIdx.x % 32; j < TILE_HEADS * V; j += 32)
                if (heads_of(tile).rank[j / V] > 0) output(tile, 0, t)[j] = narrow<OUT>(0.f);
    }
};

// Values and outputs of drafts first, first + 1, ... of a tile, GROUP at most, from the coefficients.
template <class Query>
DEVICE void read_values_of_group(const DraftReader& of, const DraftTile& tile, const DraftBuffer& buffer, int first,
                                 DraftScratch& scratch, const Query& query) {
    const TileHeads& own = of.heads_of(tile);
    const int many = min(tile.length - first, GROUP);
    __syncwarp();
    if constexpr (SWIZZLED) multiply_draft_values(buffer, own, many, of.output(tile, 0, first), scratch, query);
    else add_draft_values(buffer, own, many, of.output(tile, 0, first), scratch, query);
    __syncwarp();
}

// Outputs of drafts first, first + 1, ... of a whole tile, GROUP at most (MATRIX).
DEVICE void read_group(const DraftReader& of, const DraftTile& tile, const DraftBuffer& buffer,
                       const DraftScalars& scalars, int first, DraftScratch& scratch) {
    const TileHeads& own = of.heads_of(tile);
    const Arguments& arg = of.arg;
    // Maps' first rows; a shared projection's are loaded long before they are needed.
    MapRow first_rows[TILE_HEADS];
#pragma unroll
    for (int h = 0; h < TILE_HEADS; h++) first_rows[h] = load_map(arg, buffer, own, h, 0);
    auto query = [&](int t) { return arg.token(tile.row, min(first + t, tile.length - 1), tile.head()).q; };
    if constexpr (ERASES) project_drafts_matrix(arg, buffer, own, scalars, first_rows, first, scratch);
    else project_drafts_query(arg, buffer, own, scalars, first_rows, of.scores_of(tile), first, query, scratch);
    read_values_of_group(of, tile, buffer, first, scratch, [&](int h, int t, float(&x)[LK]) {
        effective_query(x, query(t), buffer, scratch.part[ERASES ? t : 0][h],
                        min(tile.pos + first + t, buffer.count() - 1), scratch.window_decay[t][h]);
    });
}

// A tile that does not read: its drafts are appended, and outputs past the last draft are 0.
DEVICE void skip(const DraftReader& of, const DraftTile& tile) {
    if (tile.length > 0) append_inputs(of.arg, tile);
    of.write_zeros(tile);
}

// A warp's loop over its tiles, in its memory from `lower` to `upper`.
DEVICE void read_whole_drafts(const DraftReader& of, DraftMemory& memory, char* const lower, char* const upper) {
    WarpCopyBarrier(&full)[2] = of.block.full[threadIdx.x / 32];
    u32 issued = 0, consumed = 0;
    auto buffer_of = [&](u32 number, const DraftTile& tile) {
        char* const at = number % 2 ? upper - tile.bytes : lower;
        const int count = tile.pos + tile.length;
        return DraftBuffer{at, at + DraftBuffer::bytes(KEY_HALF, count, tile.length, 0), tile.pos, tile.length};
    };
    auto issue = [&](DraftScalars& scalars, const DraftTile& tile) {
        fetch<BOTH_HALVES>(of.arg, buffer_of(issued, tile), of.heads_of(tile), tile, full[issued % 2]);
        scalars.load(of.arg, tile);
        issued++;
    };
    DraftScalars next_scalars, scalars;
    DraftTile tile = of.first();
    if (tile.reads()) issue(next_scalars, tile);
    while (tile.row >= 0) {
        const DraftTile next = of.next();
        if (tile.reads()) {
            wait_for_copies<0>(full[consumed % 2], consumed / 2);
            scalars = next_scalars;
        }
        const bool early = next.reads() && tile.bytes + next.bytes <= upper - lower;
        if (early) issue(next_scalars, next);
        if (tile.reads()) {
            const DraftBuffer buffer = buffer_of(consumed, tile);
            append<BOTH_HALVES>(of.arg, buffer, tile);
#pragma unroll 1
            for (int first = 0; first < tile.length; first += GROUP)
                read_group(of, tile, buffer, scalars, first, memory.scratch);
            of.write_zeros(tile);
        } else {
            skip(of, tile);
        }
        if (next.reads() && !early) issue(next_scalars, next);
        consumed += tile.reads();
        tile = next;
    }
}

// The same with TWO_HALVES, as in read_tiles_in_halves: the next tile's key half is requested when the last backward
// pass over this tile's keys has ended, its value half when this tile is done.
DEVICE void read_drafts_in_halves(const DraftReader& of, DraftMemory& memory, char* const lower, char* const upper) {
    const Arguments& arg = of.arg;
    DraftScratch& scratch = memory.scratch;
    WarpCopyBarrier(&full)[2] = of.block.full[threadIdx.x / 32];
    auto buffer_of = [&](const DraftTile& tile) {
        const int count = tile.pos + tile.length, elements = of.heads_of(tile).elements;
        return DraftBuffer{lower, upper - DraftBuffer::bytes(VALUE_HALF, count, tile.length, elements), tile.pos,
                           tile.length};
    };
    DraftScalars scalars;
    auto fetch_keys = [&](const DraftTile& tile) {
        fetch<KEY_HALF>(arg, buffer_of(tile), of.heads_of(tile), tile, full[0]);
        scalars.load(arg, tile);
    };
    DraftTile tile = of.first();
    if (tile.reads()) fetch_keys(tile);
    for (u32 phase = 0; tile.row >= 0;) {
        if (!tile.reads()) {
            skip(of, tile);
            tile = of.next();
            if (tile.reads()) fetch_keys(tile);
            continue;
        }
        const TileHeads& own = of.heads_of(tile);
        const DraftBuffer buffer = buffer_of(tile);
        fetch<VALUE_HALF>(arg, buffer, own, tile, full[1]);
        GateInput<LK> input;
        input.load(arg.gate_input, tile.index, first_channel());
        wait_for_copies<1>(full[0], phase);
        append<KEY_HALF>(arg, buffer, tile);
        DraftTile next;
#pragma unroll 1
        for (int first = 0; first < tile.length; first += GROUP) {
            MapRow first_rows;  // a shared projection's are loaded long before they are needed
            if (QUERY_SLICED && MAP != DENSE) first_rows = load_map(arg, buffer, own, 0, 0);
            float x[GROUP][LK];
            walk_back_drafts(buffer, scalars, input, first, scratch, x);
            if (first == 0) {
                wait_for_copies<0>(full[1], phase);
                append<VALUE_HALF>(arg, buffer, tile);
            }
            __syncwarp();
            if (first + GROUP >= tile.length) {
                next = of.next();
                if (next.reads()) fetch_keys(next);
            }
            if constexpr (QUERY_SLICED) {
                if (MAP == DENSE) first_rows = load_map(arg, buffer, own, 0, 0);
                project_drafts_slices(arg, buffer, own, first_rows, scratch);
            } else {
                project_lanes<GROUP>(arg, buffer, own, x, scratch.c, scratch.y);
            }
            read_values_of_group(of, tile, buffer, first, scratch, [&](int, int t, float(&query)[LK]) {
#pragma unroll
                for (int n = 0; n < LK; n++) query[n] = x[t][n];
            });
        }
        of.write_zeros(tile);
        phase++;
        tile = next;
    }
}
