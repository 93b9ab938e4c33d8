// Flush: one pass over the state of every (row, head) whose window is full.
//
// Reads the state, folds the window's raw tokens into it exactly, reads the output from the updated state, rebuilds
// the sketch and its map, and writes the state back. A fixed number of blocks takes the (row, head) items in turn, so
// that all of them work on one stretch of memory at a time.
//
// Warps hardly wait for each other. Each of NWARPS owns 16 value rows: it brings them to shared memory, makes all of them
// there, 16 channels at a time, and sends them back. SERVERS more serve them: they fetch tokens, prepare operands, decays and
// the delta rule's solve ahead, and finish sketches.
// Gates in shared memory say when something is there and when it has been used.
//
// mode STEP: the rows that the read kernel has listed, whose windows end with this token. mode FOLD: all rows that have
// buffered something, without an output. mode LOAD: new states, nothing to fold.
//
// -D constants besides read.cu's: PRIOR, MIN_BLOCKS (blocks that should fit on one multiprocessor).
#include "schedule.cuh"
#include "sketch_layout.cuh"
#include "fold.cuh"
#include "maps.cuh"

enum { STEP = 0, FOLD = 1, LOAD = 2 };
constexpr int SERVERS = !RAW ? 2 + TEAM / 32 : ERASES ? 2 : 1;  // keys and solves, sketches, the team that prepares keys
constexpr int FINISHER = NWARPS + (SERVERS > 1);  // the server that finishes sketches
constexpr int BLOCK_THREADS = THREADS + 32 * SERVERS;
constexpr int SETS = RAW ? KEYS : PREPARED;       // of operands that warps which fold read

// The states' rows have so many places in shared memory that the next ones come in while a state is used.
template <int PLACES> struct MemoryOf {
    static constexpr int places = PLACES;
    Rows rows[PLACES][NWARPS];
    KeyStage keys[KEYS];
    ValueStage values[VALUES_AHEAD];
    PreparedKeys prepared[PREPARED];
    Solve solve[SOLVES];
    Gate used[SETS], solved[SOLVES], ready[KEYS], met;  // operands have been used, or are prepared; the team is ready, or has met
#if SKETCHED_HEADS
    SketchMemory sketch;
    SketchGates sketched;
#endif
};
template <bool YES> struct Choice { typedef MemoryOf<1> type; };
template <> struct Choice<true> { typedef MemoryOf<2> type; };
// Two blocks on a multiprocessor do the same for each other. A kilobyte stays for what is not Memory.
typedef Choice<MIN_BLOCKS == 1 && sizeof(MemoryOf<2>) + 1024 <= MOST_SHARED>::type Memory;
constexpr int PLACES = Memory::places;

// Lists the rows to flush, in order; returns how many. All blocks find, and write, the same.
__device__ __forceinline__ int list_rows(int* rows, const int* cursor, const i64* slots, int batch, int mode) {
    __shared__ int counts[NWARPS + SERVERS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int total = 0;
    for (int first = 0; first < batch; first += BLOCK_THREADS) {
        const int row = first + threadIdx.x;
        const i64 slot = row < batch ? slots[row] : -1;
        const bool due = slot >= 0 && (mode == LOAD || cursor[slot] > 0);
        const u32 ballot = __ballot_sync(ALL, due);
        if (lane == 0) counts[warp] = __popc(ballot);
        __syncthreads();
        int before = total;
        for (int i = 0; i < NWARPS + SERVERS; i++) {
            if (i < warp) before += counts[i];
            total += counts[i];
        }
        if (due) rows[before + __popc(ballot & ((1u << lane) - 1))] = row;
        __syncthreads();
    }
    return total;
}

// One item: a slot, and a row and one of its heads. Small, as three of them stay in registers.
struct Item {
    int slot, place;
    __device__ __forceinline__ bool exists() const { return slot >= 0; }
    __device__ __forceinline__ int row() const { return place / HEADS; }
    __device__ __forceinline__ int head() const { return place % HEADS; }
};

#ifndef SIZES_ONLY  // set where only the last line is asked for
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, MIN_BLOCKS) flush_step(
    float* state, i64 slot_stride, int* cursor, act_t* ring_k, act_t* ring_v, float* ring_g, float* ring_beta,
    sketch_t* sketch, i64 sketch_stride, const sketch_t* projection, const uint2* basis, const int4* heads,
    const act_t* q, const act_t* k, const act_t* v, const float* g, const float* beta, out_t* out, const i64* slots,
    int batch, int tokens, int t, Schedule* schedule, int mode, float ridge) {
    start_kernel_after();
    wait_for_kernel_before();
    extern __shared__ uint4 shared[];
    Memory& m = *reinterpret_cast<Memory*>(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = lane % 4;
    int count = 0;
    if (mode == STEP) {
        count = schedule->due;
        // nobody else looks at the cursors now: rows that are due stand at their window's last place
        if (blockIdx.x == 0)
            for (int row = threadIdx.x; row < batch; row += BLOCK_THREADS) {
                const i64 slot = slots[row];
                if (slot >= 0) cursor[slot] = cursor[slot] + 1 < W ? cursor[slot] + 1 : 0;
            }
        if (count == 0) return;
    } else {
        count = list_rows(schedule->rows, cursor, slots, batch, mode);
    }
    if (threadIdx.x == 0) {
        m.met.init(TEAM / 32);
        for (Gate& gate : m.ready) gate.init(TEAM / 32);
        for (Gate& gate : m.used) gate.init(NWARPS);
        for (Gate& gate : m.solved) gate.init(1);
        for (KeyStage& stage : m.keys) stage.delivery.init();
        for (ValueStage& stage : m.values) stage.delivery.init();
        for (auto& place : m.rows)
            for (Rows& rows : place) rows.delivery.init();
#if SKETCHED_HEADS
        m.sketched.init();
#endif
    }
    if (W < WP && warp == NWARPS)
        for (int i = 0; i < KEYS; i++) m.keys[i].clear(W);
    __syncthreads();

    const int end = count * HEADS, stride = gridDim.x;
    auto item_at = [&](int i) {
        if (i >= end) return Item{-1, 0};
        // heads shift from row to row: else a stride that shares a factor with HEADS would leave some blocks the high ranks
        const int place = i / HEADS, row = schedule->rows[place];
        return Item{static_cast<int>(slots[row]), row * HEADS + (i + place) % HEADS};
    };
    auto buffered = [&](const Item& item) { return mode == STEP ? W - 1 : mode == LOAD ? 0 : cursor[item.slot]; };
    auto token_of_item = [&](const Item& item) { return Token(q, k, v, g, beta, static_cast<i64>(item.row()) * tokens + t, item.head()); };
    auto ring_of = [&](const Item& item) { return Ring(ring_k, ring_v, ring_g, ring_beta, item.slot, item.head()); };
    auto home = [&](const Item& item) { return state + item.slot * slot_stride + static_cast<i64>(item.head()) * V * K; };
    // Lane s: token s's entry in a ring of scalars.
    auto scalar = [&](const Item& item, const float* ring, const float* own) {
        const int last = buffered(item);
        return lane < last ? ring[lane] : mode == STEP && lane == last ? *own : 0.f;
    };
    auto beta_of = [&](const Item& item) { return scalar(item, ring_of(item).beta, token_of_item(item).beta); };
    auto gate_of = [&](const Item& item) { return KIND == KDA || !item.exists() ? 0.f : scalar(item, ring_of(item).g, token_of_item(item).g); };
    Item now = item_at(blockIdx.x), next = item_at(blockIdx.x + stride);
    [[maybe_unused]] int turn = 0;

    if (warp >= NWARPS) {
        auto fetch = [&](const Item& item, int n) {
            if (!item.exists()) return;
            if (mode != STEP) m.keys[n % KEYS].clear(buffered(item));
            m.keys[n % KEYS].fetch(token_of_item(item), ring_of(item), buffered(item), mode == STEP);
        };
        auto used = [&](int n) {  // operands of item n
            if (n >= 0) m.used[n % SETS].wait(n / SETS);
        };
        auto fetch_values = [&](const Item& item, int n) {
            if (item.exists()) m.values[n % VALUES_AHEAD].fetch(token_of_item(item), ring_of(item), buffered(item), mode == STEP);
        };
        auto solve = [&](const Item& item, int n) {
            if (!item.exists()) return;
            const float gate = gate_of(item), erased = ERASES ? beta_of(item) : 0.f;
            if (RAW) {
                if (ERASES) m.keys[n % KEYS].delivery.wait(n / KEYS);
                used(n - SOLVES);  // whose solve lay where this one will
            } else {
                m.ready[n % KEYS].wait(n / KEYS);
                fetch(item_at(blockIdx.x + (n + KEYS) * stride), n + KEYS);
            }
            prepare_solve(m.solve[n % SOLVES], m.keys[n % KEYS], m.prepared[n % PREPARED], gate, erased);
            if (lane == 0) m.solved[n % SOLVES].arrive();
        };
        int meeting = 0;
        auto meet = [&] {
            __syncwarp();
            if (lane == 0) m.met.arrive();
            m.met.wait(meeting++);
        };
        if (warp == NWARPS) {
            fetch(now, 0);
            fetch_values(now, 0);
            if (KEYS > 1) fetch(next, 1);
            if (VALUES_AHEAD > 1) fetch_values(next, 1);
            solve(now, 0);
        }
        for (int n = 0; now.exists(); n++) {
            const Item after = item_at(blockIdx.x + (n + 2) * stride);
            if (SOLVES > 1 && warp == NWARPS) solve(next, n + 1);
            if (!RAW && warp > FINISHER) {
                m.keys[n % KEYS].delivery.wait(n / KEYS);
                used(n - PREPARED);
                prepare(m.prepared[n % PREPARED], m.solve[n % SOLVES], m.keys[n % KEYS], mode == STEP ? W : buffered(now),
                        threadIdx.x - 32 * (FINISHER + 1), meet);
                if (KIND == KDA) release_to_copies();  // decays lie where the next log-decays will
                __syncwarp();
                if (lane == 0) m.ready[n % KEYS].arrive();
            }
            if (warp == NWARPS && next.exists()) {
                used(n);
                fetch_values(VALUES_AHEAD > 1 ? after : next, n + VALUES_AHEAD);
                if (RAW) fetch(after, n + KEYS);
                if (SOLVES == 1) solve(next, n + 1);
            }
#if SKETCHED_HEADS
            if (warp == FINISHER) {
                const int4 info = heads[now.head()];
                if (info.x > 0)
                    finish_sketch(m.sketch, m.sketched, sketch + static_cast<i64>(now.slot) * sketch_stride + info.y,
                                  projection + info.z, info.x, ridge, turn);
            }
#endif
            now = next, next = after;
        }
    } else {
        auto fetch = [&](const Item& item, int n) {
            if (item.exists()) m.rows[n % PLACES][warp].fetch(home(item));
        };
        fetch(now, 0);
        for (int n = 0; now.exists(); n++) {
            const Item after = item_at(blockIdx.x + (n + 2) * stride);
            if (PLACES > 1) wait_sent(), fetch(next, n + 1);
            const int folded = mode == STEP ? W : buffered(now);
#if SKETCHED_HEADS
            const int4 info = heads[now.head()];
#endif
            Rows& rows = m.rows[n % PLACES][warp];
            KeyStage& stage = m.keys[n % KEYS];
            PreparedKeys& prepared = m.prepared[n % PREPARED];
            const Solve& solve = m.solve[n % SOLVES];
            m.solved[n % SOLVES].wait(n / SOLVES);
            if (RAW) stage.delivery.wait(n / KEYS);
            rows.delivery.wait(n / PLACES);
            Writes writes;
            if (folded > 0) writes.prepare(rows.state, m.values[n % VALUES_AHEAD], n / VALUES_AHEAD, folded, stage, prepared, solve);
            else m.values[n % VALUES_AHEAD].delivery.wait(n / VALUES_AHEAD);
            float squares = 0, read[2] = {0, 0};
#pragma unroll UNROLLED
            for (int step = 0; step < STEPS; step++) {
                Piece piece;
                piece.load(rows.state, step);
                if (folded > 0) {
                    writes.fold(piece, step, stage, prepared);
                    piece.store(rows.state, step);
                }
                float x[4];
                if constexpr (RAW) {
                    Packed<ACT, 4> packed;
                    packed.load(&stage.q[16 * step + 4 * c]);
#pragma unroll
                    for (int e = 0; e < 4; e++) x[e] = packed[e];
                } else {
                    Packed<FP32, 4> packed;
                    packed.load(&prepared.query[16 * step + 4 * c]);
#pragma unroll
                    for (int e = 0; e < 4; e++) x[e] = packed[e];
                }
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        read[half] += piece.s[half][e] * x[e];
                        squares += piece.s[half][e] * piece.s[half][e];
                    }
            }
            send(home(now) + 16 * warp * K, rows.state.data, StateRows::SHIFT * sizeof(float), 2, StateRows::HALF * sizeof(float));
            __syncwarp();
            if (lane == 0) m.used[n % SETS].arrive();
            if (mode == STEP) {
                const i64 at = static_cast<i64>(now.row()) * tokens + t;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    read[half] += __shfl_xor_sync(ALL, read[half], 1);
                    read[half] += __shfl_xor_sync(ALL, read[half], 2);
                    if (c == 0) out[(at * HEADS + now.head()) * V + 16 * warp + value_row(half)] = narrow<OUT>(read[half]);
                }
            }
#if SKETCHED_HEADS
            if (info.x > 0)
                share_sketch(m.sketch, m.sketched, m.rows[n % PLACES], squares, sketch + static_cast<i64>(now.slot) * sketch_stride + info.y, basis + info.w,
                             info.x, turn);
#endif
            if (PLACES == 1) wait_sent(), fetch(next, n + 1);
            now = next, next = after;
        }
        wait_sent();  // what has not been read goes with the block
    }

    // The block that comes last clears the schedule, and starts the rows' windows anew where others had to see them.
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(&schedule->ticket, 1u) == gridDim.x - 1;
        if (last) schedule->ticket = 0, schedule->due = 0;
    }
    __syncthreads();
    if (!last || mode == STEP) return;
    for (int i = threadIdx.x; i < count; i += BLOCK_THREADS) cursor[slots[schedule->rows[i]]] = 0;
}
#endif

// What the host must ask for at the launch.
extern "C" __device__ int flush_shared_bytes = sizeof(Memory);
