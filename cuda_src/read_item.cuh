// A warp's items of a read step: one row and TOGETHER neighbouring heads that share keys.
//
// All bytes of an item come into the warp's part of shared memory by a few bulk copies, one lane each. Where two items
// have room at once, one lies at the lower end of that memory and the next at the upper end.
#pragma once
#include "sketch_layout.cuh"
#include "read_window.cuh"

// Whether products along K go to the tensor cores: operands as they lie in memory, decays that are no part of them.
constexpr bool MATRIX = KIND != KDA && ACT == BF16 && SKETCH == BF16 && W <= 16;
constexpr int TOGETHER = MATRIX && GROUP % 2 == 0 ? 2 : 1;
constexpr int PARTS = HEADS / TOGETHER;  // items of a row
constexpr int LANES = 32 / TOGETHER;     // lanes of a head, where heads are worked on side by side

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

// What a warp works on; nothing where no row goes on.
struct Work {
    int row, part, slot, pos;
    bool reads;
};

// Gates and betas of the tokens of an item; 0 after the newest.
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
            if (ERASES) beta[i] = get(arg.ring_beta, arg.beta);
        }
    }
    __device__ __forceinline__ void append(const Arguments& arg, const Work& work) const {
        const int lane = threadIdx.x % 32;
        if (lane % SPAN != work.pos) return;
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            const int h = lane / SPAN + i * HEADS_AT_ONCE;
            if (h >= TOGETHER) continue;
            const int own = (work.part * TOGETHER + h) * W + work.pos;
            if (KIND != KDA) *place<HEADS * W>(arg.ring_g, work.slot, own) = g[i];
            if (ERASES) *place<HEADS * W>(arg.ring_beta, work.slot, own) = beta[i];
        }
    }
};

// An item in shared memory, without a gap: keys of tokens 0 to pos, then the query | values of each head but for the
// newest | newest values | gates (kda) | sketches of all heads.
struct Item {
    static constexpr int KEY = K * sizeof(act_t), VALUE = V * sizeof(act_t);
    static constexpr int GATE = KIND == KDA ? K * sizeof(gate_t) : 0;
    char* at;
    int pos;

    __device__ __forceinline__ const act_t* key(int s) const { return reinterpret_cast<const act_t*>(at + s * KEY); }
    __device__ __forceinline__ const act_t* values(int h) const {
        return reinterpret_cast<const act_t*>(at + values_at(pos) + h * pos * VALUE);
    }
    __device__ __forceinline__ const act_t* newest(int h) const {
        return reinterpret_cast<const act_t*>(at + newest_at(pos) + h * VALUE);
    }
    __device__ __forceinline__ const gate_t* gates() const {
        return reinterpret_cast<const gate_t*>(at + gates_at(pos));
    }
    __device__ __forceinline__ const sketch_t* sketches() const {
        return reinterpret_cast<const sketch_t*>(at + sketches_at(pos));
    }

    static constexpr __device__ __forceinline__ int values_at(int pos) { return (pos + 2) * KEY; }
    static constexpr __device__ __forceinline__ int newest_at(int pos) {
        return values_at(pos) + TOGETHER * pos * VALUE;
    }
    static constexpr __device__ __forceinline__ int gates_at(int pos) { return newest_at(pos) + TOGETHER * VALUE; }
    static constexpr __device__ __forceinline__ int sketches_at(int pos) { return gates_at(pos) + (pos + 1) * GATE; }
    static constexpr __device__ __forceinline__ int bytes(int pos, int elements) {
        return sketches_at(pos) + elements * static_cast<int>(sizeof(sketch_t));
    }

    // Puts the newest token into the ring, 16 bytes a lane.
    __device__ __forceinline__ void append(const Arguments& arg, const Work& work) const {
        const int first = work.part * TOGETHER;
        auto put = [&](auto* row, int from, int bytes, int count) {  // rows of `count` heads
            for (int i = threadIdx.x % 32 * 16; i < count * bytes; i += 512) {
                const uint4 x = *reinterpret_cast<const uint4*>(at + from + i);
                *reinterpret_cast<uint4*>(reinterpret_cast<char*>(row) + i + i / bytes * ((W - 1) * bytes)) = x;
            }
        };
        const int key = (first / GROUP * W + pos) * K, own = first * W + pos;
        if (first % GROUP == 0) put(place<KEY_HEADS * W * K>(arg.ring_k, work.slot, key), pos * KEY, KEY, 1);
        put(place<HEADS * W * V>(arg.ring_v, work.slot, own * V), newest_at(pos), VALUE, TOGETHER);
        if (KIND == KDA)
            put(place<HEADS * W * K>(arg.ring_g, work.slot, own * K), gates_at(pos) + pos * GATE, GATE, 1);
    }
};

// A piece of every item, which one lane fetches, from a slot or from the step's inputs. Its place and size are linear
// in the position.
constexpr int PIECES = 8 + TOGETHER;

struct alignas(16) Piece {
    const char* base;
    int stride, part_stride;  // bytes from slot to slot or row to row, and from part to part or key head to key head
    int to, to_step, size, size_step;
    int input, of_key;

    __device__ __forceinline__ void set(const Arguments& arg, int which) {
        constexpr int KEY = Item::KEY, VALUE = Item::VALUE, GATE = Item::GATE;
        const int h = which - 8;
        input = which == 1 || which == 2 || which == 5 || which == 6, of_key = which < 3;
        base = nullptr, stride = part_stride = to = to_step = size = size_step = 0;
        auto from = [&](const void* base_, int stride_, int part_stride_) {
            base = static_cast<const char*>(base_), stride = stride_, part_stride = part_stride_;
        };
        if (which == 0) from(arg.ring_k, KEY_HEADS * W * KEY, W * KEY), size_step = KEY;
        if (which == 1) from(arg.k, KEY_HEADS * KEY, KEY), size = to_step = KEY;
        if (which == 2) from(arg.q, KEY_HEADS * KEY, KEY), size = to = to_step = KEY;
        if (which == 3) to = Item::sketches_at(0), to_step = Item::sketches_at(1) - to;
        if (KIND == KDA && which == 4) {
            from(arg.ring_g, HEADS * W * GATE, W * GATE), size_step = GATE;
            to = Item::gates_at(0), to_step = Item::gates_at(1) - to;
        }
        if (KIND == KDA && which == 5) {
            from(arg.g, HEADS * GATE, GATE), size = GATE;
            to = Item::gates_at(0), to_step = Item::gates_at(1) - to + GATE;
        }
        if (which == 6) {
            from(arg.v, HEADS * VALUE, TOGETHER * VALUE), size = TOGETHER * VALUE;
            to = Item::newest_at(0), to_step = Item::newest_at(1) - to;
        }
        if (h >= 0) {
            from(reinterpret_cast<const char*>(arg.ring_v) + h * W * VALUE, HEADS * W * VALUE, TOGETHER * W * VALUE);
            to = Item::values_at(0), to_step = KEY + h * VALUE, size_step = VALUE;
        }
    }
};

// Starts the copies of an item.
__device__ __forceinline__ void fetch(const Arguments& arg, const Piece* pieces, const Item& item, const Heads& heads,
                                      const Work& work, int at, Arrival& arrival) {
    const int lane = threadIdx.x % 32, elements = heads.elements;
    const char* from = nullptr;
    char* to = nullptr;
    int bytes = 0;
    if (lane < PIECES) {
        const Piece piece = pieces[lane];
        const int part = piece.of_key ? work.part * TOGETHER / GROUP : work.part;
        from = piece.base + static_cast<i64>(piece.input ? at : work.slot) * piece.stride + part * piece.part_stride;
        to = item.at + piece.to + work.pos * piece.to_step, bytes = piece.size + work.pos * piece.size_step;
        if (lane == 3) {
            from = reinterpret_cast<const char*>(arg.sketch + work.slot * arg.sketch_stride + heads.from);
            bytes = elements * static_cast<int>(sizeof(sketch_t));
        }
    }
    if (lane == 0) arrival.expect(Item::bytes(work.pos, elements));
    __syncwarp();
    copy_pieces(to, from, bytes, arrival);
}
