// How an item's bytes come into its warp's part of shared memory: by a few bulk copies.
#pragma once
#include "read_item.cuh"

// Starts the copies of an item, or of a half of it.
template <int HALF>
__device__ __forceinline__ void fetch(const Arguments& arg, const Item& item, const Heads& heads, const Work& work, int at,
                                      Arrival& arrival) {
    constexpr int KEY = Item::KEY, VALUE = Item::VALUE, GATE = Item::GATE;
    const int head = work.part * TOGETHER, key_head = head / GROUP, pos = work.pos;
    copy_pieces(
        [&](auto&& copy) {
            if (HALF & KEYS) {
                if (!SCORED) {
                    copy(item.keys, place<KEY_HEADS * W * K>(arg.ring_k, work.slot, key_head * W * K), pos * KEY);
                    copy(item.keys + pos * KEY, place<KEY_HEADS * K>(arg.k, at, key_head * K), KEY);
                }
                copy(item.keys + Item::query_at(pos), place<KEY_HEADS * K>(arg.q, at, key_head * K), KEY);
                if (GATE) {
                    char* const gates = item.keys + Item::gates_at(pos);
                    copy(gates, place<HEADS * W * GATES>(arg.ring_g, work.slot, head * W * GATES), pos * GATE);
                    copy(gates + pos * GATE, place<HEADS * GATES>(arg.g, at, head * GATES), GATE);
                }
            }
            if (HALF & REST) {
#pragma unroll
                for (int h = 0; h < TOGETHER; h++)
                    copy(item.rest + h * pos * VALUE, place<HEADS * W * V>(arg.ring_v, work.slot, (head + h) * W * V), pos * VALUE);
                copy(item.rest + Item::newest_at(pos), place<HEADS * V>(arg.v, at, head * V), TOGETHER * VALUE);
                copy(item.rest + Item::sketches_at(pos), arg.sketch + work.slot * arg.sketch_stride + heads.from,
                     heads.elements * static_cast<int>(sizeof(sketch_t)));
            }
        },
        HALF == BOTH ? work.bytes : Item::bytes(HALF, pos, heads.elements), arrival);
}
