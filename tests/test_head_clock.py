"""Clocks of heads: all rows flush at the same steps."""

import numpy as np
import pytest
from samples import at, states_of, tokens_of

import sketchssm as ss

SLOTS, WINDOW = 5, 4


@pytest.mark.parametrize("phase", range(WINDOW))
def test_all_rows_flush_together(backend, layer, phase, rng):
    """Whenever they joined: at the clock's strokes, W tokens apart, the first after W - phase tokens."""
    head = ss.ReplayHead(layer, SLOTS, backend, window=WINDOW, phase=phase)
    tokens = tokens_of(rng, layer, SLOTS, 3 * WINDOW)
    joined = np.array([0, 2, 3, 5, 9])
    for t in range(3 * WINDOW):
        slots = np.flatnonzero(joined <= t)
        for slot in np.flatnonzero(joined == t):
            head.load_state(states_of(rng, layer, 1), [slot])
        head.step(*at(tokens, np.s_[slots, t]), slots=slots)
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
