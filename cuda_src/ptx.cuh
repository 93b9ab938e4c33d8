// Every instruction that C++ has no word for, and nothing else: a host build replaces this one file.
#pragma once

typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;

// Bytes of shared memory that a block may have: the data-centre chips have more than their siblings.
#if __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000 || __CUDA_ARCH__ == 1030
constexpr int MOST_SHARED = 232448;
#elif __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 870
constexpr int MOST_SHARED = 166912;
#else
constexpr int MOST_SHARED = 101376;
#endif

// d (16 x 8, float32) += a (16 x 16) b (16 x 8), bf16 operands. With c = lane % 4 and r = lane / 4, a thread holds
// d[r][2c, 2c+1], d[r+8][2c, 2c+1]; a[r][2c..], a[r+8][2c..], a[r][2c+8..], a[r+8][2c+8..]; b[2c..][r], b[2c+8..][r].
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d (16 x 8, float32) += a (16 x 8) b (8 x 8), float32 operands of which the upper 19 bits count (tf32: 11 bits of
// mantissa). A thread holds a[r][c], a[r+8][c], a[r][c+4], a[r+8][c+4]; b[c][r], b[c+4][r]; d as above.
__device__ __forceinline__ void mma_tf32(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
          "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// As mma_bf16, with fp16 operands.
__device__ __forceinline__ void mma_half(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Transposes an 8 x 8 matrix of 16-bit elements: a thread gives [r][2c, 2c+1] and gets [2c, 2c+1][r].
__device__ __forceinline__ u32 transpose_8x8(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// Four 8 x 8 matrices of 16-bit elements from shared memory, each transposed: lane l gives row l % 8 of matrix l / 8, 16 bytes at a
// multiple of 16, and gets [2c, 2c+1][r] of each.
__device__ __forceinline__ void load_transposed(u32 (&x)[4], const void* shared, int offset) {
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(shared)) + offset;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// Starts a copy of 16 bytes from global to shared memory, past the L1 cache.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}
// The same of 4 bytes, by way of that cache.
__device__ __forceinline__ void copy_async_4(void* shared, const void* global) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(global) : "memory");
}

// Where the host lets a kernel start before the one ahead in the stream has ended: waits until that one has, and all that it
// wrote is seen. Every thread comes here before it touches what others write or read, but for what docs/cuda.md names, and no such pointer is __restrict__:
// the compiler would be free to read through it earlier.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel in the stream start so, once all blocks have come here or ended.
__device__ __forceinline__ void start_kernel_after() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// What one thread stores, and all that it has seen before, is seen by who loads it, in any kernel.
__device__ __forceinline__ void store_release(int* at, int x) { asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(at), "r"(x) : "memory"); }
__device__ __forceinline__ int load_acquire(const int* at) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}

// The same number, of which the compiler does not know that: it works out anew what follows from it, rather than to keep that in registers.
__device__ __forceinline__ u32 anew(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Asks for a line in the L2 cache.
__device__ __forceinline__ void prefetch(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// Cycles of the multiprocessor's clock, which wraps; and a wait until so many have passed since then.
__device__ __forceinline__ u32 clock_now() {
    u32 x;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(x));
    return x;
}
__device__ __forceinline__ void wait_since(u32 then, u32 cycles) {
    while (clock_now() - then < cycles) {}
}

// Ends a batch of copies, and waits until at most PENDING of this thread's latest batches are under way.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// A barrier of THREADS of the block's threads, whole warps, which all come to it equally often: for one such group of a block, beside __syncthreads.
// Waiting here takes no instructions, at a latch it does.
template <int THREADS> __device__ __forceinline__ void meet_some() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// An mbarrier, an object in shared memory that opens when `count` arrivals have come, once a round; rounds are counted from 0. What
// a thread wrote before it arrived is seen by those that waited.
struct Latch {
    unsigned long long state;

    // Once, by one thread; a barrier of the block must follow.
    __device__ __forceinline__ void init(int count) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address()), "r"(count) : "memory");
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __device__ __forceinline__ void arrive() {
        asm volatile("{\n\t.reg .b64 token;\n\tmbarrier.arrive.shared.b64 token, [%0];\n\t}" ::"r"(address()) : "memory");
    }
    // Until a round is over. No thread may be more than a round late.
    __device__ __forceinline__ void wait(int round) {
#if __CUDA_ARCH__ >= 900
#define TRY "mbarrier.try_wait.parity.shared.b64"
#else
#define TRY "mbarrier.test_wait.parity.shared.b64"
#endif
        asm volatile("{\n\t.reg .pred done;\nagain:\n\t" TRY " done, [%0], %1;\n\t@!done bra again;\n\t}" ::"r"(address()), "r"(round % 2)
                     : "memory");
#undef TRY
    }
    __device__ __forceinline__ u32 address() { return static_cast<u32>(__cvta_generic_to_shared(this)); }
};

#if __CUDA_ARCH__ >= 900
// True in one lane of a whole warp. The compiler knows that it is one: bulk copies, whose operands are the warp's, otherwise
// come in a loop over lanes, with a wait in every round.
__device__ __forceinline__ bool elected() {
    u32 yes;
    asm volatile("{\n\t.reg .pred one;\n\telect.sync _|one, 0xffffffff;\n\tselp.u32 %0, 1, 0, one;\n\t}" : "=r"(yes));
    return yes;
}
// The bulk copy engine brings `bytes` (a multiple of 16); the latch at an address in shared memory waits for them if it has been told so.
__device__ __forceinline__ void bring(void* shared, const void* global, int bytes, u32 latch) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     static_cast<u32>(__cvta_generic_to_shared(shared))),
                 "l"(global), "r"(bytes), "r"(latch)
                 : "memory");
}
__device__ __forceinline__ void expect(int bytes, u32 latch) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(latch), "r"(bytes) : "memory");
}
#endif

// A latch that opens when copies from global to shared memory have landed. One warp sends for all: it copies, then
// ends. Small rows go in pieces of 16 bytes, lane by lane; from sm_90 on the bulk copy engine brings long ones.
struct Delivery {
    Latch latch;

    __device__ __forceinline__ void init() { latch.init(32); }
    // Rows of `bytes` (16 a piece), at strides of bytes in shared and in global memory. `place` says where in a row of global memory the
    // piece lies that comes to a byte of it in shared memory.
    template <class Place>
    __device__ __forceinline__ void rows(void* shared, int shared_stride, const void* global, int global_stride, int count, int bytes,
                                         const Place& place) {
        char* const to = static_cast<char*>(shared);
        const char* const from = static_cast<const char*>(global);
        const int pieces = bytes / 16;
#pragma unroll 4
        for (int i = threadIdx.x % 32; i < count * pieces; i += 32) {
            const int row = i / pieces, at = i % pieces * 16;
            copy_async_16(to + row * shared_stride + at, from + row * global_stride + place(row, at));
        }
    }
    __device__ __forceinline__ void rows(void* shared, int shared_stride, const void* global, int global_stride, int count, int bytes) {
        rows(shared, shared_stride, global, global_stride, count, bytes, [](int, int at) { return at; });
    }
    // COUNT long rows of `bytes`, one after the other in global memory.
    template <int COUNT> __device__ __forceinline__ void stretch(void* shared, int shared_stride, const void* global, int bytes) {
#if __CUDA_ARCH__ >= 900
        if (elected()) {
            expect(COUNT * bytes, latch.address());
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                bring(static_cast<char*>(shared) + i * shared_stride, static_cast<const char*>(global) + i * bytes, bytes, latch.address());
        }
#else
        rows(shared, shared_stride, global, bytes, COUNT, bytes);
#endif
    }
    // Up to 32 long rows, a lane each.
    __device__ __forceinline__ void blocks(void* shared, int shared_stride, const void* global, int global_stride, int count, int bytes) {
#if __CUDA_ARCH__ >= 900
        const int lane = threadIdx.x % 32;
        if (lane < count) {
            expect(bytes, latch.address());
            bring(static_cast<char*>(shared) + lane * shared_stride, static_cast<const char*>(global) + lane * global_stride, bytes, latch.address());
        }
#else
        rows(shared, shared_stride, global, global_stride, count, bytes);
#endif
    }
    __device__ __forceinline__ void end() {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(latch.address()) : "memory");
    }
    __device__ __forceinline__ void wait(int round) { latch.wait(round); }
};

// Copies COUNT rows of `bytes` (a multiple of 16) from shared memory, whose writers have released them to copies, to one
// stretch of global memory; whole warps. The shared memory may be written again after the wait.
template <int COUNT> __device__ __forceinline__ void send(void* global, const void* shared, int shared_stride, int bytes) {
    char* const to = static_cast<char*>(global);
    const char* const from = static_cast<const char*>(shared);
#if __CUDA_ARCH__ >= 900
    if (elected()) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to + i * bytes),
                         "r"(static_cast<u32>(__cvta_generic_to_shared(from + i * shared_stride))), "r"(bytes)
                         : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
#else
    const int pieces = bytes / 16;
    for (int i = threadIdx.x % 32; i < COUNT * pieces; i += 32)
        *reinterpret_cast<uint4*>(to + 16 * i) = *reinterpret_cast<const uint4*>(from + i / pieces * shared_stride + i % pieces * 16);
#endif
}
// Puts this thread's writes of shared memory before copies from or to it that threads start once they know of them.
__device__ __forceinline__ void release_to_copies() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_sent() {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
    __syncwarp();
}

// Copies from global to shared memory that only the warp waits for which sent them. From sm_90 on one lane sends them all, and says
// how many bytes that is; before, every lane waits for its own pieces.
struct Arrival {
    Latch latch;

    // Once, by one thread; the warp must meet after it.
    __device__ __forceinline__ void init() {
#if __CUDA_ARCH__ >= 900
        latch.init(1);
#endif
    }
    __device__ __forceinline__ void wait(int round) {
#if __CUDA_ARCH__ >= 900
        latch.wait(round);
#else
        copy_async_wait<0>();
#endif
    }
};

// Starts a round's copies, of `all` bytes: `pieces` calls what it is given with (shared, global, bytes) for each, bytes a multiple of 16
// (none for 0); a whole warp, with the same values in all lanes.
template <class Pieces> __device__ __forceinline__ void copy_pieces(const Pieces& pieces, [[maybe_unused]] int all, Arrival& arrival) {
#if __CUDA_ARCH__ >= 900
    if (elected()) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(arrival.latch.address()), "r"(all) : "memory");
        pieces([&](void* shared, const void* global, int bytes) {
            if (bytes > 0) bring(shared, global, bytes, arrival.latch.address());
        });
    }
#else
    pieces([&](void* shared, const void* global, int bytes) {
        for (int i = threadIdx.x % 32 * 16; i < bytes; i += 512)
            copy_async_16(static_cast<char*>(shared) + i, static_cast<const char*>(global) + i);
    });
    copy_async_commit();
#endif
}

// The next number of a counter in shared memory, one for the whole warp. (An increment with a bound: the compiler would first gather
// the lanes of a plain sum, though there is only one.)
__device__ __forceinline__ int next_number(int& counter) {
    u32 number = 0;
    if (threadIdx.x % 32 == 0)
        asm volatile("atom.shared.inc.u32 %0, [%1], 0x7fffffff;" : "=r"(number) : "r"(static_cast<u32>(__cvta_generic_to_shared(&counter))) : "memory");
    return static_cast<int>(__shfl_sync(0xffffffffu, number, 0));
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

// A pair rounded to bf16, the first in the low half-word.
__device__ __forceinline__ u32 floats_to_bf16(float x, float y) {
    u32 z;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(y), "f"(x));
    return z;
}

// A pair rounded to fp16, the first in the low half-word, and back.
__device__ __forceinline__ u32 floats_to_halves(float x, float y) {
    u32 z;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(y), "f"(x));
    return z;
}
__device__ __forceinline__ float2 halves_to_floats(u32 x) {
    float2 y;
    asm("{\n\t.reg .f16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.f32.f16 %0, low;\n\tcvt.f32.f16 %1, high;\n\t}" : "=f"(y.x), "=f"(y.y) : "r"(x));
    return y;
}
