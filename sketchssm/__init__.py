"""Linear-attention decode that keeps every recurrent state exact and reads it through a compact sketch.

Calibrate once, save a plan, decode with a tenth of the state traffic: see the README for the main job, and
`sketchssm.reference` for the method in plain NumPy. Names are loaded on first use, so that the import is cheap.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    "layer.recurrence": "FULL_STATE Layer Tokens",
    "calibrate.traces": "Traces",
    "layer.coefficients": "CoefficientMap",
    "arrays.gates": "GateInput",
    "calibrate.moments": "Moments",
    "calibrate.calibration": "Calibration LayerCalibration",
    "plans.basis": "SketchBasis",
    "calibrate.basis": "fit_basis",
    "calibrate.scores": "RankScores",
    "calibrate.joint_allocation": "allocate_joint",
    "calibrate.joint_scores": "JointScores",
    "calibrate.allocation": "Allocation allocate_ranks",
    "study.planning": "autoplan Candidate candidates PlanPoint PlanSearch StepTimes plans_within",
    "plans.plan": "PlanFileError SketchPlan",
    "heads.head": "DecodeHead",
    "heads.exact": "ExactHead",
    "heads.sketch": "ReadErrors SketchHead",
    "heads.snapshot": "Snapshot SnapshotFileError",
    "layer.slots": "SlotPart",
    "layer.checks": "UnsupportedError",
    "heads.standard": "StandardHead ReplayHead",
    "study.baselines": "QuantisedHead CopyReadHead low_rank_projection ChannelScores PrunedHead KeyMoments "
    "KeyReduction KeyReducedHead",
}
"""Names by module."""
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = {
    "distributed": "calibrate.distributed",
    "models": "models",
    "torch": "torch",
    "traffic": "plans.traffic",
    "transformers": "transformers",
}

__all__ = [
    "FULL_STATE", "Allocation", "Calibration", "Candidate", "ChannelScores", "CoefficientMap", "CopyReadHead",
    "DecodeHead", "ExactHead", "GateInput", "JointScores", "KeyMoments", "KeyReducedHead", "KeyReduction", "Layer",
    "LayerCalibration", "Moments", "PlanFileError", "PlanPoint", "PlanSearch", "PrunedHead", "QuantisedHead",
    "RankScores", "ReadErrors", "ReplayHead", "SketchBasis", "SketchHead", "SketchPlan", "SlotPart", "Snapshot",
    "SnapshotFileError", "StandardHead", "StepTimes", "Tokens", "Traces", "UnsupportedError", "allocate_joint",
    "allocate_ranks", "autoplan", "candidates", "distributed", "fit_basis", "low_rank_projection", "models",
    "plans_within", "traffic",
]  # fmt: skip

if TYPE_CHECKING:
    from sketchssm import models
    from sketchssm.arrays.gates import GateInput
    from sketchssm.calibrate import distributed
    from sketchssm.calibrate.allocation import Allocation, allocate_ranks
    from sketchssm.calibrate.basis import fit_basis
    from sketchssm.calibrate.calibration import Calibration, LayerCalibration
    from sketchssm.calibrate.joint_allocation import allocate_joint
    from sketchssm.calibrate.joint_scores import JointScores
    from sketchssm.calibrate.moments import Moments
    from sketchssm.calibrate.scores import RankScores
    from sketchssm.calibrate.traces import Traces
    from sketchssm.heads.exact import ExactHead
    from sketchssm.heads.head import DecodeHead
    from sketchssm.heads.sketch import ReadErrors, SketchHead
    from sketchssm.heads.snapshot import Snapshot, SnapshotFileError
    from sketchssm.heads.standard import ReplayHead, StandardHead
    from sketchssm.layer.checks import UnsupportedError
    from sketchssm.layer.coefficients import CoefficientMap
    from sketchssm.layer.recurrence import FULL_STATE, Layer, Tokens
    from sketchssm.layer.slots import SlotPart
    from sketchssm.plans import traffic
    from sketchssm.plans.basis import SketchBasis
    from sketchssm.plans.plan import PlanFileError, SketchPlan
    from sketchssm.study.baselines import (
        ChannelScores,
        CopyReadHead,
        KeyMoments,
        KeyReducedHead,
        KeyReduction,
        PrunedHead,
        QuantisedHead,
        low_rank_projection,
    )
    from sketchssm.study.planning import (
        Candidate,
        PlanPoint,
        PlanSearch,
        StepTimes,
        autoplan,
        candidates,
        plans_within,
    )


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"sketchssm.{_HOME[name]}"), name)
    if name in _MODULES:
        return import_module(f"sketchssm.{_MODULES[name]}")
    raise AttributeError(f"module 'sketchssm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _warn_of_namesake(folders: Iterable[str]) -> None:
    """Warn if a folder has the package of the paper's authors, whose import name is `sketchssm` too."""
    for folder in map(Path, folders):
        for place in (folder / "sketchssm/kernels/_nvrtc.py", *folder.glob("sketchssm-*.dist-info/RECORD")):
            if place.exists() and (place.name != "RECORD" or "sketchssm/kernels/" in place.read_text("utf-8")):
                warnings.warn(
                    f"the package sketchssm of the paper's authors is in {str(folder)!r}. It and sketchssm-decode "
                    "write over each other's files: pip uninstall sketchssm, then install sketchssm-decode again",
                    RuntimeWarning,
                    stacklevel=3,
                )
                return


_warn_of_namesake(dict.fromkeys([str(Path(__file__).parents[1]), *sys.path]))
