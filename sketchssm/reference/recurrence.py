"""The recurrence, token by token. Tests compare every other form with it.

All functions here use the paper's orientation, ``S`` of shape ``(..., K, V)``, in float64, with one entry per
value head on the leading axes (see `sketchssm.layer.recurrence.Layer.expand_keys`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.layer.checks import check_tokens
from sketchssm.layer.recurrence import Layer, Tokens

__all__ = ["Array", "per_head", "run", "step", "transition"]

Array = npt.NDArray[np.floating[Any]]


def transition(k: Array, g: Array, beta: Array | None) -> Array:
    """One token's transition ``M = (I - beta k k^T) Diag(exp g)`` as a matrix.

    Parameters
    ----------
    k : ndarray, (..., K)
        Key.
    g : ndarray, (..., 1) or (..., K)
        Log-decay: one for all channels, or one per channel.
    beta : ndarray (...) or None
        Write gate; None erases nothing (mamba2).

    Returns
    -------
    ndarray, (..., K, K)
        The transition of equation *transition-update*.
    """
    eye = np.eye(k.shape[-1])
    erase = eye if beta is None else eye - beta[..., None, None] * k[..., :, None] * k[..., None, :]
    return erase * np.exp(g)[..., None, :]


def step(state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array | None) -> tuple[Array, Array]:
    """Advance a state by one token and read it (equations *update* and *read*).

    Parameters
    ----------
    state : ndarray, (..., K, V)
        State before the token.
    q, k : ndarray, (..., K)
        Query and key.
    v : ndarray, (..., V)
        Value.
    g : ndarray, (..., 1) or (..., K)
        Log-decay.
    beta : ndarray (...) or None
        Write gate; None for mamba2.

    Returns
    -------
    state : ndarray, (..., K, V)
        State after the token.
    output : ndarray, (..., V)
        ``S^T q`` of the new state.
    """
    state = np.exp(g)[..., None] * state
    write = v
    if beta is not None:
        write = beta[..., None] * (v - np.einsum("...kv,...k->...v", state, k))
    state = state + k[..., :, None] * write[..., None, :]
    return state, np.einsum("...kv,...k->...v", state, q)


def per_head(layer: Layer, tokens: Tokens) -> Tokens:
    """Inputs in float64 with one key and query per value head and a channel axis on g.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    tokens : Tokens
        Arrays ``(batch, [tokens,] ...)``.

    Returns
    -------
    Tokens
        ``q, k (..., heads, K)``, ``v (..., heads, V)``, ``g (..., heads, 1 or K)``, ``beta (..., heads)`` or None.
    """
    wide = [None if x is None else np.asarray(x, dtype=np.float64) for x in tokens]
    q, k, v, g, beta = wide
    assert q is not None and k is not None and g is not None
    gates = g if layer.kind == "kda" else g[..., None]
    return Tokens(layer.expand_keys(q), layer.expand_keys(k), v, gates, beta)


def run(
    layer: Layer, q: Any, k: Any, v: Any, g: Any, beta: Any = None, *, state: npt.ArrayLike | None = None
) -> tuple[Array, Array]:
    """Run whole sequences through the recurrence.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    q, k : array_like, (batch, tokens, key_heads, K)
        Queries and keys.
    v : array_like, (batch, tokens, heads, V)
        Values.
    g : array_like, (batch, tokens, heads) or, for kda, (batch, tokens, heads, K)
        Log-decays.
    beta : array_like, (batch, tokens, heads), optional
        Write gates; absent for mamba2.
    state : array_like, (batch, heads, V, K), optional
        States to start from, K last; zeros by default.

    Returns
    -------
    output : ndarray, (batch, tokens, heads, V)
        Outputs in float64.
    state : ndarray, (batch, heads, V, K)
        States after the last token, K last.

    Raises
    ------
    ValueError
        If a shape does not fit the layer.
    """
    check_tokens(layer, q, k, v, g, beta, tokens_axis=True)
    inputs = per_head(layer, Tokens(q, k, v, g, beta))
    batch, length = inputs.v.shape[:2]
    if state is None:
        current = np.zeros((batch, layer.heads, layer.key_dim, layer.value_dim))
    else:
        current = np.asarray(state, dtype=np.float64).swapaxes(-1, -2)
    output = np.empty(inputs.v.shape)
    for t in range(length):
        token = Tokens(*(x if x is None else x[:, t] for x in inputs))
        current, output[:, t] = step(current, *token)
    return output, np.ascontiguousarray(current.swapaxes(-1, -2))
