// Block elimination of dense maps beyond rank 16, by a team of warps: replaces the symmetric matrix A = U^T U / mu +
// ridge I in shared memory by the lower triangular W with A = W^-1 W^-T.
//
// Blocks have 8 rows and 8 columns. All products of blocks are on the tensor cores.
#pragma once
#include "map/sums.cuh"

constexpr int BLOCK = 8;

DEVICE int blocks_of(int rank) { return (rank + BLOCK - 1) / BLOCK; }

// Replaces a diagonal block by the inverse of its Cholesky factor. A lane has one column of the block or of the
// identity, and subtracts the pivot row from the rows below.
DEVICE void invert_block(SketchMemory& m, int first, float ridge) {
    const int lane = threadIdx.x % 32, column = lane % BLOCK;
    float x[BLOCK];
    load_floats(x, &m.gram[first + column][first]);  // the block is symmetric
    if (lane / BLOCK % 2)
#pragma unroll
        for (int i = 0; i < BLOCK; i++) x[i] = i == column ? 1.f : 0.f;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < BLOCK; j++) {
        const float root = rsqrtf(fmaxf(__shfl_sync(ALL, x[j], j), ridge)), own = x[j] * root;
        if (lane / BLOCK == 1) m.gram[first + j][first + column] = own;
#pragma unroll
        for (int i = j + 1; i < BLOCK; i++) x[i] -= __shfl_sync(ALL, x[i], j) * (own * root);
    }
    __syncwarp();
}

// The columns of blocks `column` and `column` + 1 of a row of blocks, as rows of a left operand times `sign`.
DEVICE LeftOperand transposed_blocks(const SketchMemory& m, int row, int column, float sign) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    LeftOperand left;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            left.a[0][half + 2 * e] =
                sign * m.gram[BLOCK * row + c + 4 * e][min(BLOCK * (column + half), RANKS - BLOCK) + r];
    return left;
}

// Replaces the blocks on and below the diagonal by W. Step b is about row b of blocks: blocks before the diagonal
// belong to W, blocks behind the diagonal to the matrix.
//
// 1. The first warp inverts the Cholesky factor of diagonal block b.
// 2. The other blocks of the row are multiplied by this inverse.
// 3. Products of the row with itself are subtracted from the rows of blocks below. In these rows, blocks of the matrix
//    begin on the diagonal, because the matrix is symmetric.
//
// By the whole team. The caller calls team.sync() before; the last step ends with a team.sync().
template <int SIZE> DEVICE void eliminate(const Team<SIZE>& team, SketchMemory& m, int rank, float ridge) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4, blocks = blocks_of(rank);
#pragma unroll 1
    for (int b = 0; b < blocks; b++) {
        const int row = BLOCK * b;
        if (team.member == 0) invert_block(m, row, ridge);
        team.sync();
        if (blocks == 1) return;
        const float inverse[2] = {m.gram[row + r][row + c], m.gram[row + r][row + c + 4]};
#pragma unroll 1
        for (int j = 2 * team.member; j < blocks; j += 2 * SIZE) {
            const LeftOperand left = transposed_blocks(m, b, j, 1.f);
            float sum[4] = {}, rest[4] = {};
            left.multiply<false, false>(0, sum, rest, inverse[0], inverse[1]);
            __syncwarp();
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int column = j + e / 2;
                if (column != b && column < blocks)
                    m.gram[row + 2 * c + e % 2][BLOCK * column + r] = sum[e] + rest[e];
            }
        }
        team.sync();
        int piece = 0;
#pragma unroll 1
        for (int i = b + 1; i < blocks; i += 2)
#pragma unroll 1
            for (int n = i; n <= blocks + b; n++) {
                // The first warp has only the first piece, which contains the next diagonal block, and then inverts
                // this block.
                const int owner = SIZE == 1 || piece == 0 ? 0 : 1 + (piece - 1) % (SIZE - 1 + (SIZE == 1));
                piece++;
                if (owner != team.member) continue;
                const int j = n < blocks ? n : n - blocks;
                const LeftOperand left = transposed_blocks(m, b, i, -1.f);
                float sum[4] = {}, rest[4] = {};
                auto at = [&](int half) {
                    return reinterpret_cast<float2*>(&m.gram[BLOCK * (i + half) + r][BLOCK * j + 2 * c]);
                };
                auto exists = [&](int half) { return i + half < blocks; };
#pragma unroll
                for (int half = 0; half < 2; half++)
                    if (j != b && exists(half)) {
                        const float2 x = *at(half);
                        sum[2 * half] = x.x, sum[2 * half + 1] = x.y;
                    }
                left.multiply<false, false>(0, sum, rest, m.gram[row + c][BLOCK * j + r],
                                            m.gram[row + c + 4][BLOCK * j + r]);
                __syncwarp();
#pragma unroll
                for (int half = 0; half < 2; half++)
                    if (exists(half))
                        *at(half) = make_float2(sum[2 * half] + rest[2 * half], sum[2 * half + 1] + rest[2 * half + 1]);
            }
        __syncwarp();
    }
}
