"""The recurrence, token by token. Tests compare every other form with it.

All functions here use the paper's orientation, ``S`` of shape ``(..., K, V)``, in float64, with one entry per
value head on the leading axes (see `sketchssm.layer.recurrence.Layer.expand_keys`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.layer.calls import check_state, check_tokens
from sketchssm.layer.recurrence import Layer, Tokens

Array = npt.NDArray[np.floating[Any]]


def transition(k: Array, g: Array, beta: Array | None) -> Array:
    """One token's transition ``M = (I - beta k k^T) Diag(exp g)`` as a matrix ``(..., K, K)``.

    `k (..., K)`, `g (..., 1)` or, one decay per channel, ``(..., K)``, `beta (...)`, or None if nothing is
    erased.
    """
    eye = np.eye(k.shape[-1])
    erase = eye if beta is None else eye - beta[..., None, None] * k[..., :, None] * k[..., None, :]
    return erase * np.exp(g)[..., None, :]


def step(state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array | None) -> tuple[Array, Array]:
    """Advance a state ``(..., K, V)`` by one token and read it (equations *update* and *read*).

    Returns the new state and the output ``S^T q``, ``(..., V)``. Shapes of the token: `q, k (..., K)`, `v (..., V)`,
    `g (..., 1)` or ``(..., K)``, `beta (...)` or None.
    """
    state = np.exp(g)[..., None] * state
    write = v
    if beta is not None:
        write = beta[..., None] * (v - np.einsum("...kv,...k->...v", state, k))
    state = state + k[..., :, None] * write[..., None, :]
    return state, np.einsum("...kv,...k->...v", state, q)


def per_head(layer: Layer, tokens: Tokens) -> Tokens:
    """Inputs ``(batch, [tokens,] ...)`` in float64, one key and query per value head, and a channel axis on g.

    `q, k (..., heads, K)`, `v (..., heads, V)`, `g (..., heads, 1 or K)`, `beta (..., heads)` or None.
    """
    wide = [None if x is None else np.asarray(x, dtype=np.float64) for x in tokens]
    q, k, v, g, beta = wide
    assert q is not None and k is not None and g is not None
    gates = g if layer.channel_decays else g[..., None]
    return Tokens(layer.expand_keys(q), layer.expand_keys(k), v, gates, beta)


def run(
    layer: Layer, q: Any, k: Any, v: Any, g: Any, beta: Any = None, *, state: npt.ArrayLike | None = None
) -> tuple[Array, Array]:
    """Run whole sequences ``(batch, tokens, ...)`` through the recurrence, from zero states or `state`.

    Returns outputs ``(batch, tokens, heads, V)`` and the states ``(batch, heads, V, K)`` after the last token, in
    float64. Shapes are those of `Layer.token_shapes`; ValueError if one does not fit.
    """
    check_tokens(layer, q, k, v, g, beta, tokens_axis=True)
    inputs = per_head(layer, Tokens(q, k, v, g, beta))
    batch, length = inputs.v.shape[:2]
    if state is None:
        current = np.zeros((batch, layer.heads, layer.key_dim, layer.value_dim))
    else:
        given = np.asarray(state, dtype=np.float64)
        check_state(layer, given, batch)
        current = given.swapaxes(-1, -2)
    output = np.empty(inputs.v.shape)
    for t in range(length):
        current, output[:, t] = step(current, *inputs.at(np.s_[:, t]))
    return output, np.ascontiguousarray(current.swapaxes(-1, -2))
