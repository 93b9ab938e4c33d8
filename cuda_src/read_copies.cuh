// Bulk copies that bulk_load a tile into its warp's part of shared memory.
#pragma once
#include "read_tile.cuh"

// Starts the copies of a tile, or of one half of it.
template <int HALF>
__device__ __forceinline__ void fetch(const Arguments& arg, const TileBuffer& buffer, const TileHeads& heads,
                                      const ReadTile& tile, int at, WarpCopyBarrier& full) {
    constexpr int KEY = TileBuffer::KEY, VALUE = TileBuffer::VALUE, GATE = TileBuffer::GATE;
    const int head = tile.index * TILE_HEADS, key_head = head / HEADS_PER_KEY, pos = tile.pos;
    bulk_copy(
        [&](auto&& copy) {
            if (HALF & KEY_HALF) {
                if (!SHARED_SCORES) {
                    copy(buffer.keys, place<KEY_HEADS * W * K>(arg.ring_k, tile.slot, key_head * W * K), pos * KEY);
                    copy(buffer.keys + pos * KEY, place<KEY_HEADS * K>(arg.k, at, key_head * K), KEY);
                }
                copy(buffer.keys + TileBuffer::query_at(pos), place<KEY_HEADS * K>(arg.q, at, key_head * K), KEY);
                if (GATE) {
                    char* const gates = buffer.keys + TileBuffer::gates_at(pos);
                    copy(gates, place<HEADS * W * GATES>(arg.ring_g, tile.slot, head * W * GATES), pos * GATE);
                    copy(gates + pos * GATE, place<HEADS * GATES>(arg.g, at, head * GATES), GATE);
                }
            }
            if (HALF & VALUE_HALF) {
#pragma unroll
                for (int h = 0; h < TILE_HEADS; h++)
                    copy(buffer.rest + h * pos * VALUE, place<HEADS * W * V>(arg.ring_v, tile.slot, (head + h) * W * V),
                         pos * VALUE);
                copy(buffer.rest + TileBuffer::newest_at(pos), place<HEADS * V>(arg.v, at, head * V),
                     TILE_HEADS * VALUE);
                copy(buffer.rest + TileBuffer::sketches_at(pos),
                     arg.sketch + tile.slot * arg.sketch_stride + heads.from,
                     heads.elements * static_cast<int>(sizeof(sketch_t)));
            }
        },
        HALF == BOTH_HALVES ? tile.bytes : TileBuffer::bytes(HALF, pos, heads.elements), full);
}
