// Folds a window token by token, as standard decode does: windows with a beta above 1.
//
// A transition I - beta k k^T with beta above 1 reverses what a state holds along k, and with beta = 2 forgets nothing.
// If a key repeats, an error of the Gram matrix, of N or of a rounded write is the same in every window and adds up.
// The errors of predictions from the whole state change from token to token.
#pragma once
#include "flush_tiles.cuh"

constexpr int TURN_LANES = KIND == KDA ? K / 4 : 16;  // that share a value row: fewer would take more registers

// By a fold warp, for its row block. Keys and gates come from global memory, unless keys are in shared memory as
// given. Writes the outputs, and returns the lane's share of the sum of squares.
__device__ __forceinline__ float fold_in_turns(const Flush& f, const FlushTile& tile, const KeyStage& stage,
                                               const PreparedKeys& prepared, const ValueStage& values,
                                               StateBlock& rows) {
    constexpr int CHUNKS = K / 4 / TURN_LANES;
    const int channel = 4 * (threadIdx.x % TURN_LANES), folded = f.folded(tile);
    const Ring ring = f.ring(tile);
    const Token own = f.token(tile);
    const float beta = f.beta_of(tile), same = decay(f.gate_of(tile));  // of token number `lane`
    float squares = 0;
#pragma unroll 1
    for (int row = threadIdx.x % 32 / TURN_LANES; row < 16; row += 32 / TURN_LANES) {
        const int value = threadIdx.x / 32 * 16 + row;
        float s[CHUNKS][4], read = 0;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            Packed<STATE, 4> x;
            x.load(rows.at(row, channel + 4 * TURN_LANES * i));
#pragma unroll
            for (int e = 0; e < 4; e++) s[i][e] = x[e];
        }
#pragma unroll 1
        for (int t = 0; t < folded; t++) {
            const bool kept = t < tile.buffered;
            const act_t* const keys = (RAW_KEYS ? stage.k[t] : kept ? ring.k + t * K : own.k) + channel;
            const float one = __shfl_sync(ALL, same, t);
            float predicted = 0;
#pragma unroll
            for (int i = 0; i < CHUNKS; i++) {
                Packed<ACT, 4> key;
                key.load(keys + 4 * TURN_LANES * i);
                float decays[4] = {one, one, one, one};
                if constexpr (KIND == KDA) {
                    const int at = channel + 4 * TURN_LANES * i;
                    GateInput<4> input;
                    Packed<GATE_TYPE, 4> given;
                    input.load(f.gate_input, tile.head(), at);
                    given.load((kept ? ring.g + t * GATES : own.g) + at);
#pragma unroll
                    for (int e = 0; e < 4; e++) decays[e] = decay(input.log_decay(given[e], e));
                }
#pragma unroll
                for (int e = 0; e < 4; e++) s[i][e] *= decays[e], predicted += s[i][e] * key[e];
            }
            const float write =
                __shfl_sync(ALL, beta, t) * (values.at(t, value) - group_sum<TURN_LANES>(predicted));
#pragma unroll
            for (int i = 0; i < CHUNKS; i++) {
                Packed<ACT, 4> key;
                key.load(keys + 4 * TURN_LANES * i);
#pragma unroll
                for (int e = 0; e < 4; e++) s[i][e] += write * key[e];
            }
        }
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const int at = channel + 4 * TURN_LANES * i;
            Packed<STATE, 4> x;
            x.set_state(s[i]);
            x.store(rows.at(row, at));
            float query[4];
            load_query(query, stage, prepared, at);
#pragma unroll
            for (int e = 0; e < 4; e++) read += s[i][e] * query[e], squares += s[i][e] * s[i][e];
        }
        read = group_sum<TURN_LANES>(read);
        if (f.takes_own() && channel == 0) f.output(tile)[value] = narrow<OUT>(read);
    }
    return squares;
}
