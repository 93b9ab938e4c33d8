"""Converters of layers whose recurrences are not written like the library's, against their own formulas in float64."""

import numpy as np
import pytest
from samples import refused, relative

from sketchssm.layer.recurrence import Layer
from sketchssm.models import (
    delta_product_inputs,
    lightning_decay,
    linear_inputs,
    mamba2_output,
    mamba3_inputs,
    retention_decay,
)
from sketchssm.reference.recurrence import run

BATCH, LENGTH, HEADS, KEY_HEADS, K, V = 2, 9, 4, 2, 8, 5
# Both sides are float64 and sum up to LENGTH K products in another order.
FLOAT64 = 1e-13


@pytest.fixture
def normal(rng):
    return lambda *shape: rng.standard_normal((BATCH, LENGTH, *shape))


def wide(x):
    return np.repeat(x, HEADS // KEY_HEADS, -2)


@pytest.mark.parametrize("decay", ["lightning", "retention", "head", "channel"])
def test_linear_attention_is_a_decayed_sum(normal, decay):
    """Parallel form: ``o_t = sum_s (q_t * exp(g_{s+1} + ... + g_t)) k_s v_s``; the decay's shape says the kind."""
    q, k, v = normal(KEY_HEADS, K), normal(KEY_HEADS, K), normal(HEADS, V)
    g = {
        "lightning": lightning_decay(HEADS, 1, 3),
        "retention": retention_decay(HEADS),
        "head": -np.exp(normal(HEADS)),
        "channel": -np.exp(normal(HEADS, K)),
    }[decay]
    tokens = linear_inputs(q, k, v, g)
    kind = "gla" if decay == "channel" else "mamba2"
    got, _ = run(Layer(kind, HEADS, K, V, KEY_HEADS), *tokens)
    full = np.broadcast_to(g if decay == "channel" else np.asarray(g)[..., None], (BATCH, LENGTH, HEADS, K))
    total = np.cumsum(full, 1)
    later = np.tril(np.ones((LENGTH, LENGTH)))[None, :, :, None, None]
    between = np.exp(np.minimum(total[:, :, None] - total[:, None], 0)) * later
    want = np.einsum("bthk,btshk,bshk,bshv->bthv", wide(q), between, wide(k), v) * K**-0.5
    assert relative(got, want) < FLOAT64


def test_decays_of_published_layers():
    assert np.allclose(lightning_decay(8), -(0.5 ** np.arange(1, 9)))
    assert np.allclose(lightning_decay(8, 3, 4), 0, atol=1e-4)  # the last layer hardly decays
    assert np.allclose(np.exp(retention_decay(3)), [1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128])
    refused("layer: expected an integer from 0 to 3, got 4", lightning_decay, 8, 4, 4)


@pytest.mark.parametrize("writes", [1, 2, 3])
def test_delta_product(normal, writes):
    """One token is a product of `writes` reflections; beta up to 2."""
    unit = [normal(KEY_HEADS, K), normal(writes, KEY_HEADS, K)]
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in unit)
    v, g, beta = normal(writes, HEADS, V), -np.exp(normal(HEADS)), 2 / (1 + np.exp(normal(writes, HEADS)))
    tokens = delta_product_inputs(q, k, v, beta, g, scale=1.0, l2norm=False)
    got = run(Layer("gdn", HEADS, K, V, KEY_HEADS), *tokens)[0][:, writes - 1 :: writes]
    state, want = np.zeros((BATCH, HEADS, K, V)), np.empty((BATCH, LENGTH, HEADS, V))
    for t in range(LENGTH):
        state = np.exp(g[:, t])[..., None, None] * state
        for i in range(writes):
            key, b = wide(k[:, t, i]), beta[:, t, i, :, None]
            erase = np.eye(K) - (b * key)[..., None] * key[..., None, :]
            state = erase @ state + (b * key)[..., None] * v[:, t, i, :, None]
        want[:, t] = np.einsum("bhk,bhkv->bhv", wide(q[:, t]), state)
    assert relative(got, want) < FLOAT64


def test_mamba3(normal, rng):
    """The trapezoidal recurrence, whole and cut in two calls, with the local term and the skip."""
    x, B, C, D = normal(HEADS, V), normal(KEY_HEADS, K), normal(KEY_HEADS, K), rng.standard_normal(HEADS)
    dt, trap, A = np.exp(normal(HEADS) - 1), 1 / (1 + np.exp(normal(HEADS))), -np.exp(normal(HEADS))
    state, want = np.zeros((BATCH, HEADS, K, V)), np.empty(x.shape)
    for t in range(LENGTH):
        step, weight, decay = dt[:, t], trap[:, t], np.exp(A[:, t] * dt[:, t])
        write = [(wide(B[:, i])[..., None] * x[:, i, :, None]) if i >= 0 else 0 for i in (t - 1, t)]
        older, newer = ((1 - weight) * step * decay)[..., None, None], (weight * step)[..., None, None]
        state = decay[..., None, None] * state + older * write[0] + newer * write[1]
        want[:, t] = np.einsum("bhk,bhkv->bhv", wide(C[:, t]), state) + D[:, None] * x[:, t]
    layer, after, previous, parts = Layer("mamba2", HEADS, K, V, KEY_HEADS), None, None, []
    for cut in (np.s_[:, :4], np.s_[:, 4:]):
        given = [y[cut] for y in (x, dt, A, B, C, trap)]
        tokens, local = mamba3_inputs(*given, previous)
        out, after = run(layer, *tokens, state=after)
        parts.append(mamba2_output(out + local, given[0], D))
        previous = given[0][:, -1], given[3][:, -1], given[5][:, -1] * given[1][:, -1]
    assert relative(np.concatenate(parts, 1), want) < FLOAT64
