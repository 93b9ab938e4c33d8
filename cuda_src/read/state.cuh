// State read of full-state heads (heads without a sketch): o = S^T x + output of the buffered tokens. A warp has a
// quarter of the value rows.
#pragma once
#include "read/tile.cuh"

constexpr int QUARTERS = 4;
// Value rows of the state that a warp has in flight: as many bytes of a shadow.
constexpr int STATE_ROWS = (LK > 4 ? 4 : 8) * (SHADOW ? 2 : 1);
constexpr int STATE_LANES = 32 / STATE_ROWS;  // lanes that share a value row of the output
// Type of what is read: the state, or its shadow (slot/sketch_layout.cuh).
constexpr int SERVED = SHADOW ? BF16 : STATE;
typedef Element<SERVED>::type served_t;

// What is read of the nth full-state head.
DEVICE const served_t* served_state(const Arguments& arg, int nth, int head, int slot) {
    const void* rows = arg.memory.state.of(slot);
    if (SHADOW) rows = arg.memory.sketch.of(slot);
    return static_cast<const served_t*>(rows) + (SHADOW ? nth : head) * V * K;
}

typedef Packed<ACT, ValueShare::WIDTH> LaneValues[ValueShare::COUNT];

// Appends the newest token to the ring; the caller has loaded the token's value. Only for replay, where no values are
// swizzled.
DEVICE void append_token(const Token& token, const Ring& ring, const LaneValues& values, int pos, int head) {
    const int lane = threadIdx.x % 32;
    if (head % HEADS_PER_KEY == 0) {
        ChannelShare<ACT> key;
        key.load(token.k);
        key.store(ring.k + pos * K);
    }
#pragma unroll
    for (int i = 0; i < ValueShare::COUNT; i++)
        if (ValueShare::at(i) < V) values[i].store(ring.v + pos * V + ValueShare::at(i));
    if constexpr (CHANNEL_DECAYS) {
        ChannelShare<GATE_TYPE> gate;
        gate.load(token.g);
        gate.store(ring.g + pos * K);
    } else if (lane == 0) {
        ring.g[pos] = *token.g;
    }
    if (ERASES && lane == 0) ring.beta[pos] = *token.beta;
}

// The window of a full-state head, read from global memory. All keys are requested at once; then the tokens are
// processed one by one.
constexpr int CHUNK = W - 1 < 8 ? 4 : 8;  // tokens that share a reduction, or a load of gates
constexpr int CHUNKS = (W - 1 + CHUNK - 1) / CHUNK;

struct WindowRead {
    float x[LK];   // this lane's channels of the effective query
    float weight;  // lane s: weight of token s (0 after the newest)
};

DEVICE WindowRead read_ring(const Token& token, const Ring& ring, const GateInput<LK>& input, int pos) {
    static_assert(W <= 32, "lane s keeps the scalars of token s");
    const int lane = threadIdx.x % 32;
    WindowRead window;
    // A pass back needs every key twice: all keys stay in registers.
    constexpr int HELD = ERASES || CHANNEL_DECAYS ? CHUNKS : 1;
    ChannelShare<ACT> query, newest, keys[HELD][CHUNK];
    auto fetch = [&](int n, ChannelShare<ACT>(&into)[CHUNK]) {
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            into[i].clear();
            if (n * CHUNK + i < pos) into[i].load(ring.k + (n * CHUNK + i) * K);
        }
    };
    query.load(token.q);
    newest.load(token.k);
#pragma unroll
    for (int n = 0; n < HELD; n++) fetch(n, keys[n]);
    float gate = 0, beta = 0;  // of token number `lane`
    if (!CHANNEL_DECAYS) gate = lane < pos ? ring.g[lane] : lane == pos ? *token.g : 0.f;
    if (ERASES) beta = lane < pos ? ring.beta[lane] : lane == pos ? *token.beta : 0.f;
#pragma unroll
    for (int c = 0; c < LK; c++) window.x[c] = query[c];
    window.weight = 0;

    if constexpr (!ERASES && !CHANNEL_DECAYS) {
        // c_s = exp(g_{s+1} + ... + g_t) <k_s, q>, for all tokens at once
        const float after = sum_of_later<32>(gate);
        float dot = 0;
#pragma unroll 1
        for (int n = 0; n * CHUNK < pos; n++) {
            if (n) fetch(n, keys[0]);
            float sums[CHUNK];
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                sums[i] = 0;
#pragma unroll
                for (int c = 0; c < LK; c++) sums[i] += keys[0][i][c] * window.x[c];
            }
            const float sum = warp_sums(sums);
            const float y = __shfl_sync(ALL, sum, lane % CHUNK * (32 / CHUNK));
            if (lane / CHUNK == n) dot = y;
        }
        float own = 0;
#pragma unroll
        for (int c = 0; c < LK; c++) own += newest[c] * window.x[c];
        own = warp_sum(own);
        if (lane == pos) dot = own;
        window.weight = lane <= pos ? decay(after) * dot : 0.f;
        const float whole = decay(__shfl_sync(ALL, after + gate, 0));
#pragma unroll
        for (int c = 0; c < LK; c++) window.x[c] *= whole;
    } else {
        const float same = CHANNEL_DECAYS ? 1.f : decay(gate);  // of token number `lane`
        auto back = [&](int s, const ChannelShare<ACT>& key, const float* gates) {
            float product = 0;
#pragma unroll
            for (int c = 0; c < LK; c++) product += key[c] * window.x[c];
            const float weight = (ERASES ? __shfl_sync(ALL, beta, s) : 1.f) * warp_sum(product);
            const float one = __shfl_sync(ALL, same, s);
            if (lane == s) window.weight = weight;
#pragma unroll
            for (int c = 0; c < LK; c++)
                window.x[c] =
                    (CHANNEL_DECAYS ? decay(input.log_decay(gates[c], c)) : one) *
                    (ERASES ? window.x[c] - weight * key[c] : window.x[c]);
        };
        constexpr int FETCH = CHANNEL_DECAYS ? CHUNK : 1;
        float gates[FETCH][LK];
        if constexpr (CHANNEL_DECAYS) {
            ChannelShare<GATE_TYPE> packed;
            packed.load(token.g);
#pragma unroll
            for (int c = 0; c < LK; c++) gates[0][c] = packed[c];
        }
        back(pos, newest, gates[0]);
#pragma unroll
        for (int n = CHUNKS - 1; n >= 0; n--) {
            if (n * CHUNK >= pos) continue;
            if constexpr (CHANNEL_DECAYS) {
#pragma unroll
                for (int i = 0; i < CHUNK; i++) {
                    ChannelShare<GATE_TYPE> packed;
                    packed.clear();
                    if (n * CHUNK + i < pos) packed.load(ring.g + (n * CHUNK + i) * K);
#pragma unroll
                    for (int c = 0; c < LK; c++) gates[i % FETCH][c] = packed[c];
                }
            }
#pragma unroll
            for (int i = CHUNK - 1; i >= 0; i--)
                if (n * CHUNK + i < pos) back(n * CHUNK + i, keys[n][i], gates[i % FETCH]);
        }
    }
    return window;
}

// A quarter of the value rows of a row's nth full-state head.
DEVICE void read_state(const Arguments& arg, int nth, int head, int row, int slot, int pos, int part) {
    const int lane = threadIdx.x % 32;
    constexpr int SHARE = V / QUARTERS;
    const Token token(arg.inputs, row, head);
    const Ring ring(arg.memory, slot, head);
    const served_t* const home = served_state(arg, nth, head, slot);
    ChannelShare<SERVED> rows[STATE_ROWS];
#pragma unroll
    for (int i = 0; i < STATE_ROWS; i++) rows[i].load(home + (part * SHARE + i % SHARE) * K);
    LaneValues newest;
#pragma unroll
    for (int i = 0; i < ValueShare::COUNT; i++) {
        newest[i].clear();
        if (part == 0 && ValueShare::at(i) < V) newest[i].load(token.v + ValueShare::at(i));
    }
    GateInput<LK> input;
    input.load(arg.gate_input, head, first_channel());
    const WindowRead window = read_ring(token, ring, input, pos);
    if (part == 0 && !SKETCHED_HEADS) append_token(token, ring, newest, pos, head);  // else NewTokens does it
    // The addresses are computed again here: kept from above, they would occupy registers.
    row = opaque(row), slot = opaque(slot);
    const act_t *const kept = Ring(arg.memory, slot, head).v, *const own_value = Token(arg.inputs, row, head).v;
    for (int first = 0; first < SHARE; first += STATE_ROWS) {
        float sums[STATE_ROWS];
#pragma unroll
        for (int i = 0; i < STATE_ROWS; i++) {
            sums[i] = 0;
#pragma unroll
            for (int c = 0; c < LK; c++) sums[i] += rows[i][c] * window.x[c];
        }
#pragma unroll
        for (int i = 0; i < STATE_ROWS; i++)
            if (first + STATE_ROWS + i < SHARE) rows[i].load(home + (part * SHARE + first + STATE_ROWS + i) * K);
        // STATE_LANES lanes share a value row; each adds its part of the buffered tokens.
        float o = warp_sums(sums), buffer = 0;
        const int own = first + lane / STATE_LANES, value = part * SHARE + own;
#pragma unroll
        for (int s = 0; s < W; s += STATE_LANES) {
            const int mine = s + lane % STATE_LANES;
            const float weight = __shfl_sync(ALL, window.weight, mine);
            if (mine <= pos && own < SHARE)
                buffer += weight * widen<ACT>(mine < pos ? kept[mine * V + (value ^ swizzle(mine))] : own_value[value]);
        }
        buffer = group_sum<STATE_LANES>(buffer);
        if (lane % STATE_LANES == 0 && own < SHARE) arg.out.of(row)[head * V + value] = narrow<OUT>(o + buffer);
    }
}
