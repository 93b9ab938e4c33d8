// Standard decode: every token reads and writes the whole state (equations `update` and `read`).
//
// A warp owns ROWS value rows of the state, keeps them in registers over all tokens of the call, and issues all their
// loads at once. Let s = Diag(a) S be the state after decay. The delta rule needs s^T k for the write w; the output is
// o = s^T q + w (k . q). So s^T k and s^T q come from one reduction. SIDE rows are side by side, ROW_LANES lanes each:
// a sum takes few shuffles, and every lane of a row knows the result.
//
// -D constants besides lib/common.cuh's: ROWS (a multiple of 4, at most 32; divides V).
#include "slot/call_slots.cuh"
#include "standard/rows.cuh"

// The launch's arguments.
struct Standard {
    Strided<state_t> state;
    const float* gate_input;
    Inputs inputs;
    TokenSteps steps;
    Strided<out_t> out;
    int batch, tokens;

    // The outputs of a row without work.
    DEVICE void write_zeros(const WarpRows& part, const CallSlots& slots, int slot) const {
        if (part.value == 0 && part.head == 0 && threadIdx.x % 32 == 0) slots.note(slot);
        for (int t = 0; t < tokens; t++) Output(out, part).put(t, 0.f);
    }
    // Decodes all tokens of the call.
    DEVICE void decode(const WarpRows& part, const CallSlots& slots, int slot) const {
        state_t* const home = state.of(slot) + (part.head * V + part.first_row()) * K;
        StateRegisters rows;
        rows.load(home);
        allow_next_kernel();
        slot = slots.once_in_warp(part.row, slot);  // overlaps with the loads of the state
        if (slot < 0) return write_zeros(part, slots, slot);
        const GateInputs gates(gate_input, part.head);
        const Output output(out, part);
        for (int t = 0; t < tokens; t++) {  // loading the first token before the loop would take more registers
            Token token(inputs, part.row, part.head);
            token.move(steps, t);
            TokenInputs given;
            given.load(token, part.first_row());
            rows.widen();
            output.put(t, rows.take(given, gates));
            rows.round();  // at every token, so that the result does not depend on the number of tokens per call
        }
        // With less than 256 MB of states, streaming stores keep useful lines in the caches.
        constexpr i64 FEW = (1 << 28) / static_cast<int>(sizeof(state_t));
        rows.store(home, ERASES && static_cast<i64>(batch) * HEADS * V * K < FEW);
    }
};

extern "C" __global__ void __launch_bounds__(32 * STANDARD_WARPS, MIN_BLOCKS)
    standard_step(state_t* state, int state_stride, const float* gate_input, STANDARD_STEP_PARAMETERS, SLOT_LIMITS) {
    wait_for_previous_kernel();
    const Standard step{{state, state_stride}, gate_input, INPUTS, TOKEN_STEPS, {out, out_stride}, batch, tokens};
    const CallSlots slots = SLOTS;
    const WarpRows part;
    if (part.row >= batch) return;
    const int slot = slots.of(part.row);
    if (slot >= 0) step.decode(part, slots, slot);
    else step.write_zeros(part, slots, slot);
}
