"""Layers, checks of arguments, and the recurrence against its definition."""

import re

import numpy as np
import pytest
from samples import LAYERS, at, relative, states_of, tokens_of

from sketchssm.layer.checks import check_gates, check_slots, check_state, check_tokens
from sketchssm.layer.recurrence import KINDS, Layer
from sketchssm.reference.recurrence import per_head, run, step, transition

# Some hundred float64 operations an element, each within 2^-53 of its terms' size.
FLOAT64 = 1e-13


def says(text):
    """The start of a message: argument, expected value, given value."""
    return pytest.raises(ValueError, match="^" + re.escape(text))


class TestLayer:
    def test_defaults_and_shapes(self):
        layer = Layer("kda", 6, 32, 48)
        assert (layer.key_heads, layer.group) == (6, 1)
        assert layer.state_shape == (6, 48, 32)
        assert layer == Layer("kda", 6, 32, 48, key_heads=6)
        assert len({layer, Layer("kda", 6, 32, 48)}) == 1

    @pytest.mark.parametrize(
        ("kind", "erases", "channels", "names"),
        [
            ("mamba2", False, 1, "qkvg"),
            ("gdn", True, 1, "qkvgb"),
            ("kda", True, 6, "qkvgb"),
            ("gla", False, 6, "qkvg"),
        ],
    )
    def test_what_kinds_differ_in(self, kind, erases, channels, names):
        layer = LAYERS[kind]
        assert (layer.erases, layer.gate_channels) == (erases, channels)
        shapes = layer.token_shapes()
        assert "".join(name[0] for name in shapes) == names
        assert shapes["q"] == shapes["k"] == (2, 6)
        assert shapes["v"] == (4, 5)
        assert shapes["g"] == ((4, 6) if channels == 6 else (4,))

    def test_value_heads_share_key_heads_in_blocks(self):
        layer = LAYERS["gdn"]
        keys = np.arange(12.0).reshape(2, 6)
        wide = layer.expand_keys(keys)
        for head in range(layer.heads):
            np.testing.assert_array_equal(wide[head], keys[head // layer.group])
        ungrouped = Layer("gdn", 2, 6, 5)
        assert ungrouped.expand_keys(keys) is keys

    @pytest.mark.parametrize(
        ("heads", "key_heads", "world", "want"),
        [
            (8, 4, 1, [(0, 8, 0, 4)]),
            (8, 4, 2, [(0, 4, 0, 2), (4, 8, 2, 4)]),
            (8, 2, 2, [(0, 4, 0, 1), (4, 8, 1, 2)]),
            (8, 2, 4, [(0, 2, 0, 1), (2, 4, 0, 1), (4, 6, 1, 2), (6, 8, 1, 2)]),
            (4, 1, 2, [(0, 2, 0, 1), (2, 4, 0, 1)]),
        ],
    )
    def test_shards(self, heads, key_heads, world, want):
        """Each value head finds its own key head in its process."""
        layer = Layer("kda", heads, 6, 5, key_heads)
        for rank, expected in enumerate(want):
            values, keys = layer.shard_heads(rank, world)
            assert (values.start, values.stop, keys.start, keys.stop) == expected
            own = layer.shard(rank, world)
            assert own == Layer("kda", values.stop - values.start, 6, 5, keys.stop - keys.start)
            for head in range(own.heads):
                assert keys.start + head // own.group == (values.start + head) // layer.group

    def test_numpy_sizes_become_plain(self):
        layer = Layer("gdn", np.int64(4), np.int32(6), 5, np.int8(2))
        assert all(type(getattr(layer, name)) is int for name in ("heads", "key_dim", "value_dim", "key_heads"))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("mamba1", 4, 6, 5), "kind: expected one of mamba2, gdn, kda, gla, got 'mamba1'"),
            ((None, 4, 6, 5), "kind: expected one of mamba2, gdn, kda, gla, got None"),
            (("gdn", 0, 6, 5), "heads: expected a positive integer, got 0"),
            (("gdn", 4, -6, 5), "key_dim: expected a positive integer, got -6"),
            (("gdn", 4, 6, 5.0), "value_dim: expected a positive integer, got 5.0"),
            (("gdn", True, 6, 5), "heads: expected a positive integer, got True"),
            (("gdn", "4", 6, 5), "heads: expected a positive integer, got '4'"),
            (("gdn", 4, 6, 5, -2), "key_heads: expected a positive integer, got -2"),
            (("gdn", 4, 6, 5, 3), "key_heads: expected a divisor of heads=4, got 3"),
        ],
    )
    def test_refuses(self, arguments, message):
        with says(message):
            Layer(*arguments)

    def test_is_frozen(self):
        with pytest.raises(AttributeError):
            LAYERS["gdn"].heads = 8


class TestCheckTokens:
    @pytest.mark.parametrize("kind", KINDS)
    def test_accepts_one_token_or_several(self, kind, rng):
        layer = LAYERS[kind]
        several = tokens_of(rng, layer, 3, 7)
        one = at(several, np.s_[:, 0])
        assert check_tokens(layer, *several) is True
        assert check_tokens(layer, *several, tokens_axis=True) is True
        assert check_tokens(layer, *one) is False
        assert check_tokens(layer, *one, tokens_axis=False) is False

    @pytest.mark.parametrize(
        ("kind", "name"), [(kind, name) for kind in KINDS for name in LAYERS[kind].token_shapes()]
    )
    def test_names_the_argument_with_the_wrong_shape(self, kind, name, rng):
        layer = LAYERS[kind]
        tokens = at(tokens_of(rng, layer, 3, 1), np.s_[:, 0])
        good = getattr(tokens, name)
        for axis in range(1, good.ndim):
            bad = np.repeat(good, 2, axis=axis)
            with says(f"{name}: expected shape {good.shape}, got {bad.shape}"):
                check_tokens(layer, *tokens._replace(**{name: bad}))

    def test_names_the_one_batch_that_differs(self, rng):
        layer = LAYERS["gdn"]
        tokens = at(tokens_of(rng, layer, 3, 1), np.s_[:, 0])
        with says("k: expected shape (3, 2, 6), got (2, 2, 6)"):
            check_tokens(layer, *tokens._replace(k=tokens.k[:2]))

    @pytest.mark.parametrize("shape", [(), (5,), (4, 5), (3, 2, 7, 4, 5)])
    def test_names_v_when_its_rank_is_wrong(self, shape, rng):
        tokens = at(tokens_of(rng, LAYERS["gdn"], 3, 1), np.s_[:, 0])
        with says(f"v: expected shape (batch, [tokens,] 4, 5), got {shape}"):
            check_tokens(LAYERS["gdn"], *tokens._replace(v=np.zeros(shape)))

    def test_demands_or_forbids_the_tokens_axis(self, rng):
        layer = LAYERS["kda"]
        several = tokens_of(rng, layer, 3, 7)
        with pytest.raises(ValueError, match=r"^[qv]: expected shape \(batch, tokens, \d, \d\), got \(3, \d, \d\)"):
            check_tokens(layer, *at(several, np.s_[:, 0]), tokens_axis=True)
        with pytest.raises(ValueError, match=r"^[qv]: expected shape \(batch, \d, \d\), got \(3, 7, \d, \d\)"):
            check_tokens(layer, *several, tokens_axis=False)

    def test_missing_superfluous_and_shapeless(self, rng):
        gdn, mamba2 = tokens_of(rng, LAYERS["gdn"], 3, 7), tokens_of(rng, LAYERS["mamba2"], 3, 7)
        with says("beta: mamba2 has no write gate, expected None, got an array"):
            check_tokens(LAYERS["mamba2"], *mamba2._replace(beta=gdn.beta))
        with says("beta: gdn needs an array (batch, [tokens,] 4), got None"):
            check_tokens(LAYERS["gdn"], *gdn._replace(beta=None))
        with says("q: expected an array (batch, [tokens,] 2, 6), got list"):
            check_tokens(LAYERS["gdn"], *gdn._replace(q=gdn.q.tolist()))


class TestCheckGates:
    def test_accepts_the_ends_of_the_range(self):
        check_gates(np.array([0.0, -50.0, -np.inf]), np.array([0.0, 1.0]))
        check_gates(np.array([-0.0]), None)
        check_gates(np.empty((0, 4)), np.empty((0, 4)))

    @pytest.mark.parametrize(("bad", "shown"), [(0.5, "0.5"), (np.inf, "inf"), (np.nan, "nan")])
    def test_refuses_growth(self, bad, shown):
        with says(f"g: expected log-decays <= 0 (-inf allowed), got a value of {shown}"):
            check_gates(np.array([[-1.0, bad]]), None)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_refuses_beta_that_is_not_finite(self, bad):
        with says("beta: expected finite numbers, got NaN or infinity"):
            check_gates(np.array([-1.0]), np.array([1.0, bad]))


class TestCheckSlots:
    def test_default_is_the_first_rows(self):
        slots = check_slots(None, 3, 4)
        np.testing.assert_array_equal(slots, [0, 1, 2])
        assert slots.dtype == np.int64

    @pytest.mark.parametrize("given", [[3, -1, 0], (3, -1, 0), np.array([3, -1, 0], np.int8), [-1, 2, -1], []])
    def test_accepts_integers_and_padding(self, given):
        slots = check_slots(given, len(given), 4)
        np.testing.assert_array_equal(slots, given)
        assert slots.dtype == np.int64

    @pytest.mark.parametrize(
        ("slots", "message"),
        [
            (None, "slots: expected an array, as a batch of 3 exceeds the head's 2 slots"),
            ([0.0, 1.0, -1.0], "slots: expected integers, got dtype float64"),
            ([True, False, True], "slots: expected integers, got dtype bool"),
            ([0, 1], "slots: expected shape (3,), got (2,)"),
            ([[0, 1, -1]], "slots: expected shape (3,), got (1, 3)"),
            ([0, 1, 2], "slots: expected -1 (padding) or 0 to 1, got 2"),
            ([0, -2, 1], "slots: expected -1 (padding) or 0 to 1, got -2"),
            (np.array([0, 2**63, 1], np.uint64), "slots: expected -1 (padding) or 0 to 1, got 9223372036854775808"),
            (
                np.array([0, 2**64 - 1, 1], np.uint64),
                "slots: expected -1 (padding) or 0 to 1, got 18446744073709551615",
            ),
            ([1, -1, 1], "slots: expected each slot at most once, got slot 1 twice"),
        ],
    )
    def test_refuses(self, slots, message):
        with says(message):
            check_slots(slots, 3, 2)


class TestCheckState:
    def test_accepts(self):
        check_state(LAYERS["gdn"], np.zeros((3, 4, 5, 6)))
        check_state(LAYERS["gdn"], np.zeros((3, 4, 5, 6)), batch=3)

    @pytest.mark.parametrize("shape", [(3, 4, 6, 5), (4, 5, 6), (3, 2, 5, 6), (1, 3, 4, 5, 6)])
    def test_refuses(self, shape):
        with says(f"state: expected shape (batch, 4, 5, 6), K last, got {shape}"):
            check_state(LAYERS["gdn"], np.zeros(shape))

    def test_refuses_another_batch_and_what_has_no_shape(self):
        with says("state: expected shape (2, 4, 5, 6), K last, got (3, 4, 5, 6)"):
            check_state(LAYERS["gdn"], np.zeros((3, 4, 5, 6)), batch=2)
        with says("state: expected shape (batch, 4, 5, 6), K last, got ()"):
            check_state(LAYERS["gdn"], None)


def by_matrices(layer, tokens, state):
    """The recurrence with every transition written out as a K x K matrix, head by head."""
    batch, length = tokens.v.shape[:2]
    output = np.empty((batch, length, layer.heads, layer.value_dim))
    state = np.array(state, dtype=np.float64)
    for row in range(batch):
        for head in range(layer.heads):
            s = state[row, head].T
            for t in range(length):
                q, k = (x[row, t, head // layer.group].astype(float) for x in (tokens.q, tokens.k))
                decay = np.diag(np.exp(np.broadcast_to(tokens.g[row, t, head].astype(float), layer.key_dim)))
                beta = 1.0 if tokens.beta is None else float(tokens.beta[row, t, head])
                erase = np.eye(layer.key_dim) - (beta * np.outer(k, k) if layer.erases else 0)
                s = erase @ decay @ s + beta * np.outer(k, tokens.v[row, t, head])
                output[row, t, head] = s.T @ q
            state[row, head] = s.T
    return output, state


SHAPES = {
    "grouped": {"heads": 4, "key_dim": 6, "value_dim": 5, "key_heads": 2},
    "one key head": {"heads": 3, "key_dim": 5, "value_dim": 7, "key_heads": 1},
    "V = 80": {"heads": 2, "key_dim": 16, "value_dim": 80},
    "single": {"heads": 1, "key_dim": 1, "value_dim": 1},
}


class TestRun:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("harsh", [False, True])
    def test_is_the_product_of_transitions(self, kind, shape, harsh, rng):
        layer = Layer(kind, **SHAPES[shape])
        tokens = tokens_of(rng, layer, 2, 9, harsh=harsh)
        start = states_of(rng, layer, 2)
        for got, want in zip(run(layer, *tokens, state=start), by_matrices(layer, tokens, start), strict=True):
            assert relative(got, want) < FLOAT64

    @pytest.mark.parametrize("kind", KINDS)
    def test_starts_from_zero_and_can_be_continued(self, kind, rng):
        layer = LAYERS[kind]
        tokens = tokens_of(rng, layer, 2, 9)
        output, state = run(layer, *tokens)
        first, middle = run(layer, *at(tokens, np.s_[:, :4]), state=np.zeros((2, *layer.state_shape)))
        second, end = run(layer, *at(tokens, np.s_[:, 4:]), state=middle)
        # not to the last bit: NumPy sums in the order of the memory, and a state handed over lies K last
        assert relative(np.concatenate([first, second], axis=1), output) < FLOAT64
        assert relative(end, state) < FLOAT64
        assert state.shape == (2, *layer.state_shape)
        assert state.flags.c_contiguous

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_full_forget_leaves_one_token(self, kind, rng):
        layer = LAYERS[kind]
        tokens = tokens_of(rng, layer, 2, 5)
        tokens.g[:, -1] = -np.inf
        _, state = run(layer, *tokens, state=states_of(rng, layer, 2))
        last = at(tokens, np.s_[:, -1:])
        np.testing.assert_array_equal(state, run(layer, *last._replace(g=np.zeros_like(last.g)))[1])

    def test_does_not_touch_its_inputs(self, rng):
        layer = LAYERS["kda"]
        tokens, start = tokens_of(rng, layer, 2, 5, dtype=np.float64), states_of(rng, layer, 2, np.float64)
        before = [x.copy() for x in (*tokens, start)]
        run(layer, *tokens, state=start)
        for x, was in zip((*tokens, start), before, strict=True):
            np.testing.assert_array_equal(x, was)

    def test_refuses_a_call_without_tokens_axis(self, rng):
        with pytest.raises(ValueError, match="expected shape"):
            run(LAYERS["gdn"], *at(tokens_of(rng, LAYERS["gdn"], 2, 5), np.s_[:, 0]))


@pytest.mark.parametrize("kind", KINDS)
def test_step_and_transition_agree(kind, rng):
    """A token that writes nothing applies its transition to the state."""
    layer = LAYERS[kind]
    token = per_head(layer, at(tokens_of(rng, layer, 2, 1, harsh=True), np.s_[:, 0]))
    state = states_of(rng, layer, 2, np.float64).swapaxes(-1, -2)
    after, output = step(state, *token._replace(v=np.zeros_like(token.v)))
    moved = transition(token.k, token.g, token.beta) @ state
    assert relative(after, moved) < FLOAT64
    assert relative(output, np.einsum("...kv,...k->...v", moved, token.q)) < FLOAT64
