// State read of a row's drafts in full-state heads, as in read/state.cuh. The state is read once for GROUP drafts.
#pragma once
#include "draft/backward.cuh"
#include "read/state.cuh"

// Value rows that a warp has in flight. Those of a shadow are no more: several drafts need the registers.
constexpr int DRAFT_ROWS = LK > 4 ? 4 : 8;
constexpr int DRAFT_LANES = 32 / DRAFT_ROWS;  // lanes that share a value row of the output

// A quarter of the value rows of a row's nth full-state head. `tokens`: drafts of a row in the output array; outputs
// past the row's `length` are zeros.
DEVICE void read_state_drafts(const Arguments& arg, int nth, int head, int row, int slot, int pos, int length,
                              int tokens, int part) {
    const int lane = threadIdx.x % 32, count = pos + length;
    constexpr int SHARE = V / QUARTERS, TOKENS = (W + DRAFT_LANES - 1) / DRAFT_LANES;
    out_t* const output = arg.out.of(row) + head * V + part * SHARE;
    for (int i = lane; i < (tokens - length) * SHARE; i += 32)
        place<HEADS * V>(output, length + i / SHARE, i % SHARE)[0] = narrow<OUT>(0.f);
    if (length == 0) return;
    const Ring ring(arg.memory, slot, head);
    const served_t* const home = served_state(arg, nth, head, slot);
    if (part == 0 && !SKETCHED_HEADS)  // else NewTokens does it
        for (int t = 0; t < length; t++) {
            const Token token = arg.token(row, t, head);
            LaneValues values;
#pragma unroll
            for (int i = 0; i < ValueShare::COUNT; i++)
                if (ValueShare::at(i) < V) values[i].load(token.v + ValueShare::at(i));
            append_token(token, ring, values, pos + t, head);
        }
    auto token_of = [&](int s) { return arg.token(row, max(s - pos, 0), head); };
    float gate = 0, beta = 0;  // of token number `lane`
    if constexpr (!CHANNEL_DECAYS)
        if (lane < count) gate = lane < pos ? ring.g[lane] : *token_of(lane).g;
    if (ERASES && lane < count) beta = lane < pos ? ring.beta[lane] : *token_of(lane).beta;
    GateInput<LK> input;
    input.load(arg.gate_input, head, first_channel());
#pragma unroll 1
    for (int first = 0; first < length; first += GROUP) {
        const int last = pos + first, newest = min(last + GROUP, count) - 1;
        float x[GROUP][LK], weight[GROUP] = {};  // lane s: weight of token s
#pragma unroll
        for (int t = 0; t < GROUP; t++) {
            ChannelShare<ACT> query;
            query.load(token_of(min(last + t, newest)).q);
#pragma unroll
            for (int c = 0; c < LK; c++) x[t][c] = query[c];
        }
        read_window_drafts(
            [&](int s) { return s < pos ? ring.k + s * K : token_of(s).k; },
            [&](int s) { return s < pos ? ring.g + s * GATES : token_of(s).g; }, input, gate, beta, last,
            newest, x, [&](int s, const float(&c)[GROUP]) {
#pragma unroll
                for (int t = 0; t < GROUP; t++)
                    if (lane == s && last + t >= s) weight[t] = c[t];
            });
        for (int from = 0; from < SHARE; from += DRAFT_ROWS) {
            ChannelShare<SERVED> rows[DRAFT_ROWS];
#pragma unroll
            for (int i = 0; i < DRAFT_ROWS; i++)
                if (from + i < SHARE) rows[i].load(home + (part * SHARE + from + i) * K);
                else rows[i].clear();
            const int own_row = from + lane / DRAFT_LANES, value = part * SHARE + own_row;
            float kept[TOKENS];  // the lane's part of the tokens' values
#pragma unroll
            for (int n = 0; n < TOKENS; n++) {
                const int s = DRAFT_LANES * n + lane % DRAFT_LANES;
                kept[n] = s >= count || own_row >= SHARE ? 0.f
                          : s < pos                   ? widen<ACT>(ring.v[s * V + (value ^ swizzle(s))])
                                                      : widen<ACT>(token_of(s).v[value]);
            }
#pragma unroll
            for (int t = 0; t < GROUP; t++) {
                float sums[DRAFT_ROWS], buffer = 0;
#pragma unroll
                for (int i = 0; i < DRAFT_ROWS; i++) {
                    sums[i] = 0;
#pragma unroll
                    for (int c = 0; c < LK; c++) sums[i] += rows[i][c] * x[t][c];
                }
                const float o = warp_sums(sums);
#pragma unroll
                for (int n = 0; n < TOKENS; n++) {
                    const int s = DRAFT_LANES * n + lane % DRAFT_LANES;
                    const float own = __shfl_sync(ALL, weight[t], s);
                    if (s <= last + t) buffer += own * kept[n];
                }
                buffer = group_sum<DRAFT_LANES>(buffer);
                if (lane % DRAFT_LANES == 0 && own_row < SHARE && last + t <= newest)
                    *place<HEADS * V>(output, first + t, own_row) = narrow<OUT>(o + buffer);
            }
        }
    }
}
