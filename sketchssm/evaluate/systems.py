"""Decode systems to compare or to time: a name, a way to build the head, and its traffic.

A system's head may be any object with the interface of `sketchssm.head.DecodeHead`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sketchssm import traffic
from sketchssm.baselines import ReplayHead, StandardHead
from sketchssm.exact import SketchHead
from sketchssm.head import DecodeHead
from sketchssm.plan import SketchPlan
from sketchssm.recurrence import Layer

if TYPE_CHECKING:
    from sketchssm.gates import GateInput

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
        Traffic reduction relative to standard decoding.
    plan : SketchPlan or None
        The plan of a sketch.
    gate : GateInput or None
        Gate of a head that takes raw gate inputs.
    """

    name: str
    build: Callable[[int, str], DecodeHead]
    reduction: float
    plan: SketchPlan | None = None
    gate: GateInput | None = None


def exact_systems(layer: Layer, window: int = 16, gate: GateInput | None = None) -> list[System]:
    """List the exact systems: standard decoding and buffered replay.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    window : int, default 16
        Tokens from one flush to the next.
    gate : GateInput, optional
        Gate of heads that take raw gate inputs.

    Returns
    -------
    list of System
        "standard" and "replay".
    """
    whole = traffic.standard(layer.key_dim, layer.value_dim)
    replayed = traffic.replay(layer.key_dim, layer.value_dim, window)
    return [
        System("standard", partial(StandardHead, layer, gate=gate), 1.0, gate=gate),
        System("replay", partial(ReplayHead, layer, window=window, gate=gate), whole / replayed, gate=gate),
    ]


def sketch_system(plan: SketchPlan, name: str, gate: GateInput | None = None) -> System:
    """Make the system of a sketch.

    Parameters
    ----------
    plan : SketchPlan
        Plan of the layer.
    name : str
        Name in tables.
    gate : GateInput, optional
        Gate of a head that takes raw gate inputs.

    Returns
    -------
    System
        The system.
    """
    return System(name, partial(SketchHead, plan, gate=gate), plan.reduction, plan, gate)
