"""Decode with sketches: exact states written once a window, and read through their sketches in between."""

from __future__ import annotations

from typing import ClassVar

from sketchssm.arrays.options import DEFAULTS, EngineOptions
from sketchssm.cpu.decode import window_kernel
from sketchssm.cpu.layout import REBUILD, Memory
from sketchssm.cpu.packed import Packing, pack
from sketchssm.cpu.parts import Parts, slot_parts, window_parts
from sketchssm.cpu.replay import ReplayEngine
from sketchssm.cpu.standard import Slots
from sketchssm.cpu.workers import run
from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.slots import PartsOf
from sketchssm.plans.plan import SketchPlan


class SketchEngine(ReplayEngine):
    """The paper's algorithm 1: replay, with a sketch for the state reads between flushes."""

    supports = ReplayEngine.supports | {"monitor", "tolerance"}
    parts_of: ClassVar[PartsOf] = staticmethod(
        lambda plan, sketch_dtype, options: slot_parts(_plan_parts(plan, sketch_dtype, options)[1])
    )

    def __init__(
        self, plan: SketchPlan, num_slots: int, sketch_dtype: str = "bfloat16", options: EngineOptions = DEFAULTS
    ) -> None:
        packing, parts = _plan_parts(plan, sketch_dtype, options)
        self._open(Memory(plan.layer, num_slots, plan.window, parts, options), packing, options)
        self._memory.set(monitor=options.monitor, tolerance=options.tolerance or 0.0)
        self.plan = plan

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


def _plan_parts(plan: SketchPlan, sketch_dtype: str, options: EngineOptions) -> tuple[Packing, Parts]:
    """Place the sketches of a plan; return their places and the parts of a slot."""
    # a master copy of U would keep digits that a 16-bit state has lost
    tracked = not plan.layer.channel_decays and options.state_dtype == "float32"
    packing = pack(plan, sketch_dtype, tracked, SketchFormat.of(sketch_dtype).shadows(options.state_dtype))
    return packing, window_parts(plan.layer, plan.window, options.state_dtype, packing.runs, options.monitor)
