// Asynchronous copies of device.h. Compiled once, and linked into every library of kernels.
#include "device.h"

#include <map>
#include <string>
#include <vector>

namespace host {

namespace {
struct Copy {
    void* to;
    const void* from;
    std::size_t bytes, batch;

    void land() const { std::memcpy(to, from, bytes); }
};
struct ThreadCopies {
    std::vector<Copy> pending;  // copies that have not landed, oldest first
    std::size_t batch = 0;      // of the next copy
    std::vector<Copy> sent;     // from shared to global memory, not waited for
};
ThreadCopies of_threads[MAX_THREADS];
std::map<const void*, std::vector<Copy>> copies_of;  // by the object that counts them

bool is_aligned(const void* to, const void* from, std::size_t bytes) {
    return (reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from)) % bytes == 0;
}
}  // namespace

void forget_copies() {
    for (unsigned i = 0; i < threads; i++) {
        ThreadCopies& copies = of_threads[i];
        copies.pending.clear(), copies.sent.clear();
        copies.batch = 0;
    }
    copies_of.clear();
}
bool awaits_sends() { return !of_threads[thread_number].sent.empty(); }

void copy_later(void* to, const void* from, std::size_t bytes) {
    if (!is_aligned(to, from, bytes))
        fail(("an asynchronous copy of " + std::to_string(bytes) + " bytes is not aligned to its size").c_str());
    ThreadCopies& copies = of_threads[thread_number];
    copies.pending.push_back({to, from, bytes, copies.batch});
    std::memset(to, POISON, bytes);
}
void commit_copies() { of_threads[thread_number].batch++; }
void land_copies(std::size_t pending) {
    ThreadCopies& copies = of_threads[thread_number];
    auto copy = copies.pending.begin();
    for (; copy != copies.pending.end() && copy->batch + pending < copies.batch; copy++) copy->land();
    copies.pending.erase(copies.pending.begin(), copy);
}

void copy_for(const void* to_whom, void* to, const void* from, std::size_t bytes) {
    if (!is_aligned(to, from, 16)) fail("a bulk copy is not aligned to 16 bytes");
    copies_of[to_whom].push_back({to, from, bytes, 0});
    std::memset(to, POISON, bytes);
}
void land(const void* to_whom) {
    for (const Copy& copy : copies_of[to_whom]) copy.land();
    copies_of[to_whom].clear();
}

void send_later(void* to, const void* from, std::size_t bytes) {
    of_threads[thread_number].sent.push_back({to, from, bytes, 0});
}
void finish_sends() {
    std::vector<Copy>& sent = of_threads[thread_number].sent;
    for (const Copy& copy : sent) copy.land();
    sent.clear();
}

}  // namespace host
