"""Converters of Mamba-2, Gated DeltaNet and Kimi Delta Attention; see `sketchssm.models`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.arrays.gates import bounded_decay, log_softplus, scaled_decay
from sketchssm.arrays.interop import to_kind
from sketchssm.arrays.model_arrays import (
    biased,
    finished_decay,
    is_raw,
    keys,
    log_steps,
    per_head,
    queries_keys,
    real_array,
    rounded,
    tokens_like,
    values,
    write_gate,
)
from sketchssm.layer.checks import check_items, check_number
from sketchssm.layer.recurrence import Tokens

Array = npt.NDArray[Any]


def mamba2_inputs(
    x: npt.ArrayLike,
    dt: npt.ArrayLike,
    A_log: npt.ArrayLike | None,
    B: npt.ArrayLike,
    C: npt.ArrayLike,
    dt_bias: npt.ArrayLike | None = None,
    dt_limit: tuple[float, float] = (0.0, np.inf),
    dt_softplus: bool = True,
    *,
    A: npt.ArrayLike | None = None,
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
    A_log : array_like or None
        Logarithm of the decay rate, shape ``(heads,)``; None with `A`.
    B : array_like
        Input projection, shape ``(batch, [tokens,] groups, K)``; a group is a key head.
    C : array_like
        Output projection, shape ``(batch, [tokens,] groups, K)``.
    dt_bias : array_like, optional
        Added to `dt` before the softplus, shape ``(heads,)``.
    dt_limit : tuple of float
        Smallest and largest step, applied last. Configurations call it ``time_step_limit`` (Mamba-2, Bamba,
        Falcon-H1); the layers of Nemotron-H and Zamba2 use ``(time_step_min, inf)``. The layers apply the limit to
        prompts, and their kernels for decoding apply none.
    dt_softplus : bool
        False if `dt` is already positive.
    A : array_like, optional
        ``-exp(A_log)``, shape ``(heads,)``, which serving engines and the functions of transformers hold instead of
        the parameter.

    Returns
    -------
    Tokens
        ``q``, ``k``, ``v`` and ``g`` of the recurrence; ``beta`` is None.

    Raises
    ------
    ValueError
        If an array does not fit the others, `dt_limit` is no range of nonnegative steps, or not exactly one of
        `A_log` and `A` is given.
    """
    given = x
    x, lead, heads, _ = values("x", x)
    B, groups, key_dim = keys("B", B, lead, heads)
    C = real_array("C", C, (*lead, groups, key_dim))
    limits = check_items("dt_limit", dt_limit, "two numbers")
    for limit in limits:
        check_number("dt_limit", limit, "numbers of at least 0", lambda number: number >= 0)
    if len(limits) != 2 or limits[0] > limits[1]:
        raise ValueError(f"dt_limit: expected 0 <= low <= high, got {dt_limit}")
    low, high = limits

    if is_raw("A", A, "A_log", A_log):
        rate_log = per_head("A_log", A_log, heads)
    else:
        rate = per_head("A", A, heads)
        if not (rate <= 0).all():
            raise ValueError(f"A: expected numbers <= 0, got {rate.max()}")
        with np.errstate(divide="ignore"):  # a rate of 0 decays nothing
            rate_log = np.log(-rate)
    dt = real_array("dt", dt, (*lead, heads))
    step = biased(dt, dt_bias, (heads,))
    log_step = log_softplus(step) if dt_softplus else log_steps(step)
    with np.errstate(divide="ignore"):  # log(0) = -inf is the limit meant
        log_step = np.clip(log_step, np.log(low), np.log(high))

    return tokens_like(
        given,
        q=rounded(C, C),
        k=rounded(B, B),
        v=rounded(np.exp(log_step)[..., None] * x, x),
        g=rounded(scaled_decay(rate_log, log_step), dt),
        beta=None,
    )


def mamba2_output(o: npt.ArrayLike, x: npt.ArrayLike, D: npt.ArrayLike) -> Any:
    """Add Mamba-2's skip term to the recurrence's output.

    Parameters
    ----------
    o : array_like
        Output of the recurrence, shape ``(batch, [tokens,] heads, V)``.
    x : array_like
        The layer's values as given to `mamba2_inputs` (not multiplied by ``dt``), the shape of `o`.
    D : array_like
        Skip weight, shape ``(heads,)`` or, per channel, ``(heads, V)`` or ``(heads * V,)``.

    Returns
    -------
    array
        ``o + D * x``, the kind and shape of `o`, before the layer's gate, norm and projection.

    Raises
    ------
    ValueError
        If an array does not fit `o`.
    """
    given = o
    o, lead, heads, value_dim = values("o", o)
    x = real_array("x", x, (*lead, heads, value_dim))
    D = real_array("D", D)
    if D.shape not in ((heads,), (heads, value_dim), (heads * value_dim,)):
        raise ValueError(f"D: expected shape ({heads},) or ({heads}, {value_dim}), got {D.shape}")
    skip = D.reshape(heads, -1)
    dtype = np.result_type(o, x, np.float32)
    return to_kind(o.astype(dtype) + skip.astype(dtype) * x.astype(dtype), given)


def gdn_inputs(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    a: npt.ArrayLike | None = None,
    b: npt.ArrayLike | None = None,
    A_log: npt.ArrayLike | None = None,
    dt_bias: npt.ArrayLike | None = None,
    scale: float | None = None,
    l2norm: bool = True,
    eps: float | None = None,
    allow_neg_eigval: bool = False,
    *,
    g: npt.ArrayLike | None = None,
    beta: npt.ArrayLike | None = None,
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
    a : array_like, optional
        Raw decay, shape ``(batch, [tokens,] heads)``.
    b : array_like, optional
        Raw write gate before its sigmoid, shape ``(batch, [tokens,] heads)``.
    A_log : array_like, optional
        Logarithm of the decay rate, shape ``(heads,)``; needed with `a`.
    dt_bias : array_like, optional
        Added to `a` before the softplus, shape ``(heads,)``.
    scale : float, optional
        Factor of q; default ``K ** -0.5``.
    l2norm : bool
        False if q and k are already normalised.
    eps : float, optional
        Added to the squared norm, as fla and transformers do. Default: 1e-6; only with `l2norm`.
    allow_neg_eigval : bool
        Double ``sigmoid(b)``, so that a transition may have negative eigenvalues; fla has an option of this name.
    g : array_like, optional
        Instead of `a`: the log-decay itself, the shape of `a`. Then the arguments that belong to `a` are refused.
    beta : array_like, optional
        Instead of `b`: the write gate itself, the shape of `b`.

    Returns
    -------
    Tokens
        ``q``, ``k``, ``v``, ``g`` and ``beta`` of the recurrence.

    Raises
    ------
    ValueError
        If an array does not fit the others, a gate is given raw and finished, or neither, or a log-decay is above 0.
    """
    given = v
    v, lead, heads, _ = values("v", v)
    q, k = queries_keys(q, k, lead, heads, scale, l2norm, eps)
    if is_raw("g", g, "a", a, A_log=A_log, dt_bias=dt_bias):
        a = real_array("a", a, (*lead, heads))
        rate_log = per_head("A_log", A_log, heads)
        decay = rounded(scaled_decay(rate_log, log_softplus(biased(a, dt_bias, (heads,)))), a)
    else:
        decay = finished_decay(g, (*lead, heads))
    beta = write_gate(b, beta, (*lead, heads), allow_neg_eigval)
    return tokens_like(given, q=q, k=k, v=rounded(v, v), g=decay, beta=beta)


def kda_inputs(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    a: npt.ArrayLike | None = None,
    b: npt.ArrayLike | None = None,
    A_log: npt.ArrayLike | None = None,
    dt_bias: npt.ArrayLike | None = None,
    scale: float | None = None,
    l2norm: bool = True,
    eps: float | None = None,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    clamp_min: float | None = None,
    *,
    g: npt.ArrayLike | None = None,
    beta: npt.ArrayLike | None = None,
) -> Tokens:
    """Convert the inputs of a Kimi Delta Attention layer (fla, Kimi Linear) to inputs of the recurrence.

    As `gdn_inputs`, with a log-decay per channel: ``g = -exp(A_log) * softplus(a + dt_bias)`` with one `A_log` per
    head.

    Parameters
    ----------
    q, k, v : array_like
        See `gdn_inputs`.
    a : array_like, optional
        Raw decay (``g`` before fla's gate), shape ``(batch, [tokens,] heads, K)``.
    b : array_like, optional
        See `gdn_inputs`.
    A_log : array_like, optional
        Logarithm of the decay rate, shape ``(heads,)``, or ``(1, 1, heads, 1)`` as in checkpoints of Kimi Linear;
        needed with `a`, except with a `lower_bound`, whose gate without a rate is that with a rate of 1.
    dt_bias : array_like, optional
        Added to `a` first, shape ``(heads, K)`` or, as in checkpoints, ``(heads * K,)``.
    scale, l2norm, eps, allow_neg_eigval : optional
        See `gdn_inputs`.
    lower_bound : float, optional
        Negative. Selects fla's bounded gate, ``g = lower_bound * sigmoid(exp(A_log) * (a + dt_bias))``, instead of
        the softplus gate. The bounded gate is another function, not a clamp.
    clamp_min : float, optional
        Negative. Lower bound of the softplus gate: smaller log-decays become this value.
    g, beta : array_like, optional
        See `gdn_inputs`.

    Returns
    -------
    Tokens
        ``q``, ``k``, ``v``, ``g`` and ``beta`` of the recurrence.

    Raises
    ------
    ValueError
        As `gdn_inputs`, and if a bound is not negative or both bounds are given.
    """
    given = v
    v, lead, heads, _ = values("v", v)
    q, k = queries_keys(q, k, lead, heads, scale, l2norm, eps)
    if lower_bound is not None and clamp_min is not None:
        raise ValueError("clamp_min: expected None with a lower_bound, which selects another gate, got both")
    for name, bound in (("lower_bound", lower_bound), ("clamp_min", clamp_min)):
        if bound is not None:
            check_number(name, bound, "a negative number", lambda number: -np.inf < number < 0)

    channels = heads, k.shape[-1]
    bounds = {"lower_bound": lower_bound, "clamp_min": clamp_min}
    if is_raw("g", g, "a", a, needs_rate=lower_bound is None, A_log=A_log, dt_bias=dt_bias, **bounds):
        a = real_array("a", a, (*lead, *channels))
        rate_log = per_head("A_log", np.zeros(heads) if A_log is None else A_log, heads)[:, None]
        raw = biased(a, dt_bias, channels)
        if lower_bound is not None:
            wide = bounded_decay(rate_log, raw, lower_bound)
        else:
            wide = scaled_decay(rate_log, log_softplus(raw))
            if clamp_min is not None:
                wide = np.maximum(wide, clamp_min)
        decay = rounded(wide, a)
    else:
        decay = finished_decay(g, (*lead, *channels))
    beta = write_gate(b, beta, (*lead, heads), allow_neg_eigval)
    return tokens_like(given, q=q, k=k, v=rounded(v, v), g=decay, beta=beta)
