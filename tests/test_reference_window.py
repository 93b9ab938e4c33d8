"""The window's algebra against the recurrence, token by token, in float64."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from samples import states_of, tokens_of

from sketchssm.layer.recurrence import KINDS, Layer
from sketchssm.reference.recurrence import per_head, run, transition
from sketchssm.reference.window import Ring, decay_between, effective_query, erase_factors, fold, read_window

# Both sides do a few hundred float64 operations on terms of size one (unit keys, decays and gates in [0, 1]; the
# triangular systems are products of contractions, so they amplify nothing). 2^-53 times that, relative to the norm.
FLOAT64 = 1e-13


def ring_of(layer, tokens):
    inputs = per_head(layer, tokens)
    # (batch, tokens, heads, ...) to (batch, heads, tokens, ...)
    k, v, g, q = (np.moveaxis(x, 1, 2) for x in (inputs.k, inputs.v, inputs.g, inputs.q))
    return q, Ring(k, v, g, None if inputs.beta is None else np.moveaxis(inputs.beta, 1, 2))


def prefix(ring, length):
    return Ring(
        *(x[..., :length, :] for x in (ring.k, ring.v, ring.g)), None if ring.beta is None else ring.beta[..., :length]
    )


def transitions(ring):
    """``M_{1:t}`` as a matrix: the product of the ring's transitions, the latest leftmost."""
    product = np.eye(ring.k.shape[-1])
    for s in range(ring.k.shape[-2]):
        beta = None if ring.beta is None else ring.beta[..., s]
        product = transition(ring.k[..., s, :], ring.g[..., s, :], beta) @ product
    return product


def close(got, want, scale=1.0):
    """Within rounding of terms of size `scale`: harsh gates can make the result itself vanish."""
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    return np.linalg.norm(got - want) <= FLOAT64 * max(np.linalg.norm(want), scale)


@st.composite
def windows(draw):
    """A layer, a window of its tokens and states to start from."""
    key_heads = draw(st.integers(1, 2))
    layer = Layer(
        draw(st.sampled_from(KINDS)), heads=key_heads * draw(st.integers(1, 2)), key_dim=draw(st.integers(1, 9)),
        value_dim=draw(st.integers(1, 9)), key_heads=key_heads,
    )  # fmt: skip
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    length = draw(st.integers(1, 16))
    tokens = tokens_of(rng, layer, draw(st.integers(1, 2)), length, np.float64, harsh=draw(st.booleans()))
    return layer, tokens, states_of(rng, layer, tokens.v.shape[0], np.float64)


@given(windows())
def test_reads_reproduce_every_output(window):
    """``o_t = S0^T x_t + sum_s c_ts v_s`` for all tokens of the window at once."""
    layer, tokens, start = window
    q, ring = ring_of(layer, tokens)
    reads = read_window(q, ring)
    output = reads.queries @ start.swapaxes(-1, -2) + reads.weights @ ring.v
    want, _ = run(layer, *tokens, state=start)
    assert close(np.moveaxis(output, 2, 1), want, scale=np.linalg.norm(start))


@given(windows())
def test_fold_is_the_recurrence(window):
    layer, tokens, start = window
    _, ring = ring_of(layer, tokens)
    _, want = run(layer, *tokens, state=start)
    assert close(fold(start.swapaxes(-1, -2), ring).swapaxes(-1, -2), want, scale=np.linalg.norm(start))


@given(windows(), st.integers(0, 4))
def test_any_leading_axes(window, axes):
    """None, or several: each head's result is that of the head alone."""
    layer, tokens, start = window
    q, ring = ring_of(layer, tokens)
    alone = Ring(*(x if x is None else x[0, 0] for x in ring))
    deep = (1,) * axes
    wrapped = Ring(*(x if x is None else x.reshape(*deep, *x.shape) for x in alone))
    state, first = start.swapaxes(-1, -2), q[0, 0]
    outer, last = first.reshape(*deep, *first.shape), first[-1].reshape(*deep, -1)
    folded = fold(state[0, 0].reshape(*deep, *state.shape[-2:]), wrapped)
    assert close(folded, fold(state, ring)[0, 0].reshape(folded.shape), scale=np.linalg.norm(start))
    for got, want in zip(read_window(outer, wrapped), read_window(q, ring), strict=True):
        assert close(got, want[0, 0].reshape(*deep, *want.shape[2:]), scale=np.linalg.norm(q))
    want = effective_query(q[..., -1, :], ring)[0, 0]
    assert close(effective_query(last, wrapped), want.reshape(*deep, -1), scale=np.linalg.norm(q))
    if layer.erases:
        factors = erase_factors(wrapped)
        assert close(factors, erase_factors(ring)[0, 0].reshape(factors.shape), scale=np.sqrt(q.shape[-2]))


@given(windows())
def test_effective_queries_are_transposed_transitions(window):
    layer, tokens, _ = window
    q, ring = ring_of(layer, tokens)
    reads = read_window(q, ring)
    for t in range(1, ring.k.shape[-2] + 1):
        one = effective_query(q[..., t - 1, :], prefix(ring, t))
        assert close(reads.queries[..., t - 1, :], one, scale=np.linalg.norm(q[..., t - 1, :]))
        by_matrix = np.einsum("...ij,...i->...j", transitions(prefix(ring, t)), q[..., t - 1, :])
        assert close(one, by_matrix, scale=np.linalg.norm(q[..., t - 1, :]))


@given(windows())
def test_erase_factors_rebuild_the_transition(window):
    """Equation *wy*: ``M_{1:t} = Diag(D_{1:t}) - sum_s l_s(t) pi_s^T``."""
    layer, tokens, _ = window
    assume(layer.erases)
    _, ring = ring_of(layer, tokens)
    from_start, between = decay_between(ring.g)
    left = between[..., -1, :, :] * ring.k
    diagonal = np.broadcast_to(from_start[..., -1, :], left.shape[:-2] + left.shape[-1:])
    rebuilt = np.eye(layer.key_dim) * diagonal[..., None, :] - left.swapaxes(-1, -2) @ erase_factors(ring)
    assert close(rebuilt, transitions(ring), scale=np.sqrt(layer.key_dim))


@given(windows(), st.data())
def test_fewer_queries_than_tokens_are_the_last_rows(window, data):
    """A decode step asks for its own token alone; calibration asks for all."""
    layer, tokens, _ = window
    q, ring = ring_of(layer, tokens)
    last = data.draw(st.integers(1, q.shape[-2]))
    some, full = read_window(q[..., -last:, :], ring), read_window(q, ring)
    assert close(some.queries, full.queries[..., -last:, :], scale=np.linalg.norm(q))
    assert close(some.weights, full.weights[..., -last:, :], scale=np.linalg.norm(q))


@pytest.mark.parametrize("channels", [1, 4])
def test_decay_at_the_ends_of_its_range(channels):
    """-inf forgets earlier tokens only, also if repeated; decays of -50 underflow to 0, not to NaN."""
    for gates in ([-np.inf, -1.0, -np.inf, -np.inf, -1.0], [-50.0] * 40, [0.0] * 5):
        g = np.repeat(np.array(gates)[:, None], channels, axis=1)
        from_start, between = decay_between(g)
        for j in range(len(gates)):
            np.testing.assert_array_equal(from_start[j], np.exp(np.sum(g[: j + 1], axis=0)))
            for s in range(len(gates)):
                # the running sums add in another order than NumPy's: a unit or two in the exponent's last place
                want = np.exp(np.sum(g[s + 1 : j + 1], axis=0)) if s <= j else np.zeros(channels)
                np.testing.assert_allclose(between[j, s], want, rtol=1e-12)
