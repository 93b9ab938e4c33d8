"""Inputs of the recurrence from the activations and parameters of a model's layer.

A converter takes a layer's values after the projections and the short convolution. Arguments have the names of the
layer's code (``dt``, ``A_log``, ``dt_bias``, ``B``, ``C``; ``a``, ``b``). If a layer has computed a gate already, pass
the gate: ``g``, ``beta`` or ``A``. Arrays of NumPy, PyTorch (parameters and bfloat16 included), JAX and CuPy are
accepted; gradients are not followed. Leading axes are ``(batch, tokens)`` or, for one decode step, ``(batch,)``.

Arithmetic is float64 on the host, as in `sketchssm.arrays.gates`. Results have the framework and the device of the
values (``x`` or ``v``): float64 for a float64 argument, else rounded to float32.
"""

from sketchssm.models.layers import gdn_inputs, kda_inputs, mamba2_inputs, mamba2_output, prefill_state
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
