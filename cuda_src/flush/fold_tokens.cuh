// Folds a window token by token, as standard decode does: windows with a beta above 1.
//
// A transition I - beta k k^T with beta above 1 reverses what a state holds along k, and with beta = 2 forgets nothing.
// If a key repeats, an error of the Gram matrix, of N or of a rounded write is the same in every window and adds up.
// The errors of predictions from the whole state change from token to token.
#pragma once
#include "flush/tiles.cuh"

// By a fold warp, for its row block, one value row after the other. Keys and gates come from global memory, unless keys
// are in shared memory as given. Writes the outputs, adds their errors, and returns the lane's share of the sum of
// squares.
DEVICE float fold_by_token(const Flush& f, const FlushTile& tile, const KeyStage& stage, const PreparedKeys& prepared,
                           const ValueStage& values, StateBlock& rows, BlockError& error) {
    const int folded = f.folded(tile);
    const Ring ring = f.ring(tile);
    const Token own = f.token(tile);
    const float beta = f.beta_of(tile), same = decay(f.gate_of(tile));  // of token number `lane`
    float squares = 0;
    ChannelShare<QUERY> query;
    query.load(query_of(stage, prepared));
    GateInput<LK> input;
    input.load(f.gate_input, tile.head(), first_channel());
#pragma unroll 1
    for (int row = 0; row < 16; row++) {
        const int value = threadIdx.x / 32 * 16 + row;
        ChannelShare<STATE> stored;
        stored.load(rows.at(row, 0));
        float s[LK], read = 0;
#pragma unroll
        for (int e = 0; e < LK; e++) s[e] = stored[e];
#pragma unroll 1
        for (int t = 0; t < folded; t++) {
            const bool kept = t < tile.buffered;
            ChannelShare<ACT> key;
            key.load(RAW_KEYS ? stage.k[t] : kept ? ring.k + t * K : own.k);
            const float one = __shfl_sync(ALL, same, t);
            float predicted = 0;
            [[maybe_unused]] ChannelShare<GATE_TYPE> given;
            if constexpr (CHANNEL_DECAYS) given.load(kept ? ring.g + t * GATES : own.g);
#pragma unroll
            for (int e = 0; e < LK; e++) {
                s[e] *= CHANNEL_DECAYS ? decay(input.log_decay(given[e], e)) : one;
                predicted += s[e] * key[e];
            }
            const float write = __shfl_sync(ALL, beta, t) * (values.at(t, value) - warp_sum(predicted));
#pragma unroll
            for (int e = 0; e < LK; e++) s[e] += write * key[e];
        }
        stored.set_state(s);
        stored.store(rows.at(row, 0));
#pragma unroll
        for (int e = 0; e < LK; e++) read += s[e] * query[e], squares += s[e] * s[e];
        read = warp_sum(read);
        if (f.takes_own() && threadIdx.x % 32 == 0) {
            out_t& output = f.output(tile)[value];
            error.add(output, read);
            output = narrow<OUT>(read);
        }
    }
    return squares;
}
