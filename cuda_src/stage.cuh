// The flush's copy of a window's raw tokens in shared memory.
#pragma once
#include "fragments.cuh"
#include "window.cuh"

// The window's raw tokens of one head, fetched while the head before it is worked on. A row is valid below `count`.
struct Stage {
    alignas(16) act_t k[W][K];
    alignas(16) act_t v[W][V];
    alignas(16) float g[W][GATES];
    alignas(16) float beta[W];
    alignas(16) act_t q[K];

    // Starts the copies: `buffered` tokens from the ring, then the step's own token if there is one; one warp.
    __device__ __forceinline__ void prefetch(const Token& token, const Ring& ring, int buffered, bool own, Arrival& arrival) {
        constexpr int KEY = K * sizeof(act_t), VALUE = V * sizeof(act_t), GATE = GATES > 1 ? GATES * sizeof(float) : 0;
        const int s = threadIdx.x;
        if (s == 0) arrival.expect((buffered + own) * (KEY + VALUE + GATE) + own * KEY);
        __syncwarp();
        copy_rows(k, ring.k, 1, buffered * KEY, 0, arrival);
        copy_rows(v, ring.v, 1, buffered * VALUE, 0, arrival);
        if (GATE) copy_rows(g, ring.g, 1, buffered * GATE, 0, arrival);
        if (s < buffered + own) {
            if (!GATE) copy_async_4(g[s], s < buffered ? ring.g + s : token.g);
            if (ERASES) copy_async_4(beta + s, s < buffered ? ring.beta + s : token.beta);
        }
        if (!own) return;
        copy_rows(k[buffered], token.k, 1, KEY, 0, arrival);
        copy_rows(v[buffered], token.v, 1, VALUE, 0, arrival);
        copy_rows(q, token.q, 1, KEY, 0, arrival);
        if (GATE) copy_rows(g[buffered], token.g, 1, GATE, 0, arrival);
    }
};
