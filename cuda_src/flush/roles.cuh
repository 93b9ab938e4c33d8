// Warp roles of the flush. Every warp iterates over the block's tiles. Warps synchronise by mbarriers. Named barriers
// are used only among the transform warps, and in a group of warps that scales an extreme state.
//
// RAW_KEYS (bf16 mamba2 and gdn), one to four blocks per multiprocessor:
//
//   global memory            shared memory                     warps                        global memory
//
//   k, q  ----- solver ----> keys[2], values ---------------+
//   gates, beta - solver --> solve[2]  ---------------------+-> fold warps (V / 16)
//   state ----- fold ------> rows[stage][block] ------------+     predict, update, read --> S, output
//   basis ----- epilogue --> basis -------------------------+     U, S U -----------------> U
//                            columns, sums <------------------------+
//                                 +-----------------------------> epilogue warp ----------> map
//                                                                 (mamba2: may be the solver)
//
// With the map subspace (ENCODES) the fold warps make all of a sketch, from registers, and meet at a named barrier of
// their own (encode/residual.cuh).
//
// Otherwise (kda; fp16 and float32 activations), one block per multiprocessor:
//
//   k, q, gates  producer -> keys[2] --> transform warps (8) --> prepared[2], Gram matrix
//                                                                 |            |
//   beta, gates  solver ---------------------------------------------------> solve[3]
//   v            solver ---> values                               |            |
//   state        producer -> rows[2][block] --> fold warps (V / 16) <----------+ ---------> output
//                                 |                 predict, update, read
//                                 +-----------> producer ---------------------------------> S
//   basis        epilogue -> basis ----+
//                                 +----+------> sketch warps (4): U, S U -----------------> U
//                                                   columns, sums
//                                                       +-> epilogue warps (2) -----------> map
//
// Barrier [stages]           completed by                     waited for by
// queue.full, .empty         solver; all warps                all warps; solver
// keys.full [KEY]            copies of solver or producer     fold warps, solver (RAW_KEYS); transform warps
// values.full                copies of solver                 fold warps
// rows.full [STATE][block]   copies of fold warp or producer  fold warp of the block
// operands_full [KEY]        transform warps                  fold warps, producer (to load keys), solver (not kda)
// gram_full [SOLVE]          transform warps (kda)            solver
// solve_full [SOLVE]         solver                           fold warps, producer (not RAW_KEYS: to load keys)
// operands_empty [OPERAND]   fold warps                       solver (values; if RAW_KEYS keys, solve), transform warps
// state_folded [STATE][b]    fold warp of the block           producer (to store), sketch warps
// state_empty [STATE][b]     sketch warps                     producer (to load the next state)
// first_keys_full            transform warp 0, once           producer (first keys go ahead of first states)
// basis.full                 copies of epilogue warp          warps that sketch
// columns_full               warps that sketch (U)            epilogue warp; a single group's warps (before S U)
// sums_full                  warps that sketch (S U)          epilogue warp; sketch warps if U has one stage
// columns_empty, sums_empty  epilogue warp                    warps that sketch
// columns_stored             warps that sketch                epilogue warp (extreme states of several groups)
// gram_empty                 epilogue warp (dense maps)       the other epilogue warp
// group_sync                 warps of a group                 the same warps
//
// "Warps that sketch" are the fold warps (RAW_KEYS) or the sketch warps. The arrow from them to U in global memory
// starts at the epilogue warp if U has two stages or is stored in codes (EPILOGUE_STORES).
//
// Numbers of stages in the diagrams are those of W = 16 on sm_90.
#pragma once
#include "flush/fold_tokens.cuh"

// Fold warp, one tile: folds the window into the warp's row block and reads the output from the updated rows.
DEVICE void fold_tile(const Flush& f, const FlushTile& tile, int n, StateStage& rows) {
    BlockMemory& m = f.m;
    const int lane = threadIdx.x % 32, block = threadIdx.x / 32, c = lane % 4, folded = f.folded(tile);
    KeyStage& stage = m.keys[n % KEY_STAGES];
    PreparedKeys& prepared = m.prepared[n % PREPARED_STAGES];
    const Solve& solve = m.solve[n % SOLVE_STAGES];
    auto wait_solve = [&] { m.solve_full[n % SOLVE_STAGES].wait(n / SOLVE_STAGES); };
    if (RAW_KEYS) stage.full.wait(n / KEY_STAGES);
    else m.operands_full[n % KEY_STAGES].wait(n / KEY_STAGES);
    BlockError error(f, tile);
    rows.full.wait(n / STATE_STAGES);
    if (RAW_KEYS && folded < W) wait_solve();  // the solver has written zeros in place of missing keys
    Writes writes;
    if (folded > 0) writes.prepare(rows.state, m.values, n, folded, stage, prepared, solve, wait_solve);
    else wait_solve(), m.values.full.wait(n);
    float squares = 0, read[2] = {0, 0};
    const bool by_token = folded > 0 && solve.by_token();
    if (by_token) squares = fold_by_token(f, tile, stage, prepared, m.values, rows.state, error);
#pragma unroll UNROLLED
    for (int step = 0; step < STEPS && !by_token; step++) {
        StateFragment fragment;
        fragment.load(rows.state, step);
        if (folded > 0) {
            writes.fold(fragment, step, stage, prepared);
            fragment.store(rows.state, step);
        }
        float x[4];
        load_query(x, stage, prepared, 16 * step + 4 * c);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                read[half] += fragment.s[half][e] * x[e];
                squares += fragment.s[half][e] * fragment.s[half][e];
            }
    }
    fence_async_proxy();
    __syncwarp();
    if (RAW_KEYS) rows.store(f.home(tile, block));
    if constexpr (SHADOW) {
        const int4 info = f.head(tile);
        if (info.x == 0) rows.shade(reinterpret_cast<u16*>(f.packed(tile, info)) + 16 * block * K);
    }
    if (SKETCHES) rows.set_norm(squares);
    m.operands_empty[n % OPERAND_STAGES].arrive();
    if (!RAW_KEYS) m.state_folded[n % STATE_STAGES][block].arrive();
    if (!f.takes_own() || by_token) {
        if (MONITOR && f.takes_own()) error.store(f, tile);
        return;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        read[half] += __shfl_xor_sync(ALL, read[half], 1);
        read[half] += __shfl_xor_sync(ALL, read[half], 2);
        if (c > 0) continue;
        error.add(half, read[half]);
        f.output(tile)[16 * block + value_row(half)] = narrow<OUT>(read[half]);
    }
    error.store(f, tile);
}

// A warp's part of the sketch of a folded state, if the head has a sketch (info.x is its rank); `then` as in
// sketch_head.
template <class Then>
DEVICE void sketch_tile(const Flush& f, const FlushTile& tile, const int4& info, int n, int group, int member,
                        int& sketch_n, Then then) {
#if SKETCHES
    if (info.x > 0) {
        sketch_head(f.m.sketch, f.m.sketch_barriers, f.m.rows[n % STATE_STAGES], group, member,
                    f.packed(tile, info), info.x, sketch_n, then);
        return;
    }
#elif ENCODES
    if (info.x > 0) {
        StateBlock& block = f.m.rows[n % STATE_STAGES][threadIdx.x / 32].state;
        auto at = [&](int row, int channel) { return block.at(row, channel); };
        encode_state(f.m.encode, at, f.basis, f.packed(tile, info), info, [&] {
            __syncwarp();
            release_rows(member, then);
        });
        return;
    }
#endif
    release_rows(member, then);
}

// Fold warp. Waits for: keys.full (RAW_KEYS) or operands_full, rows.full, solve_full, values.full. Signals:
// operands_empty, state_folded. With RAW_KEYS the fold warp also loads, sketches and stores its own row block.
DEVICE void run_fold_warp(const Flush& f) {
    BlockMemory& m = f.m;
    const int block = threadIdx.x / 32;
    int sketch_n = 0;
    auto fetch = [&](const FlushTile& tile, int n) {
        if (RAW_KEYS && tile.exists()) m.rows[n % STATE_STAGES][block].fetch(f.home(tile, block));
    };
    TileIterator tiles(f);
    // All blocks start together. The first keys, which need more work, must not queue behind every block's states.
    if (RAW_KEYS && tiles.now.exists()) m.keys[0].full.wait(0);
    fetch(tiles.now, 0);
    for (; tiles.now.exists(); tiles.advance()) {
        const int n = tiles.n;
        if (RAW_KEYS && STATE_STAGES > 1) wait_bulk_stores(), fetch(tiles.ahead(1), n + 1);
        fold_tile(f, tiles.now, n, m.rows[n % STATE_STAGES][block]);
        if (RAW_KEYS)
            sketch_tile(f, tiles.now, f.head(tiles.now), n, block / GROUP_WARPS, block % GROUP_WARPS, sketch_n,
                        [&](int) {
                            if (STATE_STAGES == 1) wait_bulk_stores(), fetch(tiles.ahead(1), n + 1);
                        });
    }
    wait_bulk_stores();  // shared memory must live until the stores have read it
}

// Starts the copies of a tile's keys and query.
DEVICE void fetch_keys(const Flush& f, const FlushTile& tile, int n) {
    if (!tile.exists()) return;
    KeyStage& stage = f.m.keys[n % KEY_STAGES];
    if (RAW_KEYS && f.folded(tile) < W) stage.clear(f.folded(tile));
    stage.fetch(f.token(tile), f.ring(tile), tile.buffered, f.takes_own());
}

// Producer warp (not RAW_KEYS): loads states, stores them when they are folded, and loads keys (except a block's first
// KEY_STAGES tiles, which the solver loads). Waits for: operands_full and solve_full (transform warps and solver have
// released the keys' stage), state_folded (to store), state_empty (to load). Signals: keys.full, rows.full, by its
// copies. With two PREPARED_STAGES the next keys are usually requested before the previous tile's state is folded.
DEVICE void run_producer_warp(const Flush& f) {
    auto follow = [&](int n) {
        f.m.operands_full[n % KEY_STAGES].wait(n / KEY_STAGES);
        f.m.solve_full[n % SOLVE_STAGES].wait(n / SOLVE_STAGES);
        fetch_keys(f, f.m.queue.get(n + KEY_STAGES), n + KEY_STAGES);
    };
    auto fetch = [&](const FlushTile& tile, int n) {
        if (!tile.exists()) return;
        const state_t* from = f.home(tile, 0);
#pragma unroll 1
        for (int block = 0; block < ROW_BLOCKS; block++, from += 16 * K) {
            if (SKETCHES && n >= STATE_STAGES)
                f.m.state_empty[n % STATE_STAGES][block].wait(n / STATE_STAGES - 1);
            f.m.rows[n % STATE_STAGES][block].fetch(from);
        }
    };
    TileIterator tiles(f);
    if (tiles.now.exists()) f.m.first_keys_full.wait(0);  // they go ahead of the first states: see run_fold_warp
    fetch(tiles.now, 0);
    if (STATE_STAGES > 1) fetch(tiles.ahead(1), 1);
    if (tiles.now.exists()) follow(0);
    for (; tiles.now.exists(); tiles.advance()) {
        const int n = tiles.n, stage = n % STATE_STAGES;
        const bool follows = tiles.ahead(1).exists();
        if (PREPARED_STAGES > 1 && follows) follow(n + 1);
        state_t* to = f.home(tiles.now, 0);
#pragma unroll 1
        for (int block = 0; block < ROW_BLOCKS; block++, to += 16 * K) {
            f.m.state_folded[stage][block].wait(n / STATE_STAGES);
            f.m.rows[stage][block].store(to);
        }
        if (PREPARED_STAGES == 1 && follows) follow(n + 1);
        wait_bulk_stores();
        fetch(tiles.ahead(STATE_STAGES), n + STATE_STAGES);
    }
}

// Sketch warp (not RAW_KEYS). Waits for: state_folded of its row blocks; see sketch_head. Signals: state_empty.
DEVICE void run_sketch_warp(const Flush& f) {
    const int member = threadIdx.x / 32 - FIRST_SKETCH_WARP;
    int sketch_n = 0;
    for (TileIterator tiles(f); tiles.now.exists(); tiles.advance()) {
        const int n = tiles.n, stage = n % STATE_STAGES;
        const int4 info = f.head(tiles.now);  // the load overlaps with the wait
        for (int block = member; block < ROW_BLOCKS; block += GROUP_WARPS)
            f.m.state_folded[stage][block].wait(n / STATE_STAGES);
        sketch_tile(f, tiles.now, info, n, 0, member, sketch_n,
                    [&](int block) { f.m.state_empty[stage][block].arrive(); });
    }
}

DEVICE void wait_operands_empty(BlockMemory& m, int n) {  // operands of tile n
    if (n >= 0) m.operands_empty[n % OPERAND_STAGES].wait(n / OPERAND_STAGES);
}

// Transform warp (not RAW_KEYS): turns keys into operands, and makes the decayed Gram matrix (kda). Waits for:
// keys.full, operands_empty. Signals: gram_full, operands_full, first_keys_full.
DEVICE void run_transform_warp(const Flush& f) {
    BlockMemory& m = f.m;
    for (TileIterator tiles(f); tiles.now.exists(); tiles.advance()) {
        const int n = tiles.n, member = opaque(threadIdx.x) - 32 * FIRST_TRANSFORM_WARP;
        GateInput<1> input;
        input.load(f.gate_input, tiles.now.head(), channel_of(member));
        m.keys[n % KEY_STAGES].full.wait(n / KEY_STAGES);
        if (n == 0 && member < 32) m.first_keys_full.arrive();
        transform_keys(
            m.prepared[n % PREPARED_STAGES], m.solve[n % SOLVE_STAGES], m.transform[n % 2], m.keys[n % KEY_STAGES],
            input, f.folded(tiles.now), member,
            [&] {
                if (CHANNEL_DECAYS) m.gram_full[n % SOLVE_STAGES].arrive();
            },
            [&] { wait_operands_empty(m, n - PREPARED_STAGES); });
        if (CHANNEL_DECAYS) fence_async_proxy();  // decays were stored where the next log-decays will be copied to
        m.operands_full[n % KEY_STAGES].arrive();
    }
}

// Solver warp (`solves`): claims tiles, loads values (and keys with RAW_KEYS; otherwise only the first keys), and
// solves the delta rule's triangular system one tile ahead. Waits for: keys.full (RAW_KEYS), gram_full (kda) or
// operands_full; operands_empty; queue.empty. Signals: solve_full, queue.full; keys.full, values.full, by its copies.
//
// Epilogue warp (`member`; -1 for none): finishes every EPILOGUE_WARPS-th sketch and loads the next head's basis. Waits
// and signals: see finish_sketch.
DEVICE void run_solver_or_epilogue_warp(const Flush& f, bool solves, int member) {
    BlockMemory& m = f.m;
    auto fetch_values = [&](const FlushTile& tile) {
        if (tile.exists()) m.values.fetch(f.token(tile), f.ring(tile), tile.buffered, f.takes_own());
    };
    auto solve = [&](const FlushTile& tile, int n) {
        if (!tile.exists()) return;
        const float gate = f.gate_of(tile), erased = f.beta_of(tile);
        if (RAW_KEYS) {
            if (ERASES) m.keys[n % KEY_STAGES].full.wait(n / KEY_STAGES);
            wait_operands_empty(m, n - SOLVE_STAGES);  // the solve stage was used by tile n - SOLVE_STAGES
        } else if (CHANNEL_DECAYS) {
            m.gram_full[n % SOLVE_STAGES].wait(n / SOLVE_STAGES);
        } else {
            m.operands_full[n % KEY_STAGES].wait(n / KEY_STAGES);
        }
        solve_window(m.solve[n % SOLVE_STAGES], m.keys[n % KEY_STAGES], m.prepared[n % PREPARED_STAGES],
                     m.transform[n % 2], gate, erased);
        m.solve_full[n % SOLVE_STAGES].arrive();
    };
#if SKETCHES
    int sketch_n = 0;
    auto head_at = [&](const FlushTile& tile) { return tile.exists() ? f.head(tile) : make_int4(0, 0, 0, 0); };
    auto fetch_basis = [&](const int4& info) {
        if (info.x > 0) m.sketch.basis.fetch(f.basis + info.w, info.x);
    };
    if (member == 0) fetch_basis(head_at(m.queue.get(0)));
#endif
    TileIterator tiles(f);
    TileClaim claim{f};
    if (solves) {
        if (!RAW_KEYS) claim.begin();
        fetch_keys(f, tiles.now, 0);
        fetch_values(tiles.now);
        if (KEY_STAGES > 1) fetch_keys(f, tiles.ahead(1), 1);
        solve(tiles.now, 0);
        if (!RAW_KEYS) claim.find();
    }
    for (; tiles.now.exists(); tiles.advance()) {
        const int n = tiles.n;
        if (solves) {
            // RAW_KEYS: claim as late as possible. The sooner a claimed tile is loaded, the closer in memory are the
            // loads of all blocks. Transform warps need their keys earlier, so their claim began one tile earlier.
            if (!RAW_KEYS) claim.push(n);
            claim.begin();
            const FlushTile next = tiles.ahead(1);
            solve(next, n + 1);
            claim.find();  // without RAW_KEYS, the load overlaps with the rest of this iteration
            if (RAW_KEYS) claim.push(n);
            if (next.exists()) {
                wait_operands_empty(m, n);
                fetch_values(next);
                if (RAW_KEYS) fetch_keys(f, tiles.ahead(KEY_STAGES), n + KEY_STAGES);
            }
        }
#if SKETCHES
        if (member < 0) continue;
        const int4 info = f.head(tiles.now), coming = head_at(tiles.ahead(1));
        if (info.x > 0) {
            if (sketch_n % EPILOGUE_WARPS == member)
                finish_sketch(m.sketch, m.sketch_barriers, f.packed(tiles.now, info), f.projection + info.z, info.x,
                              f.ridge, sketch_n, [&] { fetch_basis(coming); });
            sketch_n++;
        } else if ((sketch_n + EPILOGUE_WARPS - 1) % EPILOGUE_WARPS == member) {
            fetch_basis(coming);  // by the warp that knows that the last basis has been used
        }
#endif
    }
}
