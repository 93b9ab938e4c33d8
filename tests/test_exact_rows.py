"""Steps of few rows, which a `SketchHead` decodes exactly: on the host's backends."""

import numpy as np
import pytest
from samples import at, plan_of, states_of, tokens_of

import sketchssm as ss
from sketchssm.recurrence import DENSE

WINDOW, SLOTS, FEW = 4, 5, 2
RANKS = np.array([DENSE, 2, 3, 1])
# Float32 on a path of some ten tokens after each flush, and float32 sketches of states that a few of them may have
# made; a sketch that was not made anew would be off by a tenth and more.
TOLERANCE = 2e-5


def make(layer, backend, **options):
    plan = plan_of(np.random.default_rng(7), layer, RANKS, window=WINDOW)
    return ss.SketchHead(plan, SLOTS, backend, sketch_dtype="float32", **options)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * max(np.abs(want).max(), 1))


def test_cpu_and_reference_agree(layer, rng):
    """In every output, read through sketches or not, and in cursors and states, wherever steps change their size."""
    heads = [make(layer, backend, exact_rows=FEW) for backend in ("cpu", "reference")]
    start = states_of(rng, layer, SLOTS)
    for head in heads:
        head.load_state(start)
    met = set()
    for _ in range(80):
        rows, length = rng.integers(1, SLOTS + 1), rng.integers(1, 4)
        slots = rng.permutation(np.append(np.arange(SLOTS), -1))[:rows]
        tokens = tokens_of(rng, layer, rows, length)
        met |= {(bool(rows <= FEW), int(position)) for position in heads[1].position[slots[slots >= 0]]}
        close(*(head.step(*tokens, slots=slots) for head in heads))
        if rng.uniform() < 0.2:
            for head in heads:
                head.flush(slots)
        np.testing.assert_array_equal(heads[0].position, heads[1].position)
        close(heads[0].state, heads[1].state)
    assert met == {(small, position) for small in (False, True) for position in range(WINDOW + 1)}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_are_standard_decode(layer, backend, rng):
    head, standard = make(layer, backend, exact_rows=FEW), ss.StandardHead(layer, SLOTS, backend)
    tokens = tokens_of(rng, layer, FEW, 2 * WINDOW + 1)
    slots = [3, 1]
    np.testing.assert_array_equal(head.step(*tokens, slots=slots), standard.step(*tokens, slots=slots))
    np.testing.assert_array_equal(head.state, standard.state)
    assert head.position.tolist() == [0, WINDOW, 0, WINDOW, 0]


@pytest.mark.parametrize("rows", [0, FEW])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_nothing_comes_of_nothing(layer, backend, rows, rng):
    """Without rows, without tokens: what a slot has buffered stays there, and so does its sketch."""
    head, twin = make(layer, backend, exact_rows=rows), make(layer, backend, exact_rows=rows)
    some = tokens_of(rng, layer, SLOTS, WINDOW + 2)
    for each in (head, twin):
        each.step(*some)
    tokens = tokens_of(rng, layer, 2, 3)
    for empty in (np.s_[:0], np.s_[:0, 0], np.s_[:, :0]):
        part = at(tokens, empty)
        assert head.step(*part, slots=[0, 1][: part.v.shape[0]]).shape == part.v.shape
    np.testing.assert_array_equal(head.position, twin.position)
    np.testing.assert_array_equal(head.step(*some), twin.step(*some))
