// Helpers of all maps: a lane's channels, products of columns of U, sums over groups.
#pragma once
#include "flush/sketch.cuh"

// A pivot is left out if its squared relative residual is at most INDEPENDENT, the square of PIVOT_TOLERANCE
// (sketchssm/reference/maps.py).
constexpr float INDEPENDENT = 9e-6f;
// A pivot is also left out if its square is below SURE times the error of the square. Products of columns have a
// relative error of ROUNDING; earlier small pivots enlarge this error.
constexpr float ROUNDING = 0x1p-22f, SURE = 16;

// Neighbouring channels of row i of S U, summed over groups.
template <int N> DEVICE void sum_parts(const Sums& sums, int i, int channel, float (&x)[N]) {
#pragma unroll
    for (int n = 0; n < N; n++) x[n] = 0;
#pragma unroll
    for (int group = 0; group < SKETCH_GROUPS; group++) {
        Packed<FP32, N> part;
        part.load(sums.at(group, i, channel));
#pragma unroll
        for (int n = 0; n < N; n++) x[n] += part[n];
    }
}

// Products of the first 8 TILES columns with the first 8 RIGHT columns; squares of columns 8 tile + r, in all four
// lanes of r.
template <int TILES, int RIGHT>
DEVICE void multiply_first_columns(const Columns& u, int rank, float (&dots)[RIGHT][4], float (&squares)[TILES]) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    float sum[RIGHT][2][4] = {}, rest[RIGHT][2][4] = {};  // four independent chains
#pragma unroll
    for (float& x : squares) x = 0;
#pragma unroll 2
    for (int step = 0; step < V / 16; step++) {
        float x[2][4] = {};
        LeftOperand columns;
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            if (tile < TILES && 8 * tile + r < rank) load_floats(x[tile], &u.of[8 * tile + r][16 * step + 4 * c]);
            columns.set(tile, x[tile]);
        }
#pragma unroll
        for (int tile = 0; tile < RIGHT; tile++)
#pragma unroll
            for (int n = 0; n < 2; n++)
                columns.multiply<false, false>(n, sum[tile][n], rest[tile][n], x[tile][2 * n], x[tile][2 * n + 1]);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int n = 0; n < 4; n++) squares[tile] += x[tile][n] * x[tile][n];
    }
#pragma unroll
    for (int tile = 0; tile < RIGHT; tile++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            dots[tile][e] = (sum[tile][0][e] + rest[tile][0][e]) + (sum[tile][1][e] + rest[tile][1][e]);
#pragma unroll
    for (float& x : squares) x = group_sum<4>(x);
}
