"""One file for any budget: bases and score curves of several layers, from which plans are made on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from sketchssm.calibrate.allocation import budget_of
from sketchssm.calibrate.joint_scores import JointScores, some_scores
from sketchssm.calibrate.plans import (
    joint_plans,
    mean_retained,
    mean_sketch_rank,
    plan_layers,
    reduction_of,
    residual_settings,
)
from sketchssm.calibrate.scores import RankScores
from sketchssm.calibrate.sums import Accumulator
from sketchssm.layer.checks import check_instance, check_size
from sketchssm.layer.coefficients import DEFAULT_MAP, CoefficientMap
from sketchssm.layer.recurrence import Layer
from sketchssm.plans.basis import SketchBasis
from sketchssm.plans.files import FileFormat, Stored, check_array
from sketchssm.plans.model_plans import AllocationSummary, LayerFingerprint, ModelFingerprint, ModelPlans
from sketchssm.plans.plan import SketchPlan

FORMAT = FileFormat("sketchssm-calibration", 3, (), older={2: {}})
"""A tensor has the name of its layer, a dot, and its name: of the basis, or of a sum after the name of its scores."""

SCORES: dict[str, type[Accumulator]] = {"ranks": RankScores, "joint": JointScores, "answers": JointScores}
"""Scores of a layer by name."""

SETTINGS = {
    "ranks": ("window", "rank_max", "weighting"),
    "joint": ("window", "ranks", "bits", "sketch_dtype", "every", "weighting"),
    "answers": ("window", "ranks", "bits", "sketch_dtype", "every", "weighting"),
}
"""Settings of scores that a file keeps."""

Scores = TypeVar("Scores", bound=Accumulator)


@dataclass(frozen=True, eq=False)
class StoredBasis:
    """Columns of a `SketchBasis` in float32, as plans hold them: all that a plan takes from a basis."""

    layer: Layer
    window: int
    omega: npt.NDArray[np.float32]

    @classmethod
    def of(cls, basis: SketchBasis) -> StoredBasis:
        """All columns of a basis."""
        return cls(basis.layer, basis.window, basis.omega.astype(np.float32))

    @property
    def rank_max(self) -> int:
        """Number of columns."""
        return int(self.omega.shape[-1])


@dataclass(frozen=True, eq=False, init=False)
class LayerCalibration:
    """Basis and scores of one layer, in `Calibration.layers`.

    Parameters
    ----------
    basis : SketchBasis
        Basis, of which the columns are kept in float32, as plans hold them.
    ranks : RankScores, optional
        Scores of ranks without residuals.
    joint : JointScores, optional
        Scores of ranks with residuals.
    answers : JointScores, optional
        The same of questions, see `sketchssm.allocate_joint`.
    """

    basis: StoredBasis
    ranks: RankScores | None = None
    joint: JointScores | None = None
    answers: JointScores | None = None

    def __init__(
        self,
        basis: SketchBasis | StoredBasis,
        ranks: RankScores | None = None,
        joint: JointScores | None = None,
        answers: JointScores | None = None,
    ) -> None:
        if not isinstance(basis, StoredBasis):
            check_instance("basis", basis, SketchBasis)
            basis = StoredBasis.of(basis)
        scores = {"ranks": ranks, "joint": joint, "answers": answers}
        for name, own in scores.items():
            if own is not None:
                check_instance(name, own, SCORES[name])
        vars(self).update(basis=basis, **scores)


class Calibration(Stored):
    """Bases and score curves of several layers, which give plans for any budget.

    Made by `sketchssm.transformers.collect`. `save` writes a file of a few megabytes a layer, and a loaded calibration
    gives the same plans bit for bit.

    Parameters
    ----------
    layers : mapping of str to LayerCalibration
        Bases and scores by the names of the layers.
    fingerprint : ModelFingerprint, optional
        The model of the layers.
    tokens : int, default 0
        Tokens of calibration text.

    Attributes
    ----------
    layers, fingerprint, tokens
        As given.

    Raises
    ------
    ValueError
        If there are no layers, or the fingerprint has others.
    """

    FORMAT = FORMAT

    def __init__(
        self, layers: Mapping[str, LayerCalibration], fingerprint: ModelFingerprint | None = None, tokens: int = 0
    ) -> None:
        if not layers:
            raise ValueError("layers: expected at least one layer, got none")
        for name, own in layers.items():
            check_instance(f"layers[{name!r}]", own, LayerCalibration)
        if fingerprint is not None and list(fingerprint.layers) != list(layers):
            raise ValueError(f"layers: expected {', '.join(fingerprint.layers)} of the fingerprint, got others")
        self.layers = dict(layers)
        self.fingerprint = fingerprint
        self.tokens = int(tokens)

    def __repr__(self) -> str:
        """Model, number of layers and collected scores in one line."""
        first = next(iter(self.layers.values()))
        have = [name for name in SCORES if getattr(first, name) is not None]
        model = "traces" if self.fingerprint is None else self.fingerprint.model
        return f"Calibration({model}, layers={len(self.layers)}, scores={', '.join(have)})"

    def plans(
        self,
        mean_rank: float | None = None,
        reduction: float | None = None,
        *,
        map: str | CoefficientMap | None = None,
        sketch_dtype: str | None = None,
        residual_bits: int = 0,
        method: str | None = None,
        rank_max: int | None = None,
    ) -> ModelPlans:
        """Make plans of all layers under one budget.

        Parameters
        ----------
        mean_rank : float, optional
            Budget: the read traffic of all heads of all layers at this rank. Default: 7 without joint scores, or
            with a `map` or a `method` that has no residuals.
        reduction : float, optional
            Budget of plans with residuals, in place of `mean_rank`: how many times less state traffic than standard
            decode. Default: 10 with scores of answers, else 9.
        map : CoefficientMap or str, optional
            Coefficient map. Default: "subspace" with residuals, else "ridge".
        sketch_dtype : {"float32", "bfloat16", "int8"}, optional
            Format of the sketches; with residuals that of the scores. Default: "int8" with residuals, else "bfloat16".
        residual_bits : {0, 1, 2, 3}, default 0
            Bits of the residuals of every sketched head; 0 with a `reduction`: the allocation chooses them.
        method : {"gradient", "perturbation", "error", "uniform"}, optional
            Score for the allocation, see `sketchssm.allocate_ranks`. Default: the weighting of the scores.
        rank_max : int, optional
            Largest rank of a head. Default: the columns of the bases.

        Returns
        -------
        ModelPlans
            Plans by the names of the layers.

        Raises
        ------
        ValueError
            If a setting is out of range, the scores for it were not collected, or there is no model's fingerprint.
        """
        if self.fingerprint is None:
            raise ValueError("calibration: expected one of a model, got one of layers without a model's fingerprint")
        settings: Any = {"map": map, "sketch_dtype": sketch_dtype, "residual_bits": residual_bits}
        plans, summary = make_plans(self, mean_rank, reduction, method=method, rank_max=rank_max, **settings)
        return ModelPlans(plans, self.fingerprint, summary)

    def _contents(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        tensors: dict[str, npt.NDArray[Any]] = {}
        layers: dict[str, Any] = {}
        for name, own in self.layers.items():
            entry: dict[str, Any] = {"layer": asdict(own.basis.layer), "window": own.basis.window}
            tensors[f"{name}.omega"] = own.basis.omega
            for kind in SCORES:
                if (scores := getattr(own, kind)) is not None:
                    tensors |= {f"{name}.{kind}.{each}": getattr(scores, each) for each in scores.sums}
                    entry[kind] = {each: getattr(scores, each) for each in SETTINGS[kind]}
            if self.fingerprint is not None:
                identity = self.fingerprint.layers[name]
                entry |= {"module": identity.module, "parameters": identity.parameters}
                if identity.layer != own.basis.layer:  # a process's share
                    entry["whole"] = asdict(identity.layer)
            layers[name] = entry
        model = None if self.fingerprint is None else self.fingerprint.model
        return tensors, {"model": model, "layers": layers, "tokens": self.tokens}

    @classmethod
    def _build(cls, tensors: dict[str, npt.NDArray[Any]], model: Any, layers: Any, tokens: Any) -> Calibration:
        found, identities = {}, {}
        for name, entry in layers.items():
            layer = Layer(**entry["layer"])
            omega = tensors[f"{name}.omega"]
            check_array(f"{name}.omega", omega, (layer.heads, layer.key_dim, omega.shape[-1]), np.float32)
            basis = StoredBasis(layer, entry["window"], omega)
            scores = {}
            for kind, own in SCORES.items():
                if kind in entry:
                    place = f"{name}.{kind}"
                    sums = {each: tensors[f"{place}.{each}"] for each in own.sums}
                    scores[kind] = scores_of_sums(own, basis, entry[kind], sums, place)
            found[name] = LayerCalibration(basis, **scores)  # type: ignore[arg-type]
            if model is not None:
                whole = Layer(**entry["whole"]) if "whole" in entry else layer
                identities[name] = LayerFingerprint(str(entry["module"]), whole, str(entry["parameters"]))
        fingerprint = None if model is None else ModelFingerprint(str(model), identities)
        return cls(found, fingerprint, tokens)


def scores_of_sums(
    kind: type[Scores],
    basis: StoredBasis,
    settings: Mapping[str, Any],
    sums: Mapping[str, npt.NDArray[Any]],
    name: str = "scores",
) -> Scores:
    """Scores from their settings and sums, whose shapes are checked."""
    scores = kind.__new__(kind)
    own: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in settings.items()}
    vars(scores).update(own, layer=basis.layer, _omega=basis.omega)
    heads = basis.layer.heads
    if kind is RankScores:
        tail: dict[str, tuple[int, ...]] = {each: (own["rank_max"] + 1,) for each in ("error", "paired", "weighted")}
    else:
        tail = {each: (len(own["ranks"]), len(own["bits"])) for each in ("paired", "error", "isotropic")}
    for each in kind.sums:
        dtype = np.int64 if each == "samples" else np.float64
        check_array(f"{name}.{each}", sums[each], (heads, *tail.get(each, ())), dtype)
        vars(scores)[each] = sums[each]
    return scores


def make_plans(
    calibration: Calibration,
    mean_rank: float | None,
    reduction: float | None,
    *,
    map: str | CoefficientMap | None,
    sketch_dtype: str | None,
    residual_bits: int,
    method: str | None,
    rank_max: int | None,
) -> tuple[dict[str, SketchPlan], AllocationSummary]:
    """Plans by the names of the layers, and how ranks were allocated; see `Calibration.plans`."""
    layers = calibration.layers
    if any(own.joint is None for own in layers.values()) and (mean_rank, reduction, residual_bits) == (None, None, 0):
        map = map or DEFAULT_MAP
    asked = method != "error" and all(own.answers is not None for own in layers.values())
    mean_rank, reduction = budget_of(mean_rank, reduction, map, method, asked)
    chosen, form, bits = residual_settings(map, sketch_dtype, residual_bits, method, reduction)
    bases: Any = [own.basis for own in layers.values()]
    if bits and method != "uniform":
        joint = _joint_scores(calibration, "joint", bits, method, form, rank_max)
        answers = _joint_scores(calibration, "answers", bits, method, form, rank_max) if asked else None
        shapes = [basis.layer for basis in bases]
        budget = reduction or reduction_of(shapes, bases[0].window, mean_rank, form, residual_bits)
        planned, allocation = joint_plans(bases, joint, budget, answers)
        retained = [own.retained(plan.ranks, plan.residual_bits) for own, plan in zip(joint, planned, strict=True)]
        mean_rank = mean_sketch_rank(planned)
    else:
        ranks = _collected(calibration, "ranks")
        settings: Any = {"map": chosen, "sketch_dtype": form, "residual_bits": residual_bits, "rank_max": rank_max}
        planned, allocation = plan_layers(bases, ranks, mean_rank, method, **settings)
        retained = [mean_retained(own, plan.ranks) for own, plan in zip(ranks, planned, strict=True)]
    kept = dict(zip(layers, retained, strict=True))
    summary = AllocationSummary(float(mean_rank), allocation.method, allocation.gap, kept, calibration.tokens)
    return dict(zip(layers, planned, strict=True)), summary


def _collected(calibration: Calibration, kind: str) -> list[Any]:
    """Scores of one kind, of all layers."""
    found: list[Any] = [getattr(own, kind) for own in calibration.layers.values()]
    if None in found:
        need = "of mean ranks" if kind == "ranks" else "of residuals, or a mean_rank without residual_bits"
        raise ValueError(f"calibration: expected scores {need}; it has no such scores")
    return found


def _joint_scores(
    calibration: Calibration, kind: str, bits: Sequence[int], method: str | None, form: str, rank_max: int | None
) -> list[JointScores]:
    """Joint scores of some bits and ranks, without their weighting for the method "error"."""
    found = _collected(calibration, kind)
    if method not in (None, "error", found[0].weighting):
        raise ValueError(f"method: expected {found[0].weighting!r} of the joint scores or 'error', got {method!r}")
    if form != found[0].sketch_dtype:
        raise ValueError(f"sketch_dtype: expected {found[0].sketch_dtype!r} of the joint scores, got {form!r}")
    most = max(scores.ranks[-1] for scores in found)
    if rank_max is not None and check_size("rank_max", rank_max) > most:
        raise ValueError(f"rank_max: expected at most the largest scored rank, {most}, got {rank_max}")
    return [some_scores(scores, bits, rank_max, method != "error") for scores in found]
