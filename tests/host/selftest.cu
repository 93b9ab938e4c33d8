#line 1 "selftest.cu"
// Kernels for the tests of the host build in test_device.py.

// The second static variable of this kernel is in an inline function.
__device__ __forceinline__ float broadcast(float x) {
    __shared__ float kept;
    if (threadIdx.x == blockDim.x - 1) kept = x;
    __syncthreads();
    return kept;
}

extern "C" __global__ void reverse(const float* x, float* out, u32* blocks) {
    extern __shared__ float dynamic[];
    __shared__ float fixed[64];
    const int i = threadIdx.x, n = blockDim.x, first = blockIdx.x * n;
    const bool poisoned = dynamic[i] != dynamic[i] && fixed[i] != fixed[i];
    dynamic[i] = x[first + i];
    __syncthreads();
    fixed[i] = dynamic[n - 1 - i];
    __syncthreads();
    out[first + i] = poisoned ? fixed[i] + broadcast(0.f) : 0.f;
    atomicAdd(blocks, 1u);
}

extern "C" __global__ void unsynchronised(float* out) {
    __shared__ float shared[64];
    shared[threadIdx.x] = threadIdx.x;
    if (blockIdx.x) __syncthreads();
    out[blockIdx.x * 64 + threadIdx.x] = shared[63 - threadIdx.x];
}

extern "C" __global__ void half_barrier() {
    if (threadIdx.x < 32) __syncthreads();
}
extern "C" __global__ void two_barriers() {
    if (threadIdx.x < 32) __syncthreads();
    else __syncthreads();
}
extern "C" __global__ void two_shuffles(float* out) {
    out[threadIdx.x] = threadIdx.x % 32 < 7 ? __shfl_sync(0xffffffffu, 1.f, 0) : __shfl_sync(0xffffffffu, 2.f, 0);
}
extern "C" __global__ void wrong_mask() { __syncwarp(0xfffffffeu); }

extern "C" __global__ void copies(const float4* x, float4* out) {
    __shared__ float4 shared[3][32];
    const int i = threadIdx.x;
    copy_async_16(&shared[0][i], x + i);
    copy_async_commit();
    copy_async_16(&shared[1][i], x + i);
    copy_async_commit();
    copy_async_16(&shared[2][i], x + i);
    copy_async_wait<1>();
    for (int n = 0; n < 3; n++) out[n * 32 + i] = shared[n][i];
}

// One warp produces numbers, the others consume them: two buffers, each with an mbarrier for "full" and one for
// "empty". `waits` 0: the producer does not wait for "empty"; -1: and the consumers do not wait for "full".
extern "C" __global__ void pipeline(float* out, int rounds, int waits) {
    __shared__ float numbers[2][32];
    __shared__ Mbarrier full[2], empty[2];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, users = blockDim.x / 32 - 1;
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; i++) full[i].init(32), empty[i].init(users);
    __syncthreads();
    for (int n = 0; n < rounds; n++) {
        if (warp == 0) {
            if (waits > 0 && n >= 2) empty[n % 2].wait(n / 2 - 1);
            numbers[n % 2][lane] = 100 * n + lane;
            full[n % 2].arrive();
        } else {
            if (waits >= 0) full[n % 2].wait(n / 2);
            out[(n * users + warp - 1) * 32 + lane] = numbers[n % 2][31 - lane];
            __syncwarp();
            if (lane == 0) empty[n % 2].arrive();
        }
    }
}

// Thread 32 waits for the first phase of an mbarrier of which thread 0 has completed `phases` phases.
extern "C" __global__ void late(int phases) {
    __shared__ Mbarrier mbarrier;
    if (threadIdx.x == 0) mbarrier.init(1);
    __syncthreads();
    if (threadIdx.x == 0)
        for (int i = 0; i < phases; i++) mbarrier.arrive();
    __syncthreads();
    if (threadIdx.x == 32) mbarrier.wait(0);
}

// All warps but the first exchange numbers `rounds` times between two barriers of their own. `skipped`: one warp omits
// the last barrier.
extern "C" __global__ void named_barrier(float* out, int rounds, int skipped) {
    __shared__ float numbers[3][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 1;
    if (warp < 0) return;
    for (int n = 0; n < rounds; n++) {
        numbers[warp][lane] = 100 * n + 32 * warp + lane;
        named_barrier_sync<96>(1);
        out[(n * 3 + warp) * 32 + lane] = numbers[(warp + 1) % 3][lane];
        if (!skipped || n + 1 < rounds || warp) named_barrier_sync<96>(1);
    }
}

// Warp 0 requests rows, rows with swapped halves, and a block, twice; all threads read the results.
extern "C" __global__ void stage_copies(const float* x, float* out, int bytes, int expected) {
    alignas(16) __shared__ float rows[2][3][12], turned[2][3][8], block[2][16];
    __shared__ CopyBarrier full;
    if (threadIdx.x == 0) full.init();
    __syncthreads();
    for (int round = 0; round < 2; round++) {
        if (threadIdx.x < 32) {
            full.expect(expected);
            full.copy_rows(rows[round], sizeof rows[0][0], x + 32 * round, 8 * sizeof(float), 3, bytes);
            full.copy_rows(turned[round], sizeof turned[0][0], x + 32 * round, 8 * sizeof(float), 3, 32,
                          [](int row, int byte) { return byte ^ row % 2 * 16; });
            full.copy_contiguous<1>(block[round], 0, x + 32 * round, sizeof block[0]);
            full.commit();
        }
        float* const mine = out + (round * blockDim.x + threadIdx.x) * 4;
        __syncthreads();
        mine[0] = block[round][0];  // without a wait
        __syncthreads();
        full.wait(round);
        const int lane = threadIdx.x % 32;
        mine[1] = rows[round][lane % 3][lane % 12];
        mine[2] = block[round][lane % 16];
        mine[3] = turned[round][lane % 3][lane % 8];
        __syncthreads();
    }
}

// Each warp sends two rows, twice. `spoil` 1: it overwrites them before the wait; `waits` 1: it omits the last wait.
extern "C" __global__ void bulk_stores(float* out, int spoil, int waits) {
    alignas(16) __shared__ float rows[2][2][68];
    float(&mine)[2][68] = rows[threadIdx.x / 32];
    for (int round = 0; round < 2; round++) {
        for (int i = threadIdx.x % 32; i < 128; i += 32) mine[i / 64][i % 64] = 1000 * round + i;
        bulk_store<2>(out + (2 * round + threadIdx.x / 32) * 128, mine, sizeof mine[0], 64 * sizeof(float));
        if (spoil) mine[0][threadIdx.x % 32] = -1;
        if (round < waits) wait_bulk_stores();
    }
}

// Three pieces (one empty) of 768 bytes in all, twice; one lane reads them before the wait, all lanes after it.
extern "C" __global__ void warp_copies(const float* x, float* out, int announced) {
    constexpr int LENGTH = 192;
    alignas(16) __shared__ float pieces[2][LENGTH];
    __shared__ WarpCopyBarrier full;
    const int lane = threadIdx.x;
    if (lane == 0) full.init();
    __syncwarp();
    for (int round = 0; round < 2; round++) {
        float *const to = pieces[round], *const mine = out + round * (LENGTH + 1);
        const float* const from = x + round * LENGTH;
        bulk_copy(
            [&](auto&& copy) {
                copy(to, from, 64);
                copy(to + 16, from + 16, 0);
                copy(to + 16, from + 16, 704);
            },
            announced, full);
        __syncwarp();
        if (lane == 0) mine[0] = to[LENGTH - 1];
        __syncwarp();
        full.wait(round);
        __syncwarp();
        for (int i = lane; i < LENGTH; i += 32) mine[1 + i] = to[i];
    }
}

extern "C" __global__ void numbers(const u32* x, u32* out, float tiny, i64 big, bool* flag) {
    out[0] = __byte_perm(x[0], x[1], 0x7632);
    out[1] = __popc(x[0]);
    out[2] = __float_as_uint(tiny * 0.5f);
    out[3] = static_cast<u32>(big >> 32);
    *flag = true;
}

extern "C" __global__ void beyond(float* out, int by) {
    extern __shared__ float memory[];
    __shared__ float fixed[4];
    if (by < 1000) memory[threadIdx.x + by] = 1;
    else if (by < 2000) fixed[threadIdx.x + by - 1000] = 1;
    else if (by < 3000) out[threadIdx.x + by - 2000] = 1;
    else *reinterpret_cast<float4*>(out + by - 3000) = make_float4(1, 1, 1, 1);
}
