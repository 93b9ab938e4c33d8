// Layout of a slot's sketches in global memory. The heads are packed one after the other, each at its own rank G:
//
//     U (G, V)  |  B~ (p, K)  F (G, p)  w (G)     map in factors (lowrank, prior), p = min(G, PIVOTS)
//     U (G, V)  |  C (G, K)                       dense map of this state (exact, ridge)
//     U (G, V)                                    shared map (offline)
//
// padded to a multiple of ALIGN bytes: reads that copy whole memory lines are faster. Rows of U are swizzled like
// values (ring.cuh). B~ = B - Pi Diag(w) L, with the paper's B = S Q / sqrt(mu), leaves out what the diagonal part of
// the map already sees, so that C x = w z + F (B~^T x) with z = Pi^T x, and L is not stored.
//
// `heads[h]` is {rank (0 for a dense head), offset in a slot, offset of its projection (G, K), offset of its basis in
// fragments}; `order` lists the dense heads, then the sketched ones.
#pragma once
#include "common.cuh"

enum { FACTORS = 0, OWN = 1, SHARED = 2 };
typedef Element<SKETCH>::type sketch_t;
constexpr int ALIGN = 128;  // as in sketchssm/cuda/layout.py
constexpr int PIVOTS_2 = PIVOTS <= 1 ? 1 : PIVOTS <= 2 ? 2 : PIVOTS <= 4 ? 4 : 8;  // the next power of two

__device__ __forceinline__ int pivots_of(int rank) { return MAP != FACTORS ? 0 : rank < PIVOTS ? rank : PIVOTS; }

// Elements of a head's sketch and map, padded; 0 for a dense head.
__device__ __forceinline__ constexpr int sketch_elements(int rank) {
    constexpr int LINE = ALIGN / static_cast<int>(sizeof(sketch_t));
    const int p = rank < PIVOTS ? rank : PIVOTS;
    return (rank * V + (MAP == FACTORS ? p * K + rank * p + rank : MAP == OWN ? rank * K : 0) + LINE - 1) / LINE * LINE;
}
