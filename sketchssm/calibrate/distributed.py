"""Calibration in several processes, of a share of the heads or of the layers each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sketchssm.calibrate.calibration import SCORES, SETTINGS, Calibration, LayerCalibration, scores_of_sums
from sketchssm.layer.checks import check_instance, check_items
from sketchssm.layer.recurrence import Layer
from sketchssm.plans.model_plans import ModelFingerprint

__all__ = ["join_shards"]


def join_shards(parts: Sequence[Calibration]) -> Calibration:
    """Put the calibrations of an engine's processes together.

    Parameters
    ----------
    parts : sequence of Calibration
        Calibrations in the order of the processes' ranks, each with the fingerprint of its layers. Parts with the same
        layer have shares of its heads, in the order of the heads (tensor parallelism). Where processes hold the same
        key heads, their fingerprints have the whole layer.

    Returns
    -------
    Calibration
        Calibration of all layers with all heads.

    Raises
    ------
    ValueError
        If there are no parts, one has no fingerprint, shares of a layer differ in more than their heads, or are not
        all the shares of the whole layer.
    """
    parts = check_items("parts", parts, "Calibrations")
    if not parts:
        raise ValueError("parts: expected at least one Calibration, got none")
    for index, part in enumerate(parts):
        check_instance(f"parts[{index}]", part, Calibration)
        if part.fingerprint is None:
            raise ValueError(f"parts[{index}]: expected a calibration with a model's fingerprint, got one without")
    layers, identities, fingerprint = {}, {}, None
    for name in dict.fromkeys(name for part in parts for name in part.layers):
        shares = [part for part in parts if name in part.layers]
        own = [part.layers[name] for part in shares]
        for other in own[1:]:
            if (got := _common(other)) != (want := _common(own[0])):
                raise ValueError(f"parts: expected shares of {name} with {want}, got {got}")
        shapes = [each.basis.layer for each in own]
        layer = _whole(name, shapes, [x.fingerprint.layers[name].layer for x in shares if x.fingerprint])
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


def _whole(name: str, shapes: Sequence[Layer], told: Sequence[Layer]) -> Layer:
    """The layer of some shares; `told` are the layers of their fingerprints."""
    if list(told) == list(shapes):
        heads, keys = (sum(getattr(shape, size) for shape in shapes) for size in ("heads", "key_heads"))
        return replace(shapes[0], heads=heads, key_heads=keys)
    try:
        want = [told[0].shard(rank, len(shapes)) for rank in range(len(shapes))]
    except ValueError:  # no such number of shares
        want = []
    if {*told} != {told[0]} or list(shapes) != want:
        raise ValueError(f"parts: expected all shares of {name}, {told[0]}, got {len(shapes)} as {shapes[0]}")
    return told[0]


def _common(own: LayerCalibration) -> dict[str, Any]:
    """What all shares of a layer have in common; scores are means, of as many windows as a process had time for."""
    basis = own.basis
    facts = {"kind": basis.layer.kind, "K and columns": basis.omega.shape[1:], "V": basis.layer.value_dim}
    scores = {
        kind: tuple(getattr(made, name) for name in SETTINGS[kind] if name != "every")
        for kind in SCORES
        if (made := getattr(own, kind)) is not None
    }
    return {**facts, "window": basis.window, "scores": scores}
