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

    // Starts the copies: `buffered` tokens from the ring, then the step's own token if there is one.
    __device__ __forceinline__ void prefetch(const Token& token, const Ring& ring, int buffered, bool own) {
        rows(&k[0][0], ring.k, buffered * K);
        rows(&v[0][0], ring.v, buffered * V);
        const int s = threadIdx.x;
        if (s < buffered + own) {
            if (GATES == 1) copy_async_4(g[s], s < buffered ? ring.g + s : token.g);
            if (ERASES) copy_async_4(beta + s, s < buffered ? ring.beta + s : token.beta);
        }
        if (GATES > 1) rows(&g[0][0], ring.g, buffered * GATES);
        if (!own) return;
        rows(k[buffered], token.k, K);
        rows(v[buffered], token.v, V);
        rows(q, token.q, K);
        if (GATES > 1) rows(g[buffered], token.g, GATES);
    }

  private:
    template <class T> __device__ __forceinline__ static void rows(T* to, const T* from, int elements) {
        constexpr int EACH = 16 / sizeof(T);
        for (int i = EACH * threadIdx.x; i < elements; i += EACH * THREADS) copy_async_16(to + i, from + i);
    }
};
