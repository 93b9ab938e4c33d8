"""Every decode system on every backend, against the plain recurrence; clocks, with which all rows flush."""

import numpy as np
import pytest
from decode_systems import RANKS, SLOTS, SYSTEMS, WINDOW, head_of, maker
from samples import plan_of, relative, reset_after_nan, same, states_of, tokens_of

import sketchssm as ss
from sketchssm.layer.recurrence import FULL_STATE, Layer, Tokens
from sketchssm.reference.recurrence import run

# Relative error of an exact result. Float64: a hundred operations of 2^-53 each. Float32: the same of 2^-24 over some
# ten tokens, whose errors add up like a random walk. Tokens have float32 values for both. Where results are compared
# with the recurrence, tokens are float64 arrays, so that the output is not rounded.
EXACT = {"reference": 1e-13, "cpu": 2e-6}
# The same of a full-state head between flushes. Its shadow rounds numbers by at most 2^-9; sums of a few products may
# be half as large as products with random signs would make them. The reference reads the state.
SHADOW = {"reference": EXACT["reference"], "cpu": 2.0**-8}


@pytest.fixture(params=SYSTEMS)
def system(request):
    return request.param


@pytest.fixture
def make(system, backend, layer):
    """A function that makes equal heads."""
    return maker(system, backend, layer)


def singly(head, tokens, **options):
    """Decode tokens with one call each."""
    outputs = [head.step(*tokens.at(np.s_[:, t]), **options) for t in range(tokens.v.shape[1])]
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
            output = head.step(*tokens.at(np.s_[:, t]))
            flushed = system == "standard" or (t + 1) % WINDOW == 0
            exact, full = flushed or system == "replay", RANKS == FULL_STATE
            if exact:
                assert relative(output, want[:, t]) < EXACT[backend]
            elif system == "sketch":
                assert relative(output[:, full], want[:, t, full]) < SHADOW[backend]
            if flushed:
                state = run(layer, *tokens.at(np.s_[:, : t + 1]), state=start)[1]
                assert relative(head.state[:3], state) < EXACT[backend]
            assert np.isfinite(output).all()
        np.testing.assert_array_equal(head.state[3:], 0)

    @pytest.mark.parametrize(("kind", "K"), [("gdn", 33), ("kda", 48), ("kda", 60), ("gdn", 96), ("kda", 100)])
    def test_keys_that_are_not_a_multiple_of_anything(self, system, backend, kind, K, rng):
        """V = 80 and three heads per key head. NaN lies behind the inputs, which are slices."""
        layer = Layer(kind, 6, K, 80, key_heads=2)
        plan = plan_of(rng, layer, [FULL_STATE, 1, 4, 33, 5, FULL_STATE], window=WINDOW)
        head = head_of(system, plan, 2, backend)
        tokens = tokens_of(rng, layer, 2, 2 * WINDOW, np.float64)
        behind = [np.full((*x.shape[:-1], x.shape[-1] + 7), np.nan)[..., :-7] for x in tokens]
        for x, y in zip(behind, tokens, strict=True):
            x[...] = y
        output = singly(head, Tokens(*behind))
        want, state = run(layer, *tokens)
        assert relative(head.state, state) < EXACT[backend]
        assert relative(output[:, WINDOW - 1 :: WINDOW], want[:, WINDOW - 1 :: WINDOW]) < EXACT[backend]
        if system != "copy":
            tolerance = SHADOW if system == "sketch" else EXACT
            assert relative(output[:, :, [0, 5]], want[:, :, [0, 5]]) < tolerance[backend]

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

    def test_no_rows_and_no_tokens(self, make, layer, rng):
        head, twin = make(), make()
        tokens = tokens_of(rng, layer, 2, 3)
        for empty in (np.s_[:0], np.s_[:0, 0], np.s_[:, :0]):
            some = tokens.at(empty)
            assert head.step(*some, slots=[0, 1][: some.v.shape[0]]).shape == some.v.shape
        same(head, twin)

    def test_a_row_does_not_depend_on_the_batch(self, make, layer, rng):
        """Its output is bitwise the same with other rows, at another index and in another slot."""
        tokens = tokens_of(rng, layer, 5, 2 * WINDOW + 1)
        head, alone = make(), make()
        full = head.step(*tokens, slots=[3, 1, 4, 0, 2])
        for row, slot in enumerate([2, 0, 1, 4, 3]):
            np.testing.assert_array_equal(
                alone.step(*tokens.at(np.s_[row : row + 1]), slots=[slot]), full[row : row + 1]
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


class TestWindows:
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

    @pytest.mark.parametrize("count", [1, WINDOW, WINDOW + 2])
    def test_reset_after_nan(self, make, layer, count, rng):
        reset_after_nan(make(), make(), layer, WINDOW, count, rng)


@pytest.mark.parametrize("phase", range(WINDOW))
def test_all_rows_flush_together(backend, layer, phase, rng):
    """Whenever they joined: at the clock's strokes, W tokens apart, the first after W - phase tokens."""
    head = ss.ReplayHead(layer, SLOTS, backend, window=WINDOW, phase=phase)
    head.warmup()
    tokens = tokens_of(rng, layer, SLOTS, 3 * WINDOW)
    joined = np.array([0, 2, 3, 5, 9])
    for t in range(3 * WINDOW):
        slots = np.flatnonzero(joined <= t)
        for slot in np.flatnonzero(joined == t):
            head.load_state(states_of(rng, layer, 1), [slot])
        head.step(*tokens.at(np.s_[slots, t]), slots=slots)
        since_stroke = (t + 1 + phase) % WINDOW
        np.testing.assert_array_equal(head.position[slots], np.minimum(since_stroke, t + 1 - joined[slots]))


def test_calls_without_rows_do_not_move_it(backend, layer, rng):
    head, twin = (ss.ReplayHead(layer, 2, backend, window=WINDOW, phase=1) for _ in range(2))
    for _ in range(2):
        head.step(*tokens_of(rng, layer, 0, 1), slots=[])
    head.step(*tokens_of(rng, layer, 1, 0), slots=[0])
    tokens = tokens_of(rng, layer, 1, WINDOW - 1)
    for each in (head, twin):
        each.step(*tokens, slots=[1])
    np.testing.assert_array_equal(head.position, twin.position)


def test_padding_moves_it(backend, layer, rng):
    head = ss.ReplayHead(layer, 2, backend, window=WINDOW, phase=0)
    head.step(*tokens_of(rng, layer, 1, WINDOW - 1), slots=[-1])
    head.load_state(states_of(rng, layer, 1), [0])
    head.step(*tokens_of(rng, layer, 1, 1), slots=[0])
    assert head.position[0] == 0
