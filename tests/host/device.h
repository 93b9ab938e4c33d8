// CUDA C++ for g++: the part of the language and its library that the kernels of cuda_src/ use, on one CPU thread.
//
// Every CUDA thread of a block is a fiber: a stack and an address to resume at. A fiber runs until it needs other
// threads (a barrier or a warp operation), and then another fiber runs. The blocks of a grid run one after the other.
// README.md describes what this shows and what it cannot show.
//
// Every library of kernels includes this file, so it takes few headers of C++; scheduler.cpp has the threads, copies.cpp
// the asynchronous copies.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <source_location>
#include <type_traits>
#include <utility>

#pragma GCC visibility push(hidden)  // every library has its own scheduler

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
// One copy is enough, as blocks take turns. The section is filled with NaN before each block.
#define __shared__ static __attribute__((section("shared_memory")))

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace host {

constexpr int WARP = 32, MAX_THREADS = 1024;  // MAX_THREADS: of a block
constexpr unsigned char POISON = 0xff;  // NaN in every floating-point type, -1 as an integer

using Place = std::source_location;

// A thread's operand of a warp operation; `finish` does the operation for all lanes of the mask.
struct Post {
    void (*finish)(Post** lanes, unsigned mask);
};

extern unsigned threads, thread_number;  // of the block, and the running one of them
extern char* dynamic_shared;

// Aborts the launch; the fibers are abandoned.
[[noreturn]] void fail(const char* what);
[[noreturn]] void fail(const char* what, const Place& where);

// A barrier of all threads of the block, at one place of the source. Returns the number of yes votes.
unsigned meet_block(bool vote, const Place& where);
// An operation of the lanes of a mask. The last lane to arrive does it for all.
void meet_warp(unsigned mask, Post& post, const Place& where);
// Waits until an mbarrier is opened.
void wait_at(const void* mbarrier, const Place& where);
void open(const void* mbarrier);
// A barrier of `count` threads, at one place of the source.
void named_barrier_sync(int number, unsigned count, const Place& where);

// Asynchronous copies land at the wait. Until then their target holds NaN.
void copy_later(void* to, const void* from, std::size_t bytes);
void commit_copies();
void land_copies(std::size_t pending);  // all but the `pending` latest batches and the open one
// Copies that a warp requests and any thread can wait for, by the object that counts them.
void copy_for(const void* to_whom, void* to, const void* from, std::size_t bytes);
void land(const void* to_whom);
// Copies to global memory read their source at the wait: kernels must not change it before.
void send_later(void* to, const void* from, std::size_t bytes);
void finish_sends();
// For scheduler.cpp: forgets the copies of the previous block; whether the running thread has sends to wait for.
void forget_copies();
bool awaits_sends();

struct Launch {
    unsigned grid[3], block[3];
    std::uint64_t shared_bytes, seed;
    void** arguments;
};
// Runs a grid; returns an error message or null.
const char* launch(const char* name, void (*kernel)(void**), const Launch& l);

// Exports for Python: SKETCHSSM_KERNEL(name) and SKETCHSSM_VARIABLE(name) follow the definitions.
struct Parameter {
    const char* access;  // of a pointer
    char kind;
    std::size_t size;
};
template <class T> Parameter parameter() {
    using E = std::remove_cv_t<std::remove_pointer_t<T>>;
    const char kind = std::is_floating_point_v<E> ? 'f'
                      : std::is_integral_v<E>     ? (std::is_signed_v<E> ? 'i' : 'u')
                                                  : 'V';
    const char* access = !std::is_pointer_v<T>                       ? ""
                         : std::is_const_v<std::remove_pointer_t<T>> ? "const "
                                                                     : "mutable ";
    return {access, kind, sizeof(E)};
}
const char* signature(std::initializer_list<Parameter> parameters);
template <class... A> const char* signature(void (*)(A...)) { return signature({parameter<A>()...}); }
template <class... A, std::size_t... I> void unpack(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<A>*>(args[I])...);
}
template <class... A> void unpack(void (*kernel)(A...), void** args) {
    unpack(kernel, args, std::index_sequence_for<A...>{});
}

#define SKETCHSSM_EXPORT extern "C" __attribute__((visibility("default")))
#define SKETCHSSM_KERNEL(name)                                                                           \
    SKETCHSSM_EXPORT const char* signature_of_##name() {                                                 \
        static const char* const text = host::signature(name);                                           \
        return text;                                                                                     \
    }                                                                                                    \
    SKETCHSSM_EXPORT const char* launch_##name(const host::Launch& l) {                                  \
        return host::launch(#name, [](void** arguments) { host::unpack(name, arguments); }, l);          \
    }

#define SKETCHSSM_VARIABLE(name)                                                \
    SKETCHSSM_EXPORT void* address_of_##name() { return &name; }                \
    SKETCHSSM_EXPORT std::size_t size_of_##name() { return sizeof(name); }

// Warp operations: the operand of a lane, and the function that computes the results of all lanes.
template <class T> struct Shuffle : Post {
    T value, result;
    int source;
    Shuffle(T x, int from) : Post{answer}, value(x), source(from) {}
    static void answer(Post** lanes, unsigned mask) {
        for (int i = 0; i < WARP; i++) {
            if (!(mask >> i & 1)) continue;
            auto* const mine = static_cast<Shuffle*>(lanes[i]);
            if (mask >> mine->source & 1) mine->result = static_cast<Shuffle*>(lanes[mine->source])->value;
            else std::memset(&mine->result, POISON, sizeof(T));  // a lane outside the mask: undefined on the device
        }
    }
};
template <class T> T shuffle_from(unsigned mask, T x, int source, const Place& where) {
    Shuffle<T> post(x, source);
    meet_warp(mask, post, where);
    return post.result;
}
inline int lane() { return thread_number % WARP; }

// Reduces the values of all lanes of the mask: join(result so far, x of a lane, lane).
template <unsigned join(unsigned, unsigned, int)> struct Joined : Post {
    unsigned x, result;
    explicit Joined(unsigned x_) : Post{answer}, x(x_) {}
    static void answer(Post** lanes, unsigned mask) {
        unsigned whole = 0;
        for (int i = 0; i < WARP; i++)
            if (mask >> i & 1) whole = join(whole, static_cast<Joined*>(lanes[i])->x, i);
        for (int i = 0; i < WARP; i++)
            if (mask >> i & 1) static_cast<Joined*>(lanes[i])->result = whole;
    }
};
template <unsigned join(unsigned, unsigned, int)> unsigned joined(unsigned mask, unsigned x, const Place& where) {
    Joined<join> post(x);
    meet_warp(mask, post, where);
    return post.result;
}
inline unsigned add_vote(unsigned votes, unsigned vote, int lane) { return votes | vote << lane; }
inline unsigned larger(unsigned most, unsigned x, int) { return most < x ? x : most; }
inline unsigned ballot(unsigned mask, bool vote, const Place& where) { return joined<add_vote>(mask, vote, where); }
inline void no_answer(Post**, unsigned) {}

}  // namespace host

#define HOST_PLACE const host::Place& where = host::Place::current()

inline void __syncthreads(HOST_PLACE) { host::meet_block(false, where); }
inline int __syncthreads_count(int vote, HOST_PLACE) { return host::meet_block(vote, where); }
inline int __syncthreads_or(int vote, HOST_PLACE) { return host::meet_block(vote, where) != 0; }
inline int __syncthreads_and(int vote, HOST_PLACE) { return host::meet_block(vote, where) == host::threads; }
inline void __syncwarp(unsigned mask = ~0u, HOST_PLACE) {
    host::Post post{host::no_answer};
    host::meet_warp(mask, post, where);
}
template <class T> T __shfl_sync(unsigned mask, T x, int source, int width = 32, HOST_PLACE) {
    return host::shuffle_from(mask, x, (host::lane() & ~(width - 1)) | (source & (width - 1)), where);
}
template <class T> T __shfl_xor_sync(unsigned mask, T x, int bits, int width = 32, HOST_PLACE) {
    const int to = host::lane() ^ bits;
    return host::shuffle_from(mask, x, to / width <= host::lane() / width ? to : host::lane(), where);
}
template <class T> T __shfl_up_sync(unsigned mask, T x, unsigned by, int width = 32, HOST_PLACE) {
    const int to = host::lane() - static_cast<int>(by);
    return host::shuffle_from(mask, x, to >= (host::lane() & ~(width - 1)) ? to : host::lane(), where);
}
template <class T> T __shfl_down_sync(unsigned mask, T x, unsigned by, int width = 32, HOST_PLACE) {
    const int to = host::lane() + static_cast<int>(by);
    return host::shuffle_from(mask, x, to <= (host::lane() | (width - 1)) ? to : host::lane(), where);
}
inline unsigned __ballot_sync(unsigned mask, int vote, HOST_PLACE) { return host::ballot(mask, vote, where); }
inline int __any_sync(unsigned mask, int vote, HOST_PLACE) { return host::ballot(mask, vote, where) != 0; }
inline int __all_sync(unsigned mask, int vote, HOST_PLACE) { return host::ballot(mask, vote, where) == mask; }

inline unsigned __reduce_max_sync(unsigned mask, unsigned x, HOST_PLACE) {
    return host::joined<host::larger>(mask, x, where);
}

// One CPU thread runs everything: plain accesses are atomic, and fences do nothing.
template <class T> T atomicAdd(T* at, std::type_identity_t<T> x) { const T old = *at; *at = old + x; return old; }
inline unsigned atomicInc(unsigned* at, unsigned most) {
    const unsigned old = *at;
    *at = old >= most ? 0 : old + 1;
    return old;
}
template <class T> T atomicMax(T* at, std::type_identity_t<T> x) {
    const T old = *at;
    *at = old < x ? x : old;
    return old;
}
template <class T> T atomicOr(T* at, std::type_identity_t<T> x) { const T old = *at; *at = old | x; return old; }
template <class T> T atomicExch(T* at, std::type_identity_t<T> x) { const T old = *at; *at = x; return old; }
template <class T> T atomicCAS(T* at, std::type_identity_t<T> is, std::type_identity_t<T> x) {
    const T old = *at;
    if (old == is) *at = x;
    return old;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T> T __ldg(const T* at) { return *at; }
template <class T> T __ldcs(const T* at) { return *at; }
template <class T> T __ldcg(const T* at) { return *at; }
template <class T> void __stcs(T* at, std::type_identity_t<T> x) { *at = x; }
template <class T> void __stcg(T* at, std::type_identity_t<T> x) { *at = x; }

inline unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
inline int __float_as_int(float x) { int y; std::memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const std::uint64_t bytes = std::uint64_t(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned choice = selector >> (4 * i), byte = bytes >> (8 * (choice & 7)) & 0xff;
        result |= (choice & 8 ? (byte & 0x80 ? 0xffu : 0) : byte) << (8 * i);
    }
    return result;
}

template <class T> const T& max(const T& a, const T& b) { return a < b ? b : a; }
template <class T> const T& min(const T& a, const T& b) { return b < a ? b : a; }
inline float rsqrtf(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __saturatef(float x) { return x > 0 ? std::fmin(x, 1.f) : 0.f; }
inline float __fmaf_rd(float x, float y, float z) {
    const double sum = static_cast<double>(x) * y + z;
    const float rounded = static_cast<float>(sum);
    return rounded > sum ? std::nextafter(rounded, -INFINITY) : rounded;
}
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }

#pragma GCC visibility pop
