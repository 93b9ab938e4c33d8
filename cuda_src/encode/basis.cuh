// The sketch of one state through a basis adapted to it: B = orth(S S^T Omega), U = S^T B, by the first ENCODERS warps
// of a block.
//
// All products use the tensor cores. S S^T Omega takes the state in bf16: its error turns the basis a little. U is of
// the basis as stored, and takes the state in bf16 too, or for float32 sketches in two slices (2^-16). A residual knows
// basis and U as they are stored, and takes the state in bf16.
#pragma once
#include "slot/codes.cuh"
#include "slot/residual.cuh"

constexpr int ENCODERS = V / 16;  // warps; each has 16 rows of S^T
constexpr int ENCODE_BARRIER = 1;  // number of their named barrier
constexpr int BASIS_GROUP = 8;     // columns of the basis in one operand
constexpr int BASIS_ROWS = round_up(RANK_MAX, BASIS_GROUP);
constexpr int OMEGA_STRIDE = SKETCH == FP32 ? 64 : 32;  // of operands of 16 channels
constexpr float PIVOT_TOLERANCE = 3e-3f;  // as in sketchssm/reference/maps.py

// The thread's number. Compilers do not know that it is always the same: else they would keep what follows from it in
// registers, of which there are none left, from one state to the next.
DEVICE int encoder_thread() { return opaque(threadIdx.x); }
DEVICE void sync_encoders() { named_barrier_sync<32 * ENCODERS>(ENCODE_BARRIER); }

struct EncodeMemory {
    union {  // in this order
        alignas(16) uint2 parts[ENCODERS][BASIS_GROUP][K / 4];  // of (S S^T Omega)^T in fp16: sums over a warp's rows
        float gram[BASIS_ROWS][BASIS_ROWS + 1];
        float columns[BASIS_ROWS][V + 4];  // U; once it is stored, as stored, in units of its scale
    };
    union {
        alignas(16) float rows[BASIS_ROWS][K];  // of (S S^T Omega)^T
        struct {                                // of a residual
            float squares[ENCODERS][K];         // sums over a warp's rows
            uint2 across[K / 4];                // inverse scales of the columns in bf16
        };
    };
    uint2 basis[BASIS_ROWS][K / 4];                      // as stored, in units of its scale; zeros past the rank
    uint2 more[SKETCH == FP32 ? BASIS_ROWS : 1][K / 4];  // second slices of a float32 basis
    float basis_scale[BASIS_ROWS];                       // units of the basis
    float scale[BASIS_ROWS];                             // the same times the unit of the column of U
    float power[ENCODERS];                               // StateRows::power of each warp
};

// The second bf16 slice of a pair.
DEVICE u32 second_slice(float x, float y, u32 first) {
    return floats_to_bf16(x - __uint_as_float(first << 16), y - __uint_as_float(first & 0xffff0000u));
}

// The power of two that brings a magnitude to [1, 2), at most 2^125; 1 for what is not finite.
DEVICE float power_of(float most) {
    const u32 exponent = __float_as_uint(most) >> 23;
    return __uint_as_float((exponent == 255 ? 127 : min(max(254 - exponent, 2u), 252u)) << 23);
}
DEVICE float inverse_of(float power) { return __uint_as_float((254u << 23) - __float_as_uint(power)); }

// Rows 16 w to 16 w + 15 of S^T, of warp w, in bf16 and in the order of operands: lane (r, c) has rows r and r + 8, and
// columns 16 q + 4 c to 16 q + 4 c + 3 for all q. In products of 16 columns, columns 4 c and 4 c + 1 are the operand's
// columns 2 c and 2 c + 1; 4 c + 2 and 4 c + 3 are 2 c + 8 and 2 c + 9. at(row, channel) is the address of four numbers
// of the warp's rows, for second slices.
template <class At> struct StateRows {
    const At& at;
    u32 of[2][K / 16][2];
    float power;  // that brings the largest of the rows to [1, 2)

    DEVICE explicit StateRows(const At& at) : at(at) {
        float most = 0;
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int q = 0; q < K / 16; q++) {
                const Packed<STATE, 4> x = load(half, q);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    most = fmaxf(most, fmaxf(fabsf(x[2 * h]), fabsf(x[2 * h + 1])));
                    of[half][q][h] = floats_to_bf16(x[2 * h], x[2 * h + 1]);
                }
            }
        power = power_of(warp_most(most));
    }
    DEVICE Packed<STATE, 4> load(int half, int q) const {
        Packed<STATE, 4> x;
        x.load(at(encoder_thread() % 32 / 4 + 8 * half, 16 * q + encoder_thread() % 4 * 4));
        return x;
    }
    DEVICE void operand(u32 (&a)[4], int q) const {
        a[0] = of[0][q][0], a[1] = of[1][q][0], a[2] = of[0][q][1], a[3] = of[1][q][1];
    }
    DEVICE void second_operand(u32 (&a)[4], int q) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const Packed<STATE, 4> x = load(half, q);
#pragma unroll
            for (int h = 0; h < 2; h++) a[half + 2 * h] = second_slice(x[2 * h], x[2 * h + 1], of[half][q][h]);
        }
    }
};

// This lane's operands of BASIS_GROUP columns of Omega, of which products take the first slices.
struct OmegaGroup {
    uint2 of[K / 16];

    DEVICE explicit OmegaGroup(const uint2* from) {
#pragma unroll
        for (int q = 0; q < K / 16; q++) of[q] = from[q * OMEGA_STRIDE + encoder_thread() % 32];
    }
};

// A warp's part of S S^T Omega for BASIS_GROUP columns of Omega, times the square of `power`.
template <class Rows>
DEVICE void multiply_twice(EncodeMemory& m, const Rows& state, const OmegaGroup& omega, float power) {
    const int lane = encoder_thread() % 32, warp = encoder_thread() / 32;
    float u[4] = {};
#pragma unroll
    for (int q = 0; q < K / 16; q++) {
        u32 a[4];
        state.operand(a, q);
        mma_bf16(u, a, omega.of[q].x, omega.of[q].y);
    }
#pragma unroll
    for (float& x : u) x = x * power * power;
    // Rows 0 to 7 of the operand are the first slices of 8 columns of S^T Omega, rows 8 to 15 the second slices.
    u32 a[4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 first = floats_to_bf16(u[2 * half], u[2 * half + 1]);
        a[2 * half] = transpose_8x8(first);
        a[2 * half + 1] = transpose_8x8(second_slice(u[2 * half], u[2 * half + 1], first));
    }
#pragma unroll
    for (int q = 0; q < K / 16; q++) {
        float x[4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float d[4] = {};
            mma_bf16(d, a, transpose_8x8(state.of[0][q][h]), transpose_8x8(state.of[1][q][h]));
            x[2 * h] = d[0] + d[2], x[2 * h + 1] = d[1] + d[3];
        }
        m.parts[warp][lane / 4][4 * q + lane % 4] =
            make_uint2(floats_to_halves(x[0], x[1]), floats_to_halves(x[2], x[3]));
    }
}

// A row of the basis, four floats a lane: pieces lane, lane + 32, ... of the row; zeros past K.
struct BasisRow {
    static constexpr int PIECES = (K / 4 + 31) / 32;
    float4 of[PIECES] = {};

    DEVICE static int piece(int i) { return encoder_thread() % 32 + 32 * i; }
    DEVICE static bool has(int i) { return K % 128 == 0 || piece(i) < K / 4; }
    DEVICE void load(const float* row) {
#pragma unroll
        for (int i = 0; i < PIECES; i++)
            if (has(i)) of[i] = reinterpret_cast<const float4*>(row)[piece(i)];
    }
    DEVICE void add(float factor, const BasisRow& x) {
#pragma unroll
        for (int i = 0; i < PIECES; i++)
            of[i].x += factor * x.of[i].x, of[i].y += factor * x.of[i].y, of[i].z += factor * x.of[i].z,
                of[i].w += factor * x.of[i].w;
    }
    // This lane's part of the product of two rows.
    DEVICE float dot(const BasisRow& x) const {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < PIECES; i++)
            sum += of[i].x * x.of[i].x + of[i].y * x.of[i].y + of[i].z * x.of[i].z + of[i].w * x.of[i].w;
        return sum;
    }
};

// A number as codes of int8 hold it (see codes_of), in units of the code.
DEVICE float rounded_code(float x, float inverse) { return (fmaf(x, inverse, 0x1.8p23f) - 0x1.8p23f) * CODE_UNIT; }

// Stores row g of the basis, and keeps it as stored. By one warp.
DEVICE void store_basis(EncodeMemory& m, sketch_t* packed, int g, int rank, const BasisRow& row) {
    sketch_t* const to = packed + rank * V + g * K;
    [[maybe_unused]] float inverse = 0;
    if constexpr (CODED) {
        float largest = 0;
#pragma unroll
        for (const float4& x : row.of)
            largest = fmaxf(largest, fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))));
        largest = warp_most(largest), inverse = inverse_scale(largest);
        if (encoder_thread() % 32 == 0 && g < rank) m.basis_scale[g] = scale_of(largest);
    } else if (encoder_thread() % 32 == 0 && g < rank) {
        m.basis_scale[g] = 1;
    }
#pragma unroll
    for (int i = 0; i < BasisRow::PIECES; i++) {
        if (!BasisRow::has(i)) continue;
        const int at = BasisRow::piece(i);
        const float4& x = row.of[i];
        if (g >= rank) {
            m.basis[g][at] = make_uint2(0, 0);
            if constexpr (SKETCH == FP32) m.more[g][at] = make_uint2(0, 0);
            continue;
        }
        float four[4] = {x.x, x.y, x.z, x.w};
        if constexpr (CODED) {
            reinterpret_cast<u32*>(to)[at] = codes_of({x.x, x.z, x.y, x.w}, inverse);
#pragma unroll
            for (float& y : four) y = rounded_code(y, inverse);
        } else {
            Packed<SKETCH, 4> rounded;
            rounded.set(four);
            rounded.store(to + 4 * at);
#pragma unroll
            for (int e = 0; e < 4; e++) four[e] = rounded[e];
        }
        const uint2 pairs = make_uint2(floats_to_bf16(four[0], four[1]), floats_to_bf16(four[2], four[3]));
        m.basis[g][at] = pairs;
        if constexpr (SKETCH == FP32)
            m.more[g][at] =
                make_uint2(second_slice(four[0], four[1], pairs.x), second_slice(four[2], four[3], pairs.y));
    }
}

// Orthonormalises the rows through their Gram matrix L D L^T: stores the rows of D^-1/2 L^-1 times them. A row that
// depends on the rows before it becomes zero. N is at least the rank.
//
// Each warp eliminates the same matrix beside the unit matrix: lane j has column j of the Gram matrix, and lane N + j
// has column j of the unit matrix, which becomes that of L^-1.
template <int N> DEVICE void store_orthonormal_rows(EncodeMemory& m, sketch_t* packed, int rank) {
    const int lane = encoder_thread() % 32, warp = encoder_thread() / 32;
    float column[N];
#pragma unroll
    for (int i = 0; i < N; i++)
        column[i] = lane < N ? m.gram[max(i, lane)][min(i, lane)] : i == lane - N ? 1.f : 0.f;
#pragma unroll
    for (int p = 0; p < N; p++) {
        if (p >= rank) break;
        const float pivot = __shfl_sync(ALL, column[p], p), before = m.gram[p][p];
        const float root = pivot > PIVOT_TOLERANCE * PIVOT_TOLERANCE * before ? rsqrtf(pivot) : 0.f;
        column[p] *= root;
#pragma unroll
        for (int i = p + 1; i < N; i++) column[i] -= __shfl_sync(ALL, column[i], p) * root * column[p];
    }
#pragma unroll 1
    for (int g = warp; g < round_up(rank, BASIS_GROUP); g += ENCODERS) {
        float own = 0;
#pragma unroll
        for (int p = 0; p < N; p++)
            if (p == g) own = column[p];
        BasisRow row;
#pragma unroll 1
        for (int j = 0; j <= g && g < rank; j++) {
            const float factor = __shfl_sync(ALL, own, N + j);
            BasisRow x;
            x.load(m.rows[j]);
            row.add(factor, x);
        }
        store_basis(m, packed, g, rank, row);
    }
}

// Stores B = orth(S S^T Omega) by rows; m.basis has it as stored. `omega` are operands (basis_fragments in
// sketchssm/cuda/layout.py), whose first group is `own`. Ends with a barrier.
//
// Rows that are almost parallel keep up to 0.06 of their products; the residual makes up for it.
template <class Rows>
DEVICE void adapt_basis(EncodeMemory& m, const Rows& state, const uint2* omega, OmegaGroup own, sketch_t* packed,
                        int rank) {
    const int lane = encoder_thread() % 32, warp = encoder_thread() / 32;
    if (lane == 0) m.power[warp] = state.power;
    sync_encoders();
    float power = m.power[0];
#pragma unroll
    for (int w = 1; w < ENCODERS; w++) power = fminf(power, m.power[w]);
#pragma unroll 1
    for (int first = 0;; first += BASIS_GROUP) {
        multiply_twice(m, state, own, power);
        sync_encoders();
        for (int i = encoder_thread(); i < BASIS_GROUP * K / 4; i += 32 * ENCODERS) {
            float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
            for (int w = 0; w < ENCODERS; w++) {
                const uint2 part = (&m.parts[w][0][0])[i];
                const float2 x = halves_to_floats(part.x), y = halves_to_floats(part.y);
                sum.x += x.x, sum.y += x.y, sum.z += y.x, sum.w += y.y;
            }
            reinterpret_cast<float4*>(m.rows[first])[i] = sum;
        }
        if (first + BASIS_GROUP >= rank) break;
        own = OmegaGroup(omega + (first / BASIS_GROUP + 1) * (K / 16) * OMEGA_STRIDE);
        sync_encoders();
    }
    sync_encoders();
#pragma unroll 1
    for (int g = warp; g < rank; g += ENCODERS) {
        BasisRow row;
        row.load(m.rows[g]);
#pragma unroll 1
        for (int first = 0; first <= g; first += BASIS_GROUP) {
            float dots[BASIS_GROUP];
#pragma unroll
            for (int j = 0; j < BASIS_GROUP; j++) {
                BasisRow x;
                x.load(m.rows[min(first + j, g)]);
                dots[j] = row.dot(x);
            }
            const float dot = warp_sums(dots);
            if (lane % (32 / BASIS_GROUP) == 0) m.gram[g][first + lane / (32 / BASIS_GROUP)] = dot;
        }
    }
    sync_encoders();
    if (rank <= BASIS_GROUP) store_orthonormal_rows<BASIS_GROUP>(m, packed, rank);
    else store_orthonormal_rows<BASIS_ROWS>(m, packed, rank);
    sync_encoders();
}

// U of the warp's rows, in m.columns.
template <class Rows> DEVICE void multiply_basis(EncodeMemory& m, const Rows& state, int rank) {
    const int lane = encoder_thread() % 32, r = lane / 4, c = lane % 4, row = encoder_thread() / 32 * 16 + r;
#pragma unroll 1
    for (int first = 0; first < rank; first += BASIS_GROUP) {
        float sums[4] = {};
#pragma unroll
        for (int q = 0; q < K / 16; q++) {
            u32 a[4];
            state.operand(a, q);
            const uint2 b = m.basis[first + r][4 * q + c];
            if constexpr (SKETCH == FP32) {
                const uint2 more = m.more[first + r][4 * q + c];
                u32 rest[4];
                state.second_operand(rest, q);
                mma_bf16(sums, rest, b.x, b.y);
                mma_bf16(sums, a, more.x, more.y);
            }
            mma_bf16(sums, a, b.x, b.y);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int g = first + 2 * c + e % 2;
            if (g < rank) m.columns[g][row + e / 2 * 8] = sums[e] * m.basis_scale[g];
        }
    }
}

// Stores U, and keeps it as stored. Ends with a barrier.
DEVICE void store_columns(EncodeMemory& m, sketch_t* packed, int rank) {
    const int lane = encoder_thread() % 32, warp = encoder_thread() / 32;
    const SmallPart<small_t> small(packed, rank);
#pragma unroll 1
    for (int g = warp; g < rank; g += ENCODERS) {
        if constexpr (CODED) {
            float most = 0;
            for (int v = lane; v < V; v += 32) most = fmaxf(most, fabsf(m.columns[g][v]));
            const float inverse = inverse_scale(warp_most(most));
            const float scale = m.basis_scale[g] * store_column_codes(m.columns[g], g, packed);
            __syncwarp();
            for (int v = lane; v < V; v += 32) m.columns[g][v] = rounded_code(m.columns[g][v], inverse);
            if (lane == 0) m.scale[g] = small.scale[g] = scale;
        } else {
            for (int v = lane; v < V; v += 32) {
                const sketch_t rounded = narrow<SKETCH>(m.columns[g][v]);
                packed[g * V + (v ^ swizzle(g))] = rounded;
                m.columns[g][v] = widen<SKETCH>(rounded);
            }
            if (lane == 0) m.scale[g] = 1;
        }
    }
    sync_encoders();
}
