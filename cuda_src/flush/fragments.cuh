// Matrix products of float32 accuracy on tensor cores of lower precision, and the lane maps of operands.
//
//   factors                        slices                                products  relative error
//   float32 x raw bf16             float32 = three bf16 slices           3         0 (every product is exact)
//   float32 x float32 (updates)    two fp16 slices each, 22 bits         3         about 2^-22 of the largest number
//   float32 x float32 (others)     tf32, and the remainder in tf32       2 or 3    about 2^-22
//
// Slices of fp16: both factors are first scaled by powers of two into the range of fp16; "the largest number" is the
// largest of the numbers that share a power.
//
// Lane map of a StateFragment, 16 value rows by 16 channels, with lane = 4 r + c:
//
//   accumulator (m16n8k16)       d[r][2c], d[r][2c+1], d[r+8][2c], d[r+8][2c+1]   for two groups t = 0, 1 of 8 columns
//   value row of row r, r + 8    value_row(0), value_row(1)
//   channels of group 0          4c, 4c + 1
//   channels of group 1          4c + 2, 4c + 3
//
// So a thread's four channels of 16 are neighbours: one load or store per row (16 bytes in float32, 8 in 16 bits).
// Updates have the same lane map and are added register by register. The same registers are right operands of m16n8k8
// in tf32. A state of 16 bits is exact in tf32.
#pragma once
#include "lib/common.cuh"

constexpr int STEPS = K / 16;        // fragments along K
constexpr int ROW_BLOCKS = V / 16;

// Operand column that holds channel `column` of 16: columns 2c, 2c+1, 8+2c, 8+2c+1 hold channels 4c to 4c+3.
DEVICE int place_of(int column) { return 8 * (column % 4 / 2) + 2 * (column / 4) + column % 2; }

// The leading bf16 slices of two floats (their upper halves, truncated), the first float's in the low half-word.
DEVICE u32 upper_halves(float x, float y) { return __byte_perm(__float_as_uint(x), __float_as_uint(y), 0x7632); }
DEVICE float below_bf16(float x) { return x - __uint_as_float(__float_as_uint(x) & 0xffff0000u); }

// The part of a float that tf32 truncates: 13 bits.
DEVICE float below_tf32(float x) { return x - __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

// Splits a pair into TERMS bf16 slices.
template <int TERMS> DEVICE void slices(float x, float y, u32* to, int stride) {
#pragma unroll
    for (int i = 0; i < TERMS; i++) {
        to[i * stride] = upper_halves(x, y);
        if (i + 1 < TERMS) x = below_bf16(x), y = below_bf16(y);
    }
}

// The power of two that brings a number to [2^EXPONENT, 2^(EXPONENT + 1)), and the inverse of a power of two.
template <int EXPONENT> DEVICE float power_for(float most) {
    const int exponent = static_cast<int>(__float_as_uint(most) >> 23);
    return __uint_as_float(static_cast<u32>(min(max(254 + EXPONENT - exponent, 1), 253)) << 23);
}
DEVICE float inverse_of_power(float x) { return __uint_as_float((254u << 23) - __float_as_uint(x)); }
// If a state's norm is between these bounds, float32 holds the squares of the state's numbers.
constexpr float LEAST_ORDINARY = 0x1p-40f, MOST_ORDINARY = 0x1p40f;
// The power of two that brings a norm to [1, 2), so that float32 holds squares. The power is bounded, so that its
// inverse is finite.
DEVICE float power_for_norm(float norm) { return fminf(power_for<0>(norm), 0x1p116f); }
constexpr int HALF_EXPONENT = 14;  // of scaled numbers: less than half of fp16's range

// Splits a pair into two fp16 slices. Error: 2^-23 of a number, or 2^-39 of a number of 2^(HALF_EXPONENT + 1).
DEVICE void half_slices(float x, float y, u32& high, u32& low) {
    high = floats_to_halves(x, y);
    const float2 taken = halves_to_floats(high);
    low = floats_to_halves(x - taken.x, y - taken.y);
}

// 16 rows by 16 channels as left operands of two tf32 products: product i has channels 4c + 2i + {0, 1} of rows r and r
// + 8. The same registers are right operands of 8 of the rows.
struct LeftOperand {
    float a[2][4];

    // The thread's channels 4c to 4c + 3 of row r (half 0) or r + 8 (half 1).
    DEVICE void set(int half, const float (&x)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i / 2][half + i % 2 * 2] = x[i];
    }
    DEVICE void set(int half, const uint2& bf16) {
        const float x[4] = {__uint_as_float(bf16.x << 16), __uint_as_float(bf16.x & 0xffff0000u),
                            __uint_as_float(bf16.y << 16), __uint_as_float(bf16.y & 0xffff0000u)};
        set(half, x);
    }
    // sum + rest += product i with the right operand (x, y), to about 2^-22. SHORT: this operand is exact in tf32 (or
    // precise enough); SHORT_RIGHT: the other operand is.
    template <bool SHORT, bool SHORT_RIGHT>
    DEVICE void multiply(int i, float (&sum)[4], [[maybe_unused]] float (&rest)[4], float x, float y) const {
        const float(&k)[4] = a[i];
        mma_tf32(sum, k[0], k[1], k[2], k[3], x, y);
        if (!SHORT_RIGHT) mma_tf32(rest, k[0], k[1], k[2], k[3], below_tf32(x), below_tf32(y));
        if (!SHORT) mma_tf32(rest, below_tf32(k[0]), below_tf32(k[1]), below_tf32(k[2]), below_tf32(k[3]), x, y);
    }
};

// The same 16 rows as a left operand of mma_bf16, as stored. The product with a bf16 state is exact.
struct StoredOperand {
    u32 a[4];

    DEVICE void set(int half, const uint2& bf16) { a[half] = bf16.x, a[half + 2] = bf16.y; }
    DEVICE void multiply(float (&sum)[4], const uint2& state) const { mma_bf16(sum, a, state.x, state.y); }
};

// A row block is stored as PARTS parts of PART_ROWS value rows. Neighbouring rows r of an operand are rows of different
// parts. In shared memory, neighbouring parts are a multiple of 128 bytes plus or minus 128 / PARTS bytes apart, so
// that loading a fragment has no bank conflicts.
constexpr int PARTS = STATE == FP32 ? 2 : 4, PART_ROWS = 16 / PARTS;

// The value row that is row r (half 0) or r + 8 (half 1) of a thread's operand.
DEVICE int value_row(int half) {
    const int r = threadIdx.x % 32 / 4;
    return PART_ROWS * (r % PARTS) + r / PARTS + PART_ROWS / 2 * half;
}
// The value row of column 2c + e of an accumulator. The right operand was half `half` of the state's rows.
DEVICE int value_at(int half, int e) {
    const int c = threadIdx.x % 4;
    return (PARTS == 2 ? c : 8 * (c % 2) + c / 2) + PART_ROWS * e + PART_ROWS / 2 * half;
}

// A row block in shared memory.
struct StateBlock {
    static constexpr int PART = PART_ROWS * K, SHIFT = PART + 128 / PARTS / static_cast<int>(sizeof(state_t));
    alignas(16) state_t data[(PARTS - 1) * SHIFT + PART];
    DEVICE state_t* at(int row, int channel) { return &data[row / PART_ROWS * SHIFT + row % PART_ROWS * K + channel]; }
};

// 16 channels of a row block in registers: s[half] holds channels 4c to 4c + 3 of value_row(half).
struct StateFragment {
    float s[2][4];

    static DEVICE state_t* place(StateBlock& rows, int half, int step) {
        return rows.at(value_row(half), 16 * step + 4 * (threadIdx.x % 4));
    }
    DEVICE void load(StateBlock& rows, int step) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Packed<STATE, 4> x;
            x.load(place(rows, half, step));
#pragma unroll
            for (int e = 0; e < 4; e++) s[half][e] = x[e];
        }
    }
    // Channels 4c to 4c + 3 of value_row(half) of a state in 16 bits, as stored.
    static DEVICE uint2 words(StateBlock& rows, int half, int step) {
        return *reinterpret_cast<const uint2*>(place(rows, half, step));
    }
    // Stores the fragment, rounded if `rows` have 16 bits. The registers keep the unrounded numbers.
    DEVICE void store(StateBlock& rows, int step) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Packed<STATE, 4> x;
            x.set_state(s[half]);
            x.store(place(rows, half, step));
        }
    }
};
