// Warp operations on matrix fragments, as cuda_src/lib/ptx.cuh describes them. Compiled once, and linked into every library
// of kernels.
#include "ptx.cuh"

namespace host {

static float bf16_at(u32 pair, int i) { return __uint_as_float(i ? pair & 0xffff0000u : pair << 16); }

static float toward_zero(double x) {
    const float y = static_cast<float>(x);
    return std::isfinite(y) && std::fabs(static_cast<double>(y)) > std::fabs(x) ? std::nextafter(y, 0.f) : y;
}

// d += a b for all lanes. The sum is exact to double precision and then rounded toward zero: tensor cores drop low bits
// too, though not the same ones.
template <class Operation, int DEPTH>
static void multiply(Post** lanes, const float (&a)[16][DEPTH], const float (&b)[DEPTH][8]) {
    for (int row = 0; row < 16; row++) {
        double sums[8];
        auto at = [&](int column) -> float& {
            return static_cast<Operation*>(lanes[row % 8 * 4 + column / 2])->d[row / 8 * 2 + column % 2];
        };
        for (int column = 0; column < 8; column++) sums[column] = at(column);
        for (int n = 0; n < DEPTH; n++)
            for (int column = 0; column < 8; column++) sums[column] += static_cast<double>(a[row][n]) * b[n][column];
        for (int column = 0; column < 8; column++) at(column) = toward_zero(sums[column]);
    }
}

template <float at(u32, int)> static void multiply_pairs(Post** lanes) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < WARP; lane++) {
        const auto* const mine = static_cast<const Mma*>(lanes[lane]);
        const int r = lane / 4, c = 2 * (lane % 4);
        for (int i = 0; i < 2; i++) {
            for (int n = 0; n < 4; n++) a[r + 8 * (n % 2)][c + 8 * (n / 2) + i] = at(mine->a[n], i);
            for (int n = 0; n < 2; n++) b[c + 8 * n + i][r] = at(mine->b[n], i);
        }
    }
    multiply<Mma>(lanes, a, b);
}
void multiply_bf16(Post** lanes, unsigned) { multiply_pairs<bf16_at>(lanes); }
void multiply_half(Post** lanes, unsigned) { multiply_pairs<half_at>(lanes); }

static float upper(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }
void multiply_tf32(Post** lanes, unsigned) {
    float a[16][8], b[8][8];
    for (int lane = 0; lane < WARP; lane++) {
        const auto* const mine = static_cast<const MmaTf32*>(lanes[lane]);
        for (int n = 0; n < 4; n++) a[lane / 4 + 8 * (n % 2)][lane % 4 + 4 * (n / 2)] = upper(mine->a[n]);
        for (int n = 0; n < 2; n++) b[lane % 4 + 4 * n][lane / 4] = upper(mine->b[n]);
    }
    multiply<MmaTf32>(lanes, a, b);
}

void multiply_codes(Post** lanes, unsigned) {
    int a[16][32], b[32][8];
    for (int lane = 0; lane < WARP; lane++) {
        const auto* const mine = static_cast<const MmaCodes*>(lanes[lane]);
        for (int i = 0; i < 4; i++) {
            const int k = 4 * (lane % 4) + i;
            for (int n = 0; n < 4; n++) a[lane / 4 + 8 * (n % 2)][k + 16 * (n / 2)] = mine->a[n] >> 8 * i & 255;
            for (int n = 0; n < 2; n++) b[k + 16 * n][lane / 4] = static_cast<signed char>(mine->b[n] >> 8 * i & 255);
        }
    }
    for (int lane = 0; lane < WARP; lane++)
        for (int n = 0; n < 4; n++) {
            int sum = 0;
            for (int k = 0; k < 32; k++) sum += a[lane / 4 + 8 * (n / 2)][k] * b[k][2 * (lane % 4) + n % 2];
            static_cast<MmaCodes*>(lanes[lane])->d[n] += sum;
        }
}

void transpose(Post** lanes, unsigned) {
    for (int lane = 0; lane < WARP; lane++)
        for (int i = 0; i < 2; i++) {
            const int row = 2 * (lane % 4) + i, column = lane / 4;
            const u32 pair = static_cast<Transpose*>(lanes[4 * row + column / 2])->x;
            static_cast<Transpose*>(lanes[lane])->y |= (pair >> (16 * (column % 2)) & 0xffffu) << (16 * i);
        }
}

void load_transposed(Post** lanes, unsigned) {
    for (int lane = 0; lane < WARP; lane++)
        for (int n = 0; n < 4; n++) {
            u16 pair[2];
            for (int i = 0; i < 2; i++)
                std::memcpy(&pair[i],
                            static_cast<LoadTransposed*>(lanes[8 * n + 2 * (lane % 4) + i])->row + lane / 4 * 2, 2);
            static_cast<LoadTransposed*>(lanes[lane])->x[n] = pair[0] | static_cast<u32>(pair[1]) << 16;
        }
}

}  // namespace host
