// The sketch U = S^T Phi of an updated state S, and the products S U, from which the coefficient map is computed.
//
// U is a product along K: fragments of the state are operands as stored. S U is a product along V: fragments are
// transposed by 8 x 8 blocks within the warp. Precision: for a bf16 sketch, U takes 11 bits of the state and 8 of the
// basis, and S U takes two bf16 slices of U and 8 bits of the state; for a float32 sketch, two slices of each.
//
// S U is a sum over row blocks, and different warps have different row blocks. Warps that sketch form groups. Each warp
// computes U for its own row blocks and waits until the group's U is complete. Then each warp computes S U for its
// share of the channels, over all row blocks of the group. The result is one sum per group. The epilogue warps add the
// groups' sums and compute the map (map/maps.cuh).
#pragma once
#include "flush/config.cuh"
#include "slot/codes.cuh"

// Releases a warp's row blocks if the group does not meet after S U. The barrier counts GROUP_WARPS arrivals for each
// row block. The owner makes all of them, because an arrival of another warp that is a tile ahead must not count.
template <class Then> DEVICE void release_rows(int member, Then then) {
    if constexpr (RAW_KEYS) {
        then(0);
    } else {
        for (int block = member; block < GROUP_BLOCKS; block += GROUP_WARPS)
            for (int i = 0; i < GROUP_WARPS; i++) then(block);
    }
}

// U of a warp's own row blocks, of at most 8 TILES columns. The group reads U after its barrier.
template <int TILES>
DEVICE void sketch_tiles(Columns& u, const Basis& from, StateStage* rows, int group, int member, int rank) {
    const int lane = threadIdx.x % 32;
    auto block = [&](int i) { return group * GROUP_BLOCKS + member + i * GROUP_WARPS; };
    auto exists = [&](int i) { return GROUP_BLOCKS % GROUP_WARPS == 0 || member + i * GROUP_WARPS < GROUP_BLOCKS; };
    float sum[OWN_BLOCKS][2][4] = {}, rest[OWN_BLOCKS][2][4] = {};
#pragma unroll(OWN_BLOCKS == 1 ? 2 : 1)
    for (int step = 0; step < STEPS; step++) {
        if constexpr (STATE == BF16 && BASIS_SLICES == 1) {
            StoredOperand basis;
#pragma unroll
            for (int tile = 0; tile < 2; tile++)
                basis.set(tile, tile < TILES ? from.columns[tile % TILES][step][0][lane] : make_uint2(0, 0));
#pragma unroll
            for (int i = 0; i < OWN_BLOCKS; i++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    basis.multiply(sum[i][half], StateFragment::words(
                                                     rows[exists(i) ? block(i) : block(0)].state, half, step));
            continue;
        }
        LeftOperand basis;
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            const auto& columns = from.columns[tile % TILES][step];
            if (tile < TILES) basis.set(tile, columns[0][lane]);
            else basis.set(tile, make_uint2(0, 0));
            if constexpr (BASIS_SLICES > 1) {
                LeftOperand more;
                more.set(tile, tile < TILES ? columns[BASIS_SLICES - 1][lane] : make_uint2(0, 0));
#pragma unroll
                for (int j = 0; j < 4; j++) basis.a[j / 2][tile + j % 2 * 2] += more.a[j / 2][tile + j % 2 * 2];
            }
        }
#pragma unroll
        for (int i = 0; i < OWN_BLOCKS; i++) {
            StateFragment fragment;
            fragment.load(rows[exists(i) ? block(i) : block(0)].state, step);
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int j = 0; j < 2; j++)
                    basis.multiply<BASIS_SLICES == 1, BASIS_SLICES == 1 || STATE != FP32>(
                        j, sum[i][half], rest[i][half], fragment.s[half][2 * j], fragment.s[half][2 * j + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < OWN_BLOCKS; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int column = lane / 4 + e / 2 * 8;
                if (e / 2 < TILES && column < rank && exists(i))
                    u.of[column][16 * block(i) + value_at(half, e % 2)] = sum[i][half][e] + rest[i][half][e];
            }
}
DEVICE void sketch_columns(Columns& u, const Basis& basis, StateStage* rows, int group, int member, int rank) {
    if (RANK_MAX > 8 && rank > 8) sketch_tiles<BASIS_TILES>(u, basis, rows, group, member, rank);
    else sketch_tiles<1>(u, basis, rows, group, member, rank);
}

// Stores a row block of U in the packed sketch.
DEVICE void store_columns(const Columns& u, int block, sketch_t* packed, int rank) {
    const int lane = threadIdx.x % 32, row = 16 * block + lane % 8 * 2;
    for (int g = lane / 8; g < rank; g += 4) {
        Packed<SKETCH, 2> pair;
        pair.set({u.of[g][row], u.of[g][row + 1]});
        pair.store(packed + g * V + (row ^ swizzle(g)));
    }
}

// Stores all of U, by one warp.
DEVICE void store_columns(const Columns& u, sketch_t* packed, int rank) {
#pragma unroll 2
    for (int i = threadIdx.x % 32; i < rank * (V / 4); i += 32) {
        const int g = i / (V / 4), row = i % (V / 4) * 4;
        Packed<FP32, 4> x;
        x.load(&u.of[g][row]);
        Packed<SKETCH, 4> rounded;
        rounded.set({x[0], x[1], x[2], x[3]});
        rounded.store(packed + g * V + (row ^ swizzle(g)));
    }
}

// Stores all of U as codes, by one warp. The scales are multiplied by `factor`.
DEVICE void store_column_codes(const Columns& u, sketch_t* packed, int rank, float factor) {
    const SmallPart<float> small(packed, rank);
#pragma unroll 2
    for (int g = 0; g < rank; g++) {
        const float scale = store_column_codes(u.of[g], g, packed);
        if (threadIdx.x % 32 == 0) small.scale[g] = scale * factor;
    }
}

// sums.parts[group] = `count` columns of U, at most 8 TILES, times the group's rows of the state, in the channels of
// warp `member`. For bf16 maps the state is rounded to bf16. All columns are multiplied by the same rounded
// matrix, so the solve does not amplify the rounding.
template <int TILES, class Then>
DEVICE void state_product_tiles(Sums& sums, const Columns& columns, StateStage* rows, int group, int member, int count,
                                Then then) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    // Rows 0 to 7 of the operand are the first slices of 8 columns of U, rows 8 to 15 the second slices: one product
    // for both. The operand's columns 2c + e are value rows value_at(0, e); columns 8 further are value_at(1, e).
    float sum[OWN_STEPS][TILES][2][4] = {};
#pragma unroll 2
    for (int i = group * GROUP_BLOCKS; i < (group + 1) * GROUP_BLOCKS; i++) {
        u32 a[TILES][4];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            u32(&x)[4] = a[tile];
            x[0] = x[1] = x[2] = x[3] = 0;
            if (8 * tile + r < count) {
                const float* const u = &columns.of[8 * tile + r][16 * i + value_at(0, 0)];
                slices<2>(u[0], u[PART_ROWS], &x[0], 1);
                slices<2>(u[PART_ROWS / 2], u[PART_ROWS + PART_ROWS / 2], &x[2], 1);
            }
        }
#pragma unroll
        for (int own = 0; own < OWN_STEPS; own++) {
            const int step = member + own * GROUP_WARPS;
            if (STEPS % GROUP_WARPS && step >= STEPS) break;
            if constexpr (STATE == BF16) {  // exact
                const uint2 upper = StateFragment::words(rows[i].state, 0, step),
                            lower = StateFragment::words(rows[i].state, 1, step);
#pragma unroll
                for (int t = 0; t < 2; t++) {
                    const u32 x = transpose_8x8(t ? upper.y : upper.x), y = transpose_8x8(t ? lower.y : lower.x);
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) mma_bf16(sum[own][tile][t], a[tile], x, y);
                }
                continue;
            }
            StateFragment fragment;
            fragment.load(rows[i].state, step);
#pragma unroll
            for (int t = 0; t < 2; t++) {
                u32 upper[BASIS_SLICES], lower[BASIS_SLICES];
                if constexpr (BASIS_SLICES == 1) {
                    upper[0] = floats_to_bf16(fragment.s[0][2 * t], fragment.s[0][2 * t + 1]);
                    lower[0] = floats_to_bf16(fragment.s[1][2 * t], fragment.s[1][2 * t + 1]);
                } else {
                    slices<BASIS_SLICES>(fragment.s[0][2 * t], fragment.s[0][2 * t + 1], upper, 1);
                    slices<BASIS_SLICES>(fragment.s[1][2 * t], fragment.s[1][2 * t + 1], lower, 1);
                }
#pragma unroll
                for (int j = 0; j < BASIS_SLICES; j++) {
                    const u32 x = transpose_8x8(upper[j]), y = transpose_8x8(lower[j]);
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) mma_bf16(sum[own][tile][t], a[tile], x, y);
                }
            }
        }
        then(i);
    }
#pragma unroll
    for (int own = 0; own < OWN_STEPS; own++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int step = member + own * GROUP_WARPS;
            const float(&x)[2][4] = sum[own][tile];
            const float4 product =
                make_float4(x[0][0] + x[0][2], x[0][1] + x[0][3], x[1][0] + x[1][2], x[1][1] + x[1][3]);
            if (8 * tile + r < count && step < STEPS)
                *reinterpret_cast<float4*>(sums.at(group, 8 * tile + r, 16 * step + 4 * c)) = product;
        }
}
template <class Then>
DEVICE void state_products(Sums& sums, const Columns& u, StateStage* rows, int group, int member, int count,
                           Then then) {
    constexpr int TILES = PRODUCT_COLUMNS > 8 ? 2 : 1;
    if (TILES > 1 && count > 8) state_product_tiles<TILES>(sums, u, rows, group, member, count, then);
    else state_product_tiles<1>(sums, u, rows, group, member, count, then);
}
