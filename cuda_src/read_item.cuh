// A warp's items of a read step: one row and TOGETHER neighbouring heads that share keys.
//
// All bytes of an item come into the warp's part of shared memory by a few bulk copies, one lane each. Two items
// have room at once unless both are large: one lies at the lower end of that memory, the next at the upper end.
#pragma once
#include "sketch_layout.cuh"
#include "window.cuh"

#ifndef GDN_TOGETHER
#define GDN_TOGETHER 1
#endif
// Whether products along K go to the tensor cores: operands as they lie in memory, decays that are no part of them.
constexpr bool MATRIX = KIND != KDA && ACT == BF16 && SKETCH == BF16 && W <= 16;
constexpr int TOGETHER = !MATRIX || GROUP % 2 ? 1 : KIND == MAMBA2 && GROUP % 4 == 0 ? 4 : KIND == MAMBA2 ? 2 : GDN_TOGETHER;
constexpr int PARTS = HEADS / TOGETHER;  // items of a row
constexpr int LANES = 32 / TOGETHER;     // lanes of a head, where heads are worked on side by side

// A lane keeps the gates of token lane % SPAN of every (32 / SPAN)-th head.
constexpr int SPAN = MATRIX && TOGETHER > 1 ? 16 : 32;
constexpr int HEADS_AT_ONCE = 32 / SPAN;
constexpr int TURNS = (TOGETHER + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE;

struct Arguments {
    const float* state;
    i64 slot_stride;
    act_t *ring_k, *ring_v;
    float *ring_g, *ring_beta;
    const sketch_t *sketch, *projection;
    i64 sketch_stride;
    const int4* heads;
    const act_t *q, *k, *v;
    const float *g, *beta;
    out_t* out;

    __device__ __forceinline__ Ring ring(i64 slot, int head) const { return Ring(ring_k, ring_v, ring_g, ring_beta, slot, head); }
    __device__ __forceinline__ Token token(i64 at, int head) const { return Token(q, k, v, g, beta, at, head); }
};

// Heads of an item as the plan has them.
struct Heads {
    int rank[TOGETHER], projection[TOGETHER];  // rank 0: a dense head
    int from, elements;                        // where their sketches lie in a slot's, one after the other

    __device__ __forceinline__ void load(const int4* heads, int part) {
        elements = 0, from = 0;
#pragma unroll
        for (int h = 0; h < TOGETHER; h++) {
            const int4 info = heads[part * TOGETHER + h];
            rank[h] = info.x, projection[h] = info.z;
            if (elements == 0) from = info.y;
            elements += sketch_elements(info.x);
        }
    }
};

// Gates and betas of the tokens of an item; 0 after the newest.
struct Gates {
    float g[TURNS], beta[TURNS];

    __device__ __forceinline__ void load(const Arguments& arg, int first, i64 at, i64 slot, int pos) {
        const int lane = threadIdx.x % 32, s = lane % SPAN;
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            const int head = first + lane / SPAN + i * HEADS_AT_ONCE;
            const Token token = arg.token(at, head);
            const Ring ring = arg.ring(slot, head);
            g[i] = beta[i] = 0;
            if (s > pos || head >= first + TOGETHER) continue;
            if (KIND != KDA) g[i] = s < pos ? ring.g[s] : *token.g;
            if (ERASES) beta[i] = s < pos ? ring.beta[s] : *token.beta;
        }
    }
    __device__ __forceinline__ void append(const Arguments& arg, int first, i64 slot, int pos) const {
        const int lane = threadIdx.x % 32;
        if (lane % SPAN != pos) return;
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            const int head = first + lane / SPAN + i * HEADS_AT_ONCE;
            if (head >= first + TOGETHER) continue;
            const Ring ring = arg.ring(slot, head);
            if (KIND != KDA) ring.g[pos] = g[i];
            if (ERASES) ring.beta[pos] = beta[i];
        }
    }
};

// An item in shared memory, without a gap: keys of tokens 0 to pos, then the query | values of each head | gates
// (kda) | sketches of all heads.
struct Item {
    static constexpr int KEY = K * sizeof(act_t), VALUE = V * sizeof(act_t), GATE = KIND == KDA ? K * sizeof(float) : 0;
    char* at;
    int pos;

    __device__ __forceinline__ const act_t* key(int s) const { return reinterpret_cast<const act_t*>(at + s * KEY); }
    __device__ __forceinline__ const act_t* values(int h) const { return reinterpret_cast<const act_t*>(at + values_at(pos) + h * (pos + 1) * VALUE); }
    __device__ __forceinline__ const float* gates() const { return reinterpret_cast<const float*>(at + gates_at(pos)); }
    __device__ __forceinline__ const sketch_t* sketches() const { return reinterpret_cast<const sketch_t*>(at + sketches_at(pos)); }

    static constexpr __device__ __forceinline__ int values_at(int pos) { return (pos + 2) * KEY; }
    static constexpr __device__ __forceinline__ int gates_at(int pos) { return values_at(pos) + TOGETHER * (pos + 1) * VALUE; }
    static constexpr __device__ __forceinline__ int sketches_at(int pos) { return gates_at(pos) + (pos + 1) * GATE; }
    static constexpr __device__ __forceinline__ int bytes(int pos, int elements) {
        return sketches_at(pos) + elements * static_cast<int>(sizeof(sketch_t));
    }

    // Starts the copies of a row's heads from `first` on.
    __device__ __forceinline__ void fetch(const Arguments& arg, const Heads& heads, int first, i64 row, i64 slot, Arrival& arrival) const {
        const int lane = threadIdx.x % 32, h = lane % 8;
        const Ring ring = arg.ring(slot, first);
        const Token token = arg.token(row, first);
        const void* from = ring.k;
        int to = 0, size = pos * KEY;
        if (lane == 1) from = token.k, to = pos * KEY, size = KEY;
        if (lane == 2) from = token.q, to = (pos + 1) * KEY, size = KEY;
        if (lane == 3) {
            from = arg.sketch + slot * arg.sketch_stride + heads.from;
            to = sketches_at(pos), size = heads.elements * sizeof(sketch_t);
        }
        if (lane == 4) from = ring.g, to = gates_at(pos), size = pos * GATE;
        if (lane == 5) from = token.g, to = gates_at(pos) + pos * GATE, size = GATE;
        if (lane >= 6) size = 0;
        if (lane / 8 == 1 && h < TOGETHER) from = ring.v + h * W * V, to = values_at(pos) + h * (pos + 1) * VALUE, size = pos * VALUE;
        if (lane / 8 == 2 && h < TOGETHER) from = token.v + h * V, to = values_at(pos) + (h * (pos + 1) + pos) * VALUE, size = VALUE;
        if (lane == 0) arrival.expect(bytes(pos, heads.elements));
        __syncwarp();
        copy_pieces(at + to, from, size, arrival);
    }

    // Puts the newest token into the ring.
    __device__ __forceinline__ void append(const Arguments& arg, int first, i64 slot) const {
        const int lane = threadIdx.x % 32;
        const Ring ring = arg.ring(slot, first);
        typedef ValueShare<LANES> Share;
        if (first % GROUP == 0) {
            Packed<ACT, LK> own;
            own.load(key(pos) + lane * LK);
            own.store(ring.k + pos * K + lane * LK);
        }
#pragma unroll
        for (int i = 0; i < Share::COUNT; i++) {
            const int h = lane / LANES;
            if (Share::at(i) >= V) continue;
            Packed<ACT, Share::WIDTH> own;
            own.load(values(h) + pos * V + Share::at(i));
            own.store(ring.v + (h * W + pos) * V + Share::at(i));
        }
        if (KIND == KDA) {
            Packed<FP32, LK> own;
            own.load(gates() + pos * K + lane * LK);
            own.store(ring.g + pos * K + lane * LK);
        }
    }
};
