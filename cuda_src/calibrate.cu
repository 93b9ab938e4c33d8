// Sums of calibration (sketchssm/calibrate/), for many states at once.
#include "lib/ptx.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, QUERIES = 16;

DEVICE float round_to_bf16(float x) { return __uint_as_float(static_cast<u32>(float_to_bf16(x)) << 16); }

template <class T> DEVICE T sum_of_warp(T x) {
#pragma unroll
    for (int bit = 16; bit; bit /= 2) x += __shfl_xor_sync(0xffffffffu, x, bit);
    return x;
}

// Sums `out [state][rank][bits][warp][3]` of squares: of the reads' errors, of the state's error, of slopes times the
// reads' errors. Inputs: states [V][K], images [columns][V] and rows [columns][K] of sketches, queries [tokens][K],
// slopes [tokens][V, 1 or 0]; `levels` of numbers of bits {half the codes, distance, gain, distance times gain}.
//
// A block has one state. What its sketch leaves is in shared memory, transposed; each rank subtracts its new columns.
// For each number of bits the error of an element is computed where it is summed, and none is stored: thread
// (value, group) has every so many channels of a value row, for QUERIES queries at once.
// The host has the same sizes of shared memory (sketchssm/cuda/calibrate.py).
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    joint_sums(const float* states, const float* image, const float* rows, const float* queries, const float* slope,
               double* out, const int* ranks, const float* levels, int values, int channels, int columns, int tokens,
               int slopes, int rank_count, int bit_count) {
    extern __shared__ float4 memory[];
    const int stride = values | 1;  // odd, so that neither rows nor columns meet in a bank
    const int padded = (tokens + QUERIES - 1) / QUERIES * QUERIES;
    float* const query = reinterpret_cast<float*>(memory);                        // [tokens / QUERIES][K][QUERIES]
    float2* const across = reinterpret_cast<float2*>(query + padded * channels);  // [K] {1 / scale, scale}
    float *const spread = reinterpret_cast<float*>(across + channels), *const down = spread + values;  // [V] each
    float *const left = down + values, *const part = left + channels * stride;  // [K][stride], [QUERIES][THREADS]
    const int value = threadIdx.x % values, group = threadIdx.x / values, groups = THREADS / values;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 state = blockIdx.x;
    states += state * values * channels, image += state * columns * values, rows += state * columns * channels;
    queries += state * tokens * channels, slope += state * tokens * slopes;
    for (int i = threadIdx.x; i < values * channels; i += THREADS)
        left[i % channels * stride + i / channels] = states[i];
    for (int i = threadIdx.x; i < padded * channels; i += THREADS) {
        const int token = i / (QUERIES * channels) * QUERIES + i % QUERIES, k = i / QUERIES % channels;
        query[i] = token < tokens ? queries[token * channels + k] : 0.f;
    }
    for (int rank = 0; rank < rank_count; rank++) {
        const int first = rank ? ranks[rank - 1] : 0, last = ranks[rank];
        __syncthreads();
        for (int v = warp; v < values; v += WARPS) {
            float squares = 0;
            for (int k = lane; k < channels; k += 32) {
                float& x = left[k * stride + v];
                float sum = 0;
                for (int g = first; g < last; g++) sum += image[g * values + v] * rows[g * channels + k];
                x -= sum, squares += x * x;
            }
            squares = sum_of_warp(squares);
            if (lane == 0) spread[v] = sqrtf(squares / channels);
        }
        for (int b = 0; b < bit_count; b++) {
            __syncthreads();
            const float4 level = reinterpret_cast<const float4*>(levels)[b];
            const float row = round_to_bf16(level.w * spread[value]), inverse = row > 0 ? level.z / row : 0.f;
            if (group == 0) down[value] = inverse;
            __syncthreads();
            for (int k = threadIdx.x; k < channels; k += THREADS) {
                float sum = 0;
                for (int v = 0; v < values; v++) {
                    const float x = left[k * stride + v] * down[v];
                    sum += x * x;
                }
                const float column = round_to_bf16(level.y * sqrtf(sum / values));
                across[k] = make_float2(column > 0 ? 1 / column : 0.f, column);
            }
            __syncthreads();
            const float least = -level.x, most = level.x - 1, shrink = 1 / level.z;
            double sums[3] = {};
            for (int start = 0; start < tokens; start += QUERIES) {
                float read[QUERIES] = {}, energy = 0;
                for (int k = group < groups ? group : channels; k < channels; k += groups) {
                    const float2 scales = across[k];
                    const float x = left[k * stride + value] * inverse * scales.x;
                    const float error = (fminf(fmaxf(floorf(x), least), most) + 0.5f - x * shrink) * scales.y;
                    const float4* const own = memory + (start / QUERIES * channels + k) * (QUERIES / 4);
                    energy += error * error;
#pragma unroll
                    for (int w = 0; w < QUERIES; w += 4) {
                        const float4 four = own[w / 4];
                        read[w] += four.x * error, read[w + 1] += four.y * error;
                        read[w + 2] += four.z * error, read[w + 3] += four.w * error;
                    }
                }
                if (start == 0) sums[1] = static_cast<double>(energy) * row * row;
#pragma unroll
                for (int w = 0; w < QUERIES; w++) part[w * THREADS + threadIdx.x] = read[w] * row;
                __syncthreads();
                for (int w = warp; w < min(QUERIES, tokens - start); w += WARPS) {
                    const float* const own = slope + (start + w) * slopes;
                    float squares = 0, along = 0;
                    for (int v = lane; v < values; v += 32) {
                        float x = 0;
                        for (int i = 0; i < groups; i++) x += part[w * THREADS + i * values + v];
                        squares += x * x;
                        if (slopes == values) along += own[v] * x;
                    }
                    sums[0] += squares;
                    along = sum_of_warp(along);
                    if (slopes == 1) sums[2] += static_cast<double>(own[0]) * own[0] * squares;
                    else if (lane == 0) sums[2] += static_cast<double>(along) * along;
                }
                __syncthreads();
            }
#pragma unroll
            for (int i = 0; i < 3; i++) {
                const double sum = sum_of_warp(sums[i]);
                if (lane == 0) out[(((state * rank_count + rank) * bit_count + b) * WARPS + warp) * 3 + i] = sum;
            }
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
