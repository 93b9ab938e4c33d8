// A block's warps: their memory, and how one of them reads items, one after the other.
#pragma once
#include "read_fetch.cuh"
#include "read_block.cuh"
#include "read_back.cuh"
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
    u32 start;  // when the block began

    __device__ __forceinline__ const Heads& heads_of(const Work& work) const { return block.heads[work.part]; }
    __device__ __forceinline__ int at(const Work& work) const { return share.at(work.row); }
    __device__ __forceinline__ out_t* output(const Work& work) const {
        return place<HEADS * V>(arg.out, at(work), work.part * TOGETHER * V);
    }
    __device__ __forceinline__ Work find(int i) const {
        const u32 item = begin + i;
        Work work{static_cast<int>(item / PARTS), static_cast<int>(item % PARTS), -1, 0, 0};
        if (i >= count) {
            work.row = -1;
            return work;
        }
        const int2 entry = share.of(work.row);
        const int elements = heads_of(work).elements;
        work.slot = entry.x, work.pos = entry.y;
        if (Share::goes_on(entry.x, entry.y) && elements > 0) work.bytes = Item::bytes(BOTH, work.pos, elements);
        return work;
    }
    // A warp's first item, and the next one.
    __device__ __forceinline__ Work first() const {
        const Work work = find(threadIdx.x / 32);
        if (work.reads()) wait_since(start, threadIdx.x / 32 * work.bytes / PACE);
        return work;
    }
    __device__ __forceinline__ Work next() const { return find(sharing + next_number(block.claimed)); }
    // Of an item that is not read.
    __device__ __forceinline__ void put_zeros(const Work& work) const {
        if (work.slot >= 0) return;
        for (int j = threadIdx.x % 32; j < TOGETHER * V; j += 32)
            if (heads_of(work).rank[j / V] > 0) output(work)[j] = narrow<OUT>(0.f);
    }
};

// A warp's work, in its memory from `lower` to `upper`. Of two items that have room at once one lies at the lower end and the next
// at the upper end.
__device__ __forceinline__ void read_whole_items(const Reading& of, WarpMemory& memory, char* const lower, char* const upper) {
    const Arguments& arg = of.arg;
    Arrival(&arrivals)[2] = of.block.arrivals[threadIdx.x / 32];
    u32 sent = 0, read = 0;  // items: numbers of their copies
    auto item_of = [&](u32 number, const Work& work) {  // where the copies of that number are
        char* const at = number % 2 ? upper - work.bytes : lower;
        return Item{at, at + Item::bytes(KEYS, work.pos, 0), work.pos};
    };
    auto send = [&](Gates& gates, const Work& work) {
        fetch<BOTH>(arg, item_of(sent, work), of.heads_of(work), work, of.at(work), arrivals[sent % 2]);
        gates.load(arg, work, of.at(work));
        sent++;
    };
    Gates coming_gates, gates;
    Work work = of.first();
    if (work.reads()) send(coming_gates, work);

    // First rows of maps: those of a shared projection are on their way long before they are multiplied with.
    MapRows first_rows;
    if (MAP != OWN && work.reads()) first_rows.load(arg, Item{}, of.heads_of(work), 0);
    while (work.row >= 0) {
        const Work next = of.next();
        const Heads& own = of.heads_of(work);
        const Item item = item_of(read, work);
        if (work.reads()) {
            arrivals[read % 2].wait(read / 2);
            __syncwarp();
            if (MAP == OWN) first_rows.load(arg, item, own, 0);
            gates = coming_gates;
        }
        // The next item not before this one is there: all of the device's warps begin together, and would wait for twice the bytes.
        const bool early = next.reads() && work.bytes + next.bytes <= upper - lower;
        if (early) send(coming_gates, next);
        if (work.reads()) {
            if constexpr (ERASES) {
                project_matrix(arg, item, own, gates, first_rows, memory.scratch);
            } else {
                Scores& products = of.scores[(work.row * PARTS + work.part) / PARTS_OF_KEY - of.first_key];
                project_query(arg, item, own, gates, first_rows, products, memory.scratch);
            }
        }
        if (MAP != OWN && next.reads()) first_rows.load(arg, item, of.heads_of(next), 0);
        if (work.reads()) {
            __syncwarp();
            read_values(item, own, of.output(work), memory.scratch);
            __syncwarp();
        } else {
            of.put_zeros(work);
        }
        if (next.reads() && !early) send(coming_gates, next);
        read += work.reads();
        work = next;
    }
}

// The same of items in halves: keys at the lower end, the rest at the upper end, where there is room for any item's keys beside any
// other's rest (read.cu). The rest follows its keys at once; the next item's keys not before it is there.
__device__ __forceinline__ void read_split_items(const Reading& of, WarpMemory& memory, char* const lower, char* const upper) {
    const Arguments& arg = of.arg;
    Arrival(&arrivals)[2] = of.block.arrivals[threadIdx.x / 32];
    auto item_of = [&](const Work& work) {
        return Item{lower, upper - Item::bytes(REST, work.pos, of.heads_of(work).elements), work.pos};
    };
    auto send_keys = [&](Gates& gates, const Work& work) {
        copy_betas(arg, work, of.at(work), memory.scratch.beta);
        fetch<KEYS>(arg, item_of(work), of.heads_of(work), work, of.at(work), arrivals[0]);
        gates.load(arg, work, of.at(work));
    };
    Gates gates;
    Work work = of.first();
    if (work.reads()) send_keys(gates, work);
    for (u32 round = 0; work.row >= 0;) {
        if (!work.reads()) {
            of.put_zeros(work);
            work = of.next();
            if (work.reads()) send_keys(gates, work);
            continue;
        }
        const Heads& own = of.heads_of(work);
        const Item item = item_of(work);
        fetch<REST>(arg, item, own, work, of.at(work), arrivals[1]);
        GateInput<LK> input;
        input.load(arg.gate_input, work.part, threadIdx.x % 32 * LK);
        arrivals[0].wait(round);
        copy_async_wait<0>();
        __syncwarp();
        Row first_rows, second_rows;
        auto load_rows = [&] {
            first_rows = load_map(arg, item, own, 0, 0);
            if (own.rank[0] > 8) second_rows = load_map(arg, item, own, 0, 8);
        };
        if (SLICED && MAP != OWN) load_rows();
        float x[LK];  // the effective query
        look_back(item, gates, input, memory.scratch, x);

        const Work next = of.next();
        arrivals[1].wait(round);
        __syncwarp();
        if (SLICED && MAP == OWN) load_rows();
        if (next.reads()) send_keys(gates, next);
        if constexpr (SLICED) project_slices(arg, item, own, first_rows, second_rows, memory.scratch);
        else project_lanes(arg, item, own, x, memory.scratch);
        __syncwarp();
        read_values(item, own, of.output(work), memory.scratch);
        __syncwarp();
        round++;
        work = next;
    }
}
