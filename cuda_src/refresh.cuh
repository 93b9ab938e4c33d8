// Steps of a refresh: the factors Y and X of the surrogate at the window's end, and products of their rows.
//
// A worker warp has 8 rows of X, a worker thread one channel of all rows of Y. Products of two rows are on the tensor
// cores.
#pragma once
#include "maps.cuh"

// Four worker warps advance the factors; the map warp computes the map (see refresh.cu).
constexpr int WORKERS = 128, WORKER_WARPS = WORKERS / 32, REFRESH_THREADS = WORKERS + 32;
// Rows of Y and X. W is at least the largest number of pivots, because rows of pivots are first stored in the places of
// keys. KEY_FACTOR: a padded row of X.
constexpr int FACTOR_ROWS = (RANK_MAX + (W > PIVOTS ? W : PIVOTS) + 7) / 8 * 8, KEY_FACTOR = K + 4;

// Shared memory of a block, which has one head of a row at a time.
struct RefreshMemory {
    alignas(16) float y[FACTOR_ROWS][COLUMN];          // columns of U, then the write of each token
    alignas(16) float x[FACTOR_ROWS][KEY_FACTOR];      // rows of R, then keys; decayed to the window's end
    alignas(16) float products[W + 1][FACTOR_ROWS];    // of each token's key with the decayed rows; last of the query
    alignas(16) float small[FACTOR_ROWS][RANKS];       // X Omega, then Y U'
    float norms[WORKER_WARPS], most[WORKER_WARPS];     // shares of |S'|^2, and the largest numbers of Y
    float power, mu, missing;                          // of Y; |S'|^2 / K; factor that U' lacks
#if MAP == 0
    float projected[W + 1][RANKS];                     // products of keys and query with the decayed rows of Pi^T
    float factors[PIVOTS][RANKS], z[RANKS], missed[RANKS];  // see refresh_factors.cuh
#endif
    SketchMemory sketch;
    SketchBarriers barriers;  // the map's functions arrive at these barriers; no warp waits for them
};

// The window's tokens at one head: all but the last are in the ring.
struct WindowTokens {
    Ring ring;
    Token last;

    __device__ __forceinline__ const act_t* key(int s) const { return s < W - 1 ? ring.k + s * K : last.k; }
    __device__ __forceinline__ const gate_t* gate(int s) const { return s < W - 1 ? ring.g + s * GATES : last.g; }
    __device__ __forceinline__ float beta(int s) const { return s < W - 1 ? ring.beta[s] : *last.beta; }
    __device__ __forceinline__ float value(int s, int channel) const {
        return widen<ACT>(s < W - 1 ? ring.v[s * V + (channel ^ swizzle(s))] : last.v[channel]);
    }
    // Appends the last token to the ring.
    __device__ __forceinline__ void append(int head) const {
        constexpr int s = W - 1;
        for (int i = threadIdx.x; i < V; i += WORKERS) ring.v[s * V + (i ^ swizzle(s))] = last.v[i];
        if (head % HEADS_PER_KEY == 0)
            for (int i = threadIdx.x; i < K; i += WORKERS) ring.k[s * K + i] = last.k[i];
        for (int i = threadIdx.x; i < GATES; i += WORKERS) ring.g[s * GATES + i] = last.g[i];
        if (ERASES && threadIdx.x == 0) ring.beta[s] = *last.beta;
    }
};

__device__ __forceinline__ void sync_workers() { named_barrier_sync<WORKERS>(1); }

// Loads the columns of U.
__device__ __forceinline__ void load_columns(RefreshMemory& m, const sketch_t* packed, int rank, int wide) {
    for (int i = threadIdx.x; i < rank * (V / 4); i += WORKERS) {
        const int g = i / (V / 4), n = i % (V / 4);
        if constexpr (CODED) {  // the inverse of store_column_codes
            const CodedColumn as(g, wide);
            const int piece = as.narrow ? n / 8 * 16 : n / 4 * 16;
            Codes<4> codes;
            codes.load(packed + as.at + (piece ^ as.turn) - piece, 4 * n, as.narrow);
            const float scale = SmallPart<const float>(packed, rank, wide).scale[g];
            const int first = SWIZZLED ? n / 4 * 16 + n % 4 * 2 : 4 * n;
#pragma unroll
            for (int e = 0; e < 4; e++) m.y[g][first + (SWIZZLED ? e % 2 * 8 + e / 2 : e)] = scale * codes[e];
        } else {
            Packed<SKETCH, 4> x;
            x.load(packed + g * V + (4 * n ^ swizzle(g)));
            *reinterpret_cast<float4*>(&m.y[g][4 * n]) = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
}

// A lane's channels of a stored row of a map; codes without their scale.
__device__ __forceinline__ void load_row(float (&x)[LK], const sketch_t* row, [[maybe_unused]] bool narrow) {
    const int lane = threadIdx.x % 32;
    if constexpr (CODED) {  // words hold channels 0, 2, 1, 3
        Codes<4> codes;
        codes.load(row, LK * lane / 4 * 4, narrow);
#pragma unroll
        for (int c = 0; c < LK; c++)
            x[c] = LK == 4 ? codes[c % 2 * 2 + c / 2] : lane % 2 ? codes[1 + c % 2 * 2] : codes[c % 2 * 2];
    } else {
        Packed<SKETCH, LK> packed;
        packed.load(row + LK * lane);
#pragma unroll
        for (int c = 0; c < LK; c++) x[c] = packed[c];
    }
}
__device__ __forceinline__ void load_projection(float (&x)[LK], const projection_t* row) {
    Packed<CODED ? BF16 : SKETCH, LK> packed;
    packed.load(row + LK * (threadIdx.x % 32));
#pragma unroll
    for (int c = 0; c < LK; c++) x[c] = packed[c];
}

// Advances 8 rows through the window's tokens. products[s][first + i] = <row i, key of token s>; for s = W <row i,
// query>. Row number `own` + s becomes token s's key. A row is multiplied by one decay after another: there are no sums
// of log-decays and no quotients.
template <int LENGTH>
__device__ __forceinline__ void advance_eight(float (&x)[8][LK], float (*products)[LENGTH], int first, int own,
                                              const WindowTokens& tokens, const GateInput<LK>& input) {
    const int lane = threadIdx.x % 32;
    auto put = [&](int s, float (&dots)[8]) {
        const float dot = warp_sums(dots);
        if (lane % 4 == 0) products[s][first + lane / 4] = dot;
    };
#pragma unroll 4
    for (int s = 0; s < W; s++) {
        Packed<ACT, LK> key;
        key.load(tokens.key(s) + LK * lane);
        float decays[LK], dots[8] = {};
        if constexpr (KIND == KDA) {
            Packed<GATE_TYPE, LK> gates;
            gates.load(tokens.gate(s) + LK * lane);
#pragma unroll
            for (int c = 0; c < LK; c++) decays[c] = decay(input.log_decay(gates[c], c));
        } else {
            decays[0] = decay(*tokens.gate(s));
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int c = 0; c < LK; c++) {
                x[i][c] *= decays[KIND == KDA ? c : 0];
                if (ERASES) dots[i] += x[i][c] * key[c];
                if (first + i == own + s) x[i][c] = key[c];
            }
        if (ERASES) put(s, dots);
    }
    Packed<ACT, LK> query;
    query.load(tokens.last.q + LK * lane);
    float dots[8] = {};
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int c = 0; c < LK; c++) dots[i] += x[i][c] * query[c];
    put(W, dots);
}

// X, and its products with keys and with the query. With maps in factors, X begins with R.
__device__ __forceinline__ void advance_rows(RefreshMemory& m, const WindowTokens& tokens, const sketch_t* packed,
                                             [[maybe_unused]] const projection_t* projection,
                                             const GateInput<LK>& input, int rank, int wide) {
    const int lane = threadIdx.x % 32;
    for (int first = threadIdx.x / 32 * 8; first < rank + W; first += 8 * WORKER_WARPS) {
        float x[8][LK];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int g = min(first + i, rank - 1);
            if constexpr (MAP == DENSE)
                load_row(x[i], packed + column_at(rank, wide) + row_at(g, wide), g >= wide);
            if constexpr (MAP == SHARED) load_projection(x[i], projection + g * K);
#pragma unroll
            for (int c = 0; c < LK; c++) {
                if constexpr (MAP == FACTORS) x[i][c] = m.x[g][LK * lane + c];
                if (first + i >= rank) x[i][c] = 0;
            }
        }
        advance_eight(x, m.products, first, rank, tokens, input);
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int c = 0; c < LK; c++) m.x[first + i][LK * lane + c] = x[i][c];
    }
#if MAP == 0
    for (int first = threadIdx.x / 32 * 8; first < rank; first += 8 * WORKER_WARPS) {
        float x[8][LK];
#pragma unroll
        for (int i = 0; i < 8; i++) load_projection(x[i], projection + min(first + i, rank - 1) * K);
        advance_eight(x, m.projected, first, RANKS, tokens, input);  // no row becomes a key
    }
#endif
}

// The tokens' rows of Y, w_s = beta_s (v_s - prediction), at a thread's channel; returns the output. Rows past the last
// row are zeros.
__device__ __forceinline__ float advance_columns(RefreshMemory& m, const WindowTokens& tokens, int rank, int channel) {
    for (int i = rank; i < (rank + W + 3) / 4 * 4; i++) m.y[i][channel] = 0;
    // Sum of rows 0 to count - 1 with weights. Weights past the last row are zeros.
    auto sum = [&](const float* weights, int count) {
        float x[4] = {};
        for (int i = 0; i < count; i += 4) {
            float own[4];
            load_floats(own, weights + i);
#pragma unroll
            for (int e = 0; e < 4; e++) x[e] += own[e] * m.y[i + e][channel];
        }
        return (x[0] + x[1]) + (x[2] + x[3]);
    };
#pragma unroll 1
    for (int s = 0; s < W; s++) {
        const float value = tokens.value(s, channel);
        m.y[rank + s][channel] = ERASES ? tokens.beta(s) * (value - sum(m.products[s], rank + s)) : value;
    }
    return sum(m.products[W], rank + W);
}

// Products of rows i to i + 15 with rows j to j + 7 of LENGTH numbers, in accumulator order. `left(row, at, x)` and
// `right` load four neighbours.
template <int LENGTH, class Left, class Right>
__device__ __forceinline__ void multiply_rows(float (&dots)[4], int i, int j, const Left& left, const Right& right) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    float rest[4] = {};
    dots[0] = dots[1] = dots[2] = dots[3] = 0;
#pragma unroll 2
    for (int step = 0; step < LENGTH / 16; step++) {
        float x[4], y[4];
        LeftOperand rows;
        left(i + r, 16 * step + 4 * c, x), rows.set(0, x);
        left(i + 8 + r, 16 * step + 4 * c, x), rows.set(1, x);
        right(j + r, 16 * step + 4 * c, y);
#pragma unroll
        for (int n = 0; n < 2; n++) rows.multiply<false, false>(n, dots, rest, y[2 * n], y[2 * n + 1]);
    }
#pragma unroll
    for (int e = 0; e < 4; e++) dots[e] += rest[e];
}

// Loads of rows below `count`, and zeros past them.
template <int LENGTH> struct RowsOf {
    const float (*rows)[LENGTH];
    int count;

    __device__ __forceinline__ void operator()(int row, int at, float (&x)[4]) const {
        x[0] = x[1] = x[2] = x[3] = 0;
        if (row < count) load_floats(x, &rows[row][at]);
    }
};

// A column of the basis in the flush's layout: four channels of each lane are one operand.
struct BasisRows {
    const uint2* basis;

    __device__ __forceinline__ void operator()(int column, int at, float (&x)[4]) const {
        x[0] = x[1] = x[2] = x[3] = 0;
        const uint2* const from = basis + (column / 8 * STEPS + at / 16) * BASIS_SLICES * 32 + threadIdx.x % 32;
#pragma unroll
        for (int slice = 0; slice < BASIS_SLICES; slice++) {
            const uint2 four = from[32 * slice];
            x[0] += __uint_as_float(four.x << 16), x[1] += __uint_as_float(four.x & 0xffff0000u);
            x[2] += __uint_as_float(four.y << 16), x[3] += __uint_as_float(four.y & 0xffff0000u);
        }
    }
};

// small[i][j] = <left row i, right row j>. The products are divided among the worker warps.
template <int LENGTH, class Left, class Right>
__device__ __forceinline__ void multiply_small(RefreshMemory& m, int count, int columns, const Left& left,
                                               const Right& right) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4, tiles = (columns + 7) / 8;
    for (int n = threadIdx.x / 32; n < (count + 15) / 16 * tiles; n += WORKER_WARPS) {
        const int i = n / tiles * 16, j = n % tiles * 8;
        float dots[4];
        multiply_rows<LENGTH>(dots, i, j, left, right);
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (i + 8 * half + r < count)
                *reinterpret_cast<float2*>(&m.small[i + 8 * half + r][j + 2 * c]) =
                    make_float2(dots[2 * half], dots[2 * half + 1]);
    }
}

// A warp's share of |S'|_F^2 = <Y Y^T, X X^T>, rows by rows.
__device__ __forceinline__ float norm_of_product(const RefreshMemory& m, int count) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    const RowsOf<COLUMN> y{m.y, count};
    const RowsOf<KEY_FACTOR> x{m.x, count};
    float sum = 0;
    int n = threadIdx.x / 32;
    for (int i = 0; i < count; i += 16)
        for (int j = 0; j < min(i + 16, count); j += 8, n++) {
            if (n % WORKER_WARPS) continue;
            float values[4], keys[4];
            multiply_rows<V>(values, i, j, y, y), multiply_rows<K>(keys, i, j, x, x);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = i + r + 8 * (e / 2), column = j + 2 * c + e % 2;
                sum += (row == column ? 1.f : row > column ? 2.f : 0.f) * values[e] * keys[e];
            }
        }
    return warp_sum(sum);
}

// sum over i of small[i][g] rows[i][at], for 8 columns g from `first` on.
template <int LENGTH>
__device__ __forceinline__ void combine(float (&x)[8], const RefreshMemory& m, const float (*rows)[LENGTH], int count,
                                        int first, int at) {
#pragma unroll
    for (float& sum : x) sum = 0;
#pragma unroll 2
    for (int i = 0; i < count; i++) {
        float own[8];
        load_floats(own, &m.small[i][first]);
        const float factor = rows[i][at];
#pragma unroll
        for (int g = 0; g < 8; g++) x[g] += own[g] * factor;
    }
}
