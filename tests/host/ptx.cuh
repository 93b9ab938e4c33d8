// Replaces cuda_src/ptx.cuh in the host build: the same names, in C++.
#pragma once
#include "device.h"

typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;

#ifndef HOST_MOST_SHARED
#define HOST_MOST_SHARED 232448
#endif
constexpr int MOST_SHARED = HOST_MOST_SHARED;

namespace host {

inline float bf16_at(u32 pair, int i) { return __uint_as_float(i ? pair & 0xffff0000u : pair << 16); }
inline float half_at(u32 pair, int i) {
    const u16 bits = static_cast<u16>(pair >> 16 * i);
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return static_cast<float>(half);
}

inline float toward_zero(double x) {
    const float y = static_cast<float>(x);
    return std::isfinite(y) && std::fabs(static_cast<double>(y)) > std::fabs(x) ? std::nextafter(y, 0.f) : y;
}

// Matrix fragments as ptx.cuh describes them. The sum is exact to double precision and then rounded toward zero:
// tensor cores drop low bits too, though not the same ones.
template <float at(u32, int)> struct Mma : Post {
    float* d;
    const u32 *a, *b;
    Mma(float* d_, const u32* a_, const u32* b_) : Post{answer}, d(d_), a(a_), b(b_) {}
    static void answer(Post** lanes, unsigned) {
        float a[16][16], b[16][8];
        for (int lane = 0; lane < WARP; lane++) {
            const auto* const mine = static_cast<const Mma*>(lanes[lane]);
            const int r = lane / 4, c = 2 * (lane % 4);
            for (int i = 0; i < 2; i++) {
                for (int n = 0; n < 4; n++) a[r + 8 * (n % 2)][c + 8 * (n / 2) + i] = at(mine->a[n], i);
                for (int n = 0; n < 2; n++) b[c + 8 * n + i][r] = at(mine->b[n], i);
            }
        }
        for (int lane = 0; lane < WARP; lane++)
            for (int i = 0; i < 4; i++) {
                const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
                float& d = static_cast<Mma*>(lanes[lane])->d[i];
                double sum = d;
                for (int n = 0; n < 16; n++) sum += static_cast<double>(a[row][n]) * b[n][column];
                d = toward_zero(sum);
            }
    }
};

struct MmaTf32 : Post {
    float *d, a[4], b[2];
    MmaTf32(float* d_, float a0, float a1, float a2, float a3, float b0, float b1)
        : Post{answer},
          d(d_),
          a{a0, a1, a2, a3},
          b{b0, b1} {}
    static float upper(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }
    static void answer(Post** lanes, unsigned) {
        float a[16][8], b[8][8];
        for (int lane = 0; lane < WARP; lane++) {
            const auto* const mine = static_cast<const MmaTf32*>(lanes[lane]);
            for (int n = 0; n < 4; n++) a[lane / 4 + 8 * (n % 2)][lane % 4 + 4 * (n / 2)] = upper(mine->a[n]);
            for (int n = 0; n < 2; n++) b[lane % 4 + 4 * n][lane / 4] = upper(mine->b[n]);
        }
        for (int lane = 0; lane < WARP; lane++)
            for (int i = 0; i < 4; i++) {
                const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
                float& d = static_cast<MmaTf32*>(lanes[lane])->d[i];
                double sum = d;
                for (int n = 0; n < 8; n++) sum += static_cast<double>(a[row][n]) * b[n][column];
                d = toward_zero(sum);
            }
    }
};

struct Transpose : Post {
    u32 x, y;
    explicit Transpose(u32 x_) : Post{answer}, x(x_), y(0) {}
    static void answer(Post** lanes, unsigned) {
        for (int lane = 0; lane < WARP; lane++)
            for (int i = 0; i < 2; i++) {
                const int row = 2 * (lane % 4) + i, column = lane / 4;
                const u32 pair = static_cast<Transpose*>(lanes[4 * row + column / 2])->x;
                static_cast<Transpose*>(lanes[lane])->y |= (pair >> (16 * (column % 2)) & 0xffffu) << (16 * i);
            }
    }
};

struct LoadTransposed : Post {
    u32* x;
    const char* row;
    LoadTransposed(u32* x_, const char* row_) : Post{answer}, x(x_), row(row_) {}
    static void answer(Post** lanes, unsigned) {
        for (int lane = 0; lane < WARP; lane++)
            for (int n = 0; n < 4; n++) {
                u16 pair[2];
                for (int i = 0; i < 2; i++)
                    std::memcpy(&pair[i],
                                static_cast<LoadTransposed*>(lanes[8 * n + 2 * (lane % 4) + i])->row + lane / 4 * 2, 2);
                static_cast<LoadTransposed*>(lanes[lane])->x[n] = pair[0] | static_cast<u32>(pair[1]) << 16;
            }
    }
};

}  // namespace host

inline void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, HOST_PLACE) {
    const u32 b[2] = {b0, b1};
    host::Mma<host::bf16_at> post(d, a, b);
    host::meet_warp(~0u, post, where);
}
inline void mma_half(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, HOST_PLACE) {
    const u32 b[2] = {b0, b1};
    host::Mma<host::half_at> post(d, a, b);
    host::meet_warp(~0u, post, where);
}

inline void mma_tf32(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1, HOST_PLACE) {
    host::MmaTf32 post(d, a0, a1, a2, a3, b0, b1);
    host::meet_warp(~0u, post, where);
}

inline u32 transpose_8x8(u32 x, HOST_PLACE) {
    host::Transpose post(x);
    host::meet_warp(~0u, post, where);
    return post.y;
}

inline void load_transposed(u32 (&x)[4], const void* shared, int offset, HOST_PLACE) {
    const char* const row = static_cast<const char*>(shared) + offset;
    if (reinterpret_cast<std::uintptr_t>(row) % 16) host::fail("a row of a matrix is not aligned to 16 bytes");
    host::LoadTransposed post(x, row);
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
// In double precision, as the host flushes subnormal float32 numbers. The result is not subnormal where kernels use this.
inline u32 fma_bf16(u32 x, u32 y, u32 z) {
    auto wide = [](u32 pair, int i) {
        const int bits = static_cast<int>(pair >> 16 * i & 0xffff), exponent = bits >> 7 & 0xff;
        const double most = exponent ? std::ldexp(128 + (bits & 0x7f), exponent - 134) : std::ldexp(bits & 0x7f, -133);
        return bits >> 15 ? -most : most;
    };
    auto one = [&](int i) { return static_cast<float>(wide(x, i) * wide(y, i) + wide(z, i)); };
    return floats_to_bf16(one(0), one(1));
}

inline u32 extend_bytes_0_2(u32 x) {
    auto one = [&](int i) { return static_cast<u16>(static_cast<signed char>(x >> 8 * i)); };
    return one(0) | static_cast<u32>(one(2)) << 16;
}
inline u32 extend_bytes_1_3(u32 x) { return extend_bytes_0_2(x >> 8); }
inline u32 floats_to_halves(float x, float y) { return float_to_half(x) | static_cast<u32>(float_to_half(y)) << 16; }
inline float2 halves_to_floats(u32 x) { return {host::half_at(x, 0), host::half_at(x, 1)}; }
