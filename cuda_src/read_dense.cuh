// State read of heads without a sketch: o = S^T x + (buffer output), a quarter of the value rows a warp.
#pragma once
#include "read_item.cuh"

constexpr int QUARTERS = 4;
constexpr int DENSE_ROWS = 8;  // value rows of the state that a warp holds in flight

__device__ __forceinline__ void append_token(const Token& token, const Ring& ring, int pos, int head) {
    const int lane = threadIdx.x % 32;
    typedef ValueShare<32> Share;
    if (head % GROUP == 0) {
        Packed<ACT, LK> key;
        key.load(token.k + lane * LK);
        key.store(ring.k + pos * K + lane * LK);
    }
#pragma unroll
    for (int i = 0; i < Share::COUNT; i++) {
        if (Share::at(i) >= V) continue;
        Packed<ACT, Share::WIDTH> value;
        value.load(token.v + Share::at(i));
        value.store(ring.v + pos * V + Share::at(i));
    }
    if (KIND == KDA) {
        Packed<FP32, LK> gate;
        gate.load(token.g + lane * LK);
        gate.store(ring.g + pos * K + lane * LK);
    } else if (lane == 0) {
        ring.g[pos] = *token.g;
    }
    if (ERASES && lane == 0) ring.beta[pos] = *token.beta;
}

// One quarter of a (row, head).
__device__ __forceinline__ void read_dense(const Arguments& arg, int head, i64 at, i64 slot, int pos, int part) {
    const int lane = threadIdx.x % 32;
    constexpr int SHARE = V / QUARTERS;  // 16, 20, 24 or 32 rows
    const Token token = arg.token(at, head);
    const Ring ring = arg.ring(slot, head);
    const float* const home = arg.state + slot * arg.slot_stride + static_cast<i64>(head) * V * K + lane * LK;
    Packed<FP32, LK> rows[DENSE_ROWS];
#pragma unroll
    for (int i = 0; i < DENSE_ROWS; i++) rows[i].load(home + (part * SHARE + i) * K);
    float gate = 0, beta = 0;  // of token `lane`
    if (KIND != KDA && lane <= pos) gate = lane < pos ? ring.g[lane] : *token.g;
    if (ERASES && lane <= pos) beta = lane < pos ? ring.beta[lane] : *token.beta;
    const WindowRead window = read_window<KIND != KDA && W <= 16 && ACT != FP32>({token.q, ring.k, token.k, ring.g, token.g}, pos, gate, beta);
    if (part == 0) append_token(token, ring, pos, head);
    for (int first = 0; first < SHARE; first += DENSE_ROWS) {
        float sums[DENSE_ROWS];
#pragma unroll
        for (int i = 0; i < DENSE_ROWS; i++) {
            sums[i] = 0;
#pragma unroll
            for (int c = 0; c < LK; c++) sums[i] += rows[i][c] * window.x[c];
        }
#pragma unroll
        for (int i = 0; i < DENSE_ROWS; i++)
            if (first + DENSE_ROWS + i < SHARE) rows[i].load(home + (part * SHARE + first + DENSE_ROWS + i) * K);
        // four lanes share a value row: they add a quarter of the buffer each
        float o = warp_sums(sums), buffer = 0;
        const int row = first + lane / 4, value = part * SHARE + row;
#pragma unroll
        for (int s = 0; s < W; s += 4) {
            const int mine = s + lane % 4;
            const float weight = __shfl_sync(ALL, window.weight, mine);
            if (mine <= pos && row < SHARE)
                buffer += weight * widen<ACT>(mine < pos ? ring.v[mine * V + value] : token.v[value]);
        }
        buffer += __shfl_xor_sync(ALL, buffer, 1);
        buffer += __shfl_xor_sync(ALL, buffer, 2);
        if (lane % 4 == 0 && row < SHARE) arg.out[(at * HEADS + head) * V + value] = narrow<OUT>(o + buffer);
    }
}
