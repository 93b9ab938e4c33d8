// CUDA C++ for g++: the part of the language and its library that the kernels of cuda_src/ use, on one CPU thread.
//
// Every CUDA thread of a block is a fiber: a stack and an address to resume at. A fiber runs until it needs other
// threads (a barrier or a warp operation), and then another fiber runs. The blocks of a grid run one after the other.
// README.md describes what this shows and what it cannot show.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <source_location>
#include <string>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

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

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;

// Bounds of the section of static shared memory; null in a module without any.
extern char __start_shared_memory[] __attribute__((weak, visibility("hidden")));
extern char __stop_shared_memory[] __attribute__((weak, visibility("hidden")));

namespace host {

constexpr int WARP = 32, MAX_THREADS = 1024;
constexpr unsigned char POISON = 0xff;  // NaN in every floating-point type, -1 as an integer
#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t STACK = 1 << 20;  // redzones between variables need space
#else
constexpr std::size_t STACK = 1 << 18;
#endif

using Place = std::source_location;

// A thread's operand of a warp operation; `finish` does the operation for all lanes of the mask.
struct Post {
    void (*finish)(Post** lanes, unsigned mask);
};

enum State { READY, AT_WARP, AT_BLOCK, AT_MBARRIER, RETURNED };

struct Fiber {
    uint3 index;
    unsigned number;  // in the block
    State state;
    Place where;
    unsigned mask;
    Post* post;
    const void* mbarrier;  // at which it waits
    struct Copy { void* to; const void* from; std::size_t bytes, batch; };
    std::vector<Copy> copies;  // asynchronous ones that have not landed, oldest first
    std::size_t batch;         // of the next copy
    std::vector<Copy> sent;    // from shared to global memory, not waited for
    char* stack;
#if defined(__x86_64__)
    void* resume;
#else
    ucontext_t resume;
#endif
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack;
    const void* bottom;
    std::size_t size;
#endif
};

static Fiber fibers[MAX_THREADS], outside;  // `outside` is the caller's own stack
static Fiber* current = &outside;
static unsigned threads, returned, waiting[MAX_THREADS / WARP];  // lanes of a warp that wait for others
static unsigned at_block, votes, outcome;  // of the current barrier; `outcome`: votes at the last one
struct NamedBarrier {
    unsigned arrived, phases;
    Place place;  // where the first thread waits
};
static NamedBarrier named[16];
inline bool is_named(const void* barrier) { return barrier >= named && barrier < named + 16; }
static std::vector<Fiber*> ready;
static std::uint64_t chance;  // state of the random order; 0: warp after warp
static bool fair;             // all runnable threads are equally likely; otherwise one warp runs as far as it can
static std::string failure;
static char* dynamic_shared;
// Copies that a warp requests and any thread can wait for, by the object that counts them.
static std::map<const void*, std::vector<Fiber::Copy>> copies_of;
static void (*call)(void** arguments);
static void** arguments;

#if defined(__x86_64__)
extern "C" void sketchssm_host_switch(void** from, void* to) __attribute__((visibility("hidden")));
asm(R"(
.text
.type sketchssm_host_switch, @function
sketchssm_host_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
.size sketchssm_host_switch, . - sketchssm_host_switch
)");
#endif

// Switches to another fiber; returns when a fiber switches back.
inline void resume(Fiber* to) {
    Fiber* const from = current;
    if (to == from) return;
    current = to;
    threadIdx = to->index;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(from->state == RETURNED ? nullptr : &from->fake_stack, to->bottom, to->size);
#endif
#if defined(__x86_64__)
    sketchssm_host_switch(&from->resume, to->resume);
#else
    swapcontext(&from->resume, &to->resume);
#endif
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom;
    std::size_t size;
    __sanitizer_finish_switch_fiber(from->fake_stack, &bottom, &size);
#endif
}

// Aborts the launch; the fibers are abandoned.
[[noreturn]] inline void fail(const std::string& what) {
    char at[128];
    std::snprintf(at, sizeof at, "block (%u, %u, %u), thread (%u, %u, %u): ", blockIdx.x, blockIdx.y, blockIdx.z,
                  threadIdx.x, threadIdx.y, threadIdx.z);
    failure = at + what;
    resume(&outside);
    std::abort();
}

inline bool same_place(const Place& a, const Place& b) {
    return a.line() == b.line() && a.column() == b.column() &&
           (a.file_name() == b.file_name() || !std::strcmp(a.file_name(), b.file_name()));
}

inline std::string describe(const Place& where) {
    return std::string(where.file_name()) + ":" + std::to_string(where.line()) + ":" + std::to_string(where.column());
}

// Describes where threads wait when none can run.
inline std::string describe_deadlock() {
    std::string text = "threads wait for each other, as not all of them come to the same barrier or warp operation:";
    for (unsigned first = 0, last; first < threads; first = last + 1) {
        const Fiber& f = fibers[first];
        auto same = [&](const Fiber& o) {
            return o.state == f.state && (f.state == RETURNED || (o.mask == f.mask && same_place(o.where, f.where)));
        };
        for (last = first; last + 1 < threads && same(fibers[last + 1]);) last++;
        char mask[64];
        std::snprintf(mask, sizeof mask, "a warp operation of lanes %08x", f.mask);
        text += "\n  thread " + std::to_string(first) + (last > first ? " to " + std::to_string(last) : "") + ": " +
                (f.state == RETURNED
                     ? "returned"
                     : (f.state == AT_BLOCK      ? "__syncthreads"
                        : f.state == AT_MBARRIER ? (is_named(f.mbarrier) ? "a named barrier" : "an mbarrier")
                                                 : mask) +
                           (" at " + describe(f.where)));
    }
    return text;
}

// A random number below n; n - 1 where the order is not random.
inline unsigned draw(std::size_t n) {
    if (!chance) return n - 1;
    chance ^= chance << 13, chance ^= chance >> 7, chance ^= chance << 17;
    return (chance >> 16) % n;
}

// The next fiber that can run; the caller is not among them.
inline void run_another() {
    if (returned == threads) resume(&outside);
    if (ready.empty()) fail(describe_deadlock());
    if (fair) std::swap(ready[draw(ready.size())], ready.back());
    Fiber* const next = ready.back();
    ready.pop_back();
    resume(next);
}

// Pushes lanes on the stack of runnable fibers, in order or in random order.
inline void wake(Fiber* lanes, unsigned mask) {
    Fiber* awake[WARP];
    unsigned n = 0;
    for (int i = 0; i < WARP; i++)
        if (mask >> i & 1) awake[n++] = lanes + i;
    for (; n; n--) {
        std::swap(awake[draw(n)], awake[n - 1]);
        awake[n - 1]->state = READY;
        ready.push_back(awake[n - 1]);
    }
}

inline void wake_block() {
    unsigned warps[MAX_THREADS / WARP], n = (threads + WARP - 1) / WARP;
    for (unsigned i = 0; i < n; i++) warps[i] = i;
    for (; n; n--) {
        std::swap(warps[draw(n)], warps[n - 1]);
        const unsigned first = warps[n - 1] * WARP, lanes = std::min(threads - first, unsigned(WARP));
        wake(fibers + first, ~0u >> (WARP - lanes));
    }
}

// A barrier of all threads of the block, at one place of the source. Returns the number of yes votes.
inline unsigned meet_block(bool vote, const Place& where) {
    Fiber& me = *current;
    me.state = AT_BLOCK, me.where = where, me.mask = 0;
    votes += vote;
    if (++at_block == threads) {
        for (unsigned i = 0; i < threads; i++)
            if (!same_place(fibers[i].where, where)) fail(describe_deadlock());
        outcome = votes, at_block = votes = 0;
        wake_block();
    }
    run_another();
    return outcome;
}

// An operation of the lanes of a mask. The last lane to arrive does it for all.
inline void meet_warp(unsigned mask, Post& post, const Place& where) {
    Fiber& me = *current;
    const unsigned lane = me.number % WARP, warp = me.number / WARP;
    Fiber* const lanes = fibers + warp * WARP;
    if (!(mask >> lane & 1)) fail("a lane is not in its own mask, at " + describe(where));
    if (warp * WARP + WARP > threads && mask >> (threads - warp * WARP))
        fail("a mask names lanes that the block does not have, at " + describe(where));
    me.state = AT_WARP, me.where = where, me.mask = mask, me.post = &post;
    waiting[warp] |= 1u << lane;
    bool complete = (waiting[warp] & mask) == mask;
    for (int i = 0; complete && i < WARP; i++)
        if (mask >> i & 1)
            complete =
                lanes[i].mask == mask && lanes[i].post->finish == post.finish && same_place(lanes[i].where, where);
    if (complete) {
        Post* posts[WARP] = {};
        for (int i = 0; i < WARP; i++)
            if (mask >> i & 1) posts[i] = lanes[i].post;
        waiting[warp] &= ~mask;
        post.finish(posts, mask);
        wake(lanes, mask);
    }
    run_another();
}

// Waits until an mbarrier is opened.
inline void wait_at(const void* mbarrier, const Place& where) {
    current->state = AT_MBARRIER, current->where = where, current->mask = 0, current->mbarrier = mbarrier;
    run_another();
}
inline void open(const void* mbarrier) {
    for (unsigned first = 0; first < threads; first += WARP) {
        unsigned mask = 0;
        for (unsigned i = first; i < std::min(threads, first + WARP); i++)
            if (fibers[i].state == AT_MBARRIER && fibers[i].mbarrier == mbarrier) mask |= 1u << (i - first);
        wake(fibers + first, mask);
    }
}

// A barrier of `count` threads, at one place of the source.
inline void named_barrier_sync(int number, unsigned count, const Place& where) {
    NamedBarrier& barrier = named[number];
    if (barrier.arrived == 0) barrier.place = where;
    if (!same_place(barrier.place, where))
        fail("a named barrier at " + describe(where) + " while others wait at " + describe(barrier.place));
    if (++barrier.arrived < count) {
        const unsigned round = barrier.phases;
        while (barrier.phases == round) wait_at(&barrier, where);
    } else {
        barrier.arrived = 0, barrier.phases++;
        open(&barrier);
    }
}

// Copies to global memory read their source at the wait: kernels must not change it before.
inline void finish_sends() {
    for (const Fiber::Copy& copy : current->sent) std::memcpy(copy.to, copy.from, copy.bytes);
    current->sent.clear();
}

// First function of every fiber.
inline void enter() {
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom;
    std::size_t size;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
    if (!outside.bottom) outside.bottom = bottom, outside.size = size;
#endif
    call(arguments);
    if (!current->sent.empty()) fail("a thread ends before what it sent has been read");
    current->state = RETURNED;
    returned++;
    run_another();
    std::abort();
}

inline void prepare(Fiber& f, unsigned number) {
    f.number = number;
    f.index = {number % blockDim.x, number / blockDim.x % blockDim.y, number / blockDim.x / blockDim.y};
    f.copies.clear(), f.sent.clear();
    f.batch = 0;
    if (!f.stack) {  // the page below faults, which reports overflows
        f.stack = static_cast<char*>(mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (f.stack == MAP_FAILED || mprotect(f.stack, 4096, PROT_NONE)) std::abort();
    }
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(f.stack + 4096, STACK - 4096);  // frames that an earlier failure left there
    f.bottom = f.stack, f.size = STACK, f.fake_stack = nullptr;
#endif
#if defined(__x86_64__)
    void** top = reinterpret_cast<void**>(f.stack + STACK) - 1;
    *top = nullptr;                              // where enter() would return to; it never does
    *--top = reinterpret_cast<void*>(&enter);
    f.resume = top - 6;                          // six registers, of any values
#else
    getcontext(&f.resume);
    f.resume.uc_stack.ss_sp = f.stack, f.resume.uc_stack.ss_size = STACK;
    makecontext(&f.resume, enter, 0);
#endif
}

// A loop without instrumentation in place of memset, as there are redzones between the section's variables.
__attribute__((no_sanitize("address"))) inline void poison_static() {
    for (volatile char* p = __start_shared_memory; p != __stop_shared_memory; p++) *p = static_cast<char>(POISON);
}

struct Launch {
    unsigned grid[3], block[3];
    std::uint64_t shared_bytes, seed;
    void** arguments;
};

inline void run_block(std::size_t shared_bytes) {
    if (__start_shared_memory) poison_static();
    std::memset(dynamic_shared, POISON, shared_bytes);
    returned = at_block = votes = 0;
    for (NamedBarrier& barrier : named) barrier.arrived = 0;
    std::memset(waiting, 0, sizeof waiting);
    ready.clear(), copies_of.clear();
    for (unsigned i = 0; i < threads; i++) prepare(fibers[i], i);
    wake_block();
    run_another();
}

// Runs a grid; returns an error message or null.
inline const char* launch(const char* name, void (*kernel)(void**), const Launch& l) {
    const unsigned *g = l.grid, *b = l.block;
    gridDim = {g[0], g[1], g[2]}, blockDim = {b[0], b[1], b[2]};
    threads = b[0] * b[1] * b[2];
    failure.clear();
#if defined(__SANITIZE_ADDRESS__)
    outside.bottom = nullptr;
#endif
    if (threads < 1 || threads > MAX_THREADS) return "a block has 1 to 1024 threads";
    call = kernel, arguments = l.arguments;
    chance = l.seed * 0x9e3779b97f4a7c15u, fair = l.seed & 2;
    dynamic_shared = static_cast<char*>(std::aligned_alloc(128, (l.shared_bytes + 128) / 128 * 128));
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(dynamic_shared + l.shared_bytes, (l.shared_bytes + 128) / 128 * 128 - l.shared_bytes);
#endif
#if defined(__x86_64__)
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040);  // CuPy compiles with -ftz=true
#endif
    const std::uint64_t blocks = std::uint64_t(g[0]) * g[1] * g[2];
    for (std::uint64_t n = 0; n < blocks && failure.empty(); n++) {
        const std::uint64_t at = l.seed & 1 ? blocks - 1 - n : n;
        blockIdx = {unsigned(at % g[0]), unsigned(at / g[0] % g[1]), unsigned(at / g[0] / g[1])};
        run_block(l.shared_bytes);
    }
#if defined(__x86_64__)
    _mm_setcsr(mode);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(dynamic_shared, (l.shared_bytes + 128) / 128 * 128);
#endif
    for (unsigned i = 0; i < threads && fibers[i].stack;
         i++) {  // many variants' would be more mappings than a process may have
#if defined(__SANITIZE_ADDRESS__)
        __asan_unpoison_memory_region(fibers[i].stack, STACK);
#endif
        munmap(fibers[i].stack, STACK);
        fibers[i].stack = nullptr;
    }
    std::free(dynamic_shared);
    if (failure.empty()) return nullptr;
    failure = std::string(name) + ", " + failure;
    return failure.c_str();
}

// Exports for Python: SKETCHSSM_KERNEL(name) and SKETCHSSM_VARIABLE(name) follow the definitions.
template <class T> std::string code() {
    using E = std::remove_cv_t<std::remove_pointer_t<T>>;
    const char kind = std::is_floating_point_v<E> ? 'f'
                      : std::is_integral_v<E>     ? (std::is_signed_v<E> ? 'i' : 'u')
                                                  : 'V';
    const char* pointer = !std::is_pointer_v<T>                       ? ""
                          : std::is_const_v<std::remove_pointer_t<T>> ? "const "
                                                                      : "mutable ";
    return std::string(pointer) + kind + std::to_string(sizeof(E)) + ";";
}
template <class... A> std::string signature(void (*)(A...)) { return (code<A>() + ... + ""); }
template <class... A, std::size_t... I> void unpack(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<A>*>(args[I])...);
}
template <class... A> void unpack(void (*kernel)(A...), void** args) {
    unpack(kernel, args, std::index_sequence_for<A...>{});
}

#define SKETCHSSM_EXPORT extern "C" __attribute__((visibility("default")))
#define SKETCHSSM_KERNEL(name)                                                                           \
    SKETCHSSM_EXPORT const char* signature_of_##name() {                                                 \
        static const std::string text = host::signature(name);                                           \
        return text.c_str();                                                                             \
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
inline int lane() { return current->number % WARP; }

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
inline unsigned larger(unsigned most, unsigned x, int) { return std::max(most, x); }
inline unsigned ballot(unsigned mask, bool vote, const Place& where) { return joined<add_vote>(mask, vote, where); }
inline void no_answer(Post**, unsigned) {}

// Asynchronous copies land at the wait. Until then their target holds NaN.
inline void copy_later(void* to, const void* from, std::size_t bytes) {
    if ((reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from)) % bytes)
        fail("an asynchronous copy of " + std::to_string(bytes) + " bytes is not aligned to its size");
    current->copies.push_back({to, from, bytes, current->batch});
    std::memset(to, POISON, bytes);
}
inline void land_copies(std::size_t pending) {  // all but the `pending` latest batches and the open one
    std::vector<Fiber::Copy>& copies = current->copies;
    auto copy = copies.begin();
    for (; copy != copies.end() && copy->batch + pending < current->batch; copy++)
        std::memcpy(copy->to, copy->from, copy->bytes);
    copies.erase(copies.begin(), copy);
}

inline void copy_for(const void* to_whom, void* to, const void* from, std::size_t bytes) {
    if ((reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from)) % 16)
        fail("a bulk copy is not aligned to 16 bytes");
    copies_of[to_whom].push_back({to, from, bytes, 0});
    std::memset(to, POISON, bytes);
}
inline void land(const void* to_whom) {
    for (const Fiber::Copy& copy : copies_of[to_whom]) std::memcpy(copy.to, copy.from, copy.bytes);
    copies_of[to_whom].clear();
}

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

inline unsigned __reduce_min_sync(unsigned mask, unsigned x, HOST_PLACE) {
    return ~host::joined<host::larger>(mask, ~x, where);
}
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
    *at = std::max(old, x);
    return old;
}
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

using std::max;
using std::min;
inline float rsqrtf(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
