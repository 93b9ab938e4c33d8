"""Import of calibrations that the paper's authors publish: ``calibration.pt`` of SNU-ARC/SketchSSM, schema 1."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sketchssm.calibrate.calibration import Calibration, LayerCalibration, StoredBasis, scores_of_sums
from sketchssm.calibrate.scores import RankScores
from sketchssm.cuda import MAX_RANK
from sketchssm.layer.checks import check_size
from sketchssm.layer.recurrence import Layer, check_window
from sketchssm.plans.basis import orthonormal
from sketchssm.plans.files import FileFormatError
from sketchssm.transformers.identity import fingerprint

FORMAT, SCHEMA = "sketchssm-calibration", 1


def import_calibration(
    path: str | os.PathLike[str], model: torch.nn.Module, rank_max: int | None = None
) -> Calibration:
    """Read a calibration that the paper's authors published for a model.

    The file has one basis for the value heads of each group, and for every head the sums of the paired score at each
    rank. It has no errors without gradients: the retained energies of its plans are shares of the paired score.

    Parameters
    ----------
    path : str or PathLike
        ``calibration.pt``. It is loaded with ``weights_only=True``, which runs no code of the file.
    model : torch.nn.Module
        The model of transformers, whose recurrent layers the file describes.
    rank_max : int, optional
        Largest rank to keep. Default: 16, the most that backend "cuda" takes.

    Returns
    -------
    Calibration
        Bases and scores; `Calibration.plans` makes plans of a mean rank.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    FileFormatError
        If the file is no calibration of this format, contradicts itself, or describes other layers than the model's.
    """
    most = MAX_RANK if rank_max is None else check_size("rank_max", rank_max)
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no calibration at {path}")
    identity = fingerprint(model)
    layers = {name: own.layer for name, own in identity.layers.items()}
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # PyTorch's message advises to load code too
        raise FileFormatError(
            f"{path}: expected a file of torch.save, of tensors and plain values alone, got another"
        ) from error
    try:
        found = _layers(contents, layers, most)
    except Exception as error:  # whatever a damaged or crafted file provokes
        raise FileFormatError(f"{path}: {error}") from error
    return Calibration(found, identity)


def _layers(contents: Any, layers: dict[str, Layer], most: int) -> dict[str, LayerCalibration]:
    """Basis and scores of each layer of a model."""
    if not isinstance(contents, dict) or (contents.get("format"), contents.get("schema_version")) != (FORMAT, SCHEMA):
        raise ValueError(f"expected a {FORMAT} of schema {SCHEMA}, as the authors of the paper publish them")
    geometry, omega = contents["geometry"], _numbers("omega", contents["omega"], 4)
    sums = _numbers("joint_dot_sq_sum", contents["curves"]["joint_dot_sq_sum"], 3)
    samples = int(contents["curves"]["joint_nstep"])
    if samples < 1 or (sums < 0).any():
        raise ValueError("curves: expected samples and sums of at least 0")
    if len(omega) != len(sums) or len(omega) != len(layers):
        raise ValueError(f"expected {len(layers)} recurrent layers, got {len(omega)} bases and {len(sums)} curves")
    family = contents["model"]["family"]
    rank, window = min(most, omega.shape[2], sums.shape[2] - 1), check_window(int(geometry["window"]))
    found = {}
    for name, place in zip(layers, _order(contents.get("layer_ids"), list(layers)), strict=True):
        layer, groups = layers[name], omega.shape[1]
        want = (layer.kind, layer.key_dim, layer.value_dim, layer.heads)
        got = (family, omega.shape[3], int(geometry["value_dim"]), sums.shape[1])
        if want != got or layer.heads % groups:
            raise ValueError(f"layer {name}: expected kind, K, V and heads {want}, got {got} in {groups} groups")
        frames = orthonormal(omega[place].swapaxes(-1, -2)[..., :rank])[0]
        columns = np.repeat(frames, layer.heads // groups, axis=0).astype(np.float32)
        basis = StoredBasis(layer, window, columns)
        paired = sums[place, :, : rank + 1].copy()
        settings = {"window": window, "rank_max": rank, "weighting": "gradient"}
        scores = scores_of_sums(
            RankScores,
            basis,
            settings,
            {
                "error": paired.copy(),
                "paired": paired,
                "weighted": np.zeros_like(paired),
                "samples": np.full(layer.heads, samples),
            },
        )
        found[name] = LayerCalibration(basis, scores)
    return found


def _numbers(name: str, tensor: Any, axes: int) -> npt.NDArray[np.float64]:
    """A tensor as float64, checked."""
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != axes or not torch.isfinite(tensor).all():
        raise ValueError(f"{name}: expected a tensor of {axes} axes and finite numbers")
    array: npt.NDArray[np.float64] = tensor.double().numpy()
    return array


def _order(ids: Any, names: list[str]) -> list[int]:
    """Place of each of the model's layers in the file, by the numbers of layers or, without, in order."""
    if ids is None:
        return list(range(len(names)))
    numbers = [int(match.group(1)) if (match := re.search(r"layers\.(\d+)", name)) else -1 for name in names]
    given = [int(each) for each in ids]
    if sorted(given) == sorted(numbers):
        return [given.index(number) for number in numbers]
    if sorted(given) == list(range(len(names))):  # numbers among recurrent layers
        return [given.index(place) for place in range(len(names))]
    raise ValueError(f"layer_ids: expected the layers {numbers}, got {given}")
