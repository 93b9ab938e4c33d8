// Standard decode: every token reads and writes the whole state, several tokens of a launch in registers.
//
// -D constants: standard_rows.cuh's.
#include "standard_rows.cuh"

// On a multiprocessor at least, or 0 to leave it to the compiler: the registers that it then takes were fastest on H200, by up to a percent.
constexpr int BLOCKS = KIND == GDN ? 1 : 0;

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) standard_step(
    float* state, i64 slot_stride, const float* gate_input, const act_t* q, const act_t* k, const act_t* v,
    const gate_t* g, const float* beta, out_t* out, const i64* slots, int batch, int tokens) {
    wait_for_kernel_before();
    const Standard step{state, slot_stride, gate_input, q, k, v, g, beta, out, slots, batch, tokens};
    const Share share;
    const i64 slot = step.slot_of(share);
    if (slot >= 0) step.decode(share, slot, [](const StateRows&, const Inputs&, const Gates&) {});
}
