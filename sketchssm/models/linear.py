"""Converters of linear attention with a given decay, of DeltaProduct and of Mamba-3; see `sketchssm.models`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.arrays.interop import to_kind
from sketchssm.arrays.model_arrays import (
    finished_decay,
    keys,
    queries_keys,
    real_array,
    rounded,
    tokens_like,
    values,
    write_gate,
)
from sketchssm.layer.checks import check_integer, check_size
from sketchssm.layer.recurrence import Tokens

Array = npt.NDArray[Any]


def linear_inputs(
    q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike, g: npt.ArrayLike, scale: float | None = None
) -> Tokens:
    """Convert the inputs of linear attention with a decay (lightning attention, retention, GLA) to the recurrence's.

    A decay per head makes inputs of a layer of mamba2, a decay per channel makes those of gla.

    Parameters
    ----------
    q, k : array_like
        Shape ``(batch, [tokens,] key_heads, K)``, with all that the layer does to them (norm, activation, rotation).
    v : array_like
        Shape ``(batch, [tokens,] heads, V)``.
    g : array_like
        Log-decays, at most 0: constant ones ``(heads,)``, see `lightning_decay` and `retention_decay`; or one per
        head, ``(batch, [tokens,] heads)``; or one per channel, ``(batch, [tokens,] heads, K)``.
    scale : float, optional
        Factor of q; default ``K ** -0.5``. Lightning attention of MiniMax has 1.

    Returns
    -------
    Tokens
        ``q``, ``k``, ``v`` and ``g`` of the recurrence; ``beta`` is None.

    Raises
    ------
    ValueError
        If an array does not fit the others, or a log-decay is above 0.
    """
    given = v
    v, lead, heads, _ = values("v", v)
    q, k = queries_keys(q, k, lead, heads, scale, False, None)
    decay = real_array("g", g)
    if decay.shape == (heads,):
        decay = np.broadcast_to(decay, (*lead, heads))
    channels = (k.shape[-1],) if decay.ndim > len(lead) + 1 else ()
    return tokens_like(given, q=q, k=k, v=rounded(v, v), g=finished_decay(decay, (*lead, heads, *channels)), beta=None)


def lightning_decay(heads: int, layer: int = 0, layers: int | None = None) -> Array:
    """Constant log-decays of lightning attention: ``-2 ** (-8 (h + 1) / heads)``, weaker in later layers.

    Parameters
    ----------
    heads : int
        Heads of the layer.
    layer : int, default 0
        Index of the layer in the model.
    layers : int, optional
        Layers of the model: decays are multiplied by ``1 - layer / (layers - 1 + 1e-5) + 1e-5``, as in MiniMax.
        Default: no factor.

    Returns
    -------
    ndarray of float64, (heads,)
        Log-decays, for `linear_inputs`.

    Raises
    ------
    ValueError
        If a size is not positive, or `layer` is no layer of the model.
    """
    rate = 2.0 ** (-8 * np.arange(1, check_size("heads", heads) + 1) / heads)
    if layers is None:
        return -rate
    check_integer("layer", layer, 0, check_size("layers", layers) - 1)
    return -rate * (1 - layer / (layers - 1 + 1e-5) + 1e-5)


def retention_decay(heads: int) -> Array:
    """Constant log-decays of retention (RetNet): ``log(1 - 2 ** (-5 - h))``.

    Parameters
    ----------
    heads : int
        Heads of the layer.

    Returns
    -------
    ndarray of float64, (heads,)
        Log-decays, for `linear_inputs`.

    Raises
    ------
    ValueError
        If `heads` is not a positive integer.
    """
    return np.log1p(-(2.0 ** (-5.0 - np.arange(check_size("heads", heads)))))


def delta_product_inputs(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    beta: npt.ArrayLike,
    g: npt.ArrayLike | None = None,
    scale: float | None = None,
    l2norm: bool = True,
) -> Tokens:
    """Convert the inputs of a Gated DeltaProduct layer, which writes n times a token, to n tokens of gdn.

    The first of the n decays, and the last one reads: the layer's outputs are ``o[:, n - 1::n]``.

    Parameters
    ----------
    q : array_like
        Shape ``(batch, tokens, key_heads, K)``.
    k : array_like
        Keys of the writes, shape ``(batch, tokens, n, key_heads, K)``.
    v : array_like
        Values of the writes, shape ``(batch, tokens, n, heads, V)``.
    beta : array_like
        Write gates from 0 to 2, shape ``(batch, tokens, n, heads)``.
    g : array_like, optional
        Log-decays of the tokens, shape ``(batch, tokens, heads)``. Default: no decay.
    scale : float, optional
        Factor of q; default ``K ** -0.5``.
    l2norm : bool
        False if q and k are already normalised.

    Returns
    -------
    Tokens
        Arrays ``(batch, n * tokens, ...)`` of a layer of gdn. Queries of writes that read nothing are zeros.

    Raises
    ------
    ValueError
        If an array does not fit the others, or a log-decay is above 0.
    """
    given = v
    v = real_array("v", v)
    if v.ndim != 5:
        raise ValueError(f"v: expected shape (batch, tokens, n, heads, V), got {v.shape}")
    batch, length, writes, heads, value_dim = v.shape
    lead, steps = (batch, length), (batch, length * writes)
    q, key_heads, key_dim = keys("q", q, lead, heads)
    k = real_array("k", k, (batch, length, writes, key_heads, key_dim))
    reads = np.zeros(k.shape, q.dtype)
    reads[:, :, -1] = q
    decays = np.zeros((batch, length, writes, heads))
    if g is not None:
        decays[:, :, 0] = finished_decay(g, (*lead, heads))
    q, k = (y.reshape(*steps, key_heads, key_dim) for y in (reads, k))
    q, k = queries_keys(q, k, steps, heads, scale, l2norm, None)
    return tokens_like(
        given,
        q=q,
        k=k,
        v=rounded(v, v).reshape(*steps, heads, value_dim),
        g=rounded(decays.reshape(*steps, heads), v),
        beta=write_gate(None, real_array("beta", beta, v.shape[:-1]).reshape(*steps, heads), (*steps, heads), False),
    )


def mamba3_inputs(
    x: npt.ArrayLike,
    dt: npt.ArrayLike,
    A: npt.ArrayLike,
    B: npt.ArrayLike,
    C: npt.ArrayLike,
    trap: npt.ArrayLike,
    previous: tuple[Any, Any, Any] | None = None,
) -> tuple[Tokens, Any]:
    """Convert the inputs of a Mamba-3 layer with one input and output (SISO) to inputs of a layer of mamba2.

    Mamba-3 discretises by the trapezoidal rule: with ``a_t = exp(A_t dt_t)``, a token adds ``trap_t dt_t B_t x_t`` and
    ``(1 - trap_t) dt_t a_t B_{t-1} x_{t-1}``. In the recurrence a token therefore writes the token *before* it, with
    the weight ``a_t (dt_{t-1} trap_{t-1} + (1 - trap_t) dt_t)``; its own write is a local term of the output.

    Parameters
    ----------
    x : array_like
        Values, shape ``(batch, tokens, heads, V)``.
    dt : array_like
        Steps after the softplus, shape ``(batch, tokens, heads)``.
    A : array_like
        Decay rates, at most 0, shape ``(batch, tokens, heads)`` or ``(heads,)``.
    B, C : array_like
        Keys and queries after norm, bias and rotation, shape ``(batch, tokens, groups, K)``.
    trap : array_like
        Weight of the newer end of a step, from 0 to 1, shape ``(batch, tokens, heads)``.
    previous : tuple of array_like, optional
        The last token's ``x``, ``B`` and ``trap * dt`` of the call before, ``(batch, ...)``. Default: zeros, for a
        sequence's first token.

    Returns
    -------
    tokens : Tokens
        ``q``, ``k``, ``v`` and ``g`` of the recurrence; ``beta`` is None.
    local : array, (batch, tokens, heads, V)
        ``trap dt (C B) x``: add it, and the skip term of `mamba2_output`, to the outputs of the recurrence.

    Raises
    ------
    ValueError
        If an array does not fit the others, or a rate is above 0.
    """
    given = x
    x, lead, heads, value_dim = values("x", x)
    if len(lead) != 2:
        raise ValueError(f"x: expected shape (batch, tokens, heads, V), got {x.shape}")
    B, groups, key_dim = keys("B", B, lead, heads)
    C = real_array("C", C, (*lead, groups, key_dim))
    step, weight = (real_array(name, y, (*lead, heads)).astype(np.float64) for name, y in (("dt", dt), ("trap", trap)))
    rate = real_array("A", A).astype(np.float64)
    decay = finished_decay(np.broadcast_to(rate, (*lead, heads)) * step, (*lead, heads))
    shapes = (heads, value_dim), (groups, key_dim), (heads,)
    named = zip(("x", "B", "trap * dt"), previous or (None, None, None), shapes, strict=True)
    before = [
        np.zeros((lead[0], *tail)) if y is None else real_array(f"previous {name}", y, (lead[0], *tail))
        for name, y, tail in named
    ]
    new = weight * step
    late_x, late_B, late = (
        np.concatenate([first[:, None], y[:, :-1]], 1) for first, y in zip(before, (x, B, new), strict=True)
    )
    v = (np.exp(decay) * (late + (1 - weight) * step))[..., None] * late_x
    overlap = np.repeat((C.astype(np.float64) * B).sum(-1), heads // groups, -1)
    local = (new * overlap)[..., None] * x
    tokens = tokens_like(given, q=rounded(C, C), k=rounded(late_B, B), v=rounded(v, x), g=rounded(decay, x), beta=None)
    return tokens, to_kind(rounded(local, x), given)
