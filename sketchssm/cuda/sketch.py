"""Sketches on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sketchssm.cuda.layout import pack_plan
from sketchssm.cuda.limits import check_plan
from sketchssm.cuda.memory import slot_parts
from sketchssm.cuda.replay import ReplayEngine
from sketchssm.layer.slots import SlotPart
from sketchssm.plans.plan import SketchPlan

if TYPE_CHECKING:
    from sketchssm.arrays.gates import GateInput

__all__ = ["SketchEngine"]


class SketchEngine(ReplayEngine):
    """Exact states, written once in a window and read through their sketches in between.

    Parameters
    ----------
    plan : SketchPlan
        Bases, ranks and settings of the layer.
    num_slots : int
        Number of state slots.
    sketch_dtype : {"bfloat16", "float32", "int8"}, default "bfloat16"
        Format of sketches and maps.
    **settings
        See `ReplayEngine`.
    """

    def __init__(self, plan: SketchPlan, num_slots: int, sketch_dtype: str = "bfloat16", **settings: Any) -> None:
        check_plan(plan)
        super().__init__(plan.layer, num_slots, plan.window, packed=pack_plan(plan, sketch_dtype), **settings)
        self.plan = plan

    @staticmethod
    def parts_of(  # type: ignore[override]
        plan: SketchPlan,
        sketch_dtype: str = "bfloat16",
        *,
        state_dtype: str = "float32",
        gate: GateInput | None = None,
        activation_dtype: str | None = None,
    ) -> tuple[SlotPart, ...]:
        """Parts of a slot; see `sketchssm.heads.engine.ExactEngine`."""
        packed = pack_plan(plan, sketch_dtype)
        activation = activation_dtype or "bfloat16"
        return slot_parts(plan.layer, plan.window, packed, state_dtype, activation, gate is not None)
