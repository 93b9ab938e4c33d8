// Converts the activations of a model's layer to a head's inputs, and a head's outputs to the layer's outputs: one
// launch for each conversion. All arithmetic is in float32.
//
// Rows of an array may be any distance apart; a row is contiguous. A thread loads all its elements before it stores
// any.
//
// -D constants besides lib/common.cuh's: RAW, RATE and BIAS (types of raw gates, of rates and skips, and of biases). V
// is the number of elements of a head; K, OUT and STATE are not used.
#include "lib/log_decay.cuh"

constexpr int THREADS = 256;
typedef Element<RAW>::type raw_t;
typedef Element<RATE>::type rate_t;
typedef Element<BIAS>::type bias_t;

DEVICE float softplus(float x) { return softplus(x, exp_of_negative(-fabsf(x))); }

// The most neighbouring elements of a head, of at most `limit`, that one access can load.
constexpr int elements_of_access(int limit) {
    int n = 16 / sizeof(act_t);
    while (n > limit || V % n) n /= 2;
    return n;
}
constexpr int OF_THREAD = elements_of_access(8);  // elements of a thread of mamba2's kernels
constexpr int OF_LANE = V % 32 ? 1 : elements_of_access(V / 32);  // elements that a lane of `normalised` loads at once

// N neighbouring elements in float32. Whether one access may load or store them depends on the caller's addresses.
template <int N> struct Piece {
    static constexpr int BYTES = N * sizeof(act_t);
    float x[N];

    static DEVICE bool aligned(const act_t* array, i64 stride) {
        return BYTES >= 4 && (reinterpret_cast<i64>(array) | stride * static_cast<i64>(sizeof(act_t))) % BYTES == 0;
    }
    DEVICE void load(const act_t* from, bool aligned) {
        if constexpr (BYTES >= 4) {
            if (aligned) {
                Packed<ACT, N> packed;
                packed.load(from);
#pragma unroll
                for (int i = 0; i < N; i++) x[i] = packed[i];
                return;
            }
        }
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = widen<ACT>(from[i]);
    }
    DEVICE void store(act_t* to, bool aligned) const {
        if constexpr (BYTES >= 4) {
            if (aligned) {
                Packed<ACT, N> packed;
                packed.set(x);
                packed.store(to);
                return;
            }
        }
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = narrow<ACT>(x[i]);
    }
};

// The thread's elements of all rows: mamba2's kernels give each thread one piece.
struct RowPiece {
    static constexpr int PIECES = HEADS * V / OF_THREAD;
    i64 row;
    int element, head;
    DEVICE RowPiece() {
        const i64 piece = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
        row = piece / PIECES;
        element = static_cast<int>(piece % PIECES) * OF_THREAD;
        head = element / V;
    }
};

// mamba2: v = step x and g = rate step, with step = softplus(dt + bias).
extern "C" __global__ void __launch_bounds__(THREADS)
    mamba_inputs(int rows, const act_t* x, i64 x_stride, const raw_t* dt, i64 dt_stride, const rate_t* rate,
                 const bias_t* bias, act_t* v, float* g) {
    const RowPiece at;
    if (at.row >= rows) return;
    typedef Piece<OF_THREAD> piece_t;
    piece_t piece;
    piece.load(x + at.row * x_stride + at.element, piece_t::aligned(x, x_stride));
    const float step = softplus(widen<RAW>(dt[at.row * dt_stride + at.head]) + widen<BIAS>(bias[at.head]));
#pragma unroll
    for (float& value : piece.x) value *= step;
    piece.store(v + at.row * (HEADS * V) + at.element, piece_t::aligned(v, HEADS * V));
    if (at.element % V == 0) g[at.row * HEADS + at.head] = widen<RATE>(rate[at.head]) * step;
}

// mamba2: out += skip x.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_skip(int rows, act_t* out, i64 out_stride, const act_t* x, i64 x_stride, const rate_t* skip) {
    const RowPiece at;
    if (at.row >= rows) return;
    typedef Piece<OF_THREAD> piece_t;
    piece_t sum, piece;
    act_t* const to = out + at.row * out_stride + at.element;
    const bool aligned = piece_t::aligned(out, out_stride);
    sum.load(to, aligned);
    piece.load(x + at.row * x_stride + at.element, piece_t::aligned(x, x_stride));
    const float factor = widen<RATE>(skip[at.head]);
#pragma unroll
    for (int i = 0; i < OF_THREAD; i++) sum.x[i] = fmaf(factor, piece.x[i], sum.x[i]);
    sum.store(to, aligned);
}

// gdn and kda: queries and keys of norm one, queries times `scale`. A warp takes the query and the key of one head.
extern "C" __global__ void __launch_bounds__(THREADS)
    normalised(int rows, const act_t* q, i64 q_stride, const act_t* k, i64 k_stride, act_t* unit_q, act_t* unit_k,
               float scale) {
    const i64 item = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) / 32;
    const i64 row = item / HEADS;
    if (row >= rows) return;
    constexpr int STEP = 32 * OF_LANE, PIECES = (V + STEP - 1) / STEP;
    typedef Piece<OF_LANE> piece_t;
    const int head = static_cast<int>(item % HEADS) * V, first = threadIdx.x % 32 * OF_LANE;
    const act_t* const from[2] = {q + row * q_stride + head, k + row * k_stride + head};
    act_t* const to[2] = {unit_q + row * (HEADS * V) + head, unit_k + row * (HEADS * V) + head};
    const bool aligned[2] = {piece_t::aligned(q, q_stride), piece_t::aligned(k, k_stride)};
    piece_t pieces[2][PIECES];
    float sums[2] = {};
#pragma unroll
    for (int array = 0; array < 2; array++) {
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const int element = first + STEP * i;
            if (element < V) {
                pieces[array][i].load(from[array] + element, aligned[array]);
#pragma unroll
                for (const float x : pieces[array][i].x) sums[array] = fmaf(x, x, sums[array]);
            }
        }
    }
#pragma unroll
    for (int array = 0; array < 2; array++) {
        const float factor = (array ? 1.f : scale) * rsqrtf(warp_sum(sums[array]) + 1e-6f);
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const int element = first + STEP * i;
            if (element < V) {
#pragma unroll
                for (float& x : pieces[array][i].x) x *= factor;
                pieces[array][i].store(to[array] + element, true);
            }
        }
    }
}

// gdn: g = -exp(rate_log) softplus(a + bias), beta = sigmoid(b). A thread takes one head of a row.
extern "C" __global__ void __launch_bounds__(THREADS)
    delta_inputs(int rows, const raw_t* a, i64 a_stride, const raw_t* b, i64 b_stride, const rate_t* rate_log,
                 const bias_t* bias, float* g, float* beta) {
    const i64 item = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x, row = item / HEADS;
    if (row >= rows) return;
    const int head = static_cast<int>(item % HEADS);
    const float step = softplus(widen<RAW>(a[row * a_stride + head]) + widen<BIAS>(bias[head]));
    g[item] = -expf(widen<RATE>(rate_log[head])) * step;
    beta[item] = 1.f / (1.f + expf(-widen<RAW>(b[row * b_stride + head])));
}

// Copies rows `sources` of a batch's tokens to `places` of a tape, g and beta in float32; not those of place `nowhere`.
// A thread takes one of the `keys`, `keys`, HEADS * V, `gates` and `betas` elements of a row.
extern "C" __global__ void __launch_bounds__(THREADS)
    write_tape(int rows, int keys, int gates, int betas, const i64* sources, const i64* places, i64 nowhere,
               const act_t* q, i64 q_stride, act_t* q_tape, const act_t* k, i64 k_stride, act_t* k_tape,
               const act_t* v, i64 v_stride, act_t* v_tape, const raw_t* g, i64 g_stride, float* g_tape,
               const rate_t* beta, i64 beta_stride, float* beta_tape) {
    constexpr int VALUES = HEADS * V;
    const int item = blockIdx.x * THREADS + threadIdx.x, width = 2 * keys + VALUES + gates + betas;
    const int row = item / width;
    if (row >= rows || places[row] == nowhere) return;
    const i64 from = sources[row], to = places[row];
    int i = item % width;
    if (i < keys) q_tape[to * keys + i] = q[from * q_stride + i];
    else if ((i -= keys) < keys) k_tape[to * keys + i] = k[from * k_stride + i];
    else if ((i -= keys) < VALUES) v_tape[to * VALUES + i] = v[from * v_stride + i];
    else if ((i -= VALUES) < gates) g_tape[to * gates + i] = widen<RAW>(g[from * g_stride + i]);
    else beta_tape[to * betas + i - gates] = widen<RATE>(beta[from * beta_stride + i - gates]);
}
