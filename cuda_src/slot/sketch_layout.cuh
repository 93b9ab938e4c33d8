// Layout of a slot's sketches in global memory. The heads are packed one after the other, each at its own rank G:
//
//     U (G, V)  |  B~ (p, K)  F (G, p)  w (G)     map in factors (lowrank), p = min(G, PIVOTS)
//     U (G, V)  |  C (G, K)                       dense map of this state (ridge)
//
// and in codes (slot/codes.cuh), with scales in float32 for columns g of U and for pivots:
//
//     U (G, V)  |  B~ (p, K)  |  scale (G)  pivots' scale (p)  F (G, p)  w (G)
//     Q (G, V)  |  B (G, K)   |  scale (G)        split form: C = W^T B and Q = U W^T, with W of map/dense.cuh
//
// A residual (slot/residual.cuh) follows at the next multiple of 16 bytes. All are padded to a multiple of ALIGN bytes:
// reads that copy whole memory lines are faster. Rows of U are swizzled like values (slot/ring.cuh).
//
// B~ = B - Pi Diag(w) L, with the paper's B = S Q / sqrt(mu). With B~, the map needs no L:
// C x = w z + F (B~^T x), z = Pi^T x.
//
// The map subspace is stored as a dense map: C is the adapted basis B. Reads know it as DENSE, flushes as SUBSPACE.
//
// With -D SHADOW a slot begins with the shadows of the full-state heads: their states (V, K) in bf16, which reads use.
//
// `heads[h]` is {rank (0 for a full-state head), offset in a slot, offset of its projection (G, K), offset of its
// basis in fragments}; with the map subspace, the residual's bits take the place of the projection.
// `order` lists the full-state heads, then the sketched ones.
//
// -D RESIDUAL: bit b is set if some head has a residual of b bits. Without it no head has one.
#pragma once
#include "lib/common.cuh"

#ifndef RESIDUAL
#define RESIDUAL 0
#endif
#ifndef SHADOW
#define SHADOW 0
#endif
static_assert(!SHADOW || STATE == FP32, "a state of 16 bits is as small as its shadow");
constexpr int MAX_BITS = RESIDUAL & 8 ? 3 : RESIDUAL & 4 ? 2 : RESIDUAL & 2 ? 1 : 0;

typedef Element<SKETCH>::type sketch_t;
constexpr bool CODED = SKETCH == INT8;
constexpr int SMALL = CODED ? FP32 : SKETCH;  // type of F and w
typedef Element<SMALL>::type small_t;
typedef Element<CODED ? BF16 : SKETCH>::type projection_t;
static_assert(PIVOTS <= KERNEL_PIVOTS, "PIVOTS_2 covers them");
constexpr int PIVOTS_2 = PIVOTS <= 1 ? 1 : PIVOTS <= 2 ? 2 : PIVOTS <= 4 ? 4 : 8;  // the next power of two

constexpr bool MAP_IN_ROWS = MAP == DENSE || MAP == SUBSPACE;
DEVICE int pivots_of(int rank) { return MAP != FACTORS ? 0 : rank < PIVOTS ? rank : PIVOTS; }

// Elements of a head's sketch and map, without padding.
DEVICE constexpr int factor_elements(int rank) {
    constexpr int EACH = sizeof(small_t) / sizeof(sketch_t);
    const int p = rank < PIVOTS ? rank : PIVOTS;
    const int small = (MAP == FACTORS ? rank * p + rank : 0) + (CODED ? rank + (MAP == FACTORS ? p : 0) : 0);
    const int map = MAP == FACTORS ? p * K : MAP_IN_ROWS ? rank * K : 0;
    return rank * V + map + small * EACH;
}
DEVICE constexpr int round_up(int x, int unit) { return (x + unit - 1) / unit * unit; }
// Where a head's residual begins, in bytes.
DEVICE constexpr int residual_at(int rank) {
    return round_up(factor_elements(rank) * static_cast<int>(sizeof(sketch_t)), 16);
}
// Bytes of a residual's codes: 32 lanes' words for every block of 16 rows (slot/residual.cuh).
DEVICE constexpr int code_bytes(int bits) {
    constexpr int WIDE = (K / 8 + 3) / 4, NARROW = (K / 8 + 7) / 8;  // words of codes of 2 bits, and of 1 bit
    return V / 16 * 128 * ((bits > 1 ? WIDE : 0) + (bits != 2 ? NARROW : 0));
}
// Elements of a head's sketch in a slot, padded; 0 for a full-state head.
DEVICE constexpr int sketch_elements(int rank, int bits) {
    constexpr int SIZE = sizeof(sketch_t);
    const int bytes = bits ? residual_at(rank) + code_bytes(bits) + 2 * (V + K) : factor_elements(rank) * SIZE;
    return round_up(bytes, ALIGN) / SIZE;
}

// Parts of a packed head behind U and the map's rows. Scales are factors of the numbers that `widen_codes` returns.
template <class T> struct SmallPart {
    T *scale, *pivot_scale, *f, *w;

    template <class P> DEVICE SmallPart(P* packed, int rank) {
        const int p = pivots_of(rank);
        scale = reinterpret_cast<T*>(packed + rank * V + (MAP_IN_ROWS ? rank : p) * K);
        pivot_scale = scale + (CODED ? rank : 0), f = pivot_scale + (CODED ? p : 0), w = f + rank * p;
    }
};
