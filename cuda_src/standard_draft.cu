// Drafts of standard decode. `standard_draft` decodes tokens on trial: it reads the state, writes outputs, and keeps
// the tokens' raw inputs in the slot's ring. `standard_commit` decodes the ring's first tokens and writes the state.
//
// The cursor word holds the number of drafts. All blocks of a commit read the word, so a second launch clears it
// (commit.cu).
//
// -D constants besides standard.cu's: DRAFTS, the places of a slot's ring.
#include "slot/call_slots.cuh"
#include "slot/cursor.cuh"
#include "standard/rows.cuh"

// Slots' rings: keys (key_heads, DRAFTS, K), values (heads, DRAFTS, V), gates (heads, DRAFTS, 1 or K), betas (heads,
// DRAFTS).
struct DraftRings {
    Strided<act_t> keys, values;
    Strided<gate_t> gates;
    Strided<float> betas;

    DEVICE act_t* key(int slot, int head, int t) const {
        return keys.of(slot) + (head / HEADS_PER_KEY * DRAFTS + t) * K;
    }
    DEVICE act_t* value(int slot, int head, int t) const { return values.of(slot) + (head * DRAFTS + t) * V; }
    DEVICE gate_t* gate(int slot, int head, int t) const { return gates.of(slot) + (head * DRAFTS + t) * GATES; }
    DEVICE float* beta(int slot, int head, int t) const { return betas.of(slot) + head * DRAFTS + t; }
    // A kept token. Its output is not used, so the query is arbitrary.
    DEVICE Token token(int slot, int head, int t) const {
        const act_t* const k = key(slot, head, t);
        return Token(k, k, value(slot, head, t), gate(slot, head, t), beta(slot, head, t));
    }
    // Stores the warp's share of a token in the ring: the values of the warp's rows. The warp with the head's first
    // rows also stores key, gates and beta.
    DEVICE void put(const WarpRows& part, const TokenInputs& given, int slot, int t) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < ROW_SETS; i++)
            if (lane % ROW_LANES == i)
                value(slot, part.head, t)[part.first_row() + SIDE * i] = narrow<ACT>(given.v[i]);
        if (part.value > 0 || lane >= ROW_LANES) return;
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) {
            if (part.head % HEADS_PER_KEY == 0) given.k[j].store(key(slot, part.head, t) + channel(j));
            if constexpr (CHANNEL_DECAYS) given.g[j].store(gate(slot, part.head, t) + channel(j));
        }
        if (lane > 0) return;
        if constexpr (!CHANNEL_DECAYS) *gate(slot, part.head, t) = narrow<GATE_TYPE>(given.gate);
        if constexpr (ERASES) *beta(slot, part.head, t) = given.beta;
    }
};
#define RING_PARAMETERS                                                                                          \
    act_t *ring_keys, int ring_keys_stride, act_t *ring_values, int ring_values_stride, gate_t *ring_gates,      \
        int ring_gates_stride, float *ring_betas, int ring_betas_stride, int *cursor, int cursor_stride
#define RINGS                                                                                  \
    DraftRings {                                                                               \
        {ring_keys, ring_keys_stride}, {ring_values, ring_values_stride},                      \
            {ring_gates, ring_gates_stride}, { ring_betas, ring_betas_stride }                 \
    }

DEVICE state_t* home_of(const Strided<state_t>& states, const WarpRows& part, int slot) {
    return states.of(slot) + (part.head * V + part.first_row()) * K;
}

extern "C" __global__ void __launch_bounds__(32 * STANDARD_WARPS, MIN_BLOCKS)
    standard_draft(state_t* state, int state_stride, const float* gate_input, RING_PARAMETERS,
                   STANDARD_DRAFT_PARAMETERS, SLOT_LIMITS) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const DraftRings rings = RINGS;
    const Inputs inputs = INPUTS;
    const TokenSteps steps = TOKEN_STEPS;
    const WarpRows part;
    if (part.row >= batch) return;
    const CallSlots slots = SLOTS;
    const int slot = slots.once_in_warp(part.row, slots.of(part.row));
    if (part.head == 0 && part.value == 0 && threadIdx.x % 32 == 0) slots.note(slot);
    const int length = slot < 0 ? 0 : Lengths{{lengths, length_flags}, tokens}.of(part.row);
    const Output output({out, out_stride}, part);
    if (length > 0) {
        StateRegisters rows;
        rows.load(home_of({state, state_stride}, part, slot));
        const GateInputs gates(gate_input, part.head);
        for (int t = 0; t < length; t++) {
            Token token(inputs, part.row, part.head);
            token.move(steps, t);
            TokenInputs given;
            given.load(token, part.first_row());
            rings.put(part, given, slot, t);
            rows.widen();
            output.put(t, rows.take(given, gates));
            rows.round();
        }
    }
    for (int t = length; t < tokens; t++) output.put(t, 0.f);
    if (slot >= 0 && part.head == 0 && part.value == 0 && threadIdx.x % 32 == 0)
        *Strided<int>{cursor, cursor_stride}.of(slot) = length << DRAFTED_SHIFT;
}

extern "C" __global__ void __launch_bounds__(32 * STANDARD_WARPS, MIN_BLOCKS)
    standard_commit(state_t* state, int state_stride, const float* gate_input, RING_PARAMETERS,
                    STANDARD_COMMIT_PARAMETERS, SLOT_LIMITS) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const DraftRings rings = RINGS;
    const WarpRows part;
    if (part.row >= batch) return;
    const CallSlots slots = SLOTS;
    const int slot = slots.once_in_warp(part.row, slots.of(part.row));
    if (part.head == 0 && part.value == 0 && threadIdx.x % 32 == 0) slots.note(slot);
    if (slot < 0) return;
    const int word = *Strided<int>{cursor, cursor_stride}.of(slot) & ~POSITION;
    const int kept = after_commit(word, Numbers{accepted, accepted_flags}.of(part.row), DRAFTS + 1) & POSITION;
    if (kept == 0) return;
    state_t* const home = home_of({state, state_stride}, part, slot);
    StateRegisters rows;
    rows.load(home);
    const GateInputs gates(gate_input, part.head);
    for (int t = 0; t < kept; t++) {
        TokenInputs given;
        given.load(rings.token(slot, part.head, t), part.first_row());
        rows.widen();
        rows.take(given, gates);
        rows.round();
    }
    rows.store(home, false);
}
