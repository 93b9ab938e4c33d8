"""Decode with sketches: exact states written once a window, and read through their sketches in between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sketchssm.cpu.decode import window_kernel
from sketchssm.cpu.layout import REBUILD, Memory
from sketchssm.cpu.packed import Packing, pack
from sketchssm.cpu.parts import Parts, slot_parts, window_parts
from sketchssm.cpu.replay import ReplayEngine
from sketchssm.cpu.standard import Slots
from sketchssm.cpu.workers import run
from sketchssm.layer.slots import SlotPart
from sketchssm.plans.plan import SketchPlan

__all__ = ["SketchEngine"]


class SketchEngine(ReplayEngine):
    """The paper's algorithm 1: replay, with a sketch for the state reads between flushes."""

    def __init__(
        self,
        plan: SketchPlan,
        num_slots: int,
        sketch_dtype: str = "bfloat16",
        *,
        state_dtype: str = "float32",
        memory: Mapping[str, Any] | None = None,
        phase: int | None = None,
    ) -> None:
        packing, parts = _plan_parts(plan, sketch_dtype, state_dtype)
        self._open(Memory(plan.layer, num_slots, plan.window, parts, memory, phase), packing)
        self.plan = plan

    @staticmethod
    def parts_of(  # type: ignore[override]
        plan: SketchPlan, sketch_dtype: str = "bfloat16", *, state_dtype: str = "float32"
    ) -> tuple[SlotPart, ...]:
        """Parts of a slot; see `sketchssm.heads.engine.Engine`."""
        return slot_parts(_plan_parts(plan, sketch_dtype, state_dtype)[1])

    def adopt(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        super().adopt(slots)
        self._memory.set(task=REBUILD)
        run(window_kernel, self._memory, slots)

    def reset(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        super().reset(slots)
        if "sketch" in self.memory:
            # a zero sketch reads a zero state correctly through any finite map
            self.memory["sketch"][slots[slots >= 0]] = 0


def _plan_parts(plan: SketchPlan, sketch_dtype: str, state_dtype: str) -> tuple[Packing, Parts]:
    """Place the sketches of a plan; return their places and the parts of a slot."""
    # a master copy of U would keep digits that a 16-bit state has lost
    packing = pack(plan, sketch_dtype, tracked=plan.layer.kind != "kda" and state_dtype == "float32")
    return packing, window_parts(plan.layer, plan.window, state_dtype, packing.runs)
