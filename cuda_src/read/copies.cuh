// Bulk copies of a tile into its warp's part of shared memory.
#pragma once
#include "read/tile.cuh"

// Starts the copies of a tile, or of one half of a tile.
template <int HALF>
DEVICE void fetch(const Arguments& arg, const TileBuffer& buffer, const TileHeads& heads, const ReadTile& tile,
                  WarpCopyBarrier& full) {
    constexpr int KEY = TileBuffer::KEY, VALUE = TileBuffer::VALUE, GATE = TileBuffer::GATE;
    const int head = tile.index * TILE_HEADS, key_head = head / HEADS_PER_KEY, pos = tile.pos;
    const Inputs& inputs = arg.inputs;
    bulk_copy(
        [&](auto&& copy) {
            const Ring ring(arg.memory, tile.slot, head);
            if (HALF & KEY_HALF) {
                if (!SHARED_SCORES) {
                    copy(buffer.keys, ring.k, pos * KEY);
                    copy(buffer.keys + pos * KEY, inputs.k.of(tile.row) + key_head * K, KEY);
                }
                copy(buffer.keys + TileBuffer::query_at(pos), inputs.q.of(tile.row) + key_head * K, KEY);
                if (GATE) {
                    char* const gates = buffer.keys + TileBuffer::gates_at(pos);
                    copy(gates, ring.g, pos * GATE);
                    copy(gates + pos * GATE, inputs.g.of(tile.row) + head * GATES, GATE);
                }
            }
            if (HALF & VALUE_HALF) {
#pragma unroll
                for (int h = 0; h < TILE_HEADS; h++)
                    copy(buffer.value_half + h * pos * VALUE, ring.v + h * W * V, pos * VALUE);
                copy(buffer.value_half + TileBuffer::newest_at(pos), inputs.v.of(tile.row) + head * V,
                     TILE_HEADS * VALUE);
                copy(buffer.value_half + TileBuffer::sketches_at(pos), arg.memory.sketch.of(tile.slot) + heads.from,
                     heads.elements * static_cast<int>(sizeof(sketch_t)));
            }
        },
        HALF == BOTH_HALVES ? tile.bytes : TileBuffer::bytes(HALF, pos, heads.elements), full);
}
