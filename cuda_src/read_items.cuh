// A block's warps: their memory, and how one of them reads items, one after the other.
#pragma once
#include "read_fetch.cuh"
#include "read_block.cuh"

// The block's shared memory: this, a row's slot and position for each row, scores, then a part for each of its warps.
struct BlockMemory {
    int most_tokens, most_elements;  // of any item
    int claimed;                     // items, beyond each warp's first
    int appended;                    // pieces of the newest tokens
    Heads heads[PARTS];              // of the block's own parts
    Piece pieces[PIECES];
    alignas(16) int2 rows[1];
};
constexpr int LARGEST = Item::bytes(BOTH, W - 2, TOGETHER * sketch_elements(RANK_MAX));
constexpr int MAX_WARPS = MATRIX && ERASES ? 12 : SCORED && V <= 64 ? 20 : 16;  // as many as have registers enough, but in fours

// A warp's part: this, then room for at least one item.
struct WarpMemory {
    Scratch scratch;
    Arrival arrival[2];
    alignas(128) char items[1];
};
constexpr int ITEMS_AT = (sizeof(WarpMemory) - 1) / 128 * 128;
__device__ __forceinline__ constexpr int rounded(int bytes) { return (bytes + 127) / 128 * 128; }

// Bytes a cycle that a block's warps ask for at first, one warp after the other: about what memory brings, or somewhat less where
// items follow that had better not come all together again. Measured on H200.
constexpr int PACE = 16, SLOW_PACE = 12;

// What the warps have in common: items begin to begin + count - 1, of which each has claimed one at first.
struct Reading {
    const Arguments& arg;
    BlockMemory& block;
    const Share& share;
    Scores* scores;
    int first_key, begin, count, sharing;
};

// A warp's work, in its memory from `lower` to `upper`. Of two items that have room at once, or of an item's two halves, one
// lies at the lower end and the next at the upper end. The block begins at `start`; `begun` is called when the warp's first bytes are
// on their way.
template <class Begun>
__device__ __forceinline__ void read_items(const Reading& of, WarpMemory& memory, char* const lower, char* const upper, u32 start,
                                           const Begun& begun) {
    const Arguments& arg = of.arg;
    const int lane = threadIdx.x % 32;
    if (lane < 2) memory.arrival[lane].init();
    __syncwarp();
    auto heads_of = [&](const Work& work) -> const Heads& { return of.block.heads[work.part]; };
    auto bytes_of = [&](const Work& work) {
        return work.reads ? Item::bytes(work.half, work.pos, heads_of(work).elements) : 0;
    };
    auto find = [&](int i) {
        Work work{(of.begin + i) / PARTS, (of.begin + i) % PARTS, -1, 0, SPLIT ? KEYS : BOTH, false};
        if (i >= of.count) {
            work.row = -1;
            return work;
        }
        const int2 entry = of.share.of(work.row);
        work.slot = entry.x, work.pos = entry.y;
        work.reads = Share::goes_on(entry.x, entry.y) && heads_of(work).elements > 0;
        return work;
    };
    auto after = [&](const Work& work) {
        if (SPLIT && work.reads && work.half == KEYS) {
            Work rest = work;
            rest.half = REST;
            return rest;
        }
        const int claim = lane == 0 ? atomicAdd(&of.block.claimed, 1) : 0;
        return find(of.sharing + __shfl_sync(ALL, claim, 0));
    };
    int sent = 0, read = 0;  // items or halves: numbers of their copies
    // where the copies of that number are
    auto item_of = [&](int number, const Work& work) {
        char* const at = number % 2 ? upper - bytes_of(work) : lower;
        return Item{at, at + (work.half == BOTH ? Item::bytes(KEYS, work.pos, 0) : 0), work.pos};
    };
    auto send = [&](Gates& gates, const Work& work) {
        if (work.half & KEYS) gates.load(arg, work, of.share.at(work.row));
        fetch(arg, of.block.pieces, item_of(sent, work), heads_of(work), work, of.share.at(work.row), memory.arrival[sent % 2]);
        sent++;
    };
    Gates coming_gates, gates;
    Work work = find(threadIdx.x / 32);
    if (work.reads) {
        const int pace = of.count > of.sharing ? SLOW_PACE : PACE;
        wait_since(start, threadIdx.x / 32 * Item::bytes(BOTH, work.pos, heads_of(work).elements) / pace);
        send(coming_gates, work);
    }
    copy_async_commit();
    begun();

    // First rows of maps: those of a shared projection are on their way long before the item that they are for is read.
    MapRows first_rows;
    if (MATRIX && MAP != OWN && work.reads) first_rows.load(arg, Item{}, heads_of(work), 0);
    float x[LK];  // an effective query, where keys come apart
    while (work.row >= 0) {
        const Work next = after(work);
        const Heads& own = heads_of(work);
        const Item item = item_of(read, work);
        const bool early = next.reads && bytes_of(work) + bytes_of(next) <= upper - lower;
        GateInput<LK> input;
        auto wait = [&] {
            if (!work.reads) return;
            if (!SPLIT || work.half == KEYS) input.load(arg.gate_input, work.part, lane * LK);  // a head an item
            memory.arrival[read % 2].wait(read / 2);
            __syncwarp();
            if (MATRIX && MAP == OWN) first_rows.load(arg, item, own, 0);
            if (work.half & KEYS) gates = coming_gates;
        };
        const bool half = SPLIT && work.half == KEYS, whole = work.reads && !half;
        // The rest of an item follows its keys at once; the next item not before this one is there: all of the device's
        // warps begin together, and would wait for twice the bytes.
        if (!half) wait();
        if (early) send(coming_gates, next);
        copy_async_commit();
        if (half) wait();
        if (work.reads && half) look_back(item, gates, input, memory.scratch, x);
        if (whole) {
            if constexpr (SPLIT) {
                project(arg, item, own, x, memory.scratch);
            } else if constexpr (ERASES) {
                project_matrix(arg, item, own, gates, first_rows, memory.scratch);
            } else {
                Scores& products = of.scores[(work.row * PARTS + work.part) / PARTS_OF_KEY - of.first_key];
                products.known.wait(0);
                __syncwarp();
                project_query(arg, item, own, gates, first_rows, products.of, memory.scratch);
            }
        }
        if (MATRIX && MAP != OWN && next.reads) first_rows.load(arg, item, heads_of(next), 0);
        out_t* const output = place<HEADS * V>(arg.out, of.share.at(work.row), work.part * TOGETHER * V);
        if (whole) {
            __syncwarp();
            read_values(item, own, output, memory.scratch);
            __syncwarp();
        } else if (work.slot < 0) {
            for (int j = lane; j < TOGETHER * V; j += 32)
                if (own.rank[j / V] > 0) output[j] = narrow<OUT>(0.f);
        }
        if (next.reads && !early) send(coming_gates, next);
        copy_async_commit();
        read += work.reads;
        work = next;
    }
}
