// The launch's arguments, the list of rows to flush, and iteration over a block's tiles.
#pragma once
#include "slot/call_slots.cuh"
#include "slot/cursor.cuh"
#include "slot/errors.cuh"
#include "slot/schedule.cuh"
#include "flush/fold.cuh"
#include "map/maps.cuh"

// Checks the call's slots and lists the rows to flush, in order; returns their number. Every block computes and writes
// the same list. `room`: shared memory for SCAN_ROOM numbers.
DEVICE int list_rows(Schedule& schedule, const Memory& memory, const CallSlots& slots, const Lengths& lengths,
                     int batch, int mode, int* room) {
    __shared__ int counts[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int total = 0;
#pragma unroll 1
    for (int first = 0; first < batch; first += 32 * WARPS) {
        const int row = first + threadIdx.x;
        const int slot = slots.once_by_thread(row, row < batch ? slots.of(row) : PADDING, room);
        if (row < batch) schedule.slots[row] = slot;
        if (blockIdx.x == 0) slots.note(slot);
        const int word = slot >= 0 && mode != LOAD ? *memory.cursor.of(slot) : 0, position = position_of(word, W);
        const bool folds = position > 0 && (mode == FOLD || folds_before(word, lengths.of(row), W));
        const bool due = slot >= 0 && (mode == LOAD || folds);
        const u32 ballot = __ballot_sync(ALL, due);
        if (lane == 0) counts[warp] = __popc(ballot);
        __syncthreads();
        int before = total;
        for (int i = 0; i < WARPS; i++) {
            if (i < warp) before += counts[i];
            total += counts[i];
        }
        if (due)
            schedule.rows[before + __popc(ballot & ((1u << lane) - 1))] =
                DueRow{slot, static_cast<u32>(row), static_cast<u32>(position)};
        __syncthreads();
    }
    fence_async_proxy();  // bulk copies will overwrite `room`
    return total;
}

// Whether no row folds before its drafts, as in most calls. Then the blocks share the check of the rows' slots. By
// all threads of a block.
DEVICE bool no_row_folds(Schedule& schedule, const Memory& memory, const CallSlots& slots, const Lengths& lengths,
                         int batch) {
    bool folds = false;
#pragma unroll 1
    for (int row = threadIdx.x; row < batch; row += 32 * WARPS) {
        const int slot = slots.of(row), word = slot >= 0 ? *memory.cursor.of(slot) : 0;
        folds |= position_of(word, W) > 0 && folds_before(word, lengths.of(row), W);
    }
    if (__syncthreads_or(folds)) return false;
#pragma unroll 1
    for (int row = blockIdx.x; row < batch; row += gridDim.x) {
        const int slot = slots.once_in_block(row, slots.of(row));
        if (threadIdx.x == 0) schedule.slots[row] = slot, slots.note(slot);
    }
    return true;
}

// The launch's arguments, and a tile's addresses and scalars derived from them.
struct Flush {
    BlockMemory& m;
    Memory memory;
    const float* gate_input;
    const projection_t* projection;
    const uint2* basis;
    const int4* heads;
    Inputs inputs;
    Strided<out_t> out;
    Schedule* schedule;
    int mode;
    float ridge;
    int count;  // rows to flush
#if MONITOR
    Strided<ErrorSums> errors;
    float tolerance;
#endif

    DEVICE bool takes_own() const { return mode == STEP; }  // the step's own token is the last
    DEVICE int folded(const FlushTile& tile) const { return tile.buffered + takes_own(); }
    DEVICE Token token(const FlushTile& tile) const { return Token(inputs, tile.row(), tile.head()); }
    DEVICE Ring ring(const FlushTile& tile) const { return Ring(memory, tile.slot, tile.head()); }
    DEVICE state_t* home(const FlushTile& tile, int block) const {
        return memory.state.of(tile.slot) + (tile.head() * V + 16 * block) * K;
    }
    DEVICE sketch_t* packed(const FlushTile& tile, const int4& info) const {
        return memory.sketch.of(tile.slot) + info.y;
    }
    DEVICE out_t* output(const FlushTile& tile) const { return out.of(tile.row()) + tile.head() * V; }
    // {rank, offsets} of the tile's head in the plan; zeros if no head has a sketch or a shadow.
    DEVICE int4 head(const FlushTile& tile) const {
        return SKETCHES || ENCODES || SHADOW ? heads[tile.head()] : make_int4(0, 0, 0, 0);
    }
    // Lane s: token s's scalar from the ring, or from the step's own token.
    template <class T> DEVICE float scalar(const FlushTile& tile, const T* kept, const T* own) const {
        const int lane = threadIdx.x % 32, last = tile.buffered;
        return lane < last ? kept[lane] : takes_own() && lane == last ? *own : 0.f;
    }
    DEVICE float beta_of(const FlushTile& tile) const {
        return ERASES ? scalar(tile, ring(tile).beta, token(tile).beta) : 0.f;
    }
    DEVICE float gate_of(const FlushTile& tile) const {
        return CHANNEL_DECAYS ? 0.f : scalar(tile, ring(tile).g, token(tile).g);
    }
};

// A lane's part of the error of a tile's row block. Memory is far away while a flush saturates it: answers are
// requested before the warp waits for the state, and sums are added without being loaded.
struct BlockError {
    float error = 0, energy = 0;
#if MONITOR
    out_t answers[2];  // of rows r and r + 8, in lanes (r, 0)

    DEVICE BlockError(const Flush& f, const FlushTile& tile) {
        const bool given = tile.measure == MEASURED && threadIdx.x % 4 == 0;
#pragma unroll
        for (int half = 0; half < 2; half++)
            answers[half] = given ? f.output(tile)[threadIdx.x / 32 * 16 + value_row(half)] : out_t();
    }
#else
    DEVICE BlockError(const Flush&, const FlushTile&) {}
#endif

    DEVICE void add([[maybe_unused]] int half, [[maybe_unused]] float exact) {
#if MONITOR
        add(answers[half], exact);
#endif
    }
    DEVICE void add([[maybe_unused]] out_t answer, [[maybe_unused]] float exact) {
#if MONITOR
        const float difference = exact - widen<OUT>(answer);
        error += difference * difference, energy += exact * exact;
#endif
    }
    // Counts a flush. Adds the warp's sums if it is measured; a full-state head has no answer, and no error.
    DEVICE void store([[maybe_unused]] const Flush& f, [[maybe_unused]] const FlushTile& tile) {
#if MONITOR
        ErrorSums& sums = f.errors.of(tile.slot)[tile.head() * ROW_BLOCKS + threadIdx.x / 32];
        const bool first = threadIdx.x % 32 == 0;
        if (tile.measure == MEASURED) {
            error = warp_sum(error), energy = warp_sum(energy);
            if (first && (FULL_STATE_HEADS == 0 || f.heads[tile.head()].x > 0)) atomicAdd(&sums.error, error);
            if (first) atomicAdd(&sums.energy, energy);
        }
        if (first && tile.measure != UNCOUNTED) atomicAdd(&sums.flushes, 1.f);
#endif
    }
};

// After all flushes of a step: rows whose error is above the tolerance are read exactly from the next token on. By all
// threads of a block. The sums, and the cursors, are those that other blocks have written.
DEVICE void compare_with_tolerance([[maybe_unused]] const Flush& f) {
#ifdef TOLERANCE
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < f.count; i += WARPS) {
        const DueRow entry = f.schedule->rows[i];
        if (entry.measure != MEASURED) continue;
        const float4* const sums = reinterpret_cast<const float4*>(f.errors.of(entry.slot));
        float error = 0, energy = 0, flushes = 0;
#pragma unroll 8
        for (int n = threadIdx.x % 32; n < HEADS * ROW_BLOCKS; n += 32) {
            const float4 x = __ldcg(sums + n);
            error += x.x, energy += x.y, flushes = x.z;
        }
        error = warp_sum(error), energy = warp_sum(energy);
        const bool above = !(error <= f.tolerance * energy);  // NaN is above
        if (threadIdx.x % 32 == 0 && flushes > (LEAST_SAMPLES - 1) * MONITOR && above)
            atomicOr(f.memory.cursor.of(entry.slot), EXACT);
    }
#endif
}

constexpr FlushTile NO_TILE{-1};
// Tile number i of the flush. The tiles of a row are consecutive; `entry` is the row's entry in the schedule.
DEVICE FlushTile tile_at(int i, const DueRow& entry) {
    return FlushTile{entry.slot, static_cast<u32>(entry.row * HEADS + i % HEADS), entry.buffered,
                     entry.measure};
}

// A warp's iteration over its block's tiles.
struct TileIterator {
    TileScheduler& queue;
    int n = 0;
    FlushTile now;

    DEVICE explicit TileIterator(const Flush& flush) : queue(flush.m.queue), now(queue.get(0)) {}
    DEVICE FlushTile ahead(int by) const { return queue.get(n + by); }
    DEVICE void advance() {
        queue.release(n++);
        now = queue.get(n);
    }
};

// The solver's claim of a tile, in three steps: `begin` and `find` start accesses of global memory, and other work can
// overlap with them.
struct TileClaim {
    const Flush& flush;
    int number;
    DueRow entry;

    DEVICE void begin() { if (threadIdx.x % 32 == 0) number = atomicAdd(&flush.schedule->next_tile, 1); }
    DEVICE void find() {
        number = __shfl_sync(ALL, number, 0) + TileScheduler::AHEAD * gridDim.x;
        entry = flush.schedule->rows[min(number / HEADS, MAX_ROWS - 1)];  // past the last row: stale, not used
    }
    DEVICE void push(int n) {
        flush.m.queue.push(n + TileScheduler::AHEAD, number < flush.count * HEADS ? tile_at(number, entry) : NO_TILE);
    }
};
