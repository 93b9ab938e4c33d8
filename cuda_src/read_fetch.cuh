// How an item's bytes come into its warp's part of shared memory: by a few bulk copies, one lane each.
#pragma once
#include "read_item.cuh"

// A piece of every item, which one lane fetches, from a slot or from the step's inputs. Its place in its half and its size
// are linear in the position.
constexpr int PIECES = 8 + TOGETHER;

struct alignas(16) Piece {
    const char* base;
    int stride, part_stride;  // bytes from slot to slot or row to row, and from part to part or key head to key head
    int to, to_step, size, size_step;
    int input, of_key, half;

    __device__ __forceinline__ void set(const Arguments& arg, int which) {
        constexpr int KEY = Item::KEY, VALUE = Item::VALUE, GATE = Item::GATE;
        const int h = which - 8;
        input = which == 1 || which == 2 || which == 5 || which == 6, of_key = which < 3;
        half = which < 3 || which == 4 || which == 5 ? KEYS : REST;
        base = nullptr, stride = part_stride = to = to_step = size = size_step = 0;
        auto from = [&](const void* base_, int stride_, int part_stride_) {
            base = static_cast<const char*>(base_), stride = stride_, part_stride = part_stride_;
        };
        auto at = [&](auto offset) { to = offset(0), to_step = offset(1) - to; };
        if (!SCORED && which == 0) from(arg.ring_k, KEY_HEADS * W * KEY, W * KEY), size_step = KEY;
        if (!SCORED && which == 1) from(arg.k, KEY_HEADS * KEY, KEY), size = to_step = KEY;
        if (which == 2) from(arg.q, KEY_HEADS * KEY, KEY), size = KEY, at(Item::query_at);
        if (which == 3) at(Item::sketches_at);
        if (KIND == KDA && which == 4) from(arg.ring_g, HEADS * W * GATE, W * GATE), size_step = GATE, at(Item::gates_at);
        if (KIND == KDA && which == 5) {
            from(arg.g, HEADS * GATE, GATE), size = GATE, at(Item::gates_at);
            to_step += GATE;
        }
        if (which == 6) from(arg.v, HEADS * VALUE, TOGETHER * VALUE), size = TOGETHER * VALUE, at(Item::newest_at);
        if (h >= 0) {
            from(reinterpret_cast<const char*>(arg.ring_v) + h * W * VALUE, HEADS * W * VALUE, TOGETHER * W * VALUE);
            to_step = h * VALUE, size_step = VALUE;
        }
    }
};

// Starts the copies of an item, or of a half of it.
__device__ __forceinline__ void fetch(const Arguments& arg, const Piece* pieces, const Item& item, const Heads& heads,
                                      const Work& work, int at, Arrival& arrival) {
    const int lane = threadIdx.x % 32;
    const char* from = nullptr;
    char* to = nullptr;
    int bytes = 0;
    if (lane < PIECES && (!SPLIT || pieces[lane].half == work.half)) {
        const Piece piece = pieces[lane];
        const int part = piece.of_key ? work.part * TOGETHER / GROUP : work.part;
        from = piece.base + static_cast<i64>(piece.input ? at : work.slot) * piece.stride + part * piece.part_stride;
        to = (piece.half == KEYS ? item.keys : item.rest) + piece.to + work.pos * piece.to_step;
        bytes = piece.size + work.pos * piece.size_step;
        if (lane == 3) {
            from = reinterpret_cast<const char*>(arg.sketch + work.slot * arg.sketch_stride + heads.from);
            bytes = heads.elements * static_cast<int>(sizeof(sketch_t));
        }
    }
    if (lane == 0) arrival.expect(Item::bytes(work.half, work.pos, heads.elements));
    __syncwarp();
    copy_pieces(to, from, bytes, arrival);
}
