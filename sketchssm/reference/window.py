"""One window of buffered tokens: the paper's split of an output into a state read and an exact buffer output.

With the state ``S0`` fixed at the window's start and tokens ``s = 1..t`` in the ring,

    o_t = S0^T x_t + sum_s c_ts v_s,          x_t = M_{1:t}^T q_t   (the effective query),
    S_t = D_{1:t} S0 + sum_s l_s(t) w_s^T,    l_s(t) = D_{s+1:t} k_s.

Both follow from two scalar tables over pairs of tokens, the decayed Gram matrix ``A[j, s] = <l_s(j), k_j>`` and the
decayed scores ``P[t, s] = <l_s(t), q_t>``: the weights of the buffer output solve the unit triangular system

    c_ts = beta_s (P[t, s] - sum_{s < j <= t} c_tj A[j, s]),

and the same weights give the effective query, ``x_t = D_{1:t} q_t - sum_j c_tj D_{1:j} k_j``. This is the transpose of
the paper's WY recurrence (equation *wy*) and does not need its forward factors ``pi_s``. Decay enters only as ``exp``
of sums of log-decays over consecutive tokens, never as a quotient of cumulative decays.

Arrays have any leading axes, with the ``t`` tokens on axis -2 of k and v. All arithmetic is in float64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sketchssm.reference.recurrence import Array, transition


class Ring(NamedTuple):
    """Raw inputs of the tokens buffered since the last flush, in token order.

    ``k (..., t, K)``, ``v (..., t, V)``, ``g (..., t, 1 or K)``, ``beta (..., t)`` or None without erasing.
    """

    k: Array
    v: Array
    g: Array
    beta: Array | None

    def at(self, index: Any) -> Ring:
        """Return the same part of every array, as views."""
        return Ring(self.k[index], self.v[index], self.g[index], None if self.beta is None else self.beta[index])


class WindowReads(NamedTuple):
    """Effective queries and buffer weights of a window.

    ``queries (..., n, K)`` and ``weights (..., n, t)`` give ``o_t = S0^T queries_t + sum_s weights_ts v_s``. The
    weights of tokens after the query's own are zero.
    """

    queries: Array
    weights: Array


def decay_between(g: Array) -> tuple[Array, Array]:
    """Decay over every range of consecutive tokens of a window, from log-decays g ``(..., t, C)``.

    `from_start (..., t, C)` is ``exp(g_1 + ... + g_j)``, the diagonal of ``D_{1:j}``. ``between[j, s]``, of
    ``(..., t, t, C)``, is ``exp(g_{s+1} + ... + g_j)`` for ``s <= j``, and 0 above the diagonal. A decay of -inf
    erases the state before the token.
    """
    tokens = g.shape[-2]
    log_between = np.full((*g.shape[:-2], tokens, tokens, g.shape[-1]), -np.inf)
    for j in range(tokens):
        log_between[..., j, j, :] = 0.0
        if j:
            # a running sum per start: a difference of cumulative sums would be -inf - (-inf), which is NaN
            log_between[..., j, :j, :] = log_between[..., j - 1, :j, :] + g[..., j, None, :]
    return np.exp(np.cumsum(g, axis=-2)), np.exp(log_between)


def effective_query(q: Array, ring: Ring) -> Array:
    """Effective query ``M_{1:t}^T q`` by applying the transposed transitions one by one (section 3.2).

    `q (..., K)` is the query of the ring's last token; the result reads the state at the window's start.
    """
    x = q
    for s in reversed(range(ring.k.shape[-2])):
        beta = None if ring.beta is None else ring.beta[..., s]
        x = np.einsum("...ij,...i->...j", transition(ring.k[..., s, :], ring.g[..., s, :], beta), x)
    return x


def erase_factors(ring: Ring) -> Array:
    """The paper's erase factors ``pi_s (..., t, K)`` of a gdn or kda window, by its forward recurrence (*wy*).

    ``M_{1:t} = Diag(D_{1:t}) - sum_s l_s(t) pi_s^T``.
    """
    assert ring.beta is not None
    from_start, between = decay_between(ring.g)
    gram = _decayed_products(between, ring.k, ring.k)
    pi = np.zeros_like(ring.k)
    for s in range(ring.k.shape[-2]):
        earlier = np.einsum("...j,...jk->...k", gram[..., s, :s], pi[..., :s, :])
        pi[..., s, :] = ring.beta[..., s, None] * (from_start[..., s, :] * ring.k[..., s, :] - earlier)
    return pi


def read_window(q: Array, ring: Ring) -> WindowReads:
    """Effective queries and buffer weights of a window's last n tokens at once, one row per query ``(..., n, K)``.

    Calibration passes the queries of all tokens, a decode step one.
    """
    from_start, between = decay_between(ring.g)
    rows = slice(ring.k.shape[-2] - q.shape[-2], None)
    scores = _decayed_products(between[..., rows, :, :], ring.k, q)
    queries = from_start[..., rows, :] * q
    if ring.beta is None:
        return WindowReads(queries, scores)
    gate = ring.beta[..., None, :]
    system = _unit_lower(_decayed_products(between, ring.k, ring.k) * gate)
    weights = _solve(system.swapaxes(-1, -2), (scores * gate).swapaxes(-1, -2)).swapaxes(-1, -2)
    return WindowReads(queries - weights @ (from_start * ring.k), weights)


def fold(state: Array, ring: Ring) -> Array:
    """Advance a state ``(..., K, V)`` through a ring, exactly, from the ring's raw inputs.

    Two matrix products and one triangular solve have the result of t steps of the recurrence.
    """
    if ring.k.shape[-2] == 0:
        return state
    from_start, between = decay_between(ring.g)
    left = between[..., -1, :, :] * ring.k
    write = ring.v
    if ring.beta is not None:
        gram = _decayed_products(between, ring.k, ring.k)
        predicted = (from_start * ring.k) @ state
        system = _unit_lower(ring.beta[..., :, None] * gram)
        write = _solve(system, ring.beta[..., None] * (ring.v - predicted))
    return from_start[..., -1, :, None] * state + left.swapaxes(-1, -2) @ write


def _decayed_products(between: Array, k: Array, y: Array) -> Array:
    """Table ``[j, s] = <D_{s+1:j} k_s, y_j>`` over rows j of `between` and y, zero for ``s > j``."""
    if between.shape[-1] == 1:
        return between[..., 0] * (y @ k.swapaxes(-1, -2))
    return np.einsum("...jsk,...jk->...js", between * k[..., None, :, :], y)


def _unit_lower(table: Array) -> Array:
    """``I`` plus the strict lower triangle: the triangular system of the delta rule's cross terms."""
    return np.tril(table, -1) + np.eye(table.shape[-1])


def _solve(system: Array, right: Array) -> Array:
    """Solution of unit triangular systems; NaN for a system that is not finite, which `np.linalg.solve` refuses."""
    finite = np.isfinite(system).all((-2, -1), keepdims=True)
    return np.where(finite, np.linalg.solve(np.where(finite, system, np.eye(system.shape[-1])), right), np.nan)
