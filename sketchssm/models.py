"""Inputs of the recurrence from the activations and parameters of a model's layer.

A converter takes a layer's values after the projections and the short convolution. Arguments have the names of the
layer's code (``dt``, ``A_log``, ``dt_bias``, ``B``, ``C``; ``a``, ``b``). Arrays of NumPy, PyTorch (parameters and
bfloat16 included), JAX and CuPy are accepted. Leading axes are ``(batch, tokens)`` or, for one decoding step,
``(batch,)``. Arithmetic is float64, as in `sketchssm.gates`. Results are NumPy arrays: float64 for a float64
argument, else rounded to float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from sketchssm.gates import bounded_decay, log_softplus, scaled_decay
from sketchssm.interop import to_host
from sketchssm.recurrence import Tokens

__all__ = ["gdn_inputs", "kda_inputs", "mamba2_inputs", "mamba2_output"]

Array = npt.NDArray[Any]


def mamba2_inputs(
    x: npt.ArrayLike,
    dt: npt.ArrayLike,
    A_log: npt.ArrayLike,
    B: npt.ArrayLike,
    C: npt.ArrayLike,
    dt_bias: npt.ArrayLike | None = None,
    dt_limit: tuple[float, float] = (0.0, np.inf),
    dt_softplus: bool = True,
) -> Tokens:
    """Convert the inputs of a Mamba-2 layer (mamba_ssm, Nemotron-H) to inputs of the recurrence.

    The step is ``dt <- clip(softplus(dt + dt_bias), *dt_limit)``; then ``q = C``, ``k = B``, ``v = dt * x``
    and ``g = -exp(A_log) * dt``. The recurrence does not contain the skip term ``D * x``: add it with `mamba2_output`.

    Parameters
    ----------
    x : array_like
        Values after the short convolution, shape ``(batch, [tokens,] heads, V)``.
    dt : array_like
        Raw time step, shape ``(batch, [tokens,] heads)``.
    A_log : array_like
        Logarithm of the decay rate, shape ``(heads,)``.
    B : array_like
        Input projection, shape ``(batch, [tokens,] groups, K)``; a group is a key head.
    C : array_like
        Output projection, shape ``(batch, [tokens,] groups, K)``.
    dt_bias : array_like, optional
        Added to `dt` before the softplus, shape ``(heads,)``.
    dt_limit : tuple of float
        Smallest and largest step, applied last; ``time_step_limit`` in model configurations.
    dt_softplus : bool
        False if `dt` is already positive.

    Returns
    -------
    Tokens
        ``q``, ``k``, ``v`` and ``g`` of the recurrence; ``beta`` is None.

    Raises
    ------
    ValueError
        If an array does not fit the others, or `dt_limit` is no range of nonnegative steps.

    Notes
    -----
    Serving engines hold ``A = -exp(A_log)`` instead of the parameter; pass ``log(-A)``. Their decoding
    kernels take no step limit: pass a limit only if the model's configuration narrows it.
    """
    x, lead, heads, _ = _values("x", x)
    B, groups, key_dim = _keys("B", B, lead, heads)
    C = _array("C", C, (*lead, groups, key_dim))
    low, high = dt_limit
    if not 0 <= low <= high:
        raise ValueError(f"dt_limit: expected 0 <= low <= high, got {dt_limit}")

    dt = _array("dt", dt, (*lead, heads))
    step = _biased(dt, dt_bias, (heads,))
    log_step = log_softplus(step) if dt_softplus else _log(step)
    with np.errstate(divide="ignore"):  # log(0) = -inf is the limit meant
        log_step = np.clip(log_step, np.log(low), np.log(high))
    rate_log = _per_head("A_log", A_log, heads)

    return Tokens(
        q=_rounded(C, C),
        k=_rounded(B, B),
        v=_rounded(np.exp(log_step)[..., None] * x, x),
        g=_rounded(scaled_decay(rate_log, log_step), dt),
        beta=None,
    )


def mamba2_output(o: npt.ArrayLike, x: npt.ArrayLike, D: npt.ArrayLike) -> Array:
    """Add Mamba-2's skip term to the recurrence's output.

    Parameters
    ----------
    o : array_like
        Output of the recurrence, shape ``(batch, [tokens,] heads, V)``.
    x : array_like
        The layer's values as given to `mamba2_inputs` (not multiplied by ``dt``), the shape of `o`.
    D : array_like
        Skip weight, shape ``(heads,)`` or, per channel, ``(heads, V)``.

    Returns
    -------
    ndarray
        ``o + D * x``, the shape of `o`, before the layer's gate, norm and projection.

    Raises
    ------
    ValueError
        If an array does not fit `o`.
    """
    o, lead, heads, value_dim = _values("o", o)
    x = _array("x", x, (*lead, heads, value_dim))
    D = _array("D", D)
    if D.shape not in ((heads,), (heads, value_dim)):
        raise ValueError(f"D: expected shape ({heads},) or ({heads}, {value_dim}), got {D.shape}")
    skip = D[:, None] if D.ndim == 1 else D
    dtype = np.result_type(o, x, np.float32)
    return o.astype(dtype) + skip.astype(dtype) * x.astype(dtype)


def gdn_inputs(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    a: npt.ArrayLike,
    b: npt.ArrayLike,
    A_log: npt.ArrayLike,
    dt_bias: npt.ArrayLike | None = None,
    scale: float | None = None,
    l2norm: bool = True,
    eps: float = 1e-6,
    allow_neg_eigval: bool = False,
) -> Tokens:
    """Convert the inputs of a Gated DeltaNet layer (fla, Qwen3-Next) to inputs of the recurrence.

    ``g = -exp(A_log) * softplus(a + dt_bias)`` and ``beta = sigmoid(b)``. q and k are L2-normalised per head
    and q is scaled; fla does both inside its kernels (``use_qk_l2norm_in_kernel``, ``scale``).

    Parameters
    ----------
    q, k : array_like
        After the short convolution, shape ``(batch, [tokens,] key_heads, K)``.
    v : array_like
        After the short convolution, shape ``(batch, [tokens,] heads, V)``.
    a : array_like
        Raw decay, shape ``(batch, [tokens,] heads)``.
    b : array_like
        Raw write gate before its sigmoid, shape ``(batch, [tokens,] heads)``.
    A_log : array_like
        Logarithm of the decay rate, shape ``(heads,)``.
    dt_bias : array_like, optional
        Added to `a` before the softplus, shape ``(heads,)``.
    scale : float, optional
        Factor of q; default ``K ** -0.5``.
    l2norm : bool
        False if q and k are already normalised.
    eps : float
        Added to the squared norm, as fla and transformers do.
    allow_neg_eigval : bool
        Double ``beta``, so that a transition may have negative eigenvalues; fla has an option of this name.

    Returns
    -------
    Tokens
        ``q``, ``k``, ``v``, ``g`` and ``beta`` of the recurrence.

    Raises
    ------
    ValueError
        If an array does not fit the others.
    """
    v, lead, heads, _ = _values("v", v)
    q, k = _queries_keys(q, k, lead, heads, scale, l2norm, eps)
    a = _array("a", a, (*lead, heads))
    raw = _biased(a, dt_bias, (heads,))
    rate_log = _per_head("A_log", A_log, heads)
    return Tokens(
        q=q,
        k=k,
        v=_rounded(v, v),
        g=_rounded(scaled_decay(rate_log, log_softplus(raw)), a),
        beta=_write_gate(b, (*lead, heads), allow_neg_eigval),
    )


def kda_inputs(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    a: npt.ArrayLike,
    b: npt.ArrayLike,
    A_log: npt.ArrayLike,
    dt_bias: npt.ArrayLike | None = None,
    scale: float | None = None,
    l2norm: bool = True,
    eps: float = 1e-6,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    clamp_min: float | None = None,
) -> Tokens:
    """Convert the inputs of a Kimi Delta Attention layer (fla, Kimi Linear) to inputs of the recurrence.

    As `gdn_inputs`, with a log-decay per channel: ``g = -exp(A_log) * softplus(a + dt_bias)`` with one `A_log` per
    head.

    Parameters
    ----------
    q, k : array_like
        After the short convolution, shape ``(batch, [tokens,] key_heads, K)``.
    v : array_like
        After the short convolution, shape ``(batch, [tokens,] heads, V)``.
    a : array_like
        Raw decay (``g`` before fla's gate), shape ``(batch, [tokens,] heads, K)``.
    b : array_like
        Raw write gate before its sigmoid, shape ``(batch, [tokens,] heads)``.
    A_log : array_like
        Logarithm of the decay rate, shape ``(heads,)``, or ``(1, 1, heads, 1)`` as in checkpoints of Kimi Linear.
    dt_bias : array_like, optional
        Added to `a` first, shape ``(heads, K)`` or, as in checkpoints, ``(heads * K,)``.
    scale : float, optional
        Factor of q; default ``K ** -0.5``.
    l2norm : bool
        False if q and k are already normalised.
    eps : float
        Added to the squared norm, as fla does.
    allow_neg_eigval : bool
        Double ``beta``; fla has an option of this name.
    lower_bound : float, optional
        Negative. Selects fla's bounded gate, ``g = lower_bound * sigmoid(exp(A_log) * (a + dt_bias))``, instead of
        the softplus gate. The bounded gate is another function, not a clamp.
    clamp_min : float, optional
        Negative. Lower bound of the softplus gate: smaller log-decays become this value.

    Returns
    -------
    Tokens
        ``q``, ``k``, ``v``, ``g`` and ``beta`` of the recurrence.

    Raises
    ------
    ValueError
        If an array does not fit the others, a bound is not negative, or both bounds are given.
    """
    v, lead, heads, _ = _values("v", v)
    q, k = _queries_keys(q, k, lead, heads, scale, l2norm, eps)
    if lower_bound is not None and clamp_min is not None:
        raise ValueError("clamp_min: expected None beside a lower_bound, which is a gate of its own, got both")
    for name, bound in (("lower_bound", lower_bound), ("clamp_min", clamp_min)):
        if bound is not None and not bound < 0:
            raise ValueError(f"{name}: expected a negative number, got {bound}")

    a = _array("a", a, (*lead, heads, k.shape[-1]))
    raw = _biased(a, dt_bias, (heads, k.shape[-1]))
    rate_log = _per_head("A_log", A_log, heads)[:, None]
    if lower_bound is not None:
        g = bounded_decay(rate_log, raw, lower_bound)
    else:
        g = scaled_decay(rate_log, log_softplus(raw))
        if clamp_min is not None:
            g = np.maximum(g, clamp_min)
    return Tokens(
        q=q,
        k=k,
        v=_rounded(v, v),
        g=_rounded(g, a),
        beta=_write_gate(b, (*lead, heads), allow_neg_eigval),
    )


def _array(name: str, value: Any, shape: tuple[int, ...] | None = None) -> Array:
    try:
        array = to_host(value, name) if hasattr(value, "dtype") else np.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: expected an array that NumPy can read, got {type(value).__name__}") from error
    if not np.can_cast(array.dtype, np.float64):
        raise ValueError(f"{name}: expected real numbers of at most 64 bits, got dtype {array.dtype}")
    if shape is not None and array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")
    return array


def _values(name: str, value: npt.ArrayLike) -> tuple[Array, tuple[int, ...], int, int]:
    """Return the array that sets the shape of a call, its leading axes, heads and V."""
    array = _array(name, value)
    if array.ndim not in (3, 4):
        raise ValueError(f"{name}: expected shape (batch, [tokens,] heads, V), got {array.shape}")
    return array, array.shape[:-2], *array.shape[-2:]


def _keys(name: str, value: npt.ArrayLike, lead: tuple[int, ...], heads: int) -> tuple[Array, int, int]:
    """Return an array of keys, its key heads and K."""
    array = _array(name, value)
    if array.ndim != len(lead) + 2 or array.shape[:-2] != lead:
        raise ValueError(f"{name}: expected shape ({', '.join(map(str, lead))}, key heads, K), got {array.shape}")
    key_heads, key_dim = array.shape[-2:]
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"{name}: expected a number of key heads that divides {heads} heads, got {key_heads}")
    return array, key_heads, key_dim


def _queries_keys(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    lead: tuple[int, ...],
    heads: int,
    scale: float | None,
    l2norm: bool,
    eps: float,
) -> tuple[Array, Array]:
    k, key_heads, key_dim = _keys("k", k, lead, heads)
    q = _array("q", q, (*lead, key_heads, key_dim))
    scale = key_dim**-0.5 if scale is None else scale
    if l2norm:
        return _normalised(q, eps, scale), _normalised(k, eps)
    return _rounded(q.astype(np.float64) * scale, q), _rounded(k, k)


def _normalised(x: Array, eps: float, scale: float = 1.0) -> Array:
    wide = x.astype(np.float64)
    return _rounded(wide * (scale / np.sqrt(np.square(wide).sum(-1, keepdims=True) + eps)), x)


def _per_head(name: str, value: npt.ArrayLike, heads: int) -> Array:
    array = _array(name, value)
    if array.size != heads or max(array.shape, default=1) != heads:
        raise ValueError(f"{name}: expected shape ({heads},), got {array.shape}")
    return array.reshape(heads).astype(np.float64)


def _biased(raw: Array, bias: npt.ArrayLike | None, shape: tuple[int, ...]) -> Array:
    """Add `dt_bias`, in its shape or flat, in float64."""
    wide = raw.astype(np.float64)
    if bias is None:
        return wide
    array = _array("dt_bias", bias)
    if array.shape not in (shape, (math.prod(shape),)):
        raise ValueError(f"dt_bias: expected shape {shape}, got {array.shape}")
    return wide + array.reshape(shape)


def _log(x: Array) -> Array:
    if (x < 0).any():
        raise ValueError(f"dt: expected steps >= 0 where dt_softplus is False, got {x.min()}")
    with np.errstate(divide="ignore"):
        return np.log(x)


def _write_gate(b: npt.ArrayLike, shape: tuple[int, ...], allow_neg_eigval: bool) -> Array:
    raw = _array("b", b, shape)
    return _rounded(expit(raw.astype(np.float64)) * (2.0 if allow_neg_eigval else 1.0), raw)


def _rounded(x: Array, given: Array) -> Array:
    """Round to float32, or keep float64 if the given array is float64."""
    with np.errstate(over="ignore"):  # a log-decay beyond float32 is -inf, a full forget
        return x.astype(np.result_type(given.dtype, np.float32))
