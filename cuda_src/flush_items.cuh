// What a block of the flush has in shared memory, and the items that it takes in turn.
#pragma once
#include "schedule.cuh"
#include "warp_latch.cuh"
#include "sketch_layout.cuh"
#include "fold.cuh"
#include "maps.cuh"

enum { STEP = 0, FOLD = 1, LOAD = 2 };

// Warps of a block by their tasks: they fold (a block of rows each), then one serves and one or two finish sketches, or one does both
// where more warps would leave them fewer registers than they need; where there are more, one moves states, SHARERS sketch them,
// and the team prepares keys.
constexpr bool BOTH = RAW && !ERASES && (NWARPS + 2) * MIN_BLOCKS > 20;  // 20 warps on a multiprocessor have 96 registers each
constexpr int SERVER = NWARPS, FINISHER = NWARPS + !BOTH, MOVER = FINISHER + FINISHERS;
static_assert(RAW || SHARERS <= NWARPS, "who sketches waits for the rows that it makes U of");
constexpr int SKETCHERS = MOVER + 1, TEAM_WARPS = SKETCHERS + (SKETCHED_HEADS ? SHARERS : 0);
constexpr int WARPS = RAW ? FINISHER + FINISHERS : TEAM_WARPS + TEAM / 32;
constexpr int SETS = RAW ? KEYS : PREPARED;  // of operands that warps which fold read

// One item: a slot, and a row and one of its heads.
struct alignas(8) Item {
    int slot, place;
    __device__ __forceinline__ bool exists() const { return slot >= 0; }
    __device__ __forceinline__ int row() const { return place / HEADS; }
    __device__ __forceinline__ int head() const { return place % HEADS; }
};

// What a block's warps know of its items. A block begins with AHEAD of them, a grid's width apart; after that its server claims one
// at a time for all. Multiprocessors differ in how fast memory serves them, and items in their ranks: with even
// shares the last blocks ended up to a tenth after the rest.
struct ItemQueue {
    static constexpr int LENGTH = 8, AHEAD = RAW ? 2 : 3, TOGETHER = 2;
    static_assert(AHEAD >= KEYS + !RAW && AHEAD >= 2, "the server or the mover fetches keys, and the mover a state, only of items that are known");
    static_assert(AHEAD + TOGETHER <= LENGTH && LENGTH % TOGETHER == 0, "the server waits for nobody who waits for it");
    Item items[LENGTH];
    WarpLatch known[LENGTH], left[LENGTH / TOGETHER];  // an item is there; all warps are done with TOGETHER neighbouring ones

    __device__ __forceinline__ void init() {
        for (WarpLatch& latch : known) latch.init(1);
        for (WarpLatch& latch : left) latch.init(WARPS);
    }
    // The block's nth item, which the warp has not left yet: at most AHEAD beyond the one that it is at.
    __device__ __forceinline__ Item get(int n) {
        if (n >= AHEAD) known[n % LENGTH].wait((n - AHEAD) / LENGTH);
        return items[n % LENGTH];
    }
    __device__ __forceinline__ void leave(int n) {
        if (n % TOGETHER == TOGETHER - 1) left[n % LENGTH / TOGETHER].arrive();
    }
    // By one warp, in turn from AHEAD on.
    __device__ __forceinline__ void put(int n, const Item& item) {
        if (n >= LENGTH && n % TOGETHER == 0) left[n % LENGTH / TOGETHER].wait(n / LENGTH - 1);
        if (threadIdx.x % 32 == 0) items[n % LENGTH] = item;
        known[n % LENGTH].arrive();
    }
};

// The state has so many places in shared memory that the next one comes in while one is used.
template <int PLACES> struct MemoryOf {
    static constexpr int places = PLACES;
    Rows rows[PLACES][NWARPS];
    KeyStage keys[KEYS];
    ValueStage values;
    PreparedKeys prepared[PREPARED];
    Solve solve[SOLVES];
    TeamMemory team[2];
    WarpLatch used[SETS], solved[SOLVES];  // operands have been used, or `solve` is there
    WarpLatch tabled[SOLVES], ready[KEYS];  // the team has made the Gram matrix, or is done with `keys`, and `prepared` is there
    WarpLatch folded[PLACES][NWARPS], sketched_rows[PLACES][NWARPS];  // rows there are folded, or no longer needed by those that sketch
    WarpLatch begun;  // once: the first keys are there
    ItemQueue queue;
#if SKETCHED_HEADS
    SketchMemory sketch;
    SketchLatches sketched;
#endif

    // By one thread; a barrier of the block must follow.
    __device__ __forceinline__ void init() {
        begun.init(1), queue.init();
        for (WarpLatch& latch : tabled) latch.init(TEAM / 32);
        for (WarpLatch& latch : ready) latch.init(TEAM / 32);
        for (WarpLatch& latch : used) latch.init(NWARPS);
        for (WarpLatch& latch : solved) latch.init(1);
        for (auto& place : folded)
            for (WarpLatch& latch : place) latch.init(1);
        for (auto& place : sketched_rows)
            for (WarpLatch& latch : place) latch.init(SHARERS);
        for (KeyStage& stage : keys) stage.delivery.init();
        values.delivery.init();
        for (auto& place : rows)
            for (Rows& block : place) block.delivery.init();
#if SKETCHED_HEADS
        sketched.init(), sketch.basis.delivery.init();
#endif
    }
};
template <bool YES> struct Choice { typedef MemoryOf<1> type; };
template <> struct Choice<true> { typedef MemoryOf<2> type; };
// Two blocks on a multiprocessor do the same for each other. Some bytes stay for what is not Memory (STATIC_SHARED of the host).
typedef Choice<MIN_BLOCKS == 1 && sizeof(MemoryOf<2>) + 128 <= MOST_SHARED>::type Memory;
constexpr int PLACES = Memory::places;

// Lists the rows to flush, in order; returns how many. All blocks find, and write, the same.
__device__ __forceinline__ int list_rows(int2* rows, const int* cursor, const i64* slots, int batch, int mode) {
    __shared__ int counts[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int total = 0;
    for (int first = 0; first < batch; first += 32 * WARPS) {
        const int row = first + threadIdx.x;
        const i64 slot = row < batch ? slots[row] : -1;
        const bool due = slot >= 0 && (mode == LOAD || cursor[slot] > 0);
        const u32 ballot = __ballot_sync(ALL, due);
        if (lane == 0) counts[warp] = __popc(ballot);
        __syncthreads();
        int before = total;
        for (int i = 0; i < WARPS; i++) {
            if (i < warp) before += counts[i];
            total += counts[i];
        }
        if (due) rows[before + __popc(ballot & ((1u << lane) - 1))] = make_int2(static_cast<int>(slot), row);
        __syncthreads();
    }
    return total;
}

// The launch's arguments, and what they have for an item.
struct Flush {
    Memory& m;
    float* state;
    i64 slot_stride;
    const int* cursor;
    act_t *ring_k, *ring_v;
    gate_t* ring_g;
    float* ring_beta;
    const float* gate_input;
    sketch_t* sketch;
    i64 sketch_stride;
    const sketch_t* projection;
    const uint2* basis;
    const int4* heads;
    const act_t *q, *k, *v;
    const gate_t* g;
    const float* beta;
    out_t* out;
    int tokens, t;
    Schedule* schedule;
    int mode;
    float ridge;
    int count;  // of rows

    __device__ __forceinline__ int buffered(const Item& item) const { return mode == STEP ? W - 1 : mode == LOAD ? 0 : cursor[item.slot]; }
    __device__ __forceinline__ int folded(const Item& item) const { return mode == STEP ? W : buffered(item); }
    __device__ __forceinline__ i64 at(const Item& item) const { return static_cast<i64>(item.row()) * tokens + t; }
    __device__ __forceinline__ Token token(const Item& item) const { return Token(q, k, v, g, beta, at(item), item.head()); }
    __device__ __forceinline__ Ring ring(const Item& item) const { return Ring(ring_k, ring_v, ring_g, ring_beta, item.slot, item.head()); }
    __device__ __forceinline__ float* home(const Item& item, int block) const {
        return state + item.slot * slot_stride + (static_cast<i64>(item.head()) * V + 16 * block) * K;
    }
    __device__ __forceinline__ sketch_t* packed(const Item& item, const int4& info) const {
        return sketch + static_cast<i64>(item.slot) * sketch_stride + info.y;
    }
    // What the plan says of an item's head; nothing where no head has a sketch.
    __device__ __forceinline__ int4 head(const Item& item) const { return SKETCHED_HEADS ? heads[item.head()] : make_int4(0, 0, 0, 0); }
    // Lane s: token s's entry in a ring of scalars.
    template <class T> __device__ __forceinline__ float scalar(const Item& item, const T* kept, const T* own) const {
        const int lane = threadIdx.x % 32, last = buffered(item);
        return lane < last ? kept[lane] : mode == STEP && lane == last ? *own : 0.f;
    }
    __device__ __forceinline__ float beta_of(const Item& item) const {
        return ERASES ? scalar(item, ring(item).beta, token(item).beta) : 0.f;
    }
    __device__ __forceinline__ float gate_of(const Item& item) const {
        return KIND == KDA ? 0.f : scalar(item, ring(item).g, token(item).g);
    }
};

// Item i of all: heads of a row one after the other, `entry` being its row.
constexpr Item NO_ITEM{-1, 0};
__device__ __forceinline__ Item item_of(int i, const int2& entry) { return Item{entry.x, entry.y * HEADS + i % HEADS}; }

// A warp's way through its block's items, one after the other.
struct Items {
    ItemQueue& queue;
    int n = 0;
    Item now;

    __device__ __forceinline__ explicit Items(const Flush& flush) : queue(flush.m.queue), now(queue.get(0)) {}
    __device__ __forceinline__ Item ahead(int by) const { return queue.get(n + by); }
    __device__ __forceinline__ void advance() {
        queue.leave(n++);
        now = queue.get(n);
    }
};

// The server's claims, in three steps, as the first two wait for the device's memory.
struct Claims {
    const Flush& flush;
    int number;
    int2 entry;

    __device__ __forceinline__ void begin() {
        if (threadIdx.x % 32 == 0) number = atomicAdd(&flush.schedule->claimed, 1);
    }
    __device__ __forceinline__ void find() {
        number = __shfl_sync(ALL, number, 0) + ItemQueue::AHEAD * gridDim.x;
        entry = flush.schedule->rows[min(number / HEADS, MAX_ROWS - 1)];  // past the last row an old one, which nobody uses
    }
    __device__ __forceinline__ void put(int n) {
        flush.m.queue.put(n + ItemQueue::AHEAD, number < flush.count * HEADS ? item_of(number, entry) : NO_ITEM);
    }
};
