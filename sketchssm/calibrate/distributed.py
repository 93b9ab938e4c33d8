"""Calibration in several processes, of a share of the heads or of the layers each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sketchssm.calibrate.calibration import SCORES, SETTINGS, Calibration, LayerCalibration, scores_of_sums
from sketchssm.plans.model_plans import ModelFingerprint

__all__ = ["join_shards"]


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
