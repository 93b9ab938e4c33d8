"""Calibration in several processes: of the same heads, through torch.distributed, or of a share of the heads each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sketchssm.calibrate.calibration import SCORES, SETTINGS, Calibration, LayerCalibration, scores_of_sums
from sketchssm.calibrate.moments import FORMAT, Moments
from sketchssm.calibrate.sums import added
from sketchssm.plans.model_plans import ModelFingerprint

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["all_reduce_moments", "join_shards"]


def all_reduce_moments(moments: Moments, group: ProcessGroup | None = None) -> Moments:
    """Add up the moments of all processes of a group; each process gets the total.

    Every process of the group calls this function, with the moments of its own sequences. Without torch.distributed,
    save the moments of each process, load all files and add them: moments have a ``+``.

    Parameters
    ----------
    moments : Moments
        Sums of this process, which stay as they are. A process without data passes new `Moments`.
    group : torch.distributed.ProcessGroup, optional
        The processes. Default: all.

    Returns
    -------
    Moments
        The total, the same on every process. The sums are float64, so the number of processes changes only their
        rounding.

    Raises
    ------
    ValueError
        On every process, if layer or window differ between processes, or a total is above 1e100.
    """
    import torch
    from torch import distributed

    settings = {name: getattr(moments, name) for name in ("layer", "window")}
    others = [settings] * distributed.get_world_size(group)
    distributed.all_gather_object(others, settings, group)
    for rank, other in enumerate(others):
        for name, value in others[0].items():
            if other[name] != value:
                raise ValueError(
                    f"moments: expected the same {name} in all processes, got {value} in process 0 and {other[name]} "
                    f"in process {rank} of the group"
                )
    device = "cuda" if distributed.get_backend(group) == "nccl" else "cpu"
    total = Moments(**{"kind" if name == "layer" else name: value for name, value in settings.items()})
    sums = {name: torch.from_numpy(getattr(moments, name)).to(device, copy=True) for name in FORMAT.tensors}
    for summed in sums.values():
        distributed.all_reduce(summed, group=group)
    total.__dict__.update(added(total, {name: summed.cpu().numpy() for name, summed in sums.items()}))
    return total


def join_shards(parts: Sequence[Calibration]) -> Calibration:
    """Put the calibrations of an engine's processes together.

    Parameters
    ----------
    parts : sequence of Calibration
        Calibrations in the order of the processes' ranks, each with the fingerprint of its layers. Parts with the same
        layer have shares of its heads, in the order of the heads (tensor parallelism).

    Returns
    -------
    Calibration
        Calibration of all layers with all heads.
    """
    layers, identities, fingerprint = {}, {}, None
    for name in dict.fromkeys(name for part in parts for name in part.layers):
        shares = [part for part in parts if name in part.layers]
        own = [part.layers[name] for part in shares]
        shapes = [each.basis.layer for each in own]
        heads, keys = (sum(getattr(shape, size) for shape in shapes) for size in ("heads", "key_heads"))
        layer = replace(shapes[0], heads=heads, key_heads=keys)
        basis = replace(own[0].basis, layer=layer, omega=np.concatenate([each.basis.omega for each in own]))
        scores: Any = {}
        for kind, form in SCORES.items():
            if (first := getattr(own[0], kind)) is not None:
                sums = {x: np.concatenate([getattr(getattr(each, kind), x) for each in own]) for x in form.sums}
                settings = {x: getattr(first, x) for x in SETTINGS[kind]}
                scores[kind] = scores_of_sums(form, basis, settings, sums)
        layers[name] = LayerCalibration(basis, **scores)
        fingerprint = shares[0].fingerprint
        assert fingerprint is not None
        identities[name] = fingerprint.layers[name]._replace(layer=layer)
    assert fingerprint is not None
    return Calibration(layers, ModelFingerprint(fingerprint.model, identities), parts[0].tokens)
