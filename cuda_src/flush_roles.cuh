// The flush's warps, by their tasks. Each goes through the block's items in turn; latches are what they wait for.
#pragma once
#include "flush_items.cuh"

// Folds the window into a block of rows and reads the output from what has become of them.
__device__ __forceinline__ void fold_item(const Flush& f, const Item& item, int n, Rows& rows) {
    Memory& m = f.m;
    const int lane = threadIdx.x % 32, block = threadIdx.x / 32, c = lane % 4, folded = f.folded(item);
    KeyStage& stage = m.keys[n % KEYS];
    PreparedKeys& prepared = m.prepared[n % PREPARED];
    const Solve& solve = m.solve[n % SOLVES];
    auto wait_solved = [&] { m.solved[n % SOLVES].wait(n / SOLVES); };
    if (RAW) stage.delivery.wait(n / KEYS);
    else m.ready[n % KEYS].wait(n / KEYS);
    rows.delivery.wait(n / PLACES);
    if (RAW && f.mode != STEP) wait_solved();  // whose warp has put zeros where keys are missing
    Writes writes;
    if (folded > 0) writes.prepare(rows.state, m.values, n, folded, stage, prepared, solve, wait_solved);
    else wait_solved(), m.values.delivery.wait(n);
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
    release_to_copies();
    __syncwarp();
    if (RAW) rows.store(f.home(item, block));
    if (SKETCHED_HEADS && MAP != SHARED) rows.set_norm(squares);
    m.used[n % SETS].arrive();
    if (!RAW) m.folded[n % PLACES][block].arrive();
    if (f.mode != STEP) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        read[half] += __shfl_xor_sync(ALL, read[half], 1);
        read[half] += __shfl_xor_sync(ALL, read[half], 2);
        if (c == 0) f.out[(f.at(item) * HEADS + item.head()) * V + 16 * block + value_row(half)] = narrow<OUT>(read[half]);
    }
}

// A warp's part of an item's sketch, if its head has one, which `info` says; `then` as in share_sketch.
template <class Then>
__device__ __forceinline__ void sketch_item(const Flush& f, const Item& item, const int4& info, int n, int group, int member, int& turn, Then then) {
#if SKETCHED_HEADS
    if (info.x > 0) {
        share_sketch(f.m.sketch, f.m.sketched, f.m.rows[n % PLACES], group, member, f.packed(item, info), info.x, turn, then);
        return;
    }
#endif
    leave_rows(member, then);
}

// Warps that fold; keys that are operands as they come leave them the rest as well, each with its own block of rows.
__device__ __forceinline__ void fold_items(const Flush& f) {
    Memory& m = f.m;
    const int block = threadIdx.x / 32;
    int turn = 0;
    auto fetch = [&](const Item& item, int n) {
        if (RAW && item.exists()) m.rows[n % PLACES][block].fetch(f.home(item, block));
    };
    Items items(f);
    // All blocks begin together: the first keys, with which more has to be done, had better not queue behind everybody's states.
    if (RAW && items.now.exists()) m.keys[0].delivery.wait(0);
    fetch(items.now, 0);
    for (; items.now.exists(); items.advance()) {
        const int n = items.n;
        if (RAW && PLACES > 1) wait_sent(), fetch(items.ahead(1), n + 1);
        fold_item(f, items.now, n, m.rows[n % PLACES][block]);
        if (RAW)
            sketch_item(f, items.now, f.head(items.now), n, block / SHARERS, block % SHARERS, turn, [&](int) {
                if (PLACES == 1) wait_sent(), fetch(items.ahead(1), n + 1);
            });
    }
    wait_sent();  // what has not been read goes with the block
}

// Starts the copies of an item's keys.
__device__ __forceinline__ void fetch_keys(const Flush& f, const Item& item, int n) {
    if (!item.exists()) return;
    KeyStage& stage = f.m.keys[n % KEYS];
    if (RAW && f.mode != STEP) stage.clear(f.buffered(item));
    stage.fetch(f.token(item), f.ring(item), f.buffered(item), f.mode == STEP);
}

// Where they do not: a warp that brings states, and stores them when they are folded. It brings keys as well, but for a block's first ones,
// as soon as the last ones in their place have been used: by the team, and by the server, who reads what that has left in TeamMemory. With room
// for two items' operands that is mostly so before the state of the item before is folded.
__device__ __forceinline__ void move_items(const Flush& f) {
    auto follow = [&](int n) {
        f.m.ready[n % KEYS].wait(n / KEYS);
        f.m.solved[n % SOLVES].wait(n / SOLVES);
        fetch_keys(f, f.m.queue.get(n + KEYS), n + KEYS);
    };
    auto fetch = [&](const Item& item, int n) {
        if (!item.exists()) return;
        const float* from = f.home(item, 0);
#pragma unroll 1
        for (int block = 0; block < NWARPS; block++, from += 16 * K) {
            if (SKETCHED_HEADS && n >= PLACES) f.m.sketched_rows[n % PLACES][block].wait(n / PLACES - 1);
            f.m.rows[n % PLACES][block].fetch(from);
        }
    };
    Items items(f);
    if (items.now.exists()) f.m.begun.wait(0);  // as in fold_items
    fetch(items.now, 0);
    if (PLACES > 1) fetch(items.ahead(1), 1);
    if (items.now.exists()) follow(0);
    for (; items.now.exists(); items.advance()) {
        const int n = items.n, place = n % PLACES;
        const bool follows = items.ahead(1).exists();
        if (PREPARED > 1 && follows) follow(n + 1);
        float* to = f.home(items.now, 0);
#pragma unroll 1
        for (int block = 0; block < NWARPS; block++, to += 16 * K) {
            f.m.folded[place][block].wait(n / PLACES);
            f.m.rows[place][block].store(to);
        }
        if (PREPARED == 1 && follows) follow(n + 1);
        wait_sent();
        fetch(items.ahead(PLACES), n + PLACES);
    }
}

// And warps that sketch them, each the blocks of rows that it makes U of as soon as they are folded.
__device__ __forceinline__ void sketch_items(const Flush& f) {
    const int member = threadIdx.x / 32 - SKETCHERS;
    int turn = 0;
    for (Items items(f); items.now.exists(); items.advance()) {
        const int place = items.n % PLACES;
        const int4 info = f.head(items.now);  // on its way while the warp waits
        for (int block = member; block < NWARPS; block += SHARERS) f.m.folded[place][block].wait(items.n / PLACES);
        sketch_item(f, items.now, info, items.n, 0, member, turn, [&](int block) { f.m.sketched_rows[place][block].arrive(); });
    }
}

__device__ __forceinline__ void wait_used(Memory& m, int n) {  // operands of item n
    if (n >= 0) m.used[n % SETS].wait(n / SETS);
}

// The team that makes operands of keys.
__device__ __forceinline__ void prepare_items(const Flush& f) {
    Memory& m = f.m;
    for (Items items(f); items.now.exists(); items.advance()) {
        const int n = items.n, member = anew(threadIdx.x) - 32 * TEAM_WARPS;
        GateInput<1> input;
        input.load(f.gate_input, items.now.head(), channel_of(member));
        m.keys[n % KEYS].delivery.wait(n / KEYS);
        if (n == 0 && member < 32) m.begun.arrive();
        prepare(
            m.prepared[n % PREPARED], m.solve[n % SOLVES], m.team[n % 2], m.keys[n % KEYS], input, f.folded(items.now), member,
            [&] {
                if (KIND == KDA) m.tabled[n % SOLVES].arrive();
            }, [&] { wait_used(m, n - PREPARED); });
        if (KIND == KDA) release_to_copies();  // decays lie where the next log-decays will
        m.ready[n % KEYS].arrive();
    }
}

// One warp that claims items, fetches tokens (keys only at first, where there is a mover) and solves ahead of those that fold, and some
// that finish sketches in turn, each a `member` from 0 on; or one for both.
__device__ __forceinline__ void serve_items(const Flush& f, bool serves, int member) {
    Memory& m = f.m;
    auto fetch_values = [&](const Item& item) {
        if (item.exists()) m.values.fetch(f.token(item), f.ring(item), f.buffered(item), f.mode == STEP);
    };
    auto solve = [&](const Item& item, int n) {
        if (!item.exists()) return;
        const float gate = f.gate_of(item), erased = f.beta_of(item);
        if (RAW) {
            if (ERASES) m.keys[n % KEYS].delivery.wait(n / KEYS);
            wait_used(m, n - SOLVES);  // whose solve lay where this one will
        } else if (KIND == KDA) {
            m.tabled[n % SOLVES].wait(n / SOLVES);
        } else {
            m.ready[n % KEYS].wait(n / KEYS);
        }
        prepare_solve(m.solve[n % SOLVES], m.keys[n % KEYS], m.prepared[n % PREPARED], m.team[n % 2], gate, erased);
        m.solved[n % SOLVES].arrive();
    };
#if SKETCHED_HEADS
    int turn = 0;
    auto find_head = [&](const Item& item) { return item.exists() ? f.head(item) : make_int4(0, 0, 0, 0); };
    auto fetch_basis = [&](const int4& info) {
        if (info.x > 0) m.sketch.basis.fetch(f.basis + info.w, info.x);
    };
    if (member == 0) fetch_basis(find_head(m.queue.get(0)));
#endif
    Items items(f);
    Claims claims{f};
    if (serves) {
        if (!RAW) claims.begin();
        fetch_keys(f, items.now, 0);
        fetch_values(items.now);
        if (KEYS > 1) fetch_keys(f, items.ahead(1), 1);
        solve(items.now, 0);
        if (!RAW) claims.find();
    }
    for (; items.now.exists(); items.advance()) {
        const int n = items.n;
        if (serves) {
            // As late as it may be: the sooner after its claim an item is fetched, the closer in memory is what all blocks fetch
            // at a time. A team wants its keys at once, and the claim was begun with the item before.
            if (!RAW) claims.put(n);
            claims.begin();
            const Item next = items.ahead(1);
            solve(next, n + 1);
            claims.find();  // what it loads has come when it is put, where that is later
            if (RAW) claims.put(n);
            if (next.exists()) {
                wait_used(m, n);
                fetch_values(next);
                if (RAW) fetch_keys(f, items.ahead(KEYS), n + KEYS);
            }
        }
#if SKETCHED_HEADS
        if (member < 0) continue;
        const int4 info = f.head(items.now), coming = find_head(items.ahead(1));
        if (info.x > 0) {
            if (turn % FINISHERS == member)
                finish_sketch(m.sketch, m.sketched, f.packed(items.now, info), f.projection + info.z, info.x, f.ridge, turn,
                              [&] { fetch_basis(coming); });
            turn++;
        } else if ((turn + FINISHERS - 1) % FINISHERS == member) {  // who has seen that the last basis has been used
            fetch_basis(coming);
        }
#endif
    }
}
