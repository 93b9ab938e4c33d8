// The work tile of a read step: one row of the batch and TILE_HEADS neighbouring heads that share a key head.
#pragma once
#include "slot/codes.cuh"
#include "slot/errors.cuh"
#include "read/window.cuh"

// Products along K use the tensor cores if the operands can be loaded as they are stored and decays are scalar.
constexpr bool MATRIX = !CHANNEL_DECAYS && ACT == BF16 && SKETCH != FP32 && W <= 16;
// Two heads of more than 128 value channels would need too many registers for their outputs.
constexpr int TILE_HEADS = MATRIX && HEADS_PER_KEY % 2 == 0 && V <= 128 ? 2 : 1;
constexpr int ROW_TILES = HEADS / TILE_HEADS;  // tiles of a row
constexpr int KEY_TILES = HEADS_PER_KEY / TILE_HEADS;  // tiles of a row that share a key head
// Lanes per head when a warp works on the heads side by side: lane l holds the scalar gate of token l % SPAN, at head
// l / SPAN of the tile. (Windows of 32 have tiles of one head.)
constexpr int SPAN = 32 / TILE_HEADS;

// SHARED_SCORES: without erasure, all heads of a key head use the same products <k_s, q>; the block computes them once.
// TWO_HALVES: the token-by-token path uses the keys first, and the values and the sketch much later, so the two halves
// of a tile are separate pipeline stages.
constexpr bool SHARED_SCORES = MATRIX && !ERASES, TWO_HALVES = !MATRIX;
enum { KEY_HALF = 1, VALUE_HALF = 2, BOTH_HALVES = 3 };  // halves of a tile in shared memory, see TileBuffer

// Position of a row that does not read. Reads have at most so many tokens.
constexpr int NO_READ = MONITOR ? W : W - 1;

struct Arguments {
    Memory memory;
    const float* gate_input;
    const projection_t* projection;
    const int4* heads;
    Inputs inputs;
    TokenSteps steps;  // read_draft.cu only: from one draft of a row to the next
    Strided<out_t> out;

    // A row's draft number t.
    DEVICE Token token(int row, int t, int head) const {
        Token token(inputs, row, head);
        token.move(steps, t);
        return token;
    }
};

// The batch rows of a thread block's tiles.
struct BlockRows {
    const int2* rows;  // {slot, position} of each row
    int first_row;
    static constexpr int t = 0;  // the rows' token

    DEVICE int2 of(int row) const { return rows[row - first_row]; }
    static DEVICE bool continues(int slot, int pos) { return slot >= 0 && pos < NO_READ; }
};

// The plan's entries for the heads of a tile.
template <bool USED> struct TileBits {
    int bits[TILE_HEADS];  // of residuals
    DEVICE void load_bits(const int4& info, int h) { bits[h] = info.z; }
    DEVICE int bits_of(int h) const { return bits[h]; }
};
template <> struct TileBits<false> {
    DEVICE void load_bits(const int4&, int) {}
    DEVICE int bits_of(int) const { return 0; }
};
struct TileHeads : TileBits<(RESIDUAL > 0)> {
    int rank[TILE_HEADS], projection[TILE_HEADS];  // rank 0: a full-state head
    int at[TILE_HEADS];  // offsets of their sketches in the tile's sketches
    int from, elements;  // offset of the tile's sketches in a slot, and their length

    DEVICE void load(const int4* heads, int part) {
        from = elements = 0;
#pragma unroll
        for (int h = 0; h < TILE_HEADS; h++) {
            const int4 info = heads[part * TILE_HEADS + h];
            rank[h] = info.x, projection[h] = info.z;
            if (elements == 0) from = info.y;
            at[h] = elements;
            load_bits(info, h);
            elements += sketch_elements(info.x, bits_of(h));
        }
    }
};

// One tile of work. bytes: the tile's size in shared memory, 0 if the row is padding or its window ends. row: -1 past
// the last tile.
struct ReadTile {
    int row, index, slot, pos, bytes;  // index: which tile of its row
    DEVICE bool reads() const { return bytes > 0; }
};

// Scalar gates and betas of a tile's tokens, 0 past the newest. With TWO_HALVES the betas are in shared memory instead.
struct TokenScalars {
    float g, beta;

    DEVICE void load(const Arguments& arg, const ReadTile& tile) {
        const int lane = threadIdx.x % 32, s = lane % SPAN, head = tile.index * TILE_HEADS + lane / SPAN;
        g = beta = 0;
        if (s > tile.pos) return;
        auto get = [&](const auto& ring, const auto& input) -> float {
            return *(s < tile.pos ? ring.of(tile.slot) + head * W + s : input.of(tile.row) + head);
        };
        if (!CHANNEL_DECAYS) g = get(arg.memory.gates, arg.inputs.g);
        if (ERASES && !TWO_HALVES) beta = get(arg.memory.betas, arg.inputs.beta);
    }
};

// Starts the copies of a tile's betas to shared memory, one token a lane (TWO_HALVES). These are copies instead of
// loads, because an instruction that waits for one load also waits for the other loads on the same scoreboard, and the
// betas come from DRAM.
DEVICE void copy_betas(const Arguments& arg, const ReadTile& tile, float* to) {
    const int s = threadIdx.x % 32;
    if (ERASES && s <= tile.pos)
        copy_async_4(to + s, s < tile.pos ? arg.memory.betas.of(tile.slot) + tile.index * W + s
                                          : arg.inputs.beta.of(tile.row) + tile.index);
    copy_async_commit();
}

// A tile in shared memory, two halves without gaps:
//
//   key half     keys of tokens 0 to pos (absent with SHARED_SCORES) | query | gates of tokens 0 to pos (kda)
//   value half   per head: values of tokens 0 to pos - 1 | newest value of each head | sketches of all heads
struct TileBuffer {
    static constexpr int KEY = K * sizeof(act_t), VALUE = V * sizeof(act_t);
    static constexpr int GATE = CHANNEL_DECAYS ? K * sizeof(gate_t) : 0;
    char *keys, *value_half;
    int pos;

    DEVICE const act_t* key(int s) const { return reinterpret_cast<const act_t*>(keys + s * KEY); }
    DEVICE const act_t* query() const { return reinterpret_cast<const act_t*>(keys + query_at(pos)); }
    DEVICE const gate_t* gates() const { return reinterpret_cast<const gate_t*>(keys + gates_at(pos)); }
    DEVICE const act_t* values(int h) const { return reinterpret_cast<const act_t*>(value_half + h * pos * VALUE); }
    DEVICE const act_t* newest(int h) const {
        return reinterpret_cast<const act_t*>(value_half + newest_at(pos) + h * VALUE);
    }
    DEVICE const sketch_t* sketches() const { return reinterpret_cast<const sketch_t*>(value_half + sketches_at(pos)); }

    static constexpr DEVICE int query_at(int pos) { return SHARED_SCORES ? 0 : (pos + 1) * KEY; }
    static constexpr DEVICE int gates_at(int pos) { return query_at(pos) + KEY; }
    static constexpr DEVICE int newest_at(int pos) { return TILE_HEADS * pos * VALUE; }
    static constexpr DEVICE int sketches_at(int pos) { return TILE_HEADS * (pos + 1) * VALUE; }
    static constexpr DEVICE int bytes(int half, int pos, int elements) {
        return (half & KEY_HALF ? gates_at(pos) + (pos + 1) * GATE : 0) +
               (half & VALUE_HALF ? sketches_at(pos) + elements * static_cast<int>(sizeof(sketch_t)) : 0);
    }
};
