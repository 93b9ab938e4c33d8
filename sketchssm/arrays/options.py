"""Options of engines: what a head may ask of its engine beside layer, plan and number of slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sketchssm.arrays.gates import GateInput
from sketchssm.layer.recurrence import PAD_SLOT

__all__ = ["DEFAULTS", "EngineOptions"]


@dataclass(frozen=True, eq=False)
class EngineOptions:
    """Options of an engine; each engine's `supports` names those that may differ from the defaults.

    Attributes
    ----------
    gate : GateInput or None
        Converts raw gate inputs.
    activation_dtype : {"bfloat16", "float16", "float32"} or None
        Type of q, k and v in kernels. None: the narrowest that holds those of the first call.
    output_dtype : {"bfloat16", "float16", "float32"} or None
        Type of outputs in kernels; None for the activations'.
    state_dtype : {"float32", "bfloat16", "float16"}
        Type of states in memory; a state is rounded whenever it is written.
    memory : mapping of str to array, or None
        The caller's memory, by the names of the engine's parts.
    phase : int or None
        Where the clock begins; None for no clock.
    drafts : int
        Most tokens of a draft, of an engine without windows.
    pad_slot : int
        Slot number that means padding.
    """

    gate: GateInput | None = None
    activation_dtype: str | None = None
    output_dtype: str | None = None
    state_dtype: str = "float32"
    memory: Mapping[str, Any] | None = None
    phase: int | None = None
    drafts: int = 0
    pad_slot: int = PAD_SLOT

    def changed(self) -> dict[str, Any]:
        """Options by name that differ from the defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in values.items() if value is not default and value != default}


DEFAULTS = EngineOptions()
