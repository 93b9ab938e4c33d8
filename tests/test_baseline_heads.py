"""Heads that approximate the state: the tests of all heads, and the cpu backend against the reference."""

import numpy as np
import pytest

# The tests of all heads run here with this module's fixtures.
from decode_systems import SLOTS, WINDOW
from samples import LAYERS, relative, states_of, tokens_of
from test_head_calls import TestArrays, TestRefusals
from test_heads import TestSeveralTokens, TestSlots, TestStates

import sketchssm as ss
from sketchssm.reference.quantise import scales
from sketchssm.reference.recurrence import run

__all__ = ["TestArrays", "TestRefusals", "TestSeveralTokens", "TestSlots", "TestStates"]

SYSTEMS = {"quantised": ("mamba2", "gdn", "kda"), "pruned": ("mamba2", "kda"), "reduced": ("gdn",)}
# A few operations of 2^-24 on vectors of at most six entries, for one token.
FLOAT32 = 1e-6


@pytest.fixture(params=[(system, kind) for system, kinds in SYSTEMS.items() for kind in kinds], ids="-".join)
def pair(request):
    return request.param


@pytest.fixture
def system(pair):
    return pair[0]


@pytest.fixture
def layer(pair):
    return LAYERS[pair[1]]


def head_of(system, layer, slots, backend):
    """A head of a system, calibrated if needed. Heads of the same system and layer are equal."""
    if system == "quantised":
        return ss.QuantisedHead(layer, slots, backend, bits=5)
    tokens = tokens_of(np.random.default_rng(7), layer, 2, 20)
    if system == "pruned":
        scores = ss.ChannelScores(layer)
        scores.update(*tokens)
        return ss.PrunedHead(layer, scores.keep(0.5), slots, backend)
    moments = ss.KeyMoments(layer)
    moments.update(*tokens)
    return ss.KeyReducedHead(moments.reduce(0.4), slots, backend)


@pytest.fixture
def make(system, layer, backend):
    return lambda slots=SLOTS: head_of(system, layer, slots, backend)


class TestBackends:
    def test_a_step_is_the_reference_s(self, system, layer, rng):
        """One token from the same states gives the reference's outputs and states, except for codes at a boundary.
        Rounding moves an element that lies just between two codes to the other one: a step further, in one state of a
        hundred at most.
        """
        heads = [head_of(system, layer, 4, backend) for backend in ("reference", "cpu")]
        tokens = tokens_of(rng, layer, 4, 30)
        step = 2 / 15 if system == "quantised" else 0.0
        total, moved = 0, 0
        for t in range(30):
            start = states_of(rng, layer, 4)
            loaded = []
            for head in heads:
                head.load_state(start)
                loaded.append(head.state.astype(np.float64))
            alike = self.alike(*loaded, step)
            want, got = (head.step(*tokens.at(np.s_[:, t])) for head in heads)
            assert relative(got[alike], want[alike]) < FLOAT32
            alike &= self.alike(*(head.state.astype(np.float64) for head in heads), step)
            total, moved = total + alike.size, moved + int((~alike).sum())
        assert moved <= 0.01 * total

    def alike(self, want, got, step):
        """Which states ``(batch, heads)`` agree; asserts that none differs by more than a quantiser step."""
        apart = np.abs(got - want)
        rounding = FLOAT32 * np.abs(want).max(axis=(-1, -2), keepdims=True)
        assert (apart <= rounding + step * np.multiply(*scales(want))).all()
        return (apart <= rounding).all(axis=(-1, -2))

    def test_a_fresh_head_is_exact_until_it_stores(self, system, layer, backend, rng):
        """The first token's output comes from a state that was never quantised."""
        if system == "quantised":
            tokens = tokens_of(rng, layer, 2, 1, np.float64)
            output = head_of(system, layer, 2, backend).step(*tokens)
            assert relative(output, run(layer, *tokens)[0]) < FLOAT32


def test_new_heads(make, system, backend, layer):
    head = make()
    assert (head.layer, head.num_slots, head.backend) == (layer, SLOTS, backend)
    assert head.state.shape == (SLOTS, *layer.state_shape)
    head.step(*tokens_of(np.random.default_rng(0), layer, 2, WINDOW + 1))
    np.testing.assert_array_equal(head.position, 0)  # these heads buffer no tokens
    with pytest.raises(ValueError, match="read-only"):
        head.state[...] = 0
