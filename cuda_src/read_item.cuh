// A warp's items of a read step: one row and TOGETHER neighbouring heads that share keys.
#pragma once
#include "sketch_layout.cuh"
#include "read_window.cuh"

// Whether products along K go to the tensor cores: operands as they lie in memory, decays that are no part of them.
constexpr bool MATRIX = KIND != KDA && ACT == BF16 && SKETCH == BF16 && W <= 16;
constexpr int TOGETHER = MATRIX && GROUP % 2 == 0 ? 2 : 1;
constexpr int PARTS = HEADS / TOGETHER;         // items of a row
constexpr int PARTS_OF_KEY = GROUP / TOGETHER;  // items of a row that share a key head
constexpr int LANES = 32 / TOGETHER;            // lanes of a head, where heads are worked on side by side

// Without erasure all heads of a key take the same products of keys and query: the block works them out once. Where
// products go token by token, keys are done with long before the rest of an item, and are fetched apart from it.
constexpr bool SCORED = MATRIX && !ERASES, SPLIT = !MATRIX;
enum { KEYS = 1, REST = 2, BOTH = 3 };  // halves of an item, which are fetched apart or together

// A lane keeps the gates of token lane % SPAN of every (32 / SPAN)-th head.
constexpr int SPAN = MATRIX && TOGETHER > 1 ? 16 : 32;
constexpr int HEADS_AT_ONCE = 32 / SPAN;
constexpr int TURNS = (TOGETHER + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE;

// base + index * STEP + more, by one multiplication that widens.
template <int STEP, class T> __device__ __forceinline__ T* place(T* base, int index, int more) {
    return base + static_cast<i64>(index) * STEP + more;
}

struct Arguments {
    const float* state;
    i64 slot_stride;
    act_t *ring_k, *ring_v;
    gate_t* ring_g;
    float* ring_beta;
    const float* gate_input;
    const sketch_t *sketch, *projection;
    i64 sketch_stride;
    const int4* heads;
    const act_t *q, *k, *v;
    const gate_t* g;
    const float* beta;
    out_t* out;

    __device__ __forceinline__ Ring ring(i64 slot, int head) const {
        return Ring(ring_k, ring_v, ring_g, ring_beta, slot, head);
    }
    __device__ __forceinline__ Token token(i64 at, int head) const { return Token(q, k, v, g, beta, at, head); }
};

// Rows of a block's items, and where their tokens are in the inputs.
struct Share {
    const int2* rows;  // slot and position
    int first_row, tokens, t;

    __device__ __forceinline__ int2 of(int row) const { return rows[row - first_row]; }
    __device__ __forceinline__ int at(int row) const { return row * tokens + t; }
    static __device__ __forceinline__ bool goes_on(int slot, int pos) { return slot >= 0 && pos + 1 < W; }
};

// Heads of an item as the plan has them.
struct Heads {
    int rank[TOGETHER], projection[TOGETHER];  // rank 0: a dense head
    int at[TOGETHER];                          // where their sketches begin in the item's
    int from, elements;                        // where all of them lie in a slot's, one after the other

    __device__ __forceinline__ void load(const int4* heads, int part) {
        from = elements = 0;
#pragma unroll
        for (int h = 0; h < TOGETHER; h++) {
            const int4 info = heads[part * TOGETHER + h];
            rank[h] = info.x, projection[h] = info.z;
            if (elements == 0) from = info.y;
            at[h] = elements;
            elements += sketch_elements(info.x);
        }
    }
};

// What a warp works on, of so many bytes; none where no row goes on, and no row after the last.
struct Work {
    int row, part, slot, pos, bytes;
    __device__ __forceinline__ bool reads() const { return bytes > 0; }
};

// Scalar gates and betas of the tokens of an item; 0 after the newest. Betas of items in halves lie in shared memory.
struct Gates {
    float g[TURNS], beta[TURNS];

    __device__ __forceinline__ void load(const Arguments& arg, const Work& work, int at) {
        const int lane = threadIdx.x % 32, s = lane % SPAN;
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            const int h = lane / SPAN + i * HEADS_AT_ONCE, head = work.part * TOGETHER + h;
            g[i] = beta[i] = 0;
            if (s > work.pos || h >= TOGETHER) continue;
            auto get = [&](auto* ring, auto* input) -> float {
                auto* const kept = place<HEADS * W>(ring, work.slot, head * W + s);
                return *(s < work.pos ? kept : place<HEADS>(input, at, head));
            };
            if (KIND != KDA) g[i] = get(arg.ring_g, arg.g);
            if (ERASES && !SPLIT) beta[i] = get(arg.ring_beta, arg.beta);
        }
    }
};

// Starts copies of the betas of an item in halves, each lane its own token's: who waits for one load waits for all that the
// compiler counts with it, and these come from memory.
__device__ __forceinline__ void copy_betas(const Arguments& arg, const Work& work, int at, float* to) {
    const int s = threadIdx.x % 32;
    if (ERASES && s <= work.pos)
        copy_async_4(to + s, s < work.pos ? place<HEADS * W>(arg.ring_beta, work.slot, work.part * W + s) : place<HEADS>(arg.beta, at, work.part));
    copy_async_commit();
}

// An item in shared memory. Its halves, each without a gap: keys of tokens 0 to pos (but where the block has their
// products), then the query, then gates (kda) | values of each head but for the newest, newest values, sketches of all heads.
struct Item {
    static constexpr int KEY = K * sizeof(act_t), VALUE = V * sizeof(act_t);
    static constexpr int GATE = KIND == KDA ? K * sizeof(gate_t) : 0;
    char *keys, *rest;
    int pos;

    __device__ __forceinline__ const act_t* key(int s) const { return reinterpret_cast<const act_t*>(keys + s * KEY); }
    __device__ __forceinline__ const act_t* query() const { return reinterpret_cast<const act_t*>(keys + query_at(pos)); }
    __device__ __forceinline__ const gate_t* gates() const {
        return reinterpret_cast<const gate_t*>(keys + gates_at(pos));
    }
    __device__ __forceinline__ const act_t* values(int h) const {
        return reinterpret_cast<const act_t*>(rest + h * pos * VALUE);
    }
    __device__ __forceinline__ const act_t* newest(int h) const {
        return reinterpret_cast<const act_t*>(rest + newest_at(pos) + h * VALUE);
    }
    __device__ __forceinline__ const sketch_t* sketches() const {
        return reinterpret_cast<const sketch_t*>(rest + sketches_at(pos));
    }

    static constexpr __device__ __forceinline__ int query_at(int pos) { return SCORED ? 0 : (pos + 1) * KEY; }
    static constexpr __device__ __forceinline__ int gates_at(int pos) { return query_at(pos) + KEY; }
    static constexpr __device__ __forceinline__ int newest_at(int pos) { return TOGETHER * pos * VALUE; }
    static constexpr __device__ __forceinline__ int sketches_at(int pos) { return TOGETHER * (pos + 1) * VALUE; }
    static constexpr __device__ __forceinline__ int bytes(int half, int pos, int elements) {
        return (half & KEYS ? gates_at(pos) + (pos + 1) * GATE : 0) +
               (half & REST ? sketches_at(pos) + elements * static_cast<int>(sizeof(sketch_t)) : 0);
    }
};
