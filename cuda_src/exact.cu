// Exact decode of slots that otherwise are sketched: a step of standard decode, for batches so small that one launch takes less time than
// reading sketches and looking for flushes.
//
// What the slot's ring has buffered is folded into the state first, and then nobody's: the ring is filled with tokens that
// change no state, and the cursor stands at W, one beyond the window's last place. So the slot is due when it is next read through its
// sketch, and the flush, to which this is a window like any other, takes that step's token and sketches the state anew.
//
// -D constants besides standard_rows.cuh's: W, SKETCHED_HEADS, SKETCH (see read.cu).
#include "standard_rows.cuh"
#include "window.cuh"

// On a multiprocessor. More registers, or fewer, took steps of two rows longer on H200 (gdn, kda); with 6, mamba2's spill on sm_100.
constexpr int BLOCKS = ERASES ? 6 : 5;
constexpr u32 WARPS_OF_A_ROW = HEADS * (V / ROWS);
// A raw gate input that forgets nothing.
constexpr u32 OPEN = RAW_GATE ? (ACT == FP32 ? 0xff800000u : ACT == FP16 ? 0xfc00fc00u : 0xff80ff80u) : 0u;

template <int COUNT, class T> __device__ __forceinline__ void fill(T* ring, i64 slot, u32 word) {
    static_assert(COUNT * sizeof(T) % 16 == 0, "whole pieces");
    uint4* const to = reinterpret_cast<uint4*>(ring + slot * COUNT);
    for (int i = threadIdx.x % 32; i < COUNT * static_cast<int>(sizeof(T)) / 16; i += 32) to[i] = make_uint4(word, word, word, word);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) exact_step(
    float* state, i64 slot_stride, int* cursor, act_t* ring_k, act_t* ring_v, gate_t* ring_g, float* ring_beta, const float* gate_input,
    const act_t* q, const act_t* k, const act_t* v, const gate_t* g, const float* beta, out_t* out, const i64* slots, int batch,
    int tokens, u32* done) {
    wait_for_kernel_before();
    const Standard step{state, slot_stride, gate_input, q, k, v, g, beta, out, slots, batch, tokens};
    const Share share;
    const i64 slot = step.slot_of(share);
    if (slot < 0) return;
    const int position = cursor[slot];
    step.decode(share, slot, [&](StateRows& rows, Inputs& inputs, const Gates& gates) {
        inputs.hold();  // else they would come behind the branch, which waits for the cursor
        if (position >= W) return;
        const Ring ring(ring_k, ring_v, ring_g, ring_beta, slot, share.head);
        Token token = step.token(share, 0);
#pragma unroll 1
        for (int s = 0; s < position; s++) {  // with the new token's query, whose output here nobody wants
            token.k = ring.k + s * K, token.v = ring.v + s * V, token.g = ring.g + s * GATES, token.beta = ring.beta + s;
            inputs.load(token, share.own(), turn_of(s));
            rows.take(inputs, gates);
        }
        inputs.load(step.token(share, 0), share.own());
    });
    if (position >= W) return;

    // The row's last warp, when all have taken cursor and ring.
    __syncwarp();
    u32 before = 0;
    if (threadIdx.x % 32 == 0) {
        __threadfence();
        before = atomicAdd(&done[slot], 1u);
        __threadfence();
    }
    if (__shfl_sync(ALL, before, 0) + 1 < WARPS_OF_A_ROW) return;
    __syncwarp();
    fill<KEY_HEADS * W * K>(ring_k, slot, 0), fill<HEADS * W * V>(ring_v, slot, 0);
    fill<HEADS * W * GATES>(ring_g, slot, OPEN);
    if constexpr (ERASES) fill<HEADS * W>(ring_beta, slot, 0);
    if (threadIdx.x % 32 == 0) cursor[slot] = W, done[slot] = 0;
}
