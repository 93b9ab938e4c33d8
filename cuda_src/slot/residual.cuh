// Residuals in few bits (sketchssm/reference/residual.py): what a sketch leaves of its state, behind the sketch.
//
//     codes of 1 or 2 bits | high bits of codes of 3 bits | row scales (V) and column scales (K) in bf16
//
// Codes are numbers from 0 to 2^b - 1, which stand for levels (code + 1/2 - 2^(b-1)). They lie in the order of the left
// operands of m16n8k32 with bytes. Lane (r, c) has rows r and r + 8 of a block of 16 rows, and columns 16 q + 4 c to
// 16 q + 4 c + 3 for all q. These four codes are an operand register: register q of row r, register K/16 + q of row
// r + 8. Word p of a plane of w bits holds 8 / w registers; register i of them has its codes in bits w i of the word's
// bytes.
#pragma once
#include "slot/ring.cuh"

constexpr int ROW_REGISTERS = K / 16;  // operand registers of a lane's part of a row
static_assert(K % 32 == 0 && V % 16 == 0, "whole operands, whole blocks of rows");

// A lane's codes of a block of 16 rows in one plane.
template <int WIDTH> struct CodePlane {
    static constexpr int IN_WORD = 8 / WIDTH, WORDS = (2 * ROW_REGISTERS + IN_WORD - 1) / IN_WORD;
    static constexpr int BYTES = code_bytes(WIDTH);
    static constexpr u32 MASK = WIDTH == 2 ? 0x03030303u : 0x01010101u;
    u32 word[WORDS];

    // Where a lane's words of a block are, in words.
    static DEVICE int place(int block) { return (block * 32 + threadIdx.x % 32) * WORDS; }
    DEVICE void load(const void* plane, int block) {
        const u32* const from = static_cast<const u32*>(plane) + place(block);
        if constexpr (WORDS % 4 == 0) {
#pragma unroll
            for (int i = 0; i < WORDS; i += 4) {
                const uint4 x = *reinterpret_cast<const uint4*>(from + i);
                word[i] = x.x, word[i + 1] = x.y, word[i + 2] = x.z, word[i + 3] = x.w;
            }
        } else if constexpr (WORDS % 2 == 0) {
#pragma unroll
            for (int i = 0; i < WORDS; i += 2) {
                const uint2 x = *reinterpret_cast<const uint2*>(from + i);
                word[i] = x.x, word[i + 1] = x.y;
            }
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; i++) word[i] = from[i];
        }
    }
    DEVICE void store(void* plane, int block) const {
        u32* const to = static_cast<u32*>(plane) + place(block);
        if constexpr (WORDS % 4 == 0) {
#pragma unroll
            for (int i = 0; i < WORDS; i += 4)
                *reinterpret_cast<uint4*>(to + i) = make_uint4(word[i], word[i + 1], word[i + 2], word[i + 3]);
        } else if constexpr (WORDS % 2 == 0) {
#pragma unroll
            for (int i = 0; i < WORDS; i += 2) *reinterpret_cast<uint2*>(to + i) = make_uint2(word[i], word[i + 1]);
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; i++) to[i] = word[i];
        }
    }
    DEVICE void clear() {
#pragma unroll
        for (u32& x : word) x = 0;
    }
    DEVICE void add(int i, u32 codes) { word[i / IN_WORD] |= codes << WIDTH * (i % IN_WORD); }
    // The four codes of a register, times 2^UP.
    template <int UP = 0> DEVICE u32 of(int i) const {
        const int down = WIDTH * (i % IN_WORD) - UP;
        const u32 x = word[i / IN_WORD];
        return (down < 0 ? x << -down : x >> down) & MASK << UP;
    }
};
template <bool USED> struct HighBits {
    CodePlane<1> high;
};
template <> struct HighBits<false> {};

// A lane's codes of a block of 16 rows.
template <int BITS> struct BlockCodes : HighBits<BITS == 3> {
    typedef CodePlane<BITS == 1 ? 1 : 2> Low;
    Low low;

    DEVICE void load(const char* codes, int block) {
        low.load(codes, block);
        if constexpr (BITS == 3) this->high.load(codes + Low::BYTES, block);
    }
    DEVICE void store(char* codes, int block) const {
        low.store(codes, block);
        if constexpr (BITS == 3) this->high.store(codes + Low::BYTES, block);
    }
    DEVICE void clear() {
        low.clear();
        if constexpr (BITS == 3) this->high.clear();
    }
    // Sets the four codes of a register, which are zeros.
    DEVICE void set(int i, u32 codes) {
        low.add(i, codes & Low::MASK);
        if constexpr (BITS == 3) this->high.add(i, codes >> 2 & CodePlane<1>::MASK);
    }
    DEVICE u32 of(int i) const {
        if constexpr (BITS == 3) return low.of(i) | this->high.template of<2>(i);
        else return low.of(i);
    }
};

// Scales of a head's residual in `codes`: rows, then columns.
DEVICE u16* scales_of(char* codes, int bits) { return reinterpret_cast<u16*>(codes + code_bytes(bits)); }
DEVICE const u16* scales_of(const char* codes, int bits) {
    return reinterpret_cast<const u16*>(codes + code_bytes(bits));
}

template <int NUMBER> struct Constant {
    static constexpr int VALUE = NUMBER;
};
// Calls `then` with a head's bits as a constant, unless they are 0.
template <class Then> DEVICE void with_bits(int bits, Then&& then) {
    if ((RESIDUAL & 2) && bits == 1) then(Constant<1>());
    else if ((RESIDUAL & 4) && bits == 2) then(Constant<2>());
    else if ((RESIDUAL & 8) && bits == 3) then(Constant<3>());
}
