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

__all__ = ["System", "exact_systems", "sketch_system"]


@dataclass(frozen=True)
class System:
    """A decode system.

    Attributes
    ----------
    name : str
        Name in tables.
    build : callable
        ``build(num_slots, backend)`` makes its head.
    reduction : float
        Traffic reduction relative to standard decode with float32 states.
    plan : SketchPlan or None
        The plan of a sketch.
    gate : GateInput or None
        Gate of a head that takes raw gate inputs.
    state_dtype : str
        Type of states in memory.
    """

    name: str
    build: Callable[[int, str], DecodeHead]
    reduction: float
    plan: SketchPlan | None = None
    gate: GateInput | None = None
    state_dtype: str = "float32"


def exact_systems(
    layer: Layer, window: int = 16, gate: GateInput | None = None, state_dtype: str = "float32"
) -> list[System]:
    """List the systems that read the whole state: standard decode and replay.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    window : int, default 16
        Tokens from one flush to the next.
    gate : GateInput, optional
        Gate of heads that take raw gate inputs.
    state_dtype : {"float32", "bfloat16", "float16"}, default "float32"
        Type of states in memory.

    Returns
    -------
    list of System
        "standard" and "replay", exact with float32 states.
    """
    whole = traffic.standard(layer.key_dim, layer.value_dim)
    every = traffic.standard(layer.key_dim, layer.value_dim, state_dtype)
    replayed = traffic.replay(layer.key_dim, layer.value_dim, window, state_dtype)
    same: Any = {"gate": gate, "state_dtype": state_dtype}
    return [
        System("standard", partial(StandardHead, layer, **same), whole / every, **same),
        System("replay", partial(ReplayHead, layer, window=window, **same), whole / replayed, **same),
    ]


def sketch_system(plan: SketchPlan, name: str, gate: GateInput | None = None, state_dtype: str = "float32") -> System:
    """Make the system of a sketch.

    Parameters
    ----------
    plan : SketchPlan
        Plan of the layer.
    name : str
        Name in tables.
    gate : GateInput, optional
        Gate of a head that takes raw gate inputs.
    state_dtype : {"float32", "bfloat16", "float16"}, default "float32"
        Type of states in memory.

    Returns
    -------
    System
        The system.
    """
    same: Any = {"gate": gate, "state_dtype": state_dtype}
    return System(name, partial(SketchHead, plan, **same), plan.reduction_with(state_dtype), plan, **same)
