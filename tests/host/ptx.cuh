// Replaces cuda_src/lib/ptx.cuh in the host build: the same names, in C++.
#pragma once
#include "device.h"

typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;

#define DEVICE __device__ __forceinline__

#ifndef HOST_MOST_SHARED
#define HOST_MOST_SHARED 232448
#endif
constexpr int MOST_SHARED = HOST_MOST_SHARED;

namespace host {

inline float half_at(u32 pair, int i) {
    const u16 bits = static_cast<u16>(pair >> 16 * i);
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return static_cast<float>(half);
}

// Matrix fragments as ptx.cuh describes them; fragments.cpp has the operations.
void multiply_bf16(Post** lanes, unsigned);
void multiply_half(Post** lanes, unsigned);
void multiply_tf32(Post** lanes, unsigned);
void multiply_codes(Post** lanes, unsigned);
void transpose(Post** lanes, unsigned);
void load_transposed(Post** lanes, unsigned);

struct Mma : Post {
    float* d;
    const u32 *a, *b;
};
struct MmaTf32 : Post {
    float *d, a[4], b[2];
};
struct MmaCodes : Post {
    int* d;
    const u32* a;
    u32 b[2];
};
struct Transpose : Post {
    u32 x, y;
};
struct LoadTransposed : Post {
    u32* x;
    const char* row;
};

}  // namespace host

inline void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, HOST_PLACE) {
    const u32 b[2] = {b0, b1};
    host::Mma post{{host::multiply_bf16}, d, a, b};
    host::meet_warp(~0u, post, where);
}
inline void mma_half(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, HOST_PLACE) {
    const u32 b[2] = {b0, b1};
    host::Mma post{{host::multiply_half}, d, a, b};
    host::meet_warp(~0u, post, where);
}

inline void mma_tf32(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1, HOST_PLACE) {
    host::MmaTf32 post{{host::multiply_tf32}, d, {a0, a1, a2, a3}, {b0, b1}};
    host::meet_warp(~0u, post, where);
}

inline void mma_codes(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, HOST_PLACE) {
    host::MmaCodes post{{host::multiply_codes}, d, a, {b0, b1}};
    host::meet_warp(~0u, post, where);
}

inline u32 transpose_8x8(u32 x, HOST_PLACE) {
    host::Transpose post{{host::transpose}, x, 0};
    host::meet_warp(~0u, post, where);
    return post.y;
}

inline void load_transposed(u32 (&x)[4], const void* shared, int offset, HOST_PLACE) {
    const char* const row = static_cast<const char*>(shared) + offset;
    if (reinterpret_cast<std::uintptr_t>(row) % 16) host::fail("a row of a matrix is not aligned to 16 bytes");
    host::LoadTransposed post{{host::load_transposed}, x, row};
    host::meet_warp(~0u, post, where);
}

inline void copy_async_16(void* shared, const void* global) { host::copy_later(shared, global, 16); }
inline void copy_async_4(void* shared, const void* global) { host::copy_later(shared, global, 4); }
inline void wait_for_previous_kernel() {}  // kernels run one after the other
inline void allow_next_kernel() {}
inline void prefetch(const void*) {}
inline u32 opaque(u32 x) { return x; }
inline void store_release(int* at, int x) { *at = x; }
inline int load_acquire(const int* at) { return *at; }
inline u32 clock_now() { return 0; }  // not used on the host
inline void wait_since(u32, u32) {}
inline void copy_async_commit() { host::commit_copies(); }
template <int PENDING> inline void copy_async_wait() { host::land_copies(PENDING); }

template <int THREADS> inline void named_barrier_sync(int number, HOST_PLACE) {
    host::named_barrier_sync(number, THREADS, where);
}

// mbarriers as ptx.cuh describes them.
struct Mbarrier {
    u16 count, arrived;
    u32 phases;  // that are complete

    void init(int n) { count = n, arrived = 0, phases = 0; }
    void arrive() {
        if (++arrived < count) return;
        arrived = 0, phases++;
        host::open(this);
    }
    void wait(int phase, HOST_PLACE) {
        // the device compares parities: a phase that has not begun would look finished
        if (phase > static_cast<int>(phases))
            host::fail("an mbarrier is waited for one phase too early", where);
        while (static_cast<int>(phases) <= phase) host::wait_at(this, where);
        if (static_cast<int>(phases) > phase + 1)
            host::fail("an mbarrier has gone two phases on", where);
    }
};

// Copies land at the first wait. Until then their target holds NaN. The bytes of the copies that are bulk copies from
// sm_90 on must be those expected: lane 0 counts.
struct CopyBarrier {
    static constexpr int NONE = -1;
    Mbarrier mbarrier;
    int missing;  // bytes that are expected and not yet requested; NONE before they are expected

    void init() { mbarrier.init(host::WARP + 1), missing = NONE; }
    void expect(int bytes) {
        if (host::lane()) return;
        if (missing != NONE) host::fail("a phase's copies are expected twice");
        missing = bytes;
        mbarrier.arrive();
    }
    void request(int bytes) {
        if (host::lane()) return;
        if (missing < bytes) host::fail("a copy brings other bytes than were expected");
        missing -= bytes;
    }
    void copy_rows(void* shared, int shared_stride, const void* global, int global_stride, int count, int bytes) {
        copy_rows(shared, shared_stride, global, global_stride, count, bytes, [](int, int at) { return at; });
    }
    template <class Place>
    void copy_rows(void* shared, int shared_stride, const void* global, int global_stride, int count, int bytes,
                   const Place& place) {
        if (bytes % 16) host::fail("a row of a copy is no multiple of 16 bytes");
        for (int row = 0; row < count; row++)
            for (int at = host::lane() * 16; at < bytes; at += host::WARP * 16)
                host::copy_for(this, static_cast<char*>(shared) + row * shared_stride + at,
                              static_cast<const char*>(global) + row * global_stride + place(row, at), 16);
    }
    template <int COUNT> void copy_contiguous(void* shared, int shared_stride, const void* global, int bytes) {
        request(COUNT * bytes);
        copy_rows(shared, shared_stride, global, bytes, COUNT, bytes);
    }
    void copy_row_per_lane(void* shared, int shared_stride, const void* global, int global_stride, int count,
                           int bytes) {
        request(count * bytes);
        copy_rows(shared, shared_stride, global, global_stride, count, bytes);
    }
    void commit() {
        if (host::lane() == 0) {
            if (missing) host::fail("a copy brings other bytes than were expected");
            missing = NONE;
        }
        mbarrier.arrive();
    }
    void wait(int phase, HOST_PLACE) {
        mbarrier.wait(phase, where);
        host::land(this);
    }
};

// A lane sends a row. The source is read at the wait.
template <int COUNT> void bulk_store(void* global, const void* shared, int shared_stride, int bytes, HOST_PLACE) {
    if (bytes % 16) host::fail("a row that is sent is no multiple of 16 bytes");
    __syncwarp(~0u, where);
    const int lane = host::lane();
    if (lane < COUNT)
        host::send_later(static_cast<char*>(global) + lane * bytes,
                         static_cast<const char*>(shared) + lane * shared_stride, bytes);
}
inline void fence_async_proxy() {}
inline void wait_bulk_stores(HOST_PLACE) {
    host::finish_sends();
    __syncwarp(~0u, where);
}

// As before sm_90, every lane copies its own pieces and waits for them. As from sm_90 on, a wait is for the pieces of
// this arrival only, and their bytes must be those announced.
struct WarpCopyBarrier {
    unsigned char phases[host::WARP];  // that a lane has sent, modulo 256

    void init() { std::memset(phases, 0, sizeof phases); }
    void wait(u32 phase, HOST_PLACE) {
        unsigned char& sent = phases[host::lane()];
        if (sent != (phase + 1) % 256)
            host::fail("a warp's copies are waited for in another phase than their last", where);
        host::land(&sent);
    }
};
template <class Copies> void bulk_copy(const Copies& copies, int all, WarpCopyBarrier& barrier) {
    unsigned char& sent = barrier.phases[host::lane()];
    sent++;
    copies([&](void* shared, const void* global, int bytes) {
        if (bytes % 16) host::fail("a piece of a copy is no multiple of 16 bytes");
        for (int i = 16 * host::lane(); i < bytes; i += 16 * host::WARP)
            host::copy_for(&sent, static_cast<char*>(shared) + i, static_cast<const char*>(global) + i, 16);
        all -= bytes;
    });
    if (all) host::fail("a copy brings other bytes than were announced");
}

inline int claim_next(int& counter, HOST_PLACE) {
    const int number = host::lane() == 0 ? counter++ : 0;
    return __shfl_sync(~0u, number, 0, 32, where);
}

inline u16 float_to_bf16(float x) {
    const u32 bits = __float_as_uint(x);
    return x != x ? 0x7fff : static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
inline float half_to_float(u16 x) { return host::half_at(x, 0); }
inline u16 float_to_half(float x) {
    const _Float16 half = static_cast<_Float16>(x);
    u16 bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}
inline u32 floats_to_bf16(float x, float y) { return float_to_bf16(x) | static_cast<u32>(float_to_bf16(y)) << 16; }
// In double precision, as the host flushes subnormal float32 numbers. The result is not subnormal where kernels use
// this.
template <class Of> inline u32 pairs_of_bf16(u32 x, u32 y, u32 z, const Of& of) {
    auto wide = [](u32 pair, int i) {
        const int bits = static_cast<int>(pair >> 16 * i & 0xffff), exponent = bits >> 7 & 0xff;
        const double most = exponent == 255 ? (bits & 0x7f ? NAN : INFINITY)
                            : exponent      ? std::ldexp(128 + (bits & 0x7f), exponent - 134)
                                            : std::ldexp(bits & 0x7f, -133);
        return bits >> 15 ? -most : most;
    };
    auto one = [&](int i) { return static_cast<float>(of(wide(x, i), wide(y, i), wide(z, i))); };
    return floats_to_bf16(one(0), one(1));
}
inline u32 fma_bf16(u32 x, u32 y, u32 z) {
    return pairs_of_bf16(x, y, z, [](double a, double b, double c) { return a * b + c; });
}
inline u32 fma_relu_bf16(u32 x, u32 y, u32 z) {
    return pairs_of_bf16(x, y, z, [](double a, double b, double c) { return a * b + c < 0 ? 0 : a * b + c; });
}
inline u32 smaller_bf16(u32 x, u32 y) {
    return pairs_of_bf16(x, y, 0, [](double a, double b, double) { return std::fmin(a, b); });
}

inline float larger(float x, float y) { return x > y || x != x ? x : y; }

inline u32 extend_bytes_0_2(u32 x) {
    auto one = [&](int i) { return static_cast<u16>(static_cast<signed char>(x >> 8 * i)); };
    return one(0) | static_cast<u32>(one(2)) << 16;
}
inline u32 extend_bytes_1_3(u32 x) { return extend_bytes_0_2(x >> 8); }
inline u32 floats_to_halves(float x, float y) { return float_to_half(x) | static_cast<u32>(float_to_half(y)) << 16; }
inline float2 halves_to_floats(u32 x) { return {host::half_at(x, 0), host::half_at(x, 1)}; }
