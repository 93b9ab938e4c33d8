"""Decode systems to compare or to time: a name, a way to build the head, and its traffic.

A system's head may be any object with the interface of `sketchssm.heads.head.DecodeHead`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sketchssm.heads.head import DecodeHead
from sketchssm.heads.sketch import SketchHead
from sketchssm.heads.standard import ReplayHead, StandardHead
from sketchssm.layer.recurrence import Layer
from sketchssm.plans import traffic
from sketchssm.plans.plan import SketchPlan

if TYPE_CHECKING:
    from sketchssm.arrays.gates import GateInput


@dataclass(frozen=True)
class System:
    """A decode system."""

    name: str  # in tables
    build: Callable[[int, str], DecodeHead]  # build(num_slots, backend) makes its head
    reduction: float  # of traffic, relative to standard decode with float32 states
    plan: SketchPlan | None = None
    gate: GateInput | None = None  # of a head that takes raw gate inputs
    state_dtype: str = "float32"


def exact_systems(
    layer: Layer, window: int = 16, gate: GateInput | None = None, state_dtype: str = "float32"
) -> list[System]:
    """List the systems that read the whole state, exact with float32 states: "standard" and "replay"."""
    whole = traffic.standard(layer.key_dim, layer.value_dim)
    every = traffic.standard(layer.key_dim, layer.value_dim, state_dtype)
    replayed = traffic.replay(layer.key_dim, layer.value_dim, window, state_dtype)
    same: Any = {"gate": gate, "state_dtype": state_dtype}
    return [
        System("standard", partial(StandardHead, layer, **same), whole / every, **same),
        System("replay", partial(ReplayHead, layer, window=window, **same), whole / replayed, **same),
    ]


def sketch_system(plan: SketchPlan, name: str, gate: GateInput | None = None, state_dtype: str = "float32") -> System:
    """Make the system of a sketch."""
    same: Any = {"gate": gate, "state_dtype": state_dtype}
    return System(name, partial(SketchHead, plan, **same), plan.reduction_with(state_dtype), plan, **same)
