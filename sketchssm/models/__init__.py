"""Inputs of the recurrence from the activations and parameters of a model's layer.

A converter takes a layer's values after the projections and the short convolution. Arguments have the names of the
layer's code (``dt``, ``A_log``, ``dt_bias``, ``B``, ``C``; ``a``, ``b``). If a layer has computed a gate already, pass
the gate: ``g``, ``beta`` or ``A``. Arrays of NumPy, PyTorch (parameters and bfloat16 included), JAX and CuPy are
accepted; gradients are not followed. Leading axes are ``(batch, tokens)`` or, for one decode step, ``(batch,)``.

Arithmetic is float64 on the host, as in `sketchssm.arrays.gates`. Results have the framework and the device of the
values (``x`` or ``v``): float64 for a float64 argument, else rounded to float32.
"""

from __future__ import annotations

from typing import Any

from sketchssm.layer.checks import check_choice, check_instance
from sketchssm.layer.recurrence import Layer
from sketchssm.models.layers import gdn_inputs, kda_inputs, mamba2_inputs, mamba2_output
from sketchssm.models.linear import (
    delta_product_inputs,
    lightning_decay,
    linear_inputs,
    mamba3_inputs,
    retention_decay,
)

__all__ = [
    "delta_product_inputs",
    "gdn_inputs",
    "kda_inputs",
    "lightning_decay",
    "linear_inputs",
    "mamba2_inputs",
    "mamba2_output",
    "mamba3_inputs",
    "prefill_state",
    "retention_decay",
]


def prefill_state(state: Any, layout: str, layer: Layer) -> Any:
    """States of a prefill, of any framework, for `DecodeHead.load_state`.

    The shape alone does not tell a state from its transpose if K equals V, so the layout must be named.

    Parameters
    ----------
    state : array
        States ``(batch, heads, K, V)`` or ``(batch, heads, V, K)``.
    layout : {"kv", "vk"}
        Order of the last two axes. "kv": chunk functions of fla and transformers for gdn and kda. "vk": mamba_ssm,
        transformers for mamba2, vLLM, and the states of heads.
    layer : Layer
        Kind and shape.

    Returns
    -------
    array
        ``(batch, heads, V, K)``, a view of `state` if the framework has views.

    Raises
    ------
    ValueError
        If the layout is unknown, or the shape is not the layout's.
    """
    check_choice("layout", layout, ("kv", "vk"))
    check_instance("layer", layer, Layer)
    heads, value_dim, key_dim = layer.state_shape
    want = (heads, key_dim, value_dim) if layout == "kv" else (heads, value_dim, key_dim)
    shape = tuple(getattr(state, "shape", ()))
    if len(shape) != 4 or shape[1:] != want:
        sizes = ", ".join(map(str, want))
        raise ValueError(f"state: expected shape (batch, {sizes}) with layout={layout!r}, got {shape}")
    return state.swapaxes(-1, -2) if layout == "kv" else state
