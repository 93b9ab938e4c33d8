"""Checks of a layer's values for `sketchssm.models`, and the arithmetic that the converters share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from sketchssm.arrays.interop import to_host, to_kind
from sketchssm.layer.checks import check_number
from sketchssm.layer.recurrence import Tokens

Array = npt.NDArray[Any]


def tokens_like(like: Any, **arrays: Array | None) -> Tokens:
    """Inputs of the recurrence as arrays of the caller's framework."""
    return Tokens(**{name: x if x is None else to_kind(x, like) for name, x in arrays.items()})


def is_raw(
    finished_name: str, finished: Any, raw_name: str, raw: Any, *, needs_rate: bool = True, **parts: Any
) -> bool:
    """Check that a gate is given either raw or computed; `parts` are the parameters of the raw gate."""
    if (raw is None) == (finished is None):
        got = "none" if raw is None else "both"
        raise ValueError(f"{raw_name}: expected {raw_name} or {finished_name}, got {got}")
    for name, part in parts.items():
        if finished is not None and part is not None:
            raise ValueError(f"{name}: expected None with {finished_name}, which is computed with it already")
    if raw is not None and needs_rate and parts and parts["A_log"] is None:
        raise ValueError(f"A_log: expected the decay rate for {raw_name}, got None")
    return raw is not None


def finished_decay(g: Any, shape: tuple[int, ...]) -> Array:
    """Log-decays that the layer has computed, of a shape and at most 0."""
    array = real_array("g", g, shape)
    if not (array <= 0).all():
        raise ValueError("g: expected log-decays <= 0, got a larger one or NaN; pass raw decays as `a`")
    return rounded(array.astype(np.float64), array)


def real_array(name: str, value: Any, shape: tuple[int, ...] | None = None) -> Array:
    """Real numbers of any framework on the host, of a shape if one is given."""
    try:
        array = to_host(value, name) if hasattr(value, "dtype") else np.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: expected an array that NumPy can read, got {type(value).__name__}") from error
    if not np.can_cast(array.dtype, np.float64):
        raise ValueError(f"{name}: expected real numbers of at most 64 bits, got dtype {array.dtype}")
    if shape is not None and array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")
    return array


def values(name: str, value: npt.ArrayLike) -> tuple[Array, tuple[int, ...], int, int]:
    """Return the array that defines the shape of a call, its leading axes, heads and V."""
    array = real_array(name, value)
    if array.ndim not in (3, 4):
        raise ValueError(f"{name}: expected shape (batch, [tokens,] heads, V), got {array.shape}")
    return array, array.shape[:-2], *array.shape[-2:]


def keys(name: str, value: npt.ArrayLike, lead: tuple[int, ...], heads: int) -> tuple[Array, int, int]:
    """Return an array of keys, its key heads and K."""
    array = real_array(name, value)
    if array.ndim != len(lead) + 2 or array.shape[:-2] != lead:
        raise ValueError(f"{name}: expected shape ({', '.join(map(str, lead))}, key heads, K), got {array.shape}")
    key_heads, key_dim = array.shape[-2:]
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"{name}: expected a number of key heads that divides {heads} heads, got {key_heads}")
    return array, key_heads, key_dim


def queries_keys(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    lead: tuple[int, ...],
    heads: int,
    scale: float | None,
    l2norm: bool,
    eps: float | None,
) -> tuple[Array, Array]:
    """Queries and keys as the recurrence uses them: normalised per head if `l2norm`, queries scaled."""
    k, key_heads, key_dim = keys("k", k, lead, heads)
    q = real_array("q", q, (*lead, key_heads, key_dim))
    scale = key_dim**-0.5 if scale is None else scale
    check_number("scale", scale, "a finite number", lambda number: -np.inf < number < np.inf)
    if eps is not None:
        check_number("eps", eps, "a finite number of at least 0", lambda number: 0 <= number < np.inf)
        if not l2norm:
            raise ValueError(f"eps: expected None with l2norm=False, got {eps!r}")
    if l2norm:
        eps = 1e-6 if eps is None else eps
        return _normalised(q, eps, scale), _normalised(k, eps)
    return rounded(q.astype(np.float64) * scale, q), rounded(k, k)


def _normalised(x: Array, eps: float, scale: float = 1.0) -> Array:
    wide = x.astype(np.float64)
    return rounded(wide * (scale / np.sqrt(np.square(wide).sum(-1, keepdims=True) + eps)), x)


def per_head(name: str, value: Any, heads: int) -> Array:
    """One number for each head, in any shape, as float64."""
    array = real_array(name, value)
    if array.size != heads or max(array.shape, default=1) != heads:
        raise ValueError(f"{name}: expected shape ({heads},), got {array.shape}")
    return array.reshape(heads).astype(np.float64)


def biased(raw: Array, bias: npt.ArrayLike | None, shape: tuple[int, ...]) -> Array:
    """Add `dt_bias`, in its shape or flat, in float64."""
    wide = raw.astype(np.float64)
    if bias is None:
        return wide
    array = real_array("dt_bias", bias)
    if array.shape not in (shape, (math.prod(shape),)):
        raise ValueError(f"dt_bias: expected shape {shape}, got {array.shape}")
    return wide + array.reshape(shape)


def log_steps(x: Array) -> Array:
    """Logarithms of steps, which must not be negative."""
    if (x < 0).any():
        raise ValueError(f"dt: expected steps >= 0 if dt_softplus is False, got {x.min()}")
    with np.errstate(divide="ignore"):
        return np.log(x)


def write_gate(b: Any, beta: Any, shape: tuple[int, ...], allow_neg_eigval: bool) -> Array:
    """Write gate from the raw activation `b`, or `beta` itself."""
    if is_raw("beta", beta, "b", b):
        raw = real_array("b", b, shape)
        return rounded(expit(raw.astype(np.float64)) * (2.0 if allow_neg_eigval else 1.0), raw)
    if allow_neg_eigval:
        raise ValueError("allow_neg_eigval: expected False with beta, which is computed with it already")
    gate = real_array("beta", beta, shape)
    return rounded(gate.astype(np.float64), gate)


def rounded(x: Array, given: Array) -> Array:
    """Round to float32, or keep float64 if the given array is float64."""
    with np.errstate(over="ignore"):  # a log-decay beyond float32 is -inf, a full forget
        return x.astype(np.result_type(given.dtype, np.float32))
