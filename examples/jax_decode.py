"""Prefill in JAX, decode with a SketchHead.

The layer is a small Mamba-2: one scalar decay per head, no write gate. JAX computes the projections and the prefill,
the head computes the recurrence of later tokens. The head takes and returns JAX arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np

import sketchssm as ss

HIDDEN, HEADS, GROUPS, K, V = 128, 8, 2, 64, 32


def weights(key):
    names = {"x": HEADS * V, "B": GROUPS * K, "C": GROUPS * K, "dt": HEADS}
    keys = jax.random.split(key, len(names))
    return {
        name: jax.random.normal(k, (HIDDEN, n)) / HIDDEN**0.5 for (name, n), k in zip(names.items(), keys, strict=True)
    }


@jax.jit
def inputs(weights, hidden):
    """Inputs of the recurrence: C is the query, B the key, dt x the value, dt A the log-decay."""
    # B and C of real layers favour some channels, which makes a sketch accurate
    favour = 0.93 ** jnp.arange(K)
    q, k = ((hidden @ weights[name]).reshape(*hidden.shape[:-1], GROUPS, K) * favour for name in "CB")
    dt = jax.nn.softplus(hidden @ weights["dt"] - 2)
    v = dt[..., None] * (hidden @ weights["x"]).reshape(*hidden.shape[:-1], HEADS, V)
    return q, k, v, -dt * jnp.linspace(0.05, 1, HEADS)


@jax.jit
def prefill(state, q, k, v, g):
    """The recurrence over ``(batch, tokens, ...)`` by `lax.scan`; states ``(batch, heads, V, K)``."""

    def token(state, inputs):
        q, k, v, g = inputs
        q, k = (jnp.repeat(x, HEADS // GROUPS, axis=1) for x in (q, k))
        state = jnp.exp(g)[..., None, None] * state + v[..., :, None] * k[..., None, :]
        return state, jnp.einsum("bhvk,bhk->bhv", state, q)

    state, outputs = jax.lax.scan(token, state, tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g)))
    return state, jnp.moveaxis(outputs, 0, 1)


keys = jax.random.split(jax.random.key(0), 4)
layer = weights(keys[0])

moments = ss.Moments("mamba2", HEADS, K, V, GROUPS, window=16)
moments.update(*inputs(layer, jax.random.normal(keys[1], (4, 192, HIDDEN))))
basis = ss.fit_basis(moments)
scores = ss.RankScores(basis)
scores.update(*inputs(layer, jax.random.normal(keys[2], (2, 192, HIDDEN))))
plan = ss.SketchPlan(basis, ss.allocate_ranks(scores, mean_rank=8))
print(plan)

# Two requests: JAX computes a prompt of 40 tokens, then the head decodes 48 tokens.
hidden = jax.random.normal(keys[3], (2, 88, HIDDEN))
states, _ = prefill(jnp.zeros((2, HEADS, V, K)), *inputs(layer, hidden[:, :40]))
head = ss.SketchHead(plan, num_slots=2, backend="cpu")
head.load_state(states)
output = jnp.stack([head.step(*inputs(layer, hidden[:, t])) for t in range(40, 88)], axis=1)

final, expected = prefill(states, *inputs(layer, hidden[:, 40:]))
error = jnp.square(output - expected).sum() / jnp.square(expected).sum()
print(f"48 tokens of 2 requests: squared error of the outputs {error:.5f} of their energy")

# 48 tokens are three whole windows, so the states are up to date; they are exact to float32 rounding.
drift = np.linalg.norm(head.state - final) / np.linalg.norm(final)
assert drift < 1e-5
print(f"difference of the final states from JAX's own: {drift:.1e}")
print(f"state traffic: {plan.reduction:.1f}x less than standard decode")
