// A block's warps: their memory, and how one of them reads items, one after the other.
#pragma once
#include "read_fetch.cuh"
#include "read_block.cuh"
#include "read_values.cuh"

constexpr int LARGEST = Item::bytes(BOTH, W - 2, TOGETHER * sketch_elements(RANK_MAX));
constexpr int MAX_WARPS = MATRIX && ERASES ? 12 : SCORED && V <= 64 ? 20 : 16;  // as many as have registers enough, but in fours

// The block's shared memory: this, a row's slot and position for each row, scores, then a part for each of its warps.
struct BlockMemory {
    int most_tokens, most_elements;  // of any item
    int claimed;                     // items, beyond each warp's first
    int pieces, appended;            // of the newest tokens, and how many have been taken
    Heads heads[PARTS];              // of the block's own parts
    Arrival arrivals[MAX_WARPS][2];
    alignas(16) int2 rows[1];
};
// A warp's part: this, then room for at least one item.
struct WarpMemory {
    Scratch scratch;
    alignas(128) char items[1];
};
constexpr int ITEMS_AT = (sizeof(WarpMemory) - 1) / 128 * 128;
__device__ __forceinline__ constexpr int rounded(int bytes) { return (bytes + 127) / 128 * 128; }

// x / y, of small numbers: half of one on, no rounding takes it over the next.
__device__ __forceinline__ int quotient(int x, int y) { return static_cast<int>(__fdividef(x + 0.5f, y)); }

// Bytes a cycle that a block's warps ask for at first, one warp after the other: less than memory brings, so that not all come
// together again for what follows. Measured on H200.
constexpr int PACE = 16;

// What the warps have in common: items begin to begin + count - 1, of which each has claimed one at first.
struct Reading {
    const Arguments& arg;
    BlockMemory& block;
    const Share& share;
    Scores* scores;
    int first_key, begin, count, sharing;
};

// A warp's work, in its memory from `lower` to `upper`. Of two items that have room at once, or of an item's two halves, one
// lies at the lower end and the next at the upper end. The block begins at `start`.
__device__ __forceinline__ void read_items(const Reading& of, WarpMemory& memory, char* const lower, char* const upper, u32 start) {
    const Arguments& arg = of.arg;
    const int lane = threadIdx.x % 32;
    Arrival(&arrivals)[2] = of.block.arrivals[threadIdx.x / 32];
    auto heads_of = [&](const Work& work) -> const Heads& { return of.block.heads[work.part]; };
    auto find = [&](int i) {
        const u32 item = of.begin + i;
        Work work{static_cast<int>(item / PARTS), static_cast<int>(item % PARTS), -1, 0, SPLIT ? KEYS : BOTH, 0};
        if (i >= of.count) {
            work.row = -1;
            return work;
        }
        const int2 entry = of.share.of(work.row);
        const int elements = heads_of(work).elements;
        work.slot = entry.x, work.pos = entry.y;
        if (Share::goes_on(entry.x, entry.y) && elements > 0) work.bytes = Item::bytes(work.half, work.pos, elements);
        return work;
    };
    auto after = [&](const Work& work) {
        if (SPLIT && work.reads() && work.half == KEYS) {
            Work rest = work;
            rest.half = REST, rest.bytes = Item::bytes(REST, work.pos, heads_of(work).elements);
            return rest;
        }
        return find(of.sharing + next_number(of.block.claimed));
    };
    u32 sent = 0, read = 0;  // items or halves: numbers of their copies
    // where the copies of that number are
    auto item_of = [&](u32 number, const Work& work) {
        char* const at = number % 2 ? upper - work.bytes : lower;
        return Item{at, at + (work.half == BOTH ? Item::bytes(KEYS, work.pos, 0) : 0), work.pos};
    };
    auto send = [&](Gates& gates, const Work& work) {
        fetch(arg, item_of(sent, work), heads_of(work), work, of.share.at(work.row), arrivals[sent % 2]);
        if (work.half & KEYS) gates.load(arg, work, of.share.at(work.row));
        sent++;
    };
    Gates coming_gates, gates;
    Work work = find(threadIdx.x / 32);
    if (work.reads()) {
        wait_since(start, threadIdx.x / 32 * Item::bytes(BOTH, work.pos, heads_of(work).elements) / PACE);
        send(coming_gates, work);
    }

    // First rows of maps: those of a shared projection are on their way long before they are multiplied with.
    MapRows first_rows;
    LaneMap lane_rows;
    if (MATRIX && MAP != OWN && work.reads()) first_rows.load(arg, Item{}, heads_of(work), 0);
    float x[LK];  // an effective query, where keys come apart
    while (work.row >= 0) {
        const Work next = after(work);
        const Heads& own = heads_of(work);
        const Item item = item_of(read, work);
        const bool early = next.reads() && work.bytes + next.bytes <= upper - lower;
        GateInput<LK> input;
        auto wait = [&] {
            if (!work.reads()) return;
            if (!SPLIT || work.half == KEYS) input.load(arg.gate_input, work.part, lane * LK);  // a head an item
            arrivals[read % 2].wait(read / 2);
            __syncwarp();
            if (MATRIX && MAP == OWN) first_rows.load(arg, item, own, 0);
            if (work.half & KEYS) gates = coming_gates;
        };
        const bool half = SPLIT && work.half == KEYS, whole = work.reads() && !half;
        // The rest of an item follows its keys at once; the next item not before this one is there: all of the device's
        // warps begin together, and would wait for twice the bytes.
        if (!half) wait();
        if (early) send(coming_gates, next);
        if (half) wait();
        if (work.reads() && half) {
            if (MAP != OWN) lane_rows.load(map_of(arg, item, own), 0, own.rank[0]);
            look_back(item, gates, input, memory.scratch, x);
        }
        if (whole) {
            if constexpr (SPLIT) {
                if (MAP == OWN) lane_rows.load(map_of(arg, item, own), 0, own.rank[0]);
                project(arg, item, own, lane_rows, x, memory.scratch);
            } else if constexpr (ERASES) {
                project_matrix(arg, item, own, gates, first_rows, memory.scratch);
            } else {
                Scores& products = of.scores[(work.row * PARTS + work.part) / PARTS_OF_KEY - of.first_key];
                project_query(arg, item, own, gates, first_rows, products, memory.scratch);
            }
        }
        if (MATRIX && MAP != OWN && next.reads()) first_rows.load(arg, item, heads_of(next), 0);
        out_t* const output = place<HEADS * V>(arg.out, of.share.at(work.row), work.part * TOGETHER * V);
        if (whole) {
            __syncwarp();
            read_values(item, own, output, memory.scratch);
            __syncwarp();
        } else if (work.slot < 0) {
            for (int j = lane; j < TOGETHER * V; j += 32)
                if (own.rank[j / V] > 0) output[j] = narrow<OUT>(0.f);
        }
        if (next.reads() && !early) send(coming_gates, next);
        read += work.reads();
        work = next;
    }
}
