"""What the engines of the CUDA backend share: memory of slots, conversion of arrays, constants of kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from sketchssm.arrays.gates import GateInput
from sketchssm.arrays.options import EngineOptions
from sketchssm.cuda.arrays import DeviceArrays
from sketchssm.cuda.constants import TYPES
from sketchssm.cuda.device_slots import DeviceSlots
from sketchssm.cuda.layout import PackedPlan
from sketchssm.cuda.limits import check_layer
from sketchssm.layer.recurrence import Layer
from sketchssm.layer.slots import SlotPart


class DeviceEngine:
    """An engine without its kernels; arguments as of `DeviceSlots`."""

    def __init__(
        self, layer: Layer, num_slots: int, options: EngineOptions, window: int = 1, packed: PackedPlan | None = None
    ) -> None:
        check_layer(layer)
        self.layer, self.num_slots, self.window, self._options = layer, num_slots, window, options
        self._gate = _gate_argument(options.gate)
        self.slots = slots = DeviceSlots(layer, num_slots, options, window, packed)  # waits for the device
        self.arrays = DeviceArrays(layer, options, slots.overlaps)
        self.state, self.memory, self.reset = slots.state, slots.memory, slots.reset
        self.copy, self.rejoin, self.left_out = slots.copy, slots.rejoin, slots.left_out

    @property
    def parts(self) -> tuple[SlotPart, ...]:
        """See `sketchssm.heads.engine.ExactEngine`."""
        return self.slots.parts

    @property
    def position(self) -> Any:
        """See `sketchssm.heads.engine.Engine`."""
        return self.slots.position

    def _constants(self) -> dict[str, int]:
        """Constants of the layer and its types; "bfloat16" as long as no call has settled a type."""
        layer, gate = self.layer, self._options.gate
        return {
            "ERASES": int(layer.erases),
            "CHANNEL_DECAYS": int(layer.channel_decays),
            "HEADS": layer.heads,
            "KEY_HEADS": layer.key_heads,
            "K": layer.key_dim,
            "V": layer.value_dim,
            "ACT": TYPES[self.arrays.activation_dtype or "bfloat16"],
            "OUT": TYPES[self.arrays.output_dtype or "bfloat16"],
            "STATE": TYPES[self._options.state_dtype],
            "RAW_GATE": 0 if gate is None else 1 if gate.lower_bound is None else 2,  # see lib/log_decay.cuh
        }


def _gate_argument(gate: GateInput | None) -> Any:
    """A gate as the kernels read it: biases, rates, and a bound (see lib/log_decay.cuh)."""
    import cupy

    if gate is None:
        return np.uint64(0)
    parts = (gate.dt_bias.reshape(-1), -np.exp(gate.A_log), [gate.lower_bound or 0.0])
    return cupy.asarray(np.concatenate(parts).astype(np.float32))
