"""Options of engines: what a head may ask of its engine beside layer or plan, number of slots and window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any

from sketchssm.arrays.gates import GateInput
from sketchssm.layer.checks import ACTIVATIONS, check_choice, check_dtype_name, check_integer, check_number
from sketchssm.layer.recurrence import PAD_SLOT
from sketchssm.layer.slots import MAX_DRAFTS, MAX_SLOTS


@dataclass(frozen=True, eq=False)
class EngineOptions:
    """Options of an engine; the engine's class names in `supports` those that may differ from the defaults.

    `SketchHead` explains the options. Heads check the phase, whose range depends on the window. `why` is no option: it
    says why the head computes on the host, for the warning about arrays on a device.
    """

    gate: GateInput | None = None
    activation_dtype: str | None = None
    output_dtype: str | None = None
    state_dtype: str = "float32"
    memory: Mapping[str, Any] | None = None
    phase: int | None = None
    drafts: int = 0
    pad_slot: int = PAD_SLOT
    monitor: int = 0
    tolerance: float | None = None
    why: str = ""

    def __post_init__(self) -> None:
        if self.gate is not None and not isinstance(self.gate, GateInput):
            raise TypeError(f"gate: expected a GateInput or None, got {type(self.gate).__name__}")
        check_dtype_name(self.activation_dtype, "activation_dtype")
        check_dtype_name(self.output_dtype, "output_dtype")
        check_choice("state_dtype", self.state_dtype, ACTIVATIONS)
        if self.memory is not None and not isinstance(self.memory, Mapping):
            raise TypeError(
                f"memory: expected a mapping from names of parts to arrays, got {type(self.memory).__name__}"
            )
        check_integer("drafts", self.drafts, 0, MAX_DRAFTS)
        check_integer("monitor", self.monitor, 0, 1 << 16)
        check_tolerance(self.tolerance, self.monitor)
        check_integer("pad_slot", self.pad_slot, -MAX_SLOTS, MAX_SLOTS)

    def changed(self) -> dict[str, Any]:
        """Defaults, by name, of the options that differ from them."""
        defaults = {field.name: field.default for field in fields(self) if field.name != "why"}
        return {name: default for name, default in defaults.items() if getattr(self, name) != default}


def check_tolerance(tolerance: Any, monitor: int) -> None:
    """Check the error above which a request is read exactly; None is any error."""
    if tolerance is None:
        return
    check_number("tolerance", tolerance, "a finite number above 0, or None", lambda x: 0 < x < inf)
    if not monitor:
        raise ValueError(f"tolerance: expected None without a monitor, which measures errors, got {tolerance}")


DEFAULTS = EngineOptions()

HOST_OPTIONS = frozenset(("gate", "state_dtype", "memory", "pad_slot"))
"""Options that every engine of exact states supports."""
