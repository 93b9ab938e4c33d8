// The cursor word of a slot, and how calls change the word. sketchssm/layer/slots.py describes the bits;
// sketchssm/reference/engines.py has the same functions in Python.
#pragma once
#include "slot/call_slots.cuh"

// Tokens in the ring. The bound is for the caller's memory in which no window has begun and which may hold any word.
DEVICE int position_of(int word, int window) { return min(word & POSITION, window - 1); }
DEVICE int drafted_of(int word) { return word >> DRAFTED_SHIFT & 15; }

// -D TOLERANCE: requests whose error is above a tolerance are read exactly (slot/errors.cuh). LASTING: the bit of a
// word that says so, and that every call but those that begin a request keeps.
#ifdef TOLERANCE
constexpr int LASTING = EXACT;
#else
constexpr int LASTING = 0;
#endif

// Whether a plain token flushes the row.
DEVICE bool flushes_now(int word, int window) {
    return word & (DUE | LASTING) || position_of(word, window) == window - 1;
}
// The word after a plain token.
DEVICE int after_token(int word, int window) {
    return (word & LASTING) | (flushes_now(word, window) ? 0 : position_of(word, window) + 1);
}
// Whether a row must fold its committed tokens before it drafts `length` tokens.
DEVICE bool folds_before(int word, int length, int window) {
    return word & (DUE | LASTING) || position_of(word, window) + length > window - 1;
}
// The word when a row begins a draft: at position 0 if it folds before.
DEVICE int after_draft(int word, int length, int window) {
    const int position = folds_before(word, length, window) ? 0 : position_of(word, window);
    return (word & LASTING) | position | length << DRAFTED_SHIFT;
}
// The word after a commit.
DEVICE int after_commit(int word, i64 accepted, int window) {
    const int position = position_of(word, window), drafted = min(drafted_of(word), window - 1 - position);
    const int kept = accepted < 0 ? 0 : accepted < drafted ? static_cast<int>(accepted) : drafted;
    return (word & (DUE | EXACT)) + position + kept;
}

// Lengths of a draft call's rows, at most `tokens` each; `rows` null: every row drafts `tokens`.
struct Lengths {
    Numbers rows;
    int tokens;

    DEVICE int of(int row) const {
        if (rows.first == nullptr) return tokens;
        const i64 length = rows.of(row);
        return length < 0 ? 0 : length < tokens ? static_cast<int>(length) : tokens;
    }
};

// The head's clock: the cursor word of a virtual row that takes part in every call. Null: no clock.
struct Clock {
    int* word;

    // The DUE bit of the clock, which all rows of the call take over.
    DEVICE int stroke() const { return word ? *word & DUE : 0; }
    // Advances the clock by a plain token. By one thread.
    DEVICE void tick(int window) const {
        const int next = after_token(*word, window);
        *word = next | (next == window - 1 ? DUE : 0);
    }
    // Advances the clock by a draft of `length` tokens. By one thread.
    DEVICE void draft(int length, int window) const { *word = after_draft(*word, length, window); }
    // Commits the clock's whole draft. If the window has no room for another draft of this length, the clock and the
    // call's rows become due. Returns that DUE bit. By all threads of a block.
    DEVICE int commit(int window) const {
        if (word == nullptr) return 0;
        const int drafted = drafted_of(*word), next = after_commit(*word, drafted, window);
        const int stroke = position_of(next, window) + drafted > window - 1 ? DUE : 0;
        __syncthreads();
        if (threadIdx.x == 0) *word = next | stroke;
        return stroke;
    }
};
