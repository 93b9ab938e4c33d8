// Instructions without a C++ equivalent. A host build replaces this file, so all PTX must be here.
#pragma once

typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;

#define DEVICE __device__ __forceinline__

// The most shared memory of a block, in bytes; data-centre chips have more.
#if __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000 || __CUDA_ARCH__ == 1030
constexpr int MOST_SHARED = 232448;
#elif __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 870
constexpr int MOST_SHARED = 166912;
#else
constexpr int MOST_SHARED = 101376;
#endif

// d (16 x 8, float32) += a (16 x 16) b (16 x 8), bf16 operands. With c = lane % 4 and r = lane / 4, a thread holds
// d[r][2c, 2c+1], d[r+8][2c, 2c+1]; a[r][2c..], a[r+8][2c..], a[r][2c+8..], a[r+8][2c+8..]; b[2c..][r], b[2c+8..][r].
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d (16 x 8, float32) += a (16 x 8) b (8 x 8), tf32 operands: the upper 19 bits of float32 (11 bits of mantissa). A
// thread holds a[r][c], a[r+8][c], a[r][c+4], a[r+8][c+4]; b[c][r], b[c+4][r]; d as above.
DEVICE void mma_tf32(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
          "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// d += a b, with unsigned bytes in a (16 x 32) and signed bytes in b (32 x 8).
DEVICE void mma_codes(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// As mma_bf16, with fp16 operands.
DEVICE void mma_half(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Transposes an 8 x 8 matrix of 16-bit elements: a thread passes [r][2c, 2c+1] and gets [2c, 2c+1][r].
DEVICE u32 transpose_8x8(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// Loads four 8 x 8 matrices of 16-bit elements from shared memory, transposed: lane l passes the address of row l % 8
// of matrix l / 8 (16 bytes, aligned) and gets [2c, 2c+1][r] of each.
DEVICE void load_transposed(u32 (&x)[4], const void* shared, int offset) {
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(shared)) + offset;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// Starts a copy of 16 bytes from global to shared memory, past L1.
DEVICE void copy_async_16(void* shared, const void* global) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}
// The same for 4 bytes, through L1.
DEVICE void copy_async_4(void* shared, const void* global) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(global) : "memory");
}

// Programmatic dependent launch: waits until the previous kernel of the stream has ended and its writes are visible.
// Every thread calls this function before it accesses memory that other kernels write or read; docs/cuda.md
// lists the exceptions. Pointers to this memory are not __restrict__: the compiler could move reads of __restrict__
// pointers ahead of the wait.
DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel of the stream start, once all blocks have called this or ended.
DEVICE void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Release and acquire across kernels: a thread that loads the value also sees all writes that the storing thread had
// made or seen before.
DEVICE void store_release(int* at, int x) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}
DEVICE int load_acquire(const int* at) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}

// Returns its argument, but hides the value from the compiler: the compiler recomputes values that depend on the result
// instead of keeping them in registers.
DEVICE u32 opaque(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Prefetches a line to L2.
DEVICE void prefetch(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// The multiprocessor's cycle counter, which wraps; and a wait until `cycles` have passed since `then`.
DEVICE u32 clock_now() {
    u32 x;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(x));
    return x;
}
DEVICE void wait_since(u32 then, u32 cycles) {
    while (clock_now() - then < cycles) {}
}

// Closes a group of cp.async copies; and waits until at most PENDING of this thread's groups are in flight.
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// A named barrier (1 to 15; 0 is __syncthreads'), for THREADS of the block's threads (whole warps that all call it
// equally often). Waiting issues no instructions, unlike waiting at an mbarrier.
template <int THREADS> DEVICE void named_barrier_sync(int number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

// An mbarrier in shared memory. A phase completes after `count` arrivals; phases are numbered from 0. Writes of a
// thread before its arrival are visible to all threads that have waited for the phase.
struct Mbarrier {
    unsigned long long state;

    // By one thread, before a barrier of the block.
    DEVICE void init(int count) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address()), "r"(count) : "memory");
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    DEVICE void arrive() {
        asm volatile("{\n\t.reg .b64 token;\n\tmbarrier.arrive.shared.b64 token, [%0];\n\t}" ::"r"(address())
                     : "memory");
    }
    // Waits until the phase is complete. No thread may be more than one phase late, because the hardware compares only
    // the parity of the phase.
    DEVICE void wait(int phase) {
#if __CUDA_ARCH__ >= 900
#define TRY "mbarrier.try_wait.parity.shared.b64"
#else
#define TRY "mbarrier.test_wait.parity.shared.b64"
#endif
        asm volatile("{\n\t.reg .pred done;\nagain:\n\t" TRY
                     " done, [%0], %1;\n\t@!done bra again;\n\t}" ::"r"(address()),
                     "r"(phase % 2)
                     : "memory");
#undef TRY
    }
    DEVICE u32 address() { return static_cast<u32>(__cvta_generic_to_shared(this)); }
};

#if __CUDA_ARCH__ >= 900
// True in one lane of a whole warp. The compiler must know that only one lane is active: for any other condition it
// issues bulk copies, whose operands must be uniform, in a loop over lanes.
DEVICE bool elect_one() {
    u32 yes;
    asm volatile("{\n\t.reg .pred one;\n\telect.sync _|one, 0xffffffff;\n\tselp.u32 %0, 1, 0, one;\n\t}" : "=r"(yes));
    return yes;
}
// Bulk copy of `bytes` (a multiple of 16) from global to shared memory. Completes `bytes` at the mbarrier with the
// given shared address. The other function arrives and expects such bytes, in one operation.
DEVICE void bulk_load(void* shared, const void* global, int bytes, u32 mbarrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     static_cast<u32>(__cvta_generic_to_shared(shared))),
                 "l"(global), "r"(bytes), "r"(mbarrier)
                 : "memory");
}
DEVICE void arrive_and_expect(int bytes, u32 mbarrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(bytes) : "memory");
}
#endif

// Full barrier of a pipeline stage: completes when the copies of one producer warp have landed. Small rows go by
// cp.async in pieces of 16 bytes, one a lane; long rows by bulk copies from sm_90 on. In each phase the warp expects
// the bytes of all its bulk copies, issues copies, and commits.
//
// A phase has 33 arrivals: those of the lanes' cp.async, which `commit` requests, and one with the expected bytes. If
// the bytes were expected without an arrival, the asynchronous arrivals of `commit` could overtake the operation and
// complete the phase before the copies have landed (seen on H200).
struct CopyBarrier {
    Mbarrier mbarrier;

    DEVICE void init() { mbarrier.init(33); }
    // Before the phase's copies. `bytes` of all copy_contiguous and copy_row_per_lane; the same in all lanes.
    DEVICE void expect(int bytes) {
#if __CUDA_ARCH__ >= 900
        if (elect_one()) arrive_and_expect(bytes, mbarrier.address());
#else
        if (threadIdx.x % 32 == 0) mbarrier.arrive();
#endif
    }
    // Copies rows of `bytes` (a multiple of 16), with strides in bytes. `place(row, byte)` is the source byte in the
    // row for a destination byte.
    template <class Place>
    DEVICE void copy_rows(void* shared, int shared_stride, const void* global, int global_stride, int count, int bytes,
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
    DEVICE void copy_rows(void* shared, int shared_stride, const void* global, int global_stride, int count,
                          int bytes) {
        copy_rows(shared, shared_stride, global, global_stride, count, bytes, [](int, int at) { return at; });
    }
    // Copies COUNT long rows of `bytes` that are contiguous in global memory.
    template <int COUNT> DEVICE void copy_contiguous(void* shared, int shared_stride, const void* global, int bytes) {
#if __CUDA_ARCH__ >= 900
        if (elect_one()) {
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                bulk_load(static_cast<char*>(shared) + i * shared_stride, static_cast<const char*>(global) + i * bytes,
                          bytes, mbarrier.address());
        }
#else
        copy_rows(shared, shared_stride, global, bytes, COUNT, bytes);
#endif
    }
    // Copies up to 32 long rows, one a lane.
    DEVICE void copy_row_per_lane(void* shared, int shared_stride, const void* global, int global_stride, int count,
                                  int bytes) {
#if __CUDA_ARCH__ >= 900
        const int lane = threadIdx.x % 32;
        if (lane < count) {
            bulk_load(static_cast<char*>(shared) + lane * shared_stride,
                      static_cast<const char*>(global) + lane * global_stride, bytes, mbarrier.address());
        }
#else
        copy_rows(shared, shared_stride, global, global_stride, count, bytes);
#endif
    }
    DEVICE void commit() {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(mbarrier.address()) : "memory");
    }
    DEVICE void wait(int phase) { mbarrier.wait(phase); }
};

// Bulk store: copies COUNT rows of `bytes` (a multiple of 16) from shared memory to contiguous global memory. By a
// whole warp, after fence_async_proxy by the writers. The shared memory may be written again after wait_bulk_stores.
template <int COUNT> DEVICE void bulk_store(void* global, const void* shared, int shared_stride, int bytes) {
    char* const to = static_cast<char*>(global);
    const char* const from = static_cast<const char*>(shared);
#if __CUDA_ARCH__ >= 900
    if (elect_one()) {
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
        *reinterpret_cast<uint4*>(to + 16 * i) =
            *reinterpret_cast<const uint4*>(from + i / pieces * shared_stride + i % pieces * 16);
#endif
}
// Orders this thread's accesses of shared memory before bulk copies from or to it that are issued afterwards.
DEVICE void fence_async_proxy() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
DEVICE void wait_bulk_stores() {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
    __syncwarp();
}

// Full barrier for copies that only the issuing warp waits for. From sm_90 on, one lane issues all copies and announces
// their bytes. On older architectures, every lane waits for its own cp.async pieces.
struct WarpCopyBarrier {
    Mbarrier mbarrier;

    // By one thread, before the warp meets.
    DEVICE void init() {
#if __CUDA_ARCH__ >= 900
        mbarrier.init(1);
#endif
    }
    DEVICE void wait(int phase) {
#if __CUDA_ARCH__ >= 900
        mbarrier.wait(phase);
#else
        copy_async_wait<0>();
#endif
    }
};

// Issues a phase's copies, `all` bytes in total. `copies` calls its argument with (shared, global, bytes) for each
// copy, bytes a multiple of 16 (0: none). By a whole warp, with the same values in all lanes.
template <class Copies> DEVICE void bulk_copy(const Copies& copies, [[maybe_unused]] int all, WarpCopyBarrier& full) {
#if __CUDA_ARCH__ >= 900
    if (elect_one()) {
        arrive_and_expect(all, full.mbarrier.address());
        copies([&](void* shared, const void* global, int bytes) {
            if (bytes > 0) bulk_load(shared, global, bytes, full.mbarrier.address());
        });
    }
#else
    copies([&](void* shared, const void* global, int bytes) {
        for (int i = threadIdx.x % 32 * 16; i < bytes; i += 512)
            copy_async_16(static_cast<char*>(shared) + i, static_cast<const char*>(global) + i);
    });
    copy_async_commit();
#endif
}

// Takes the next number of a counter in shared memory, for the whole warp. An increment with a bound instead of a plain
// atomic add, because the compiler combines the lanes of a plain add first.
DEVICE int claim_next(int& counter) {
    u32 number = 0;
    if (threadIdx.x % 32 == 0)
        asm volatile("atom.shared.inc.u32 %0, [%1], 0x7fffffff;"
                     : "=r"(number)
                     : "r"(static_cast<u32>(__cvta_generic_to_shared(&counter)))
                     : "memory");
    return static_cast<int>(__shfl_sync(0xffffffffu, number, 0));
}

DEVICE u16 float_to_bf16(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

DEVICE float half_to_float(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

DEVICE u16 float_to_half(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// A pair rounded to bf16, the first in the low half-word.
DEVICE u32 floats_to_bf16(float x, float y) {
    u32 z;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(y), "f"(x));
    return z;
}

// Products of bf16 pairs plus pairs, rounded. Subnormal numbers are kept.
DEVICE u32 fma_bf16(u32 x, u32 y, u32 z) {
    u32 sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(y), "r"(z));
    return sum;
}

// The same, with zeros for negative numbers.
DEVICE u32 fma_relu_bf16(u32 x, u32 y, u32 z) {
    u32 sum;
    asm("fma.rn.relu.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(y), "r"(z));
    return sum;
}
// The smaller numbers of pairs, or those that are not NaN.
DEVICE u32 smaller_bf16(u32 x, u32 y) {
    u32 z;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

// The larger number, or NaN if one is NaN.
DEVICE float larger(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

// Bytes 0 and 2 (1 and 3) of a word as half-words, whose upper bytes repeat the sign bits.
DEVICE u32 extend_bytes_0_2(u32 x) {
    u32 y;
    asm("prmt.b32 %0, %1, 0, 0xa280;" : "=r"(y) : "r"(x));
    return y;
}
DEVICE u32 extend_bytes_1_3(u32 x) {
    u32 y;
    asm("prmt.b32 %0, %1, 0, 0xb391;" : "=r"(y) : "r"(x));
    return y;
}

// A pair rounded to fp16, the first in the low half-word, and back.
DEVICE u32 floats_to_halves(float x, float y) {
    u32 z;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(y), "f"(x));
    return z;
}
DEVICE float2 halves_to_floats(u32 x) {
    float2 y;
    asm("{\n\t.reg .f16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.f32.f16 %0, low;\n\tcvt.f32.f16 %1, high;\n\t}"
        : "=f"(y.x), "=f"(y.y)
        : "r"(x));
    return y;
}
