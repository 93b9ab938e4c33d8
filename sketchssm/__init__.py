"""Linear-attention decode that keeps every recurrent state exact and reads it through a compact sketch.

Calibrate once, save a plan, decode with a tenth of the state traffic: see the README for the main job, and
`sketchssm.reference` for the method in plain NumPy. Names are loaded on first use, so that the import is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "FULL_STATE": "recurrence",
    "Layer": "recurrence",
    "Tokens": "recurrence",
    "Traces": "traces",
    "CoefficientMap": "coefficients",
    "GateInput": "gates",
    "Moments": "calibrate.moments",
    "SketchBasis": "calibrate.basis",
    "fit_basis": "calibrate.basis",
    "RankScores": "calibrate.scores",
    "Allocation": "calibrate.allocation",
    "allocate_ranks": "calibrate.allocation",
    "autoplan": "planning",
    "Candidate": "planning",
    "candidates": "planning",
    "PlanPoint": "planning",
    "PlanSearch": "planning",
    "StepTimes": "planning",
    "PlanFileError": "plan",
    "SketchPlan": "plan",
    "DecodeHead": "head",
    "ExactHead": "exact",
    "SketchHead": "sketch_head",
    "overlap_flushes": "overlap",
    "Snapshot": "snapshot",
    "SnapshotFileError": "snapshot",
    "SlotPart": "slots",
    "StandardHead": "baselines",
    "ReplayHead": "baselines",
    "QuantisedHead": "baselines",
    "CopyReadHead": "baselines",
    "low_rank_plan": "baselines",
    "ChannelScores": "baselines",
    "PrunedHead": "baselines",
    "KeyMoments": "baselines",
    "KeyReduction": "baselines",
    "KeyReducedHead": "baselines",
}
_MODULES = ("distributed", "models", "torch", "traffic", "transformers")

__all__ = [
    "FULL_STATE",
    "Allocation",
    "Candidate",
    "ChannelScores",
    "CoefficientMap",
    "CopyReadHead",
    "DecodeHead",
    "ExactHead",
    "GateInput",
    "KeyMoments",
    "KeyReducedHead",
    "KeyReduction",
    "Layer",
    "Moments",
    "PlanFileError",
    "PlanPoint",
    "PlanSearch",
    "PrunedHead",
    "QuantisedHead",
    "RankScores",
    "ReplayHead",
    "SketchBasis",
    "SketchHead",
    "SketchPlan",
    "SlotPart",
    "Snapshot",
    "SnapshotFileError",
    "StandardHead",
    "StepTimes",
    "Tokens",
    "Traces",
    "allocate_ranks",
    "autoplan",
    "candidates",
    "distributed",
    "fit_basis",
    "low_rank_plan",
    "models",
    "overlap_flushes",
    "traffic",
]

if TYPE_CHECKING:
    from sketchssm import distributed, models, traffic
    from sketchssm.baselines import (
        ChannelScores,
        CopyReadHead,
        KeyMoments,
        KeyReducedHead,
        KeyReduction,
        PrunedHead,
        QuantisedHead,
        ReplayHead,
        StandardHead,
        low_rank_plan,
    )
    from sketchssm.calibrate.allocation import Allocation, allocate_ranks
    from sketchssm.calibrate.basis import SketchBasis, fit_basis
    from sketchssm.calibrate.moments import Moments
    from sketchssm.calibrate.scores import RankScores
    from sketchssm.coefficients import CoefficientMap
    from sketchssm.exact import ExactHead
    from sketchssm.gates import GateInput
    from sketchssm.head import DecodeHead
    from sketchssm.overlap import overlap_flushes
    from sketchssm.plan import PlanFileError, SketchPlan
    from sketchssm.planning import Candidate, PlanPoint, PlanSearch, StepTimes, autoplan, candidates
    from sketchssm.recurrence import FULL_STATE, Layer, Tokens
    from sketchssm.sketch_head import SketchHead
    from sketchssm.slots import SlotPart
    from sketchssm.snapshot import Snapshot, SnapshotFileError
    from sketchssm.traces import Traces


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"sketchssm.{_HOME[name]}"), name)
    if name in _MODULES:
        return import_module(f"sketchssm.{name}")
    raise AttributeError(f"module 'sketchssm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
