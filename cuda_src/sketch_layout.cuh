// How a slot's sketches lie in memory. All heads of a slot are packed one after the other, each at its own rank G:
//
//     U (G, V)  |  B (p, K)  F (G, p)  w (G)      map stored as factors (lowrank, prior), p = min(G, PIVOTS)
//     U (G, V)  |  C (G, K)                       map of its own (exact, ridge)
//     U (G, V)                                    shared map (offline)
//
// padded to a multiple of ALIGN bytes: reads copy whole lines of the memory, faster than stretches that begin or end inside one. Rows of U
// are turned as those of values are (window.cuh). B is the paper's S Q / sqrt(mu) less what the diagonal part of the map already sees,
// B - Pi Diag(w) L, so that C x = w z + F (B^T x) with z = Pi^T x, and L need not be kept.
//
// `heads[h]` is {rank (0 for a dense head), offset in a slot, offset of its projection (G, K), offset of its basis
// in fragments}; `order` lists the dense heads, then the sketched ones.
#pragma once
#include "common.cuh"

enum { FACTORS = 0, OWN = 1, SHARED = 2 };
typedef Element<SKETCH>::type sketch_t;
constexpr int ALIGN = 128;  // as in sketchssm/cuda/layout.py
constexpr int PIVOTS_2 = PIVOTS <= 1 ? 1 : PIVOTS <= 2 ? 2 : PIVOTS <= 4 ? 4 : 8;  // the next power of two

__device__ __forceinline__ int pivots_of(int rank) { return MAP != FACTORS ? 0 : rank < PIVOTS ? rank : PIVOTS; }

// Elements of a head's sketch with its map, padded; none for a dense head.
__device__ __forceinline__ constexpr int sketch_elements(int rank) {
    constexpr int LINE = ALIGN / static_cast<int>(sizeof(sketch_t));
    const int p = rank < PIVOTS ? rank : PIVOTS;
    return (rank * V + (MAP == FACTORS ? p * K + rank * p + rank : MAP == OWN ? rank * K : 0) + LINE - 1) / LINE * LINE;
}
