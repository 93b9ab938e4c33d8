// Work for all tiles of a block: appending the newest tokens to the rings, and the shared scores.
#pragma once
#include "read/sketch.cuh"

// The newest token's part of one array of the ring, LENGTH elements a head, for heads `from` to `to` - 1. Heads are
// numbered through over all rows: head h of row i has number i * ROW_HEADS + h. A warp moves one piece at a time.
template <int ROW_HEADS, int LENGTH, class T, bool VALUES = false> struct NewTokenArray {
    struct alignas(LENGTH == 1 ? sizeof(T) : 16) Chunk {
        T x[LENGTH == 1 ? 1 : 16 / sizeof(T)];
    };
    static constexpr int CHUNKS = LENGTH * sizeof(T) / sizeof(Chunk), LOADS = 4;
    Strided<T> ring;
    Strided<const T> input;
    int step, from, to;  // step: bytes from a row's token to its next one

    DEVICE int pieces() const { return ((to - from) * CHUNKS + 32 * LOADS - 1) / (32 * LOADS); }
    template <class Rows> DEVICE void append(const Rows& own_rows, int piece) const {
        Chunk x[LOADS];
        Chunk* into[LOADS];
#pragma unroll
        for (int n = 0; n < LOADS; n++) {
            const int i = from * CHUNKS + (piece * LOADS + n) * 32 + threadIdx.x % 32;
            const int row = i / (ROW_HEADS * CHUNKS), own = i % (ROW_HEADS * CHUNKS);
            const int2 entry = i < to * CHUNKS ? own_rows.of(row) : make_int2(-1, 0);
            into[n] = nullptr;
            if (!BlockRows::continues(entry.x, entry.y)) continue;
            x[n] = reinterpret_cast<const Chunk*>(Strided<const T>{input.of(row), step}.of(own_rows.t))[own];
            constexpr int EACH = sizeof(Chunk) / sizeof(T);
            const int at = own % CHUNKS ^ (VALUES ? swizzle(entry.y) / EACH : 0);
            into[n] = reinterpret_cast<Chunk*>(ring.of(entry.x)) + (own / CHUNKS * W + entry.y) * CHUNKS + at;
        }
#pragma unroll
        for (int n = 0; n < LOADS; n++)
            if (into[n]) *into[n] = x[n];
    }
};

// The newest tokens of heads `from` to `to` - 1 in all arrays of the ring.
struct NewTokens {
    NewTokenArray<HEADS, V, act_t, true> values;
    NewTokenArray<KEY_HEADS, K, act_t> keys;
    NewTokenArray<HEADS, GATES, gate_t> gates;
    NewTokenArray<HEADS, 1, float> betas;

    DEVICE NewTokens(const Arguments& arg, int from, int to)
        : values{arg.memory.values, arg.inputs.v, arg.steps.v, from, to},
          keys{arg.memory.keys, arg.inputs.k, arg.steps.k, (from + HEADS_PER_KEY - 1) / HEADS_PER_KEY,
               (to + HEADS_PER_KEY - 1) / HEADS_PER_KEY},
          gates{arg.memory.gates, arg.inputs.g, arg.steps.g, from, to},
          betas{arg.memory.betas, arg.inputs.beta, arg.steps.beta, from, ERASES ? to : from} {}
    DEVICE int pieces() const { return values.pieces() + keys.pieces() + gates.pieces() + betas.pieces(); }
    template <class Rows> DEVICE void append(const Rows& own_rows, int piece) const {
        auto take = [&](const auto& newest) {
            const bool own = piece >= 0 && piece < newest.pieces();
            if (own) newest.append(own_rows, piece);
            piece -= newest.pieces();
        };
        take(values), take(keys), take(gates), take(betas);
    }
};

// Scores <k_s, q> of the tokens, for `count` key heads from `first` on. The key heads are divided among `warps` warps;
// this is number `warp`.
DEVICE void compute_scores(const Arguments& arg, const BlockRows& own_rows, int first, int count, int warp, int warps,
                           KeyScores* scores) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    for (int i = warp; i < count; i += warps) {
        const int row = (first + i) / KEY_HEADS, head = (first + i) % KEY_HEADS;
        const int2 entry = own_rows.of(row);
        if (BlockRows::continues(entry.x, entry.y)) {
            const int pos = entry.y;
            const act_t* const ring = arg.memory.keys.of(entry.x) + head * W * K;
            const act_t* const newest = arg.inputs.k.of(row) + head * K;
            QueryFragment query;
            TokenRow tokens[2];
            query.load(arg.inputs.q.of(row) + head * K);
#pragma unroll
            for (int n = 0; n < 2; n++) tokens[n].load(r + 8 * n < pos ? ring + (r + 8 * n) * K : newest);
            float d[2][4] = {};
#pragma unroll
            for (int j = 0; j < KEY_CHUNKS; j++) {
#pragma unroll
                for (int n = 0; n < 2; n++) query.multiply(d[n], tokens[n].of(j), j);
            }
            if (c < 2) scores[i].of[8 * c + r] = c ? QueryFragment::product(d[1]) : QueryFragment::product(d[0]);
        }
        scores[i].full.arrive();
    }
}
