"""Every decode system on every backend, against the plain recurrence."""

import copy
import pickle
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from samples import LAYERS, at, plan_of, relative, reset_after_nan, same, states_of, tokens_of

import sketchssm as ss
from sketchssm.recurrence import DENSE, Layer, Tokens
from sketchssm.reference.recurrence import run

WINDOW = 4
SLOTS = 5
RANKS = np.array([DENSE, 2, 3, DENSE])
SYSTEMS = ("standard", "replay", "sketch", "copy")
# Relative error of an exact result. Float64: a hundred operations of 2^-53 each. Float32: the same of 2^-24 over some
# ten tokens, whose errors add up like a random walk. Tokens have float32 values for both. Where results are compared
# with the recurrence, tokens are float64 arrays, so that the output is not rounded.
EXACT = {"reference": 1e-13, "cpu": 2e-6}


@pytest.fixture(params=SYSTEMS)
def system(request):
    return request.param


@pytest.fixture
def make(system, backend, layer):
    """A function that makes equal heads."""
    plan = plan_of(np.random.default_rng(7), layer, RANKS, window=WINDOW)

    def new(slots=SLOTS):
        if system == "standard":
            return ss.StandardHead(layer, slots, backend)
        if system == "replay":
            return ss.ReplayHead(layer, slots, backend, window=WINDOW)
        if system == "copy":
            return ss.CopyReadHead(layer, slots, backend, window=WINDOW)
        return ss.SketchHead(plan, slots, backend)

    return new


def singly(head, tokens, **options):
    """Decode tokens with one call each."""
    outputs = [head.step(*at(tokens, np.s_[:, t]), **options) for t in range(tokens.v.shape[1])]
    return np.stack(outputs, axis=1)


class TestExactness:
    @pytest.mark.parametrize("harsh", [False, True])
    def test_outputs_and_states(self, make, system, backend, layer, harsh, rng):
        """Outputs are exact except for sketched reads between flushes; states are exact at every flush."""
        tokens, start = tokens_of(rng, layer, 3, 3 * WINDOW, np.float64, harsh), states_of(rng, layer, 3)
        head = make()
        head.load_state(start)
        want, _ = run(layer, *tokens, state=start)
        for t in range(3 * WINDOW):
            output = head.step(*at(tokens, np.s_[:, t]))
            flushed = system == "standard" or (t + 1) % WINDOW == 0
            exact = slice(None) if flushed or system == "replay" else (RANKS == DENSE) & (system == "sketch")
            assert relative(output[:, exact], want[:, t, exact]) < EXACT[backend]
            if flushed:
                state = run(layer, *at(tokens, np.s_[:, : t + 1]), state=start)[1]
                assert relative(head.state[:3], state) < EXACT[backend]
            assert np.isfinite(output).all()
        np.testing.assert_array_equal(head.state[3:], 0)

    def test_values_that_are_not_a_multiple_of_anything(self, system, backend, rng):
        """V = 80, K = 33 and three heads per key head."""
        layer = Layer("gdn", 6, 33, 80, key_heads=2)
        plan = plan_of(rng, layer, [DENSE, 1, 4, 33, 5, DENSE], window=WINDOW)
        head = {
            "standard": lambda: ss.StandardHead(layer, 2, backend),
            "replay": lambda: ss.ReplayHead(layer, 2, backend, window=WINDOW),
            "sketch": lambda: ss.SketchHead(plan, 2, backend),
            "copy": lambda: ss.CopyReadHead(layer, 2, backend, window=WINDOW),
        }[system]()
        tokens = tokens_of(rng, layer, 2, 2 * WINDOW, np.float64)
        output = singly(head, tokens)
        want, state = run(layer, *tokens)
        assert relative(head.state, state) < EXACT[backend]
        assert relative(output[:, WINDOW - 1 :: WINDOW], want[:, WINDOW - 1 :: WINDOW]) < EXACT[backend]
        if system != "copy":
            assert relative(output[:, :, [0, 5]], want[:, :, [0, 5]]) < EXACT[backend]

    def test_a_long_slow_decay(self, make, backend, layer, rng):
        """With gates near 0 the first writes are still in the state after 1024 tokens."""
        tokens = tokens_of(rng, layer, 1, 1024)
        tokens.g[...] = -1e-4
        if tokens.beta is not None:
            tokens.beta[...] = 0.02
        head = make()
        head.step(*tokens, slots=[2])
        _, state = run(layer, *tokens)
        # a thousand roundings of the state add up like a random walk: 30 times one rounding
        assert relative(head.state[2], state[0]) < 10 * EXACT[backend]

    @pytest.mark.parametrize("dtype", [np.float16, np.float64])
    def test_load_state_keeps_every_bit(self, make, layer, dtype, rng):
        start = states_of(rng, layer, SLOTS).astype(np.float16)
        head = make()
        head.load_state(start.astype(dtype))
        np.testing.assert_array_equal(head.state, start)

    def test_state_is_a_live_view_to_read(self, make, layer, rng):
        head = make()
        view = head.state
        assert view.shape == (SLOTS, *layer.state_shape)
        assert np.shares_memory(view, head.state)
        assert view.strides[-1] == view.itemsize
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0
        head.step(*tokens_of(rng, layer, 1, WINDOW))
        assert np.any(view[0] != 0)


class TestSlots:
    def test_rows_go_where_they_are_sent(self, make, layer, rng):
        tokens = tokens_of(rng, layer, 3, WINDOW)
        head, twin = make(), make()
        np.testing.assert_array_equal(head.step(*tokens, slots=[4, 0, 2]), twin.step(*tokens))
        np.testing.assert_array_equal(head.state[[4, 0, 2]], twin.state[:3])
        np.testing.assert_array_equal(head.state[[1, 3]], 0)

    @pytest.mark.parametrize("slots", [(2, 0), range(2), np.array([2, 0], np.int32), np.array([2, 0], np.uint8)])
    def test_any_integers_name_slots(self, make, layer, slots, rng):
        tokens = tokens_of(rng, layer, 2, WINDOW)
        head, twin = make(), make()
        np.testing.assert_array_equal(head.step(*tokens, slots=slots), twin.step(*tokens, slots=list(slots)))
        same(head, twin)

    def test_padding_reads_and_writes_nothing(self, make, layer, rng):
        """A padding row with any values, even NaN or a positive gate, outputs zeros and changes no slot."""
        tokens = tokens_of(rng, layer, 2, 3 * WINDOW)
        wide = Tokens(*(None if x is None else np.concatenate([x[:1], x * np.nan, x[1:]]) for x in tokens))
        wide.g[1:3] = 1.0
        head, twin = make(), make()
        padded, plain = head.step(*wide, slots=[3, -1, -1, 1]), twin.step(*tokens, slots=[3, 1])
        np.testing.assert_array_equal(padded[1:3], 0)
        np.testing.assert_array_equal(padded[[0, 3]], plain)
        same(head, twin)

    def test_all_padding(self, make, layer, rng):
        head, twin = make(), make()
        np.testing.assert_array_equal(head.step(*tokens_of(rng, layer, 2, 3), slots=[-1, -1]), 0)
        head.load_state(np.full((1, *layer.state_shape), np.nan), slots=[-1])
        head.flush([-1])
        head.reset([-1])
        same(head, twin)

    def test_no_rows_and_no_tokens(self, make, layer, rng):
        head, twin = make(), make()
        tokens = tokens_of(rng, layer, 2, 3)
        for empty in (np.s_[:0], np.s_[:0, 0], np.s_[:, :0]):
            some = at(tokens, empty)
            assert head.step(*some, slots=[0, 1][: some.v.shape[0]]).shape == some.v.shape
        same(head, twin)

    def test_a_row_does_not_depend_on_the_batch(self, make, layer, rng):
        """Its output is bitwise the same with other rows, at another index and in another slot."""
        tokens = tokens_of(rng, layer, 5, 2 * WINDOW + 1)
        head, alone = make(), make()
        full = head.step(*tokens, slots=[3, 1, 4, 0, 2])
        for row, slot in enumerate([2, 0, 1, 4, 3]):
            np.testing.assert_array_equal(
                alone.step(*at(tokens, np.s_[row : row + 1]), slots=[slot]), full[row : row + 1]
            )


class TestSeveralTokens:
    def test_are_single_steps(self, make, layer, rng):
        tokens = tokens_of(rng, layer, 3, 2 * WINDOW + 3, harsh=True)
        head, twin = make(), make()
        np.testing.assert_array_equal(head.step(*tokens), singly(twin, tokens))
        same(head, twin)

    def test_with_cursors_apart(self, make, layer, rng):
        """Each slot flushes at its own token, anywhere in the call."""
        head, twin = make(), make()
        for slot in range(1, WINDOW):
            ahead = tokens_of(rng, layer, 1, slot)
            head.step(*ahead, slots=[slot])
            twin.step(*ahead, slots=[slot])
        tokens = tokens_of(rng, layer, WINDOW, 2 * WINDOW + 1)
        np.testing.assert_array_equal(head.step(*tokens), singly(twin, tokens))
        same(head, twin)

    def test_in_any_portions(self, make, layer, rng):
        tokens = tokens_of(rng, layer, 2, 11)
        head, twin = make(), make()
        parts = [head.step(*at(tokens, np.s_[:, a:b])) for a, b in ((0, 5), (5, 6), (6, 11))]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), twin.step(*tokens))
        same(head, twin)


class TestWindows:
    def test_position_counts_what_is_buffered(self, make, system, layer, rng):
        head = make()
        tokens = tokens_of(rng, layer, 1, 2 * WINDOW + 1)
        for t in range(2 * WINDOW + 1):
            head.step(*at(tokens, np.s_[:, t]), slots=[3])
            want = np.zeros(SLOTS)
            want[3] = 0 if system == "standard" else (t + 1) % WINDOW
            np.testing.assert_array_equal(head.position, want)
        head.position[:] = 99
        assert head.position.max() < WINDOW

    @pytest.mark.parametrize("count", range(2 * WINDOW))
    def test_flush_at_any_position(self, make, backend, layer, count, rng):
        tokens, start = tokens_of(rng, layer, 2, count), states_of(rng, layer, 2)
        head = make()
        head.load_state(start)
        head.step(*tokens)
        head.flush([0])
        state = run(layer, *tokens, state=start)[1]
        assert relative(head.state[0], state[0]) < EXACT[backend]
        assert head.position[0] == 0
        once = head.state.copy()
        head.flush([0])
        np.testing.assert_array_equal(head.state, once)
        head.flush()
        assert relative(head.state[:2], state) < EXACT[backend]
        np.testing.assert_array_equal(head.position, 0)

    def test_an_early_flush_changes_no_exact_result(self, make, backend, layer, rng):
        """A new window starts after the flush."""
        tokens = tokens_of(rng, layer, 2, 2 + 2 * WINDOW, np.float64)
        head = make()
        head.step(*at(tokens, np.s_[:, :2]))
        head.flush()
        output = head.step(*at(tokens, np.s_[:, 2:]))
        want, state = run(layer, *tokens)
        assert relative(output[:, WINDOW - 1 :: WINDOW], want[:, 2 + WINDOW - 1 :: WINDOW]) < EXACT[backend]
        assert relative(head.state[:2], state) < EXACT[backend]

    def test_flush_takes_one_slot_or_many(self, make, layer, rng):
        tokens = tokens_of(rng, layer, 3, 2)
        head, twin = make(), make()
        head.step(*tokens)
        twin.step(*tokens)
        head.flush(1)
        twin.flush(np.array([1]))
        same(head, twin)


class TestStates:
    def test_load_state_drops_what_was_buffered(self, make, layer, rng):
        head, fresh = make(), make()
        head.step(*tokens_of(rng, layer, 3, WINDOW - 1))
        start, tokens = states_of(rng, layer, 2), tokens_of(rng, layer, 2, WINDOW + 1)
        for each in (head, fresh):
            each.load_state(start, slots=[2, 0])
        np.testing.assert_array_equal(head.position[[2, 0]], 0)
        np.testing.assert_array_equal(head.state[[2, 0]], fresh.state[[2, 0]])
        np.testing.assert_array_equal(head.step(*tokens, slots=[2, 0]), fresh.step(*tokens, slots=[2, 0]))
        head.flush()
        fresh.flush()
        np.testing.assert_array_equal(head.state[[2, 0]], fresh.state[[2, 0]])

    def test_load_state_leaves_other_slots_alone(self, make, layer, rng):
        head, twin = make(), make()
        before, tokens = tokens_of(rng, layer, 5, WINDOW - 1), tokens_of(rng, layer, 4, WINDOW)
        for each in (head, twin):
            each.step(*before)
        head.load_state(states_of(rng, layer, 2), slots=[-1, 3])
        rest = [0, 1, 2, 4]
        np.testing.assert_array_equal(head.step(*tokens, slots=rest), twin.step(*tokens, slots=rest))

    def test_load_state_copies(self, make, layer, rng):
        head, twin, start = make(), make(), states_of(rng, layer, SLOTS)
        kept = start.copy()
        head.load_state(start)
        head.step(*tokens_of(rng, layer, SLOTS, WINDOW))
        np.testing.assert_array_equal(start, kept)
        head.load_state(start)
        twin.load_state(kept)
        start[...] = 0
        np.testing.assert_array_equal(head.state, twin.state)

    @pytest.mark.parametrize("dtype", [np.float16, np.float64])
    def test_load_state_takes_any_real_type(self, make, layer, dtype, rng):
        start = states_of(rng, layer, SLOTS).astype(np.float16)
        head, twin = make(), make()
        head.load_state(start.astype(dtype))
        twin.load_state(start.astype(np.float32))
        np.testing.assert_array_equal(head.state, twin.state)

    @pytest.mark.parametrize("count", [1, WINDOW, WINDOW + 2])
    def test_reset_after_nan(self, make, layer, count, rng):
        reset_after_nan(make(), make(), layer, WINDOW, count, rng)

    def test_a_nan_state_is_gone_after_load_state(self, make, layer, rng):
        head, twin = make(), make()
        poison = tokens_of(rng, layer, 1, WINDOW + 1)
        poison.v[...] = np.nan
        head.step(*poison, slots=[1])
        start, tokens = states_of(rng, layer, 1), tokens_of(rng, layer, 1, WINDOW + 1)
        for each in (head, twin):
            each.load_state(start, slots=[1])
        np.testing.assert_array_equal(head.step(*tokens, slots=[1]), twin.step(*tokens, slots=[1]))
        same(head, twin)

    def test_reset_of_all(self, make, layer, rng):
        head, fresh = make(), make()
        head.load_state(states_of(rng, layer, SLOTS))
        head.step(*tokens_of(rng, layer, SLOTS, WINDOW + 1))
        head.reset()
        tokens = tokens_of(rng, layer, SLOTS, WINDOW + 1)
        np.testing.assert_array_equal(head.step(*tokens), fresh.step(*tokens))
        same(head, fresh)


class TestArrays:
    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    def test_outputs_have_the_type_of_v(self, make, layer, dtype, rng):
        tokens = tokens_of(rng, layer, 2, 3)
        head, twin = make(), make()
        output = head.step(*tokens._replace(v=tokens.v.astype(np.float16).astype(dtype)))
        assert output.dtype == dtype
        plain = twin.step(*tokens._replace(v=tokens.v.astype(np.float16).astype(np.float64)))
        np.testing.assert_array_equal(output, plain.astype(dtype))

    def test_strided_inputs(self, make, layer, rng):
        tokens = tokens_of(rng, layer, 2, 2 * WINDOW)
        strided = Tokens(*(None if x is None else np.asfortranarray(x) for x in tokens))
        backwards = Tokens(*(None if x is None else x[:, ::-1].copy()[:, ::-1] for x in tokens))
        heads = [make() for _ in range(3)]
        first, *others = [head.step(*each) for head, each in zip(heads, (tokens, strided, backwards), strict=True)]
        for other in others:
            np.testing.assert_array_equal(other, first)
        same(heads[0], heads[1])

    def test_inputs_stay_as_they_were(self, make, backend, layer, rng):
        # the engine's type, so that the head makes no copy
        dtype = {"reference": np.float64, "cpu": np.float32}[backend]
        tokens = tokens_of(rng, layer, 2, 2 * WINDOW, dtype)
        kept = [None if x is None else x.copy() for x in tokens]
        head, twin = make(), make()
        for x in tokens:
            if x is not None:
                x.flags.writeable = False
        output = head.step(*tokens)
        for x, was in zip(tokens, kept, strict=True):
            np.testing.assert_array_equal(x, was)
        # the head must not keep a reference, as callers reuse their buffers
        np.testing.assert_array_equal(twin.step(*kept), output)
        for x in kept:
            if x is not None:
                x[...] = -1e3
        same(head, twin)

    def test_outputs_are_the_caller_s_own(self, make, layer, rng):
        head, twin = make(), make()
        first, second = (tokens_of(rng, layer, 2, WINDOW - 1) for _ in range(2))
        output = head.step(*first)
        kept = output.copy()
        twin.step(*first)
        after = head.step(*second)
        np.testing.assert_array_equal(output, kept)
        output[...] = np.nan
        np.testing.assert_array_equal(after, twin.step(*second))
        same(head, twin)

    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    @pytest.mark.parametrize("several", [False, True])
    def test_out_is_filled_and_returned(self, make, layer, dtype, several, rng):
        tokens = at(tokens_of(rng, layer, 2, 3), np.s_[:, :] if several else np.s_[:, 0])
        head, twin = make(), make()
        out = np.full((*tokens.v.shape, 2), np.nan, dtype)[..., 0]  # strided
        assert head.step(*tokens, out=out) is out
        np.testing.assert_array_equal(out, twin.step(*tokens._replace(v=tokens.v.astype(np.float64))).astype(dtype))
        same(head, twin)

    @pytest.mark.parametrize("several", [False, True])
    def test_a_fitting_out_is_written_itself(self, make, backend, layer, several, rng):
        """For a contiguous `out` of the engine's type, also a view; other rows of the viewed array do not change."""
        tokens = at(tokens_of(rng, layer, 2, WINDOW + 1), np.s_[:, :] if several else np.s_[:, 0])
        head, twin = make(), make()
        whole = np.full((4, *tokens.v.shape[1:]), 7.0, np.float64 if backend == "reference" else np.float32)
        assert np.may_share_memory(head.step(*tokens, out=whole[1:3]), whole)
        np.testing.assert_array_equal(whole[1:3], twin.step(*tokens._replace(v=tokens.v.astype(np.float64))))
        np.testing.assert_array_equal(whole[[0, 3]], 7)
        same(head, twin)

    def test_out_may_overlap_an_input(self, make, layer, rng):
        """Here rows of the output overlap later rows of v."""
        tokens = tokens_of(rng, layer, 3, WINDOW + 1)
        memory = np.zeros((4, *tokens.v.shape[1:]), np.float32)
        memory[:3] = tokens.v
        head, twin = make(), make()
        want = twin.step(*tokens)
        np.testing.assert_array_equal(head.step(*tokens._replace(v=memory[:3]), out=memory[1:]), want)
        same(head, twin)

    def test_inputs_may_be_overwritten_after_a_step(self, make, layer, rng):
        tokens = tokens_of(rng, layer, 2, 2 * WINDOW, np.float64)
        head, twin = make(), make()
        given = Tokens(*(None if x is None else np.empty_like(x[:, 0]) for x in tokens))
        for t in range(tokens.v.shape[1]):
            for target, source in zip(given, at(tokens, np.s_[:, t]), strict=True):
                if target is not None:
                    target[...] = source
            np.testing.assert_array_equal(head.step(*given), twin.step(*at(tokens, np.s_[:, t])))
        same(head, twin)

    def test_out_may_be_v(self, make, layer, rng):
        tokens = tokens_of(rng, layer, 2, WINDOW + 1)
        head, twin = make(), make()
        want = twin.step(*tokens)
        np.testing.assert_array_equal(head.step(*tokens, out=tokens.v), want)
        same(head, twin)


def bad_steps(layer, tokens):
    """Calls that are refused: changed arguments, the error, the start of its message."""
    q, k, v, g, beta = tokens
    batch = v.shape[0]
    yield {"q": q[:, :1]}, ValueError, "q: expected shape"
    yield {"k": k[..., :-1]}, ValueError, "k: expected shape"
    yield {"v": v.swapaxes(-1, -2)}, ValueError, "v: expected shape"
    yield {"g": g[:1]}, ValueError, "g: expected shape"
    yield {"k": k.tolist()}, ValueError, "k: expected an array"
    yield {"q": None}, ValueError, "q: "
    yield {"q": q.astype(np.int32)}, TypeError, "q: expected a real floating-point array, got dtype int32"
    yield {"k": k.astype(np.complex64)}, TypeError, "k: expected a real floating-point array, got dtype complex64"
    yield {"v": v.astype(object)}, TypeError, "v: expected a real floating-point array, got dtype object"
    yield {"v": v.astype(np.longdouble)}, TypeError, "v: expected a real floating-point array"
    yield {"v": np.zeros(v.shape, "V4")}, TypeError, "v: expected a real floating-point array"
    for bad in (1e-3, np.nan, np.inf):
        wrong = g.copy()
        wrong[-1, -1] = bad
        yield {"g": wrong}, ValueError, "g: expected log-decays <= 0"
    if beta is None:
        yield {"beta": np.ones(v.shape[:-1], np.float32)}, ValueError, "beta: mamba2 has no write gate"
    else:
        yield {"beta": None}, ValueError, f"beta: {layer.kind} needs an array"
        for bad in (np.nan, np.inf):
            yield {"beta": np.full_like(beta, bad)}, ValueError, "beta: expected finite numbers, got NaN or infinity"
        yield {"beta": beta > 0}, TypeError, "beta: expected a real floating-point array, got dtype bool"
    yield {"slots": [0]}, ValueError, f"slots: expected shape ({batch},)"
    yield {"slots": [0, SLOTS]}, ValueError, "slots: expected -1 (padding) or 0 to"
    yield {"slots": [-2, 0]}, ValueError, "slots: expected -1 (padding) or 0 to"
    yield {"slots": [1, 1]}, ValueError, "slots: expected each slot at most once, got slot 1 twice"
    yield {"slots": [0.0, 1.0]}, TypeError, "slots: expected an array, got list (only integers may come in a list)"
    yield {"slots": np.array([0.0, 1.0])}, ValueError, "slots: expected integers, got dtype float64"
    yield {"out": np.zeros((*v.shape, 1), v.dtype)}, ValueError, "out: expected shape"
    yield {"out": np.zeros(v.shape, np.int64)}, TypeError, "out: expected a real floating-point array"
    yield {"out": np.zeros(v.shape, np.complex64)}, TypeError, "out: expected a real floating-point array"
    yield {"out": np.broadcast_to(np.float32(0), v.shape)}, ValueError, "out: expected a writable array"
    yield {"out": v.tolist()}, TypeError, "out: expected a NumPy, PyTorch or CuPy array, got list"


def bad_loads(state):
    yield (state.swapaxes(-1, -2),), ValueError, "state: expected shape"
    yield (state[0],), ValueError, "state: expected shape"
    yield (state.tolist(),), ValueError, "state: expected shape"
    yield (state.astype(np.int32),), TypeError, "state: expected a real floating-point array"
    yield (state * np.nan,), ValueError, "state: expected finite numbers"
    yield (np.where(state == state.max(), np.inf, state),), ValueError, "state: expected finite numbers"
    yield (state, [0]), ValueError, "slots: expected shape"
    yield (state, [0, SLOTS]), ValueError, "slots: expected -1 (padding) or 0 to"
    yield (state, [2, 2]), ValueError, "slots: expected each slot at most once"


class TestRefusals:
    """The error of a refused call names the argument, and the head is unchanged."""

    @pytest.fixture
    def heads(self, make, layer, rng):
        pair = make(), make()
        before = tokens_of(rng, layer, SLOTS, WINDOW + 2)
        for each in pair:
            each.step(*before)
        return pair

    def still_alike(self, heads, layer, rng):
        head, twin = heads
        np.testing.assert_array_equal(head.position, twin.position)
        np.testing.assert_array_equal(head.state, twin.state)
        tokens = tokens_of(rng, layer, SLOTS, WINDOW + 1)
        np.testing.assert_array_equal(head.step(*tokens), twin.step(*tokens))
        same(head, twin)

    @pytest.mark.parametrize("several", [False, True])
    def test_step(self, heads, layer, several, rng):
        tokens = at(tokens_of(rng, layer, 2, WINDOW), np.s_[:, :] if several else np.s_[:, 0])
        for change, error, message in bad_steps(layer, tokens):
            with pytest.raises(error, match="^" + re.escape(message)):
                heads[0].step(**(tokens._asdict() | change))
        self.still_alike(heads, layer, rng)

    def test_too_large_a_batch_without_slots(self, heads, layer, rng):
        with pytest.raises(ValueError, match=r"^slots: expected an array, as a batch of 6 exceeds the head's 5 slots"):
            heads[0].step(*tokens_of(rng, layer, SLOTS + 1, 1))
        self.still_alike(heads, layer, rng)

    def test_load_state(self, heads, layer, rng):
        for arguments, error, message in bad_loads(states_of(rng, layer, 2)):
            with pytest.raises(error, match="^" + re.escape(message)):
                heads[0].load_state(*arguments)
        self.still_alike(heads, layer, rng)

    @pytest.mark.parametrize("slots", [[0, SLOTS], [-2], [1, 1], [[0, 1]]])
    def test_flush_and_reset(self, heads, layer, slots, rng):
        for call in (heads[0].flush, heads[0].reset):
            with pytest.raises(ValueError, match=r"^slots: expected"):
                call(slots)
        self.still_alike(heads, layer, rng)


class TestSharing:
    @pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_a_head_is_not_copied(self, make, duplicate):
        head = make()
        name = type(head).__name__
        with pytest.raises(
            TypeError, match=rf"^{name}: a head can't be copied or pickled; make a new {name} .*load_s"
        ):
            duplicate(head)

    def test_how_to_copy_a_head_instead(self, make, layer, rng):
        head, new = make(), make()
        tokens = tokens_of(rng, layer, SLOTS, WINDOW + 2)
        head.step(*tokens)
        head.flush()
        new.load_state(head.state)
        same(head, new)
        np.testing.assert_array_equal(head.step(*tokens), new.step(*tokens))

    @pytest.mark.parametrize("backend", ["reference"], indirect=True)
    def test_threads_take_turns(self, make, layer, rng):
        """No call enters the engine while another is in it, and each row's result is that of calls in turn."""
        head, twin = make(), make()
        engine, inside, overlaps = head._engine, [], []
        for name in ("step", "load_state", "flush", "reset"):
            method = getattr(engine, name)

            def watched(*args, method=method):
                inside.append(threading.get_ident())  # an engine may call itself
                time.sleep(1e-4)  # so that another thread may come in, were it let
                overlaps.append(len(set(inside)))
                method(*args)
                inside.pop()

            setattr(engine, name, watched)
        tokens, start = tokens_of(rng, layer, SLOTS, 12), states_of(rng, layer, SLOTS)

        def work(head, slot):
            rows = np.s_[slot : slot + 1]
            head.reset([slot])
            head.load_state(start[rows], slots=[slot])
            outputs = [head.step(*at(tokens, (rows, t)), slots=[slot]) for t in range(12)]
            head.flush([slot])
            return np.stack(outputs)

        with ThreadPoolExecutor(SLOTS) as pool:
            got = list(pool.map(lambda slot: work(head, slot), range(SLOTS)))
        assert set(overlaps) == {1}
        np.testing.assert_array_equal(got, [work(twin, slot) for slot in range(SLOTS)])
        same(head, twin)


class TestConstructors:
    @pytest.mark.parametrize("slots", [0, -1, 2.0, True, None, "4"])
    def test_slots(self, slots, system, rng):
        layer = LAYERS["gdn"]
        what = plan_of(rng, layer) if system == "sketch" else layer
        heads = {
            "standard": ss.StandardHead,
            "replay": ss.ReplayHead,
            "sketch": ss.SketchHead,
            "copy": ss.CopyReadHead,
        }
        with pytest.raises(ValueError, match=re.escape(f"num_slots: expected a positive integer, got {slots!r}")):
            heads[system](what, slots, "reference")

    @pytest.mark.parametrize("window", [0, -1, 2.0, True])
    def test_window(self, window):
        with pytest.raises(ValueError, match=re.escape(f"window: expected an integer from 1 to 4096, got {window!r}")):
            ss.ReplayHead(LAYERS["gdn"], 2, "reference", window=window)

    def test_backend(self, rng):
        for make in (
            lambda: ss.StandardHead(LAYERS["gdn"], 2, "tpu"),
            lambda: ss.ReplayHead(LAYERS["gdn"], 2, "tpu"),
            lambda: ss.SketchHead(plan_of(rng, LAYERS["gdn"]), 2, "tpu"),
        ):
            with pytest.raises(ValueError, match=r"^backend: expected one of auto, reference, cpu.* got 'tpu'"):
                make()

    def test_sketch_dtype(self, rng):
        with pytest.raises(ValueError, match=r"^sketch_dtype: expected 'bfloat16' or 'float32', got 'float16'"):
            ss.SketchHead(plan_of(rng, LAYERS["gdn"]), 2, sketch_dtype="float16")

    @pytest.mark.parametrize("backend", ["auto", "reference", "cpu"])
    @pytest.mark.parametrize("name", ["activation_dtype", "output_dtype", "state"])
    def test_settings_of_cuda_are_refused_elsewhere(self, name, backend, rng, monkeypatch):
        monkeypatch.setattr("sketchssm.cuda.missing", lambda: "CuPy is not installed")
        where = "cpu" if backend == "auto" else backend
        why = "CuPy is not installed" if backend == "auto" else f"the head was made with backend='{backend}'"
        for make in (
            lambda **o: ss.StandardHead(LAYERS["gdn"], 2, backend, **o),
            lambda **o: ss.ReplayHead(LAYERS["gdn"], 2, backend, **o),
            lambda **o: ss.SketchHead(plan_of(rng, LAYERS["gdn"]), 2, backend, **o),
        ):
            message = f"{name}: expected None on backend '{where}', as only 'cuda' has it ({why})"
            with pytest.raises(ValueError, match="^" + re.escape(message)):
                make(**{name: np.zeros(1) if name == "state" else "float32"})

    def test_what_a_head_tells(self, make, backend, layer):
        head = make()
        assert (head.layer, head.num_slots, head.backend) == (layer, SLOTS, backend)

    def test_auto_is_a_compiled_backend(self):
        assert ss.StandardHead(LAYERS["gdn"], 2).backend == "cpu"


@pytest.mark.parametrize("system", ["standard", "replay", "sketch"])
def test_a_head_names_itself_and_its_window(system, backend, rng):
    layer = LAYERS["gdn"]
    made = {
        "standard": lambda: ss.StandardHead(layer, 3, backend),
        "replay": lambda: ss.ReplayHead(layer, 3, backend, window=8),
        "sketch": lambda: ss.SketchHead(plan_of(rng, layer, window=8), 3, backend),
    }
    head = made[system]()
    window = 1 if system == "standard" else 8
    assert head.window == window
    shown = f"(gdn, heads=4, K=6, V=5, num_slots=3, window={window}, backend={backend!r})"
    assert repr(head) == type(head).__name__ + shown
