"""Layers, checks of arguments, and the recurrence against its definition."""

import re

import numpy as np
import pytest
from samples import LAYERS, relative, states_of, tokens_of

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
        first, middle = run(layer, *tokens.at(np.s_[:, :4]), state=np.zeros((2, *layer.state_shape)))
        second, end = run(layer, *tokens.at(np.s_[:, 4:]), state=middle)
        # not to the last bit: NumPy sums in the order of the memory, and a state handed over lies K last
        assert relative(np.concatenate([first, second], axis=1), output) < FLOAT64
        assert relative(end, state) < FLOAT64
        assert state.shape == (2, *layer.state_shape)
        assert state.flags.c_contiguous

    def test_refuses_a_call_without_tokens_axis(self, rng):
        with pytest.raises(ValueError, match="expected shape"):
            run(LAYERS["gdn"], *tokens_of(rng, LAYERS["gdn"], 2, 5).at(np.s_[:, 0]))

    def test_refuses_a_state_of_another_shape(self, rng):
        layer = LAYERS["gdn"]
        tokens = tokens_of(rng, layer, 2, 5)
        for state in (np.zeros(layer.state_shape), np.zeros((1, *layer.state_shape))):
            with pytest.raises(ValueError, match=r"state: expected shape \(2, .*, K last, got"):
                run(layer, *tokens, state=state)


@pytest.mark.parametrize("kind", KINDS)
def test_step_and_transition_agree(kind, rng):
    """A token that writes nothing applies its transition to the state."""
    layer = LAYERS[kind]
    token = per_head(layer, tokens_of(rng, layer, 2, 1, harsh=True).at(np.s_[:, 0]))
    state = states_of(rng, layer, 2, np.float64).swapaxes(-1, -2)
    after, output = step(state, *token._replace(v=np.zeros_like(token.v)))
    moved = transition(token.k, token.g, token.beta) @ state
    assert relative(after, moved) < FLOAT64
    assert relative(output, np.einsum("...kv,...k->...v", moved, token.q)) < FLOAT64
