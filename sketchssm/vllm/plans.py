"""The plans of a model, and the plan of each layer of vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sketchssm.layer.recurrence import Layer
from sketchssm.plans.model_plans import load_plans
from sketchssm.plans.plan import SketchPlan

__all__ = ["load_plans", "plan_of", "sharded"]

NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)(?=\.|$)")


def plan_of(plans: Mapping[str, SketchPlan], prefix: str) -> SketchPlan:
    """Find the plan of a layer.

    Names of the same layer may differ between transformers and vLLM, such as ``backbone.layers.3.mixer`` and
    ``model.layers.3.mixer``. Without a plan of the layer's full name the number behind ``layers.`` decides.

    Parameters
    ----------
    plans : mapping of str to SketchPlan
        Plans by the layers' names.
    prefix : str
        vLLM's name of the layer.

    Returns
    -------
    SketchPlan
        The layer's plan.

    Raises
    ------
    ValueError
        If there is no plan for the layer, or more than one.
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
    """Split a plan over the processes of a tensor-parallel group.

    Parameters
    ----------
    plan : SketchPlan
        Plan of the whole layer.
    layer : Layer
        Kind and shape of one process's share, as vLLM has it.
    prefix : str
        vLLM's name of the layer.
    world : int
        Processes in the group.

    Returns
    -------
    list of SketchPlan
        One plan for each process.

    Raises
    ------
    ValueError
        If a share has another kind or shape than vLLM's layer.
    """
    shares = [plan.shard(rank, world) for rank in range(world)]
    for share in shares:
        if share.layer != layer:
            raise ValueError(f"plans: expected a plan of {layer} for {prefix}, got one of {share.layer}")
    return shares
