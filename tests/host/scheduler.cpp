// The threads of device.h: fibers, barriers and launches. Compiled once, and linked into every library of kernels.
#include "device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <string>
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

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// Bounds of the section of static shared memory; null in a module without any.
extern char __start_shared_memory[] __attribute__((weak, visibility("hidden")));
extern char __stop_shared_memory[] __attribute__((weak, visibility("hidden")));

namespace host {

#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t STACK = 1 << 20;  // redzones between variables need space
#else
constexpr std::size_t STACK = 1 << 18;
#endif

enum State { READY, AT_WARP, AT_BLOCK, AT_MBARRIER, RETURNED };

struct Fiber {
    uint3 index;
    unsigned number;  // in the block
    State state;
    Place where;
    unsigned mask;
    Post* post;
    const void* mbarrier;  // at which it waits
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
// One set for all libraries of the process, kept between launches: an inline variable that is visible is one object.
// A set for every library would be more mappings than a process may have.
__attribute__((visibility("default"))) inline char* stacks[MAX_THREADS];
static Fiber* current = &outside;
unsigned threads, thread_number;
static unsigned returned, waiting[MAX_THREADS / WARP];  // lanes of a warp that wait for others
static unsigned at_block, votes, outcome;  // of the current barrier; `outcome`: votes at the last one
struct NamedBarrier {
    unsigned arrived, phases;
    Place place;  // where the first thread waits
};
static NamedBarrier named[16];
static bool is_named(const void* barrier) { return barrier >= named && barrier < named + 16; }
static std::vector<Fiber*> ready;
static std::uint64_t chance;  // state of the random order; 0: warp after warp
static bool fair;             // all runnable threads are equally likely; otherwise one warp runs as far as it can
static std::string failure;
char* dynamic_shared;
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
static void resume(Fiber* to) {
    Fiber* const from = current;
    if (to == from) return;
    current = to;
    threadIdx = to->index, thread_number = to->number;
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

static std::string describe(const Place& where) {
    return std::string(where.file_name()) + ":" + std::to_string(where.line()) + ":" + std::to_string(where.column());
}

[[noreturn]] static void fail(const std::string& what) {
    char at[128];
    std::snprintf(at, sizeof at, "block (%u, %u, %u), thread (%u, %u, %u): ", blockIdx.x, blockIdx.y, blockIdx.z,
                  threadIdx.x, threadIdx.y, threadIdx.z);
    failure = at + what;
    resume(&outside);
    std::abort();
}

void fail(const char* what) { fail(std::string(what)); }
void fail(const char* what, const Place& where) { fail(what + (", at " + describe(where))); }

static bool same_place(const Place& a, const Place& b) {
    return a.line() == b.line() && a.column() == b.column() &&
           (a.file_name() == b.file_name() || !std::strcmp(a.file_name(), b.file_name()));
}

// Describes where threads wait when none can run.
static std::string describe_deadlock() {
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
static unsigned draw(std::size_t n) {
    if (!chance) return n - 1;
    chance ^= chance << 13, chance ^= chance >> 7, chance ^= chance << 17;
    return (chance >> 16) % n;
}

// The next fiber that can run; the caller is not among them.
static void run_another() {
    if (returned == threads) resume(&outside);
    if (ready.empty()) fail(describe_deadlock());
    if (fair) std::swap(ready[draw(ready.size())], ready.back());
    Fiber* const next = ready.back();
    ready.pop_back();
    resume(next);
}

// Pushes lanes on the stack of runnable fibers, in order or in random order.
static void wake(Fiber* lanes, unsigned mask) {
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

static void wake_block() {
    unsigned warps[MAX_THREADS / WARP], n = (threads + WARP - 1) / WARP;
    for (unsigned i = 0; i < n; i++) warps[i] = i;
    for (; n; n--) {
        std::swap(warps[draw(n)], warps[n - 1]);
        const unsigned first = warps[n - 1] * WARP, lanes = std::min(threads - first, unsigned(WARP));
        wake(fibers + first, ~0u >> (WARP - lanes));
    }
}

unsigned meet_block(bool vote, const Place& where) {
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

void meet_warp(unsigned mask, Post& post, const Place& where) {
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

void wait_at(const void* mbarrier, const Place& where) {
    current->state = AT_MBARRIER, current->where = where, current->mask = 0, current->mbarrier = mbarrier;
    run_another();
}
void open(const void* mbarrier) {
    for (unsigned first = 0; first < threads; first += WARP) {
        unsigned mask = 0;
        for (unsigned i = first; i < std::min(threads, first + WARP); i++)
            if (fibers[i].state == AT_MBARRIER && fibers[i].mbarrier == mbarrier) mask |= 1u << (i - first);
        wake(fibers + first, mask);
    }
}

void named_barrier_sync(int number, unsigned count, const Place& where) {
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

// First function of every fiber.
static void enter() {
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom;
    std::size_t size;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
    if (!outside.bottom) outside.bottom = bottom, outside.size = size;
#endif
    call(arguments);
    if (awaits_sends()) fail("a thread ends before what it sent has been read");
    current->state = RETURNED;
    returned++;
    run_another();
    std::abort();
}

static void prepare(Fiber& f, unsigned number) {
    f.number = number;
    f.index = {number % blockDim.x, number / blockDim.x % blockDim.y, number / blockDim.x / blockDim.y};
    char*& stack = stacks[number];
    if (!stack) {  // the page below faults, which reports overflows
        stack = static_cast<char*>(mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (stack == MAP_FAILED || mprotect(stack, 4096, PROT_NONE)) std::abort();
    }
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack + 4096, STACK - 4096);  // frames that an earlier failure left there
    f.bottom = stack, f.size = STACK, f.fake_stack = nullptr;
#endif
#if defined(__x86_64__)
    void** top = reinterpret_cast<void**>(stack + STACK) - 1;
    *top = nullptr;                              // where enter() would return to; it never does
    *--top = reinterpret_cast<void*>(&enter);
    f.resume = top - 6;                          // six registers, of any values
#else
    getcontext(&f.resume);
    f.resume.uc_stack.ss_sp = stack, f.resume.uc_stack.ss_size = STACK;
    makecontext(&f.resume, enter, 0);
#endif
}

// A loop without instrumentation in place of memset, as there are redzones between the section's variables.
__attribute__((no_sanitize("address"))) static void poison_static() {
    for (volatile char* p = __start_shared_memory; p != __stop_shared_memory; p++) *p = static_cast<char>(POISON);
}

static void run_block(std::size_t shared_bytes) {
    if (__start_shared_memory) poison_static();
    std::memset(dynamic_shared, POISON, shared_bytes);
    returned = at_block = votes = 0;
    for (NamedBarrier& barrier : named) barrier.arrived = 0;
    std::memset(waiting, 0, sizeof waiting);
    ready.clear(), forget_copies();
    for (unsigned i = 0; i < threads; i++) prepare(fibers[i], i);
    wake_block();
    run_another();
}

const char* launch(const char* name, void (*kernel)(void**), const Launch& l) {
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
    std::free(dynamic_shared);
    if (failure.empty()) return nullptr;
    failure = std::string(name) + ", " + failure;
    return failure.c_str();
}

const char* signature(std::initializer_list<Parameter> parameters) {
    std::string text;
    for (const Parameter& p : parameters) text += std::string(p.access) + p.kind + std::to_string(p.size) + ";";
    return strdup(text.c_str());
}

}  // namespace host
