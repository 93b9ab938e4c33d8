"""Engines of CuPy arrays beside the reference: runs of both on the same inputs, and comparisons."""

import numpy as np
from gpu.cuda_support import (
    EXACT,
    STORED,
    TIPPED,
    full_reads,
    make_plan,
    make_tokens,
    separable_states,
    slot_table,
    token,
    tokens_to_device,
)
from samples import relative

from sketchssm.arrays.options import EngineOptions
from sketchssm.cuda import standard, window
from sketchssm.layer.recurrence import FULL_STATE, Tokens
from sketchssm.reference.engines import SketchEngine as ReferenceEngine


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


def poisoned(engine):
    """The warm engine, with NaN in its ring, which kernels must write before they read."""
    engine.warmup()
    for ring in engine.slots.ring:
        ring.view(np.uint8)[...] = 0xFF
    return engine


def with_blocks(engine, blocks):
    """The engine, whose later flushes launch so many blocks."""
    _, flushes, _ = engine._prepare(late=False)
    flushes.blocks = blocks
    engine._grids.clear()
    return engine


def load_same(device, oracle, rng):
    """Load the same random states into all slots of both engines."""
    import cupy

    slots = np.arange(oracle.position.size)
    start = rng.standard_normal((slots.size, *oracle.layer.state_shape)).astype(np.float32)
    device.load_state(cupy.asarray(start), cupy.asarray(slots))
    oracle.load_state(start.astype(np.float64), slots)
    assert np.array_equal(device.state.get().astype(np.float64), oracle.state)


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


def compare_window(device, oracle, start, activation, rng, cupy):
    """Error of the reads of one window that begins with these states."""
    rows, layer, length = np.arange(len(start)), oracle.layer, oracle.window - 1
    device.load_state(cupy.asarray(start), cupy.arange(len(start)))
    oracle.load_state(start.astype(np.float64), rows)
    tokens = make_tokens(layer, len(start), length, activation, rng)
    got, want, _ = run_pair(device, oracle, tokens, np.tile(rows, (length, 1)), activation)
    return relative(got, want)


def split_codes(layer, activation, rng):
    """Engine, reference and states of a plan whose split form has distinct codes."""
    ranks = np.resize([9, 15, 3, 1, 16], layer.heads)
    plan = make_plan(layer, ranks, rng, map="ridge", ridge=0.0, sketch_dtype="int8")
    start = separable_states(plan, 3, rng)
    device = SketchEngine(plan, 3, "int8", activation_dtype=activation, output_dtype="float32")
    return device, ReferenceEngine(plan, 3, "int8"), start


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
    assert relative(got[flushes], want[flushes]) < exact
    assert relative(device.state.get().astype(np.float64), oracle.state) < exact
    if full_state.any():
        assert relative(got[~flushes][:, full_state], want[~flushes][:, full_state]) < full_reads(stored, state_dtype)
    sketched = lambda x: x[~flushes][:, ~full_state]  # noqa: E731
    assert relative(sketched(got), sketched(want)) < max(STORED[stored], exact)
    device.flush(cupy.arange(5))
    oracle.flush(np.arange(5))
    assert relative(device.state.get().astype(np.float64), oracle.state) < exact
    return got, want, sketched
