// Sums of calibration (sketchssm/calibrate/), for many states at once.
//
// `joint_sums`: a block has one state. What its sketch leaves is in shared memory, transposed; each rank subtracts its
// new columns. For each number of bits the error of an element is computed where it is summed, and none is stored.
// Thread (lane, group) has two value rows of every GROUPS-th channel.
#include "lib/ptx.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, QUERIES = 16, MOST_BITS = 3;

struct Shape {
    int values, channels, tokens, slopes, bit_count;
    // Lanes of a group, elements from channel to channel (odd, so that neither rows nor columns meet in a bank).
    DEVICE int half() const { return (values + 1) / 2; }
    DEVICE int stride() const { return 2 * half() + 1; }
    DEVICE int groups() const { return min(THREADS / half(), channels); }
    DEVICE int chunks() const { return max(1, THREADS / channels); }
};

DEVICE float round_to_bf16(float x) { return __uint_as_float(static_cast<u32>(float_to_bf16(x)) << 16); }

template <class T> DEVICE T sum_of_warp(T x) {
#pragma unroll
    for (int bit = 16; bit; bit /= 2) x += __shfl_xor_sync(0xffffffffu, x, bit);
    return x;
}

// Shared memory of a block, in floats: the host has the same sizes (sketchssm/cuda/calibrate.py).
struct Room {
    float4* queries;        // [tokens / QUERIES][channels][QUERIES / 4]
    float4* weights;        // [2 half]: what the squares of a row weigh in the columns' scales, for each number of bits
    float2 *across, *down;  // [bits][channels] {inverse scale, scale} and [bits][2 half] {gain / scale, scale}
    double* sums;           // [3][WARPS]
    float *left, *part;     // [channels][stride]; sums of groups [groups][QUERIES][2 half] and others

    DEVICE Room(float4* memory, const Shape& s) {
        queries = memory;
        weights = queries + (s.tokens + QUERIES - 1) / QUERIES * s.channels * (QUERIES / 4);
        across = reinterpret_cast<float2*>(weights + 2 * s.half());
        down = across + MOST_BITS * s.channels;
        sums = reinterpret_cast<double*>(down + MOST_BITS * 2 * s.half());
        left = reinterpret_cast<float*>(sums + 3 * WARPS);
        part = left + s.channels * s.stride();
    }
};

// left -= U B of columns `first` to `last`; sums of squares over the thread's channels.
DEVICE void subtract(const Room& m, const Shape& s, const float* image, const float* rows, int first, int last) {
    const int half = s.half(), lane = threadIdx.x % half, group = threadIdx.x / half, groups = s.groups();
    if (group >= groups) return;
    float squares[2] = {};
    for (int k = group; k < s.channels; k += groups)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int v = lane + i * half;
            if (v == s.values) continue;  // padding
            float sum = 0;
            for (int g = first; g < last; g++) sum += image[g * s.values + v] * rows[g * s.channels + k];
            float& x = m.left[k * s.stride() + v];
            x -= sum, squares[i] += x * x;
        }
    m.part[2 * group * half + lane] = squares[0], m.part[(2 * group + 1) * half + lane] = squares[1];
}

// Scales of rows, then of columns, for all numbers of bits {half the codes, distance, gain, distance times gain}.
DEVICE void scale(const Room& m, const Shape& s, const float4* levels) {
    const int size = 2 * s.half(), columns = s.chunks() * s.channels;
    for (int v = threadIdx.x; v < size; v += THREADS) {
        float sum = 0, weights[4] = {};
        for (int group = 0; group < s.groups(); group++) sum += m.part[group * size + v];
        const float spread = sqrtf(sum / s.channels);
#pragma unroll
        for (int b = 0; b < MOST_BITS; b++) {
            if (b == s.bit_count) break;
            const float4 level = levels[b];
            const float row = round_to_bf16(level.w * spread), down = row > 0 ? level.z / row : 0.f;
            m.down[b * size + v] = make_float2(down, row);
            weights[b] = level.y * down * (level.y * down);
        }
        m.weights[v] = make_float4(weights[0], weights[1], weights[2], 0);
    }
    __syncthreads();
    for (int at = threadIdx.x; at < columns; at += THREADS) {
        const int k = at % s.channels;
        float sum[MOST_BITS] = {};
        for (int v = at / s.channels; v < s.values; v += s.chunks()) {
            const float x = m.left[k * s.stride() + v];
            const float4 weights = m.weights[v];
            sum[0] += weights.x * (x * x), sum[1] += weights.y * (x * x), sum[2] += weights.z * (x * x);
        }
#pragma unroll
        for (int b = 0; b < MOST_BITS; b++) m.part[b * columns + at] = sum[b];
    }
    __syncthreads();
    for (int at = threadIdx.x; at < s.bit_count * s.channels; at += THREADS) {
        float sum = 0;
        for (int i = 0; i < s.chunks(); i++)
            sum += m.part[at / s.channels * columns + i * s.channels + at % s.channels];
        const float column = round_to_bf16(sqrtf(sum / s.values));
        m.across[at] = make_float2(column > 0 ? 1 / column : 0.f, column);
    }
}

// Adds sums of one number of bits to `sums`: squares of the reads' errors, of the state's error, of slopes times errors.
DEVICE void measure(const Room& m, const Shape& s, const float4& level, int bits, const float* slope,
                    double (&sums)[3]) {
    const int half = s.half(), lane = threadIdx.x % half, group = threadIdx.x / half, groups = s.groups();
    const float least = -level.x, most = level.x - 1, shrink = 1 / level.z;
    const float2* const across = m.across + bits * s.channels;
    const float2 down[2] = {m.down[2 * bits * half + lane], m.down[(2 * bits + 1) * half + lane]};
    for (int first = 0; first < s.tokens; first += QUERIES) {
        float read[QUERIES][2] = {}, energy[2] = {};
        for (int k = group; k < s.channels && group < groups; k += groups) {
            const float2 scales = across[k];
            float error[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float x = m.left[k * s.stride() + lane + i * half] * down[i].x * scales.x;
                error[i] = (fminf(fmaxf(floorf(x), least), most) + 0.5f - x * shrink) * scales.y;
                energy[i] += error[i] * error[i];
            }
            const float4* const query = m.queries + (first / QUERIES * s.channels + k) * (QUERIES / 4);
#pragma unroll
            for (int w = 0; w < QUERIES; w += 4) {
                const float4 four = query[w / 4];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    read[w][i] += four.x * error[i], read[w + 1][i] += four.y * error[i];
                    read[w + 2][i] += four.z * error[i], read[w + 3][i] += four.w * error[i];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (group >= groups) break;
            if (first == 0) sums[1] += static_cast<double>(energy[i]) * down[i].y * down[i].y;
#pragma unroll
            for (int w = 0; w < QUERIES; w++)
                m.part[((group * QUERIES + w) * 2 + i) * half + lane] = read[w][i] * down[i].y;
        }
        __syncthreads();
        for (int w = threadIdx.x / 32; w < min(QUERIES, s.tokens - first); w += WARPS) {
            const float* const own = slope + (first + w) * s.slopes;
            float squares = 0, along = 0;
            for (int v = threadIdx.x % 32; v < s.values; v += 32) {
                float x = 0;
                for (int i = 0; i < groups; i++) x += m.part[(i * QUERIES + w) * 2 * half + v];
                squares += x * x;
                if (s.slopes == s.values) along += own[v] * x;
                else if (s.slopes) sums[2] += static_cast<double>(own[0] * x) * (own[0] * x);
            }
            sums[0] += squares;
            if (s.slopes != s.values) continue;
            along = sum_of_warp(along);
            if (threadIdx.x % 32 == 0) sums[2] += static_cast<double>(along) * along;
        }
        __syncthreads();
    }
}

// Sums `out [state][rank][bits][3]` of `measure`: states [V][K], images [columns][V] and rows [columns][K] of sketches,
// queries [tokens][K], slopes [tokens][V, 1 or 0], `levels` as of `scale`.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    joint_sums(const float* states, const float* image, const float* rows, const float* queries, const float* slope,
               const int* ranks, const float* levels, double* out, int values, int channels, int columns, int tokens,
               int slopes, int rank_count, int bit_count) {
    extern __shared__ float4 memory[];
    const Shape s{values, channels, tokens, slopes, bit_count};
    const Room m(memory, s);
    const i64 state = blockIdx.x;
    const int warp = threadIdx.x / 32, padding = s.stride() - values;
    for (int i = threadIdx.x; i < values * channels; i += THREADS)
        m.left[i % channels * s.stride() + i / channels] = states[state * values * channels + i];
    for (int i = threadIdx.x; i < channels * padding; i += THREADS)
        m.left[i / padding * s.stride() + values + i % padding] = 0;
    for (int i = threadIdx.x; i < (tokens + QUERIES - 1) / QUERIES * QUERIES * channels; i += THREADS) {
        const int token = i / (QUERIES * channels) * QUERIES + i % QUERIES, k = i / QUERIES % channels;
        reinterpret_cast<float*>(m.queries)[i] = token < tokens ? queries[(state * tokens + token) * channels + k] : 0.f;
    }
    const float4* const all = reinterpret_cast<const float4*>(levels);
    for (int rank = 0, first = 0; rank < rank_count; first = ranks[rank++]) {
        __syncthreads();
        subtract(m, s, image + state * columns * values, rows + state * columns * channels, first, ranks[rank]);
        __syncthreads();
        scale(m, s, all);
        for (int b = 0; b < bit_count; b++) {
            __syncthreads();
            double sums[3] = {};
            measure(m, s, all[b], b, slope + state * tokens * slopes, sums);
#pragma unroll
            for (int i = 0; i < 3; i++) {
                const double sum = sum_of_warp(sums[i]);
                if (threadIdx.x % 32 == 0) m.sums[i * WARPS + warp] = sum;
            }
            __syncthreads();
            if (threadIdx.x >= 3) continue;
            double sum = 0;
            for (int i = 0; i < WARPS; i++) sum += m.sums[threadIdx.x * WARPS + i];
            out[((state * rank_count + rank) * bit_count + b) * 3 + threadIdx.x] = sum;
        }
    }
}

// Lower triangular factors [size][size] of Gram matrices, one a block; see sketchssm/calibrate/prefixes.py.
extern "C" __global__ void __launch_bounds__(THREADS)
    orthogonalise(const double* gram, double* out, int size, double least) {
    extern __shared__ double table[];  // [size][2 size]: the Gram matrix and a unit matrix
    const int width = 2 * size;
    const i64 start = static_cast<i64>(blockIdx.x) * size * size;
    for (int i = threadIdx.x; i < size * width; i += THREADS) {
        const int row = i / width, column = i % width;
        table[i] = column < size ? gram[start + row * size + column] : column - size == row;
    }
    for (int i = 0; i < size; i++) {
        __syncthreads();
        const double* const own = table + i * width;
        const double inverse = own[i] > least ? 1 / own[i] : 0;
        for (int j = threadIdx.x; j < size; j += THREADS)
            out[start + i * size + j] = own[size + j] * sqrt(inverse);
        for (int j = threadIdx.x; j < (size - i - 1) * size; j += THREADS) {
            double* const other = table + (i + 1 + j / size) * width;
            other[i + 1 + j % size] -= other[i] * inverse * own[i + 1 + j % size];
        }
    }
}
