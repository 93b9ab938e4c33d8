// What a block does for all of its items at once, beside or between them.
#pragma once
#include "read_sketch.cuh"

// What the newest tokens of a block's heads, from `from` to `to` - 1, put into one of the ring's arrays, LENGTH elements each.
// Heads count on from row to row. A warp moves a piece of it at a time.
template <int ROW_HEADS, int LENGTH, class T, bool VALUES = false> struct Newest {
    struct alignas(LENGTH == 1 ? sizeof(T) : 16) Chunk {
        T x[LENGTH == 1 ? 1 : 16 / sizeof(T)];
    };
    static constexpr int CHUNKS = LENGTH * sizeof(T) / sizeof(Chunk), LOADS = 4;
    T* ring;
    const T* input;
    int from, to;

    __device__ __forceinline__ int pieces() const { return ((to - from) * CHUNKS + 32 * LOADS - 1) / (32 * LOADS); }
    __device__ __forceinline__ void append(const Share& share, int piece) const {
        Chunk x[LOADS];
        Chunk* into[LOADS];
#pragma unroll
        for (int n = 0; n < LOADS; n++) {
            const int i = from * CHUNKS + (piece * LOADS + n) * 32 + threadIdx.x % 32;
            const int row = i / (ROW_HEADS * CHUNKS), own = i % (ROW_HEADS * CHUNKS);
            const int2 entry = i < to * CHUNKS ? share.of(row) : make_int2(-1, 0);
            into[n] = nullptr;
            if (!Share::goes_on(entry.x, entry.y)) continue;
            x[n] = *place<ROW_HEADS * CHUNKS>(reinterpret_cast<const Chunk*>(input), share.at(row), own);
            constexpr int EACH = sizeof(Chunk) / sizeof(T);
            const int at = own % CHUNKS ^ (VALUES ? turn_of(entry.y) / EACH : 0);
            into[n] = place<ROW_HEADS * W * CHUNKS>(reinterpret_cast<Chunk*>(ring), entry.x, (own / CHUNKS * W + entry.y) * CHUNKS + at);
        }
#pragma unroll
        for (int n = 0; n < LOADS; n++)
            if (into[n]) *into[n] = x[n];
    }
};

// What the newest tokens of heads `from` to `to` - 1 put into the ring.
struct NewTokens {
    Newest<HEADS, V, act_t, true> values;
    Newest<KEY_HEADS, K, act_t> keys;
    Newest<HEADS, GATES, gate_t> gates;
    Newest<HEADS, 1, float> betas;

    __device__ __forceinline__ NewTokens(const Arguments& arg, int from, int to)
        : values{arg.ring_v, arg.v, from, to}, keys{arg.ring_k, arg.k, (from + GROUP - 1) / GROUP, (to + GROUP - 1) / GROUP},
          gates{arg.ring_g, arg.g, from, to}, betas{arg.ring_beta, arg.beta, from, ERASES ? to : from} {}
    __device__ __forceinline__ int pieces() const { return values.pieces() + keys.pieces() + gates.pieces() + betas.pieces(); }
    __device__ __forceinline__ void append(const Share& share, int piece) const {
        auto take = [&](const auto& newest) {
            const bool own = piece >= 0 && piece < newest.pieces();
            if (own) newest.append(share, piece);
            piece -= newest.pieces();
        };
        take(values), take(keys), take(gates), take(betas);
    }
};

// Products of a row's query with its tokens, at the key heads from `first` on: one at a time for each of `warps` warps, of
// which this is that number.
__device__ __forceinline__ void find_scores(const Arguments& arg, const Share& share, int first, int count, int warp, int warps,
                                            Scores* scores) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    for (int i = warp; i < count; i += warps) {
        const int row = (first + i) / KEY_HEADS, head = (first + i) % KEY_HEADS;
        const int2 entry = share.of(row);
        if (Share::goes_on(entry.x, entry.y)) {
            const act_t* const ring = place<KEY_HEADS * W * K>(arg.ring_k, entry.x, head * W * K);
            const act_t* const newest = place<KEY_HEADS * K>(arg.k, share.at(row), head * K);
            Query query;
            Row tokens[2];
            query.load(place<KEY_HEADS * K>(arg.q, share.at(row), head * K));
#pragma unroll
            for (int n = 0; n < 2; n++) tokens[n].load(r + 8 * n < entry.y ? ring + (r + 8 * n) * K : newest);
            float d[2][4] = {};
#pragma unroll
            for (int j = 0; j < KEY_CHUNKS; j++) {
#pragma unroll
                for (int n = 0; n < 2; n++) query.multiply(d[n], tokens[n].x[j], j);
            }
            if (c < 2) scores[i].of[8 * c + r] = c ? Query::product(d[1]) : Query::product(d[0]);
        }
        scores[i].known.arrive();
    }
}
