// Shared memory of a block of the read kernel, and a warp's loop over its tiles.
//
// Each warp is its own pipeline: the warp issues the bulk copies of a tile into its own part of shared memory, waits
// for them at its own full barriers, and computes. Warps wait for one another only for the scores (SHARED_SCORES:
// `full` of KeyScores, completed by the warp that computed the scores). The warp's part of shared memory, and its full
// barriers:
//
//   whole tiles            | tile n, lower end | ... | tile n + 1, upper end |     full[n % 2] per tile
//   halves (TWO_HALVES)    | key half, lower end | ... | value half, upper end |   full[0] keys, full[1] values
#pragma once
#include "read/copies.cuh"
#include "read/block.cuh"
#include "read/backward.cuh"
#include "read/values.cuh"

constexpr int LARGEST_TILE =
    TileBuffer::bytes(BOTH_HALVES, NO_READ - 1, TILE_HEADS * sketch_elements(RANK_MAX, MAX_BITS));
constexpr int MAX_WARPS = (MATRIX && ERASES) || K > 128 ? 12
                          : SHARED_SCORES && V <= 64   ? 20
                                                       : 16;  // limited by registers; multiples of 4

// Header of the block's shared memory. After it: {slot, position} of each row, scores, and a part for each active warp.
struct ReadMemory {
    int max_tokens, max_elements;  // over the block's tiles
    int next_tile;                 // next unclaimed tile, not counting each warp's first
    int pieces, next_piece;        // pieces of the newest tokens to append to the ring, and the next unclaimed piece
    TileHeads heads[ROW_TILES];    // of the tiles that the block may have
    WarpCopyBarrier full[MAX_WARPS][2];
    alignas(16) int2 rows[1];
};
// A block's even share of the tiles of `batch` rows; all tiles of a row follow one another. With SHARED_SCORES also of
// the key heads.
struct Share {
    int begin, end, count, first_row, rows, first_key, keys;

    DEVICE explicit Share(int batch) {
        const int tiles = ROW_TILES * batch;
        begin = static_cast<u32>(tiles) * blockIdx.x / gridDim.x;
        end = static_cast<u32>(tiles) * (blockIdx.x + 1) / gridDim.x;
        count = end - begin, first_row = begin / ROW_TILES, rows = (end - 1) / ROW_TILES - first_row + 1;
        first_key = begin / KEY_TILES, keys = SHARED_SCORES ? (end - 1) / KEY_TILES - first_key + 1 : 0;
    }
    // Loads the plan's entries for the tiles. By all threads of the block, after a barrier.
    DEVICE void load_heads(ReadMemory& block, const int4* heads) const {
        for (int i = begin + blockDim.x - 1 - threadIdx.x; i < min(end, begin + ROW_TILES); i += blockDim.x) {
            const int index = i % ROW_TILES;
            block.heads[index].load(heads, index);
            atomicMax(&block.max_elements, block.heads[index].elements);
        }
    }
};

// Header of a warp's part. After it: room for at least one tile.
template <class Scratch> struct PartHeader {
    Scratch scratch;
    alignas(128) char tiles[1];
};
typedef PartHeader<Scratch> WarpMemory;
constexpr int TILES_OFFSET = (sizeof(WarpMemory) - 1) / 128 * 128;
DEVICE constexpr int round_up_128(int bytes) { return (bytes + 127) / 128 * 128; }

// Most key heads of a block with SHARED_SCORES. The host starts enough blocks that no block has more: a block's tiles
// are whole rows, and a part of a row at each end.
constexpr int MAX_SCORES = 128;

// Least shared memory of a block: one warp, with room for the largest tile.
template <class Scores> constexpr int least_shared(int offset, int largest) {
    const int scores = SHARED_SCORES ? MAX_SCORES * sizeof(Scores) : 0;
    if (SKETCHED_HEADS == 0) return 0;
    return round_up_128(sizeof(ReadMemory) + MAX_ROWS * sizeof(int2) + scores) + offset + round_up_128(largest);
}

// x / y for small positive integers: adding a half keeps the rounded quotient below the next integer.
DEVICE int quotient(int x, int y) { return static_cast<int>(__fdividef(x + 0.5f, y)); }

// Bytes per cycle that the warps of a block request at first, one warp after the other. PACE is slightly less than the
// memory delivers: with a faster start, all tiles arrive at once and all warps then wait again at the same time.

// The block's tiles, `begin` to `begin + count - 1`. Warp i starts with tile i; then each warp claims its next tile.
struct TileReader {
    const Arguments& arg;
    ReadMemory& block;
    const BlockRows& own_rows;
    KeyScores* scores;
    int first_key, begin, count, active_warps;
    u32 start;  // clock when the block began

    DEVICE const TileHeads& heads_of(const ReadTile& tile) const { return block.heads[tile.index]; }
    DEVICE out_t* output(const ReadTile& tile) const { return arg.out.of(tile.row) + tile.index * TILE_HEADS * V; }
    DEVICE ReadTile find(int i) const {
        const u32 buffer = begin + i;
        ReadTile tile{static_cast<int>(buffer / ROW_TILES), static_cast<int>(buffer % ROW_TILES), -1, 0, 0};
        if (i >= count) {
            tile.row = -1;
            return tile;
        }
        const int2 entry = own_rows.of(tile.row);
        const int elements = heads_of(tile).elements;
        tile.slot = entry.x, tile.pos = entry.y;
        if (BlockRows::continues(entry.x, entry.y) && elements > 0)
            tile.bytes = TileBuffer::bytes(BOTH_HALVES, tile.pos, elements);
        return tile;
    }
    // A warp's first tile, and its next one.
    DEVICE ReadTile first() const {
        const ReadTile tile = find(threadIdx.x / 32);
        if (tile.reads()) wait_since(start, threadIdx.x / 32 * tile.bytes / PACE);
        return tile;
    }
    DEVICE ReadTile next() const { return find(active_warps + claim_next(block.next_tile)); }
    // The output of a padding row.
    DEVICE void write_zeros(const ReadTile& tile) const {
        if (tile.slot >= 0) return;
        for (int j = threadIdx.x % 32; j < TILE_HEADS * V; j += 32)
            if (heads_of(tile).rank[j / V] > 0) output(tile)[j] = narrow<OUT>(0.f);
    }
};

// A warp's loop over whole tiles, in its memory from `lower` to `upper`. Tiles alternate between the two ends: if two
// tiles fit, the copies of the next tile run while the warp works on the current tile.
DEVICE void read_whole_tiles(const TileReader& of, WarpMemory& memory, char* const lower, char* const upper) {
    const Arguments& arg = of.arg;
    WarpCopyBarrier(&full)[2] = of.block.full[threadIdx.x / 32];
    u32 issued = 0, consumed = 0;  // tiles whose copies were issued, and tiles that were consumed
    auto buffer_of = [&](u32 number, const ReadTile& tile) {  // where copy number `number` goes
        char* const at = number % 2 ? upper - tile.bytes : lower;
        return TileBuffer{at, at + TileBuffer::bytes(KEY_HALF, tile.pos, 0), tile.pos};
    };
    auto issue = [&](TokenScalars& gates, const ReadTile& tile) {
        fetch<BOTH_HALVES>(arg, buffer_of(issued, tile), of.heads_of(tile), tile, full[issued % 2]);
        gates.load(arg, tile);
        issued++;
    };
    TokenScalars next_scalars, gates;
    ReadTile tile = of.first();
    if (tile.reads()) issue(next_scalars, tile);

    // The first rows of a shared projection are loaded long before they are needed.
    MapFragments first_rows;
    if (MAP != DENSE && tile.reads()) first_rows.load(arg, TileBuffer{}, of.heads_of(tile), 0);
    while (tile.row >= 0) {
        const ReadTile next = of.next();
        const TileHeads& own = of.heads_of(tile);
        const TileBuffer buffer = buffer_of(consumed, tile);
        if (tile.reads()) {
            full[consumed % 2].wait(consumed / 2);
            __syncwarp();
            if (MAP == DENSE) first_rows.load(arg, buffer, own, 0);
            gates = next_scalars;
        }
        // Issue the next tile only after the current tile has landed: all warps of the device start together, and with
        // two tiles each they would first wait for twice the bytes.
        const bool early = next.reads() && tile.bytes + next.bytes <= upper - lower;
        if (early) issue(next_scalars, next);
        if (tile.reads()) {
            if constexpr (ERASES) {
                project_matrix(arg, buffer, own, gates, first_rows, memory.scratch);
            } else {
                KeyScores& products = of.scores[(tile.row * ROW_TILES + tile.index) / KEY_TILES - of.first_key];
                project_query(arg, buffer, own, gates, first_rows, products, memory.scratch);
            }
        }
        if (MAP != DENSE && next.reads()) first_rows.load(arg, buffer, of.heads_of(next), 0);
        if (tile.reads()) {
            __syncwarp();
            ResidualShare residual;
#if RESIDUAL
            residual = read_residual(buffer, own, memory.scratch, [&](int h, float(&x)[LK]) {
                effective_query(x, buffer.query(), buffer, memory.scratch.query_part[h], tile.pos,
                                memory.scratch.window_decay[h]);
            });
#endif
            read_values(buffer, own, residual, of.output(tile), memory.scratch);
            __syncwarp();
        } else {
            of.write_zeros(tile);
        }
        if (next.reads() && !early) issue(next_scalars, next);
        consumed += tile.reads();
        tile = next;
    }
}

// The same with TWO_HALVES: key halves at the lower end, value halves at the upper end. There is room for the key half
// of any tile together with the value half of any other tile (read.cu). A tile's value half is requested right after
// its key half; the next tile's key half is requested when this tile's value half has landed.
DEVICE void read_tiles_in_halves(const TileReader& of, WarpMemory& memory, char* const lower, char* const upper) {
    const Arguments& arg = of.arg;
    WarpCopyBarrier(&full)[2] = of.block.full[threadIdx.x / 32];
    auto buffer_of = [&](const ReadTile& tile) {
        return TileBuffer{lower, upper - TileBuffer::bytes(VALUE_HALF, tile.pos, of.heads_of(tile).elements), tile.pos};
    };
    auto fetch_keys = [&](TokenScalars& gates, const ReadTile& tile) {
        copy_betas(arg, tile, memory.scratch.beta);
        fetch<KEY_HALF>(arg, buffer_of(tile), of.heads_of(tile), tile, full[0]);
        gates.load(arg, tile);
    };
    TokenScalars gates;
    ReadTile tile = of.first();
    if (tile.reads()) fetch_keys(gates, tile);
    for (u32 phase = 0; tile.row >= 0;) {
        if (!tile.reads()) {
            of.write_zeros(tile);
            tile = of.next();
            if (tile.reads()) fetch_keys(gates, tile);
            continue;
        }
        const TileHeads& own = of.heads_of(tile);
        const TileBuffer buffer = buffer_of(tile);
        fetch<VALUE_HALF>(arg, buffer, own, tile, full[1]);
        GateInput<LK> input;
        input.load(arg.gate_input, tile.index, first_channel());
        full[0].wait(phase);
        copy_async_wait<0>();
        __syncwarp();
        MapRow first_rows, second_rows;
        auto load_rows = [&] {
            first_rows = load_map(arg, buffer, own, 0, 0);
            if (RANK_MAX > 8 && own.rank[0] > 8) second_rows = load_map(arg, buffer, own, 0, 8);
        };
        if (QUERY_SLICED && MAP != DENSE) load_rows();
        float x[LK];  // channels of the effective query
        walk_back(buffer, gates, input, memory.scratch, x);

        const ReadTile next = of.next();
        full[1].wait(phase);
        __syncwarp();
        if (QUERY_SLICED && MAP == DENSE) load_rows();
        if (next.reads()) fetch_keys(gates, next);
        if constexpr (QUERY_SLICED) project_slices(buffer, own, first_rows, second_rows, memory.scratch);
        else project_lanes<1>(arg, buffer, own, &x, memory.scratch.c, &memory.scratch.y);
        __syncwarp();
        ResidualShare residual;
#if RESIDUAL
        residual = read_residual(buffer, own, memory.scratch, [&](int, float(&query)[LK]) {
#pragma unroll
            for (int n = 0; n < LK; n++) query[n] = x[n];
        });
#endif
        read_values(buffer, own, residual, of.output(tile), memory.scratch);
        __syncwarp();
        phase++;
        tile = next;
    }
}
