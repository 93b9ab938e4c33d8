"""Constants and arguments that several kernels share."""

from __future__ import annotations

from typing import Any

import numpy as np

from sketchssm.arrays.gates import GateInput
from sketchssm.arrays.options import EngineOptions
from sketchssm.cuda.constants import TYPES
from sketchssm.layer.recurrence import Layer


def layer_constants(
    layer: Layer, options: EngineOptions, activation_dtype: str | None, output_dtype: str | None
) -> dict[str, int]:
    """Constants of a layer and its types; "bfloat16" as long as no call has settled a type."""
    gate = options.gate
    return {
        "ERASES": int(layer.erases),
        "CHANNEL_DECAYS": int(layer.channel_decays),
        "HEADS": layer.heads,
        "KEY_HEADS": layer.key_heads,
        "K": layer.key_dim,
        "V": layer.value_dim,
        "ACT": TYPES[activation_dtype or "bfloat16"],
        "OUT": TYPES[output_dtype or "bfloat16"],
        "STATE": TYPES[options.state_dtype],
        "RAW_GATE": 0 if gate is None else 1 if gate.lower_bound is None else 2,  # see lib/log_decay.cuh
    }


def gate_argument(gate: GateInput | None) -> Any:
    """A gate as the kernels read it: biases, rates, and a bound (see lib/log_decay.cuh)."""
    import cupy

    if gate is None:
        return np.uint64(0)
    parts = (gate.dt_bias.reshape(-1), -np.exp(gate.A_log), [gate.lower_bound or 0.0])
    return cupy.asarray(np.concatenate(parts).astype(np.float32))
