"""The plans of a model, and the plan of each layer of an engine."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sketchssm.calibrate.calibration import FORMAT, Calibration
from sketchssm.layer.recurrence import Layer
from sketchssm.plans import model_plans
from sketchssm.plans.files import format_of
from sketchssm.plans.plan import SketchPlan

NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)(?=\.|$)")


def load_plans(path: str, mean_rank: float | None = None, reduction: float | None = None) -> Mapping[str, SketchPlan]:
    """Read plans of any form, or make them from the file of a calibration; by the names of their layers.

    `mean_rank` or `reduction` is the budget of plans from a calibration, see `Calibration.plans`;
    ValueError if one is given for plans that are made already.
    """
    if format_of(path) == FORMAT.name:
        return Calibration.load(path).plans(mean_rank, reduction)
    plans = model_plans.load_plans(path)
    for name, value in (("mean_rank", mean_rank), ("reduction", reduction)):
        if value is not None:
            raise ValueError(f"{name}: expected none, as {path} holds no calibration, got {value}")
    return plans


def plan_of(plans: Mapping[str, SketchPlan], prefix: str) -> SketchPlan:
    """Find the plan of a layer by the engine's name of it; ValueError if there is none, or more than one.

    Names of the same layer may differ between transformers and an engine, such as ``backbone.layers.3.mixer`` and
    ``model.layers.3.mixer``. Without a plan of the layer's full name the number behind ``layers.`` decides.
    """
    if prefix in plans:
        return plans[prefix]
    number = NUMBER.findall(prefix)
    found = [name for name in plans if number and NUMBER.findall(name) == number]
    if len(found) != 1:
        raise ValueError(
            f"plans: expected one plan for layer {prefix}, got {', '.join(found) or 'none'} of {len(plans)}"
        )
    return plans[found[0]]


def sharded(plan: SketchPlan, layer: Layer, prefix: str, world: int) -> list[SketchPlan]:
    """Split a plan of the whole layer over the processes of a tensor-parallel group.

    ValueError if a share has another kind or shape than `layer`, the share of one process.
    """
    shares = [plan.shard(rank, world) for rank in range(world)]
    for share in shares:
        if share.layer != layer:
            raise ValueError(f"plans: expected a plan of {layer} for {prefix}, got one of {share.layer}")
    return shares
