// Folds a window token by token, as standard decode does: windows with a beta above 1.
//
// A transition I - beta k k^T with beta above 1 reverses what a state holds along k, and with beta = 2 forgets nothing.
// If a key repeats, an error of the Gram matrix, of N or of a rounded write is the same in every window and adds up.
// The errors of predictions from the whole state change from token to token.
#pragma once
#include "flush/tiles.cuh"

// By a fold warp, for its row block: K / 4 lanes share a value row (fewer would take more registers). Keys and gates
// come from global memory, unless keys are in shared memory as given. Writes the outputs, adds their errors, and returns
// the lane's share of the sum of squares.
DEVICE float fold_by_token(const Flush& f, const FlushTile& tile, const KeyStage& stage, const PreparedKeys& prepared,
                           const ValueStage& values, StateBlock& rows, BlockError& error) {
    constexpr int LANES = K / 4;
    const int channel = 4 * (threadIdx.x % LANES), folded = f.folded(tile);
    const Ring ring = f.ring(tile);
    const Token own = f.token(tile);
    const float beta = f.beta_of(tile), same = decay(f.gate_of(tile));  // of token number `lane`
    float query[4], squares = 0;
    load_query(query, stage, prepared, channel);
    GateInput<4> input;
    input.load(f.gate_input, tile.head(), channel);
#pragma unroll 1
    for (int row = threadIdx.x % 32 / LANES; row < 16; row += 32 / LANES) {
        const int value = threadIdx.x / 32 * 16 + row;
        Packed<STATE, 4> stored;
        stored.load(rows.at(row, channel));
        float s[4] = {stored[0], stored[1], stored[2], stored[3]}, read = 0;
#pragma unroll 1
        for (int t = 0; t < folded; t++) {
            const bool kept = t < tile.buffered;
            Packed<ACT, 4> key;
            key.load((RAW_KEYS ? stage.k[t] : kept ? ring.k + t * K : own.k) + channel);
            const float one = __shfl_sync(ALL, same, t);
            float decays[4] = {one, one, one, one}, predicted = 0;
            if constexpr (CHANNEL_DECAYS) {
                Packed<GATE_TYPE, 4> given;
                given.load((kept ? ring.g + t * GATES : own.g) + channel);
#pragma unroll
                for (int e = 0; e < 4; e++) decays[e] = decay(input.log_decay(given[e], e));
            }
#pragma unroll
            for (int e = 0; e < 4; e++) s[e] *= decays[e], predicted += s[e] * key[e];
            const float write = __shfl_sync(ALL, beta, t) * (values.at(t, value) - group_sum<LANES>(predicted));
#pragma unroll
            for (int e = 0; e < 4; e++) s[e] += write * key[e];
        }
        stored.set_state(s);
        stored.store(rows.at(row, channel));
#pragma unroll
        for (int e = 0; e < 4; e++) read += s[e] * query[e], squares += s[e] * s[e];
        read = group_sum<LANES>(read);
        if (f.takes_own() && channel == 0) error.replace(f.output(tile)[value], read);
    }
    return squares;
}
