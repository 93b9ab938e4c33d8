// Every instruction that C++ has no word for, and nothing else: a host build replaces this one file.
#pragma once

typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;

// d (16 x 8, float32) += a (16 x 16) b (16 x 8), bf16 operands. With c = lane % 4 and r = lane / 4, a thread holds
// d[r][2c, 2c+1], d[r+8][2c, 2c+1]; a[r][2c..], a[r+8][2c..], a[r][2c+8..], a[r+8][2c+8..]; b[2c..][r], b[2c+8..][r].
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Transposes an 8 x 8 matrix of 16-bit elements: a thread gives [r][2c, 2c+1] and gets [2c, 2c+1][r].
__device__ __forceinline__ u32 transpose_8x8(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// Starts a copy of 16 bytes from global to shared memory, past the L1 cache.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}

__device__ __forceinline__ void copy_async_4(void* shared, const void* global) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(global) : "memory");
}

// Brings a line of 128 bytes to the L2 cache.
__device__ __forceinline__ void prefetch_line(const void* global) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global) : "memory");
}

// Ends a batch of copies, and waits until at most PENDING of this thread's latest batches are under way.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Copies of whole rows from global to shared memory that report to an object in shared memory. From sm_90 on one thread
// sends for a row; before, the warp copies it in pieces of 16 bytes, which belong to the batches above.
struct Arrival {
    unsigned long long state;

    // Once, by one thread; a barrier of the block must follow.
    __device__ __forceinline__ void init() {
#if __CUDA_ARCH__ >= 900
        asm volatile("mbarrier.init.shared.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(address()) : "memory");
#endif
    }
    // How many bytes the next round of copies will bring; one thread, before they start.
    __device__ __forceinline__ void expect(int bytes) {
#if __CUDA_ARCH__ >= 900
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
#endif
    }
    // Until all of a round is there, rounds counted from 0. Before sm_90 a thread waits for its own pieces, but for
    // those of its latest PENDING batches.
    template <int PENDING> __device__ __forceinline__ void wait(int round) {
        copy_async_wait<PENDING>();
#if __CUDA_ARCH__ >= 900
        asm volatile(
            "{\n\t.reg .pred done;\n"
            "again:\n\tmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n\t@!done bra again;\n\t}" ::"r"(address()),
            "r"(round % 2)
            : "memory");
#endif
    }
    __device__ __forceinline__ u32 address() { return static_cast<u32>(__cvta_generic_to_shared(this)); }
};

// Starts the copy of rows of `bytes` (16 a piece), which lie `stride` bytes apart on both sides; a whole warp.
__device__ __forceinline__ void copy_rows(void* shared, const void* global, int rows, int bytes, int stride, Arrival& arrival) {
    const int lane = threadIdx.x % 32;
    char* const to = static_cast<char*>(shared);
    const char* const from = static_cast<const char*>(global);
#if __CUDA_ARCH__ >= 900
    if (lane < rows && bytes > 0)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         static_cast<u32>(__cvta_generic_to_shared(to + lane * stride))),
                     "l"(from + lane * stride), "r"(bytes), "r"(arrival.address())
                     : "memory");
#else
    for (int row = 0; row < rows; row++)
        for (int i = 16 * lane; i < bytes; i += 512) copy_async_16(to + row * stride + i, from + row * stride + i);
#endif
}

// Starts one copy a lane of `bytes` (a multiple of 16, none for 0); a whole warp.
__device__ __forceinline__ void copy_pieces(char* shared, const void* global, int bytes, Arrival& arrival) {
#if __CUDA_ARCH__ >= 900
    if (bytes > 0)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         static_cast<u32>(__cvta_generic_to_shared(shared))),
                     "l"(global), "r"(bytes), "r"(arrival.address())
                     : "memory");
#else
    for (int piece = 0; piece < 32; piece++) {
        const int size = __shfl_sync(0xffffffffu, bytes, piece);
        if (size == 0) continue;
        const i64 to = __shfl_sync(0xffffffffu, reinterpret_cast<i64>(shared), piece);
        const i64 from = __shfl_sync(0xffffffffu, reinterpret_cast<i64>(global), piece);
        for (int i = threadIdx.x % 32 * 16; i < size; i += 512)
            copy_async_16(reinterpret_cast<char*>(to + i), reinterpret_cast<const char*>(from + i));
    }
#endif
}

__device__ __forceinline__ u16 float_to_bf16(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float half_to_float(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

__device__ __forceinline__ u16 float_to_half(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
