"""The recurrence in chunks of one window: the states at all starts of windows, and effective queries.

`sketchssm.reference.window` derives the equations. Here they are products of matrices over many windows, rows and
heads, in NumPy, CuPy or PyTorch. Only the step from a window's start to the next is sequential:

    S' = D_{1:W} S + L^T (U - X S),        U = T v,   X = T (D k),   L_s = D_{s+1:W} k_s,

where T is the inverse of ``I + strict_lower(Diag(beta) A)`` times ``Diag(beta)`` (for mamba2 U = v and X = 0).
Effective queries are ``D q - P X``.

Types: products of matrices are in the type of the tokens, float32 or float64. Sums of log-decays, the inverses T and
all sums over windows are in float64. A log-decay below -800 is taken as -800, which gives a decay of 0
in both types, so that differences of sums are finite and exact to 1e-11.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sketchssm.arrays.space import Space
from sketchssm.calibrate.prefixes import orthogonaliser
from sketchssm.layer.recurrence import Tokens

FORGOTTEN = -800.0
"""Log-decay that stands for -inf and all below."""

WIDEST = {"float32": -120.0, "float64": -1200.0}
"""Log-decay of a window's channel down to which quotients of cumulative decays, from the window's middle, neither
overflow nor lose digits."""


class Chunks(NamedTuple):
    """Windows of some rows and heads, each array ``(rows, heads, windows, W, ...)``.

    `queries (..., K)` are effective queries, `values (..., V)` and `erase (..., K)` U and X (None for mamba2), and
    `left (..., K)` L. `decay (rows, heads, windows, 1 or K)` is the whole window's.
    """

    queries: Any
    values: Any
    erase: Any
    left: Any
    decay: Any


def chunks_of(space: Space, tokens: Tokens, dtype: str) -> Chunks:
    """Chunks of tokens ``(rows, heads, windows, W, ...)``, one key and query per head, g in float64 with channels."""
    xp = space.xp
    total = xp.cumsum(tokens.g, axis=-2)
    from_start = xp.exp(space.cast(total, dtype))
    left = xp.exp(space.cast(total[..., -1:, :] - total, dtype)) * tokens.k
    queries, decay = from_start * tokens.q, from_start[..., -1, :]
    if tokens.beta is None:
        return Chunks(queries, tokens.v, None, left, decay)
    gram, scores = _decayed_products(space, total, tokens.k, (tokens.k, tokens.q), dtype)
    gate = space.cast(tokens.beta, "float64")
    lower = space.cast(gram, "float64") * gate[..., :, None]
    inverse = space.cast(_inverse(space, lower) * gate[..., None, :], dtype)
    erase = inverse @ (from_start * tokens.k)
    return Chunks(queries - scores @ erase, inverse @ tokens.v, erase, left, decay)


def advance(space: Space, chunks: Chunks, state: Any, dtype: str) -> tuple[Any, Any]:
    """States ``(rows, heads, windows, V, K)`` at the start of each window, and the state after the last."""
    xp = space.xp
    rows, heads, windows = chunks.left.shape[:3]
    states = space.empty((rows, heads, windows, *state.shape[2:]), dtype)
    end = space.empty(tuple(state.shape), dtype)
    states[:, :, 0] = state
    for i in range(windows):
        own, write = states[:, :, i], chunks.values[:, :, i]
        new = states[:, :, i + 1] if i + 1 < windows else end
        if chunks.erase is not None:
            write = write - space.product(chunks.erase[:, :, i], own.swapaxes(-1, -2))
        xp.multiply(own, chunks.decay[:, :, i, None, :], out=new)
        new += write.swapaxes(-1, -2) @ chunks.left[:, :, i]
    return states, end


def _decayed_products(space: Space, total: Any, k: Any, others: tuple[Any, ...], dtype: str) -> list[Any]:
    """Tables ``[j, s] = <D_{s+1:j} k_s, y_j>`` of arrays y, zero for ``s > j``; `total` are sums of log-decays."""
    xp = space.xp
    size = k.shape[-2]
    earlier = xp.tril(space.zeros((size, size), dtype) + 1) > 0
    if total.shape[-1] == 1:
        span = xp.where(earlier, total - total.swapaxes(-1, -2), FORGOTTEN)
        between = xp.exp(space.cast(span, dtype))
        return [between * (y @ k.swapaxes(-1, -2)) for y in others]
    if float(total[..., -1, :].min()) >= WIDEST[dtype]:
        middle = total[..., -1:, :] / 2
        right = (xp.exp(space.cast(middle - total, dtype)) * k).swapaxes(-1, -2)
        grown = xp.exp(space.cast(total - middle, dtype))
        return [xp.where(earlier, (grown * y) @ right, 0.0) for y in others]
    found = [space.zeros((*k.shape[:-1], size), dtype) for _ in others]
    for s in range(size):
        own = xp.exp(space.cast(total[..., s:, :] - total[..., s : s + 1, :], dtype)) * k[..., s : s + 1, :]
        for table, y in zip(found, others, strict=True):
            table[..., s:, s] = (own * y[..., s:, :]).sum(-1)
    return found


def _inverse(space: Space, lower: Any) -> Any:
    """Inverses of ``I + strict_lower(lower)``, by forward substitution on the host."""
    size = lower.shape[-1]
    if space.on_device:
        unit = space.xp.tril(lower, -1)
        space.xp.diagonal(unit, 0, -2, -1)[...] = 1.0
        return orthogonaliser(space, unit, 0.0)
    found = space.zeros(tuple(lower.shape), "float64")
    for j in range(size):
        found[..., j, j] = 1.0
        if j:
            found[..., j, :j] = -(lower[..., j : j + 1, :j] @ found[..., :j, :j])[..., 0, :]
    return found
