"""Inputs, plans and comparisons for tests and benchmarks of the CUDA kernels."""

import numpy as np
import pytest
from samples import gate_of, map_of

from sketchssm.arrays.options import EngineOptions
from sketchssm.cuda import standard, window
from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.recurrence import FULL_STATE, Layer, Tokens
from sketchssm.plans.plan import SketchPlan
from sketchssm.reference.engines import SketchEngine as ReferenceEngine

# float32 arithmetic over a few hundred tokens; the reference takes the same rounded inputs in float64
EXACT = 2e-6
# Both sides round the same states of 16 bits, except for float32's errors (1e-7), which move about 1 element in 10^4
# to the other neighbour: by 2^-8 (bf16), which is 4e-5 of the norm. A missing or a second rounding is an error of 1e-3
# (bf16) or 1.4e-4 (fp16), and a rounding toward zero twice as much.
TIPPED = {"bfloat16": 1.5e-4, "float16": 5e-5}
# bf16 rounds by 2^-9 at most
ROUNDED = 2.0**-8
# bf16 sketches and maps (8 bits): a few roundings of relative size 2^-9 in a row; float32 ones: several times the
# 2^-16 that two bf16 slices leave out of the basis, of the state and of U in S U
STORED = {"bfloat16": 1.2e-2, "float32": 1e-4}
# The kernels compute U and S U with 11 bits of the state and 8 of the basis, so a part of their codes is the neighbour
# of the reference's: 1 / 127 of the largest number. Measured on the host: up to 8.5e-3.
STORED["int8"] = 1.2e-2
RIDGE = {"lowrank": 0.1, "ridge": 0.001}


def full_reads(stored="bfloat16", state_dtype="float32"):
    """Error of reads of full-state heads: as that of states, or of their shadows in bf16."""
    shadows = SketchFormat.of(stored).shadows(state_dtype)
    return ROUNDED if shadows else TIPPED.get(state_dtype, EXACT)


def thorough(*cases):
    """Cases of a test that the host runs with SKETCHSSM_THOROUGH=1 only."""
    return [pytest.param(*case, marks=pytest.mark.thorough) for case in cases]


def round_to(x, activation):
    """Values rounded to an activation type, as float32."""
    import ml_dtypes

    types = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
    return x.astype(types[activation]).astype(np.float32)


def to_device(x, activation):
    """A float32 array on the device in an activation type; bf16 as its bits."""
    import cupy
    import ml_dtypes

    if activation == "bfloat16":
        return cupy.asarray(np.ascontiguousarray(x.astype(ml_dtypes.bfloat16).view(np.uint16)))
    return cupy.asarray(np.ascontiguousarray(x.astype(activation)))


def named_gate(name, layer, rng):
    """The gate of a layer by its name: the softplus ("raw"), fla's bounded gate ("bounded") or None."""
    if not name.endswith(("raw", "bounded")):
        return None
    return gate_of(rng, layer, -5.0 if name.endswith("bounded") else None)


def make_tokens(layer, batch, tokens, activation, rng, *, hard_gates=True, gate=None):
    """Host inputs ``(batch, tokens, ...)``, representable in the activation type. Every other head has gates of all
    strengths: where all are mild, kda's flush makes its Gram matrix in another way. With a gate g is raw.
    """
    shape = (batch, tokens)
    q, k = rng.standard_normal((2, *shape, layer.key_heads, layer.key_dim))
    q, k = q / np.linalg.norm(q, axis=-1, keepdims=True), k / np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((*shape, layer.heads, layer.value_dim))
    gates = (layer.key_dim,) if layer.channel_decays else ()
    g = -(rng.uniform(0.0, 0.2, (*shape, layer.heads, *gates)) ** 2)
    if hard_gates:
        draw = rng.uniform(size=g.shape)
        draw[:, :, ::2] = 1.0
        g = np.where(draw < 0.02, -50.0, np.where(draw < 0.03, -np.inf, np.where(draw < 0.1, 0.0, g)))
    if gate is not None:
        hard = {-50.0: 100.0, -np.inf: np.inf, 0.0: -np.inf}
        raw = rng.standard_normal(g.shape)
        g = round_to(np.select([g == x for x in hard], list(hard.values()), raw), activation)
    beta = rng.uniform(0.1, 1.0, (*shape, layer.heads)).astype(np.float32) if layer.erases else None
    return Tokens(*(round_to(x, activation) for x in (q, k, v)), g.astype(np.float32), beta)


def tokens_to_device(tokens, activation, gate=None):
    narrow = "qkv" if gate is None else "qkvg"
    return Tokens(
        *(
            None if x is None else to_device(x, activation if name in narrow else "float32")
            for name, x in tokens._asdict().items()
        )
    )


def make_plan(layer, ranks, rng, map="lowrank", pivots=None, ridge=0.1, window=16, sketch_dtype="bfloat16"):
    """A plan with random bases."""
    ranks = np.asarray(ranks)
    draw = rng.standard_normal((layer.heads, layer.key_dim, layer.key_dim))
    omega = np.linalg.qr(draw)[0][:, :, : max(int(ranks.max()), 1)]
    plan = SketchPlan.__new__(SketchPlan)
    plan._fill(layer, {"omega": omega, "ranks": ranks}, window, map_of(map, pivots, ridge), sketch_dtype, 0)
    return plan


def separable_states(plan, slots, rng):
    """States ``(slots, heads, V, K)`` whose split form has the same codes in every backend. Bases are the first unit
    vectors, in place of the plan's. Columns of U have no value channel in common, so the Gram matrix is diagonal. All
    numbers are integers of up to 8 bits, with such largest numbers that no code is halfway between two. Columns differ
    in energy, in a random order.
    """
    layer = plan.layer
    plan.omega[...] = np.eye(*plan.omega.shape[1:])
    states = rng.integers(-9, 10, (slots, *layer.state_shape)).astype(float)
    for slot, head in np.ndindex(slots, layer.heads):
        rank = plan.ranks[head]
        if rank == FULL_STATE:
            continue
        owner = np.arange(layer.value_dim) % rank
        rows = np.zeros((rank, layer.key_dim))
        for g in range(rank):
            column, row = ((63, 3), (15, 7))[rng.integers(2)]
            own = rng.integers(-column, column + 1, np.count_nonzero(owner == g))
            own[0], rows[g, rank:] = column, rng.integers(-row, row + 1, layer.key_dim - rank)
            rows[g, g], rows[g, rng.integers(rank, layer.key_dim)] = 1, -row
            states[slot, head, owner == g] = own[:, None] * rows[g]
    return states.astype(np.float32)


def error(got, want):
    """Relative error by norm; NaN where anything is NaN."""
    scale = np.linalg.norm(want)
    return float(np.linalg.norm(np.asarray(got, dtype=np.float64) - want) / (scale if scale else 1.0))


def slot_table(batch, slots, tokens, rng, *, padding=0.2):
    """Random distinct slots of each row at each token, some of them padding."""
    table = np.stack([rng.permutation(slots)[:batch] for _ in range(tokens)])
    table[rng.uniform(size=table.shape) < padding] = -1
    return table.astype(np.int64)


def token(tokens, t, rows=slice(None)):
    return Tokens(*(None if x is None else np.ascontiguousarray(x[rows, t : t + 1]) for x in tokens))


def step_both(device, oracle, tokens, table, activation, gate=None):
    """Outputs of one call of both engines. With a gate, raw inputs go to the device, log-decays to the reference."""
    import cupy

    out, want = cupy.full(tokens.v.shape, np.nan, dtype=np.float32), np.empty(tokens.v.shape)
    device.step(tokens_to_device(tokens, activation, gate), cupy.asarray(table), out)
    oracle.step(tokens if gate is None else tokens._replace(g=gate.log_decays(tokens.g)), table, want)
    return out.get(), want


def run_pair(device, oracle, tokens, table, activation, gate=None):
    """Feed both engines token by token; returns outputs of both and the rows' window positions before each token."""
    got, want = np.empty((2, *tokens.v.shape))
    where = np.empty(tokens.v.shape[:2], dtype=int)
    for t in range(tokens.v.shape[1]):
        where[:, t] = np.where(table[t] >= 0, oracle.position[table[t]], -1)
        one = step_both(device, oracle, token(tokens, t), table[t], activation, gate)
        got[:, t : t + 1], want[:, t : t + 1] = one
    return got, want, where


LAYERS = {
    "mamba2": Layer("mamba2", 16, 128, 64, 2),
    "mamba2-80": Layer("mamba2", 4, 64, 80, 1),
    "mamba2-128": Layer("mamba2", 2, 128, 128, 1),  # raw keys with two places for states
    "gdn": Layer("gdn", 4, 128, 128, 2),
    "gdn-96": Layer("gdn", 2, 64, 96, 2),
    "kda": Layer("kda", 3, 128, 128, 3),
    "kda-64": Layer("kda", 2, 64, 64, 1),
    "kda-raw": Layer("kda", 3, 128, 128, 3),  # raw gate inputs
    "kda-64-bounded": Layer("kda", 2, 64, 64, 1),
    "olmo-hybrid": Layer("gdn", 3, 96, 192, 3),  # 24 lanes have four channels each
    "falcon-h1": Layer("mamba2", 3, 256, 128, 1),  # an odd group: tiles of one head
    "nemotron-h-56b": Layer("mamba2", 4, 256, 64, 1),
    "gla": Layer("gla", 2, 128, 64, 1),
    "gla-raw": Layer("gla", 2, 96, 48, 2),
}
RANKS = {"mamba2": [5, 1, 15, FULL_STATE, 16, 8], "gdn": [7, FULL_STATE, 16, 2], "kda": [9, 13, 1], "gla": [6, 11]}


def with_blocks(engine, blocks):
    """The engine, whose later flushes launch so many blocks."""
    _, flushes, _ = engine._prepare(late=False)
    flushes.blocks = blocks
    engine._grids.clear()
    return engine


def taking_arrays(kind):
    """An engine of CuPy arrays, which come to the kernels as those of a head's caller do; uint16 holds bf16's bits."""

    def as_given(tokens):
        import ml_dtypes

        return Tokens(*(x if x is None or x.dtype != np.uint16 else x.view(ml_dtypes.bfloat16) for x in tokens))

    class Taking:
        def __init__(self, *args, activation_dtype="bfloat16", **options):
            self.inner = kind(*args, options=EngineOptions(activation_dtype=activation_dtype, **options))
            self.cursor, self.sketch = self.inner.slots.cursor, self.inner.memory.get("sketch")

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def step(self, tokens, slots, out):
            given = as_given(tokens)
            with self.arrays.call(out) as call:
                pointers, index, written = call.inputs(given, slots, out, True, self.num_slots)
                self.inner.step(pointers, index, written)
                assert call.result(written, out, out) is out

        def draft(self, tokens, lengths, slots, out):
            with self.arrays.call(out) as call:
                index = call.slots(slots, out.shape[0], self.num_slots)
                counts = call.lengths(lengths, index, out.shape[1])
                pointers, index, written = call.inputs(as_given(tokens), slots, out, True, self.num_slots, counts)
                self.inner.draft(pointers, counts, index, written)
                assert call.result(written, out, out) is out

        def commit(self, accepted, slots):
            with self.arrays.call(slots) as call:
                index = call.slots(slots, accepted.shape[0], self.num_slots)
                self.inner.commit(call.accepted(accepted, index, self.cursor), index)

        def load_state(self, state, slots):
            with self.arrays.call(state) as call:
                index = call.slots(slots, state.shape[0], self.num_slots)
                self.inner.load_state(call.states(state, index), index)

        def flush(self, slots):
            with self.arrays.call(slots) as call:
                self.inner.flush(call.slots(slots, None, self.num_slots))

        def reset(self, slots):
            with self.arrays.call(slots) as call:
                self.inner.reset(call.slots(slots, None, self.num_slots))

    return Taking


StandardEngine, ReplayEngine, SketchEngine = map(
    taking_arrays, (standard.StandardEngine, window.ReplayEngine, window.SketchEngine)
)


def run_mixed(device, oracle, layer, steps, activation, rng, gate=None):
    """Feed both engines steps of 1 to 4 rows and 1 to 3 tokens, with a flush of some slots in between. Returns outputs
    of both ``(tokens, heads, V)`` and which of them are exact: those of flushes, and padding.
    """
    import cupy

    slots, window = oracle.position.size, oracle.window
    gots, wants, exact = [], [], []
    for _ in range(steps):
        rows, length = rng.integers(1, 5), rng.integers(1, 4)
        table = slot_table(rows, slots, 1, rng)[0]
        tokens = make_tokens(layer, rows, length, activation, rng, gate=gate)
        where = oracle.position[table]
        got, want = step_both(device, oracle, tokens, table, activation, gate)
        for t in range(length):
            ends = where == window - 1
            gots.append(got[:, t])
            wants.append(want[:, t])
            exact.append(ends | (table < 0))
            where = np.where(ends, 0, where + 1)
        if rng.uniform() < 0.1:
            some = rng.permutation(slots)[:2]
            device.flush(cupy.asarray(some))
            oracle.flush(some)
        assert np.array_equal(device.position.get(), oracle.position)
    return np.concatenate(gots), np.concatenate(wants), np.concatenate(exact)


RAW_GATES = """
extern "C" __global__ void raw_gates(const float* packed, const float* given, float* log_decays, float* decays) {
    GateInput<1> gate;
    const int i = blockIdx.x * K + threadIdx.x;
    gate.load(packed, 0, threadIdx.x);
    log_decays[i] = gate.log_decay(given[i], 0);
    decays[i] = gate.quick_decay(given[i], 0);
}
"""


def check_raw_gates(cupy, rate_log, bound):
    """Check log-decays and decays that kernels compute from raw gate inputs of any size against float64."""
    from sketchssm.arrays.gates import GateInput
    from sketchssm.cuda.modules import source_text

    layer = Layer("kda", 1, 64, 64, 1)
    # these biases make the sums exact, so that the test measures errors of the formulas only
    bias = np.arange(64)[None] / 16 - 2
    gate = GateInput(np.array([rate_log]), bias, bound)
    given = np.concatenate([np.arange(-1920, 1920) / 64, [-np.inf, -1e38, -1e5, -90, 88, 1e5, 1e38, np.inf, np.nan]])
    # an odd number of inputs, so that each meets every bias
    given = np.resize(given, (given.size, 64)).astype(np.float32)
    engine = StandardEngine(layer, 1, gate=gate)
    module = cupy.RawModule(code=source_text("standard") + RAW_GATES, options=engine.variants()[0].options)
    got, decays = (cupy.zeros(given.shape, np.float32) for _ in range(2))
    module.get_function("raw_gates")((len(given),), (64,), (engine._gate, cupy.asarray(given), got, decays))
    with np.errstate(invalid="ignore", over="ignore"):
        want = gate.log_decays(given[:, None].astype(np.float64))[:, 0].astype(np.float32).astype(np.float64)
    # a handful of roundings of 2^-24, and the device's 2^t to 2^-22; the bounded formula takes exp of a product of
    # up to 87, rounded; a softplus that float32 flushes is none
    np.testing.assert_allclose(
        got.get(), want, rtol=1e-6 if bound is None else 1e-5, atol=1e-37 * max(1, np.exp(rate_log))
    )
    # g exp(g) is at most 0.37 of what g is off by: 8e-6 of it, where the softplus is a polynomial
    np.testing.assert_allclose(decays.get(), np.exp(want), rtol=0, atol=5e-6)


def compare_window(device, oracle, start, activation, rng, cupy):
    """Error of the reads of one window that begins with these states."""
    rows, layer, length = np.arange(len(start)), oracle.layer, oracle.window - 1
    device.load_state(cupy.asarray(start), cupy.arange(len(start)))
    oracle.load_state(start.astype(np.float64), rows)
    tokens = make_tokens(layer, len(start), length, activation, rng)
    got, want, _ = run_pair(device, oracle, tokens, np.tile(rows, (length, 1)), activation)
    return error(got, want)


def split_codes(layer, activation, rng):
    """Engine, reference and states of a plan whose split form has distinct codes."""
    ranks = np.resize([9, 15, 3, 1, 16], layer.heads)
    plan = make_plan(layer, ranks, rng, map="ridge", ridge=0.0, sketch_dtype="int8")
    start = separable_states(plan, 3, rng)
    device = SketchEngine(plan, 3, "int8", activation_dtype=activation, output_dtype="float32")
    return device, ReferenceEngine(plan, 3, "int8"), start


def poisoned(engine):
    """The warm engine, with NaN in its ring, which kernels must write before they read."""
    engine.warmup()
    for ring in engine.slots.ring:
        ring.view(np.uint8)[...] = 0xFF
    return engine


def run_served(device, oracle, layer, steps, activation, rng, cupy):
    """Feed both engines as a server would: rows come and go, states are loaded, slots flushed and reset in between.
    Returns outputs of both, and how many tokens each flush of the oracle folded. Cursor words must always agree.
    """
    slots, gots, wants, folded = oracle.position.size, [], [], []
    fold = oracle._fold
    oracle._fold = lambda slot, count: (folded.append(count), fold(slot, count))[1]
    for _ in range(steps):
        some = rng.permutation(slots)[:1]
        match rng.integers(12):
            case 0:
                start = rng.standard_normal((1, *layer.state_shape)).astype(np.float32)
                device.load_state(cupy.asarray(start), cupy.asarray(some))
                oracle.load_state(start.astype(np.float64), some)
            case 1:
                device.flush(cupy.asarray(some)), oracle.flush(some)
            case 2:
                device.reset(cupy.asarray(some)), oracle.reset(some)
        rows, length = rng.integers(1, slots + 1), rng.choice([1, 1, 1, 3])
        table = slot_table(rows, slots, 1, rng)[0]
        tokens = make_tokens(layer, rows, length, activation, rng)
        for outputs, out in zip((gots, wants), step_both(device, oracle, tokens, table, activation), strict=True):
            outputs.append(out.reshape(-1, layer.heads, layer.value_dim))
        assert np.array_equal(device.cursor.get(), oracle.memory["cursor"])
    return np.concatenate(gots), np.concatenate(wants), folded


def load_same(device, oracle, rng):
    """Load the same random states into all slots of both engines."""
    import cupy

    slots = np.arange(oracle.position.size)
    start = rng.standard_normal((slots.size, *oracle.layer.state_shape)).astype(np.float32)
    device.load_state(cupy.asarray(start), cupy.asarray(slots))
    oracle.load_state(start.astype(np.float64), slots)
    assert np.array_equal(device.state.get().astype(np.float64), oracle.state)


def check_sketch(plan, stored, activation, rng, gate=None, blocks=None, state_dtype="float32", oracle=None):
    """Windows of mixed ranks with padding and staggered flushes against the reference; flushes in so many blocks.
    Returns outputs of both, and a function that picks sketched heads between flushes.
    """
    import cupy

    layer, length, exact = plan.layer, 2 * plan.window + 4, TIPPED.get(state_dtype, EXACT)
    options = {"activation_dtype": activation, "output_dtype": "float32", "gate": gate, "state_dtype": state_dtype}
    device = SketchEngine(plan, 5, stored, **options)
    oracle = oracle or ReferenceEngine(plan, 5, options=EngineOptions(state_dtype=state_dtype))
    poisoned(device).sketch.view(np.uint8)[...] = 0xFF
    if blocks:
        with_blocks(device, blocks)
    device.reset(cupy.arange(5))
    load_same(device, oracle, rng)
    tokens = make_tokens(layer, 4, length, activation, rng, gate=gate)
    got, want, where = run_pair(device, oracle, tokens, slot_table(4, 5, length, rng), activation, gate)
    flushes, full_state = where == plan.window - 1, plan.ranks == FULL_STATE
    assert flushes.any()
    assert error(got[flushes], want[flushes]) < exact
    assert error(device.state.get().astype(np.float64), oracle.state) < exact
    if full_state.any():
        assert error(got[~flushes][:, full_state], want[~flushes][:, full_state]) < full_reads(stored, state_dtype)
    sketched = lambda x: x[~flushes][:, ~full_state]  # noqa: E731
    assert error(sketched(got), sketched(want)) < max(STORED[stored], exact)
    device.flush(cupy.arange(5))
    oracle.flush(np.arange(5))
    assert error(device.state.get().astype(np.float64), oracle.state) < exact
    return got, want, sketched
