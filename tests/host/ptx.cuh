// Stands in for cuda_src/ptx.cuh in the host build: the same names, in C++.
#pragma once
#include "device.h"

typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;

namespace host {

inline float bf16_at(u32 pair, int i) { return __uint_as_float(i ? pair & 0xffff0000u : pair << 16); }

// Matrix fragments as ptx.cuh describes them. The sum is exact to double precision and then rounded toward zero:
// tensor cores drop low bits too, though not the same ones.
struct Mma : Post {
    float* d;
    const u32 *a, *b;
    Mma(float* d_, const u32* a_, const u32* b_) : Post{answer}, d(d_), a(a_), b(b_) {}
    static void answer(Post** lanes, unsigned) {
        float a[16][16], b[16][8];
        for (int lane = 0; lane < WARP; lane++) {
            const auto* const mine = static_cast<const Mma*>(lanes[lane]);
            const int r = lane / 4, c = 2 * (lane % 4);
            for (int i = 0; i < 2; i++) {
                for (int n = 0; n < 4; n++) a[r + 8 * (n % 2)][c + 8 * (n / 2) + i] = bf16_at(mine->a[n], i);
                for (int n = 0; n < 2; n++) b[c + 8 * n + i][r] = bf16_at(mine->b[n], i);
            }
        }
        for (int lane = 0; lane < WARP; lane++)
            for (int i = 0; i < 4; i++) {
                const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
                float& d = static_cast<Mma*>(lanes[lane])->d[i];
                double sum = d;
                for (int n = 0; n < 16; n++) sum += static_cast<double>(a[row][n]) * b[n][column];
                d = static_cast<float>(sum);
                if (std::isfinite(d) && std::fabs(static_cast<double>(d)) > std::fabs(sum)) d = std::nextafter(d, 0.f);
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

}  // namespace host

inline void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, HOST_PLACE) {
    const u32 b[2] = {b0, b1};
    host::Mma post(d, a, b);
    host::meet_warp(~0u, post, where);
}

inline u32 transpose_8x8(u32 x, HOST_PLACE) {
    host::Transpose post(x);
    host::meet_warp(~0u, post, where);
    return post.y;
}

inline void copy_async_16(void* shared, const void* global) { host::copy_later(shared, global, 16); }
inline void copy_async_4(void* shared, const void* global) { host::copy_later(shared, global, 4); }
inline void prefetch_line(const void*) {}
inline void copy_async_commit() { host::current->batch++; }
template <int PENDING> inline void copy_async_wait() { host::land_copies(PENDING); }

// As before sm_90: every thread copies, and waits for, its own pieces.
struct Arrival {
    void init() {}
    void expect(int) {}
    template <int PENDING> void wait(int) { copy_async_wait<PENDING>(); }
};
inline void copy_rows(void* shared, const void* global, int rows, int bytes, int stride, Arrival&) {
    for (int row = 0; row < rows; row++)
        for (int i = 16 * host::lane() + row * stride; i < row * stride + bytes; i += 512)
            copy_async_16(static_cast<char*>(shared) + i, static_cast<const char*>(global) + i);
}

inline void copy_pieces(char* shared, const void* global, int bytes, Arrival&) {
    for (int i = 0; i < bytes; i += 16) copy_async_16(shared + i, static_cast<const char*>(global) + i);
}

inline u16 float_to_bf16(float x) {
    const u32 bits = __float_as_uint(x);
    return x != x ? 0x7fff : static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
inline float half_to_float(u16 x) {
    _Float16 half;
    std::memcpy(&half, &x, 2);
    return static_cast<float>(half);
}
inline u16 float_to_half(float x) {
    const _Float16 half = static_cast<_Float16>(x);
    u16 bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}
