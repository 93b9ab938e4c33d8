"""Plans of all recurrent layers of one model, and their file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy.typing as npt

from sketchssm.layer.checks import check_instance, check_number
from sketchssm.layer.recurrence import Layer
from sketchssm.plans.files import FileFormat, Stored, format_of
from sketchssm.plans.plan import FORMAT as PLAN_FORMAT
from sketchssm.plans.plan import PlanFileError, SketchPlan, total_reduction

FORMAT = FileFormat(
    "sketchssm-model-plans",
    PLAN_FORMAT.version,
    (),
    PlanFileError,
    older={version: {"lacking": fields} for version, fields in PLAN_FORMAT.older.items()},
)
"""The versions are those of the plans. A tensor has the name of its layer, a dot, and its name in the plan."""


class LayerFingerprint(NamedTuple):
    """Identity of one recurrent layer."""

    module: str  # class of the module
    layer: Layer
    parameters: str  # SHA-256 of the module's parameters, in hexadecimal


@dataclass(frozen=True)
class ModelFingerprint:
    """Identity of a model with calibrated layers."""

    model: str  # class of the model
    layers: dict[str, LayerFingerprint]  # by the names of their modules, in the order of the model

    def difference(self, other: ModelFingerprint) -> str | None:
        """Describe the first difference of another model: expected and given values, and the layer. None if none.

        Models of two classes with the same recurrent layers are the same, such as a language model alone and within a
        vision-language model, whose layers have longer names.
        """
        own, others = self.places(), other.places()
        modules = [{x.module for x in each.layers.values()} for each in (self, other)]
        if self.model != other.model and modules[0] != modules[1]:
            return f"expected a {self.model}, got a {other.model}"
        for place, name in own.items():
            if place not in others:
                return f"expected a recurrent layer {name}, got none"
        for place, name in others.items():
            if place not in own:
                return f"expected no recurrent layer {name}, got one"
        for place, name in own.items():
            want, got = self.layers[name], other.layers[others[place]]
            if want.module != got.module:
                return f"layer {name}: expected a {want.module}, got a {got.module}"
            if want.layer != got.layer:
                return f"layer {name}: expected {want.layer}, got {got.layer}"
            if want.parameters != got.parameters:
                return (
                    f"layer {name}: expected parameters with SHA-256 {want.parameters[:8]}..., "
                    f"got {got.parameters[:8]}..."
                )
        return None

    def places(self) -> dict[str, str]:
        """Names of the layers' modules, by their places within the language model."""
        return {name[max(name.find("layers."), 0) :]: name for name in self.layers}


@dataclass(frozen=True)
class AllocationSummary:
    """Settings and quality of the rank allocation of a model."""

    mean_rank: float  # budget: the read traffic of all heads at this rank; of joint allocation the mean of its ranks
    method: str  # score that the table minimises, see `sketchssm.allocate_ranks` and `sketchssm.allocate_joint`
    gap: float  # no rank table within the budget reduces the objective by a larger share
    retained: dict[str, float]  # by layer: energy of state reads on the scored text (of rank scores least-squares)
    tokens: int  # of calibration text

    def __post_init__(self) -> None:
        check_instance("method", self.method, str)
        check_instance("retained", self.retained, dict)
        numbers = {"mean_rank": self.mean_rank, "gap": self.gap, "tokens": self.tokens, **self.retained}
        for name, value in numbers.items():
            check_number(name, value, "a finite number", math.isfinite)


class ModelPlans(Stored, Mapping[str, SketchPlan]):
    """Plans of all recurrent layers of a model, by the names of the layers' modules.

    Made by `sketchssm.transformers.calibrate`. ``dict(plans)`` has the plans alone, without the fingerprint.

    Parameters
    ----------
    plans : mapping of str to SketchPlan
        Plans by layer.
    fingerprint : ModelFingerprint
        The model that the plans belong to; its layers are those of `plans`.
    allocation : AllocationSummary
        How the ranks were allocated.

    Raises
    ------
    ValueError
        If plans and fingerprint have different layers or shapes.
    """

    FORMAT = FORMAT

    def __init__(
        self, plans: Mapping[str, SketchPlan], fingerprint: ModelFingerprint, allocation: AllocationSummary
    ) -> None:
        if list(plans) != list(fingerprint.layers):
            raise ValueError(f"plans: expected the layers {', '.join(fingerprint.layers)}, got {', '.join(plans)}")
        for name, plan in plans.items():
            if plan.layer != fingerprint.layers[name].layer:
                raise ValueError(
                    f"plans: expected a plan of {fingerprint.layers[name].layer} for {name}, got one of {plan.layer}"
                )
        self._plans = dict(plans)
        self.fingerprint = fingerprint
        self.allocation = allocation

    def __getitem__(self, name: str) -> SketchPlan:
        return self._plans[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plans)

    def __len__(self) -> int:
        return len(self._plans)

    def __repr__(self) -> str:
        """Model, number of layers, mean rank and traffic in one line."""
        return (
            f"ModelPlans({self.fingerprint.model}, layers={len(self)}, mean_rank={self.allocation.mean_rank:g}, "
            f"reduction={self.reduction:.2f})"
        )

    @property
    def reduction(self) -> float:
        """Traffic reduction of all layers together: how many times fewer bytes than standard decode."""
        return total_reduction(self.values())

    def of(self, model: ModelFingerprint) -> dict[str, SketchPlan]:
        """Plans by the names that the layers have in a model.

        Parameters
        ----------
        model : ModelFingerprint
            The model, see `sketchssm.transformers.fingerprint`; it may be of another class with the same layers.

        Returns
        -------
        dict of str to SketchPlan
            The plans.

        Raises
        ------
        ValueError
            If the plans were made for another model, naming the first layer that differs.
        """
        difference = self.fingerprint.difference(model)
        if difference is not None:
            raise ValueError(f"plans: made for another model: {difference}")
        own = self.fingerprint.places()
        return {name: self[own[place]] for place, name in model.places().items()}

    def _contents(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        tensors: dict[str, npt.NDArray[Any]] = {}
        layers: dict[str, Any] = {}
        for name, plan in self.items():
            own, fields = plan._contents()
            tensors |= {f"{name}.{tensor}": array for tensor, array in own.items()}
            identity = self.fingerprint.layers[name]
            layers[name] = {"module": identity.module, "parameters": identity.parameters, "plan": fields}
        fields = {"model": self.fingerprint.model, "layers": layers, "allocation": asdict(self.allocation)}
        return tensors, fields

    @classmethod
    def _build(
        cls,
        tensors: dict[str, npt.NDArray[Any]],
        model: Any,
        layers: Any,
        allocation: Any,
        lacking: Mapping[str, Any] = MappingProxyType({}),  # fields of an older version's plans
    ) -> ModelPlans:
        expected = [f"{name}.{tensor}" for name in layers for tensor in PLAN_FORMAT.tensors]
        older = {f"{name}.projection" for name in layers}
        if set(tensors) - older != set(expected):
            raise ValueError(f"expected the tensors {', '.join(expected)}, got {', '.join(tensors)}")
        plans, identities = {}, {}
        for name, entry in layers.items():
            own = {tensor: tensors[f"{name}.{tensor}"] for tensor in PLAN_FORMAT.tensors}
            try:
                plans[name] = SketchPlan._build(own, **lacking, **entry["plan"])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            identities[name] = LayerFingerprint(str(entry["module"]), plans[name].layer, str(entry["parameters"]))
        summary = AllocationSummary(**allocation)
        if sorted(summary.retained) != sorted(layers):
            raise ValueError(f"allocation: expected retained energies of {', '.join(layers)}")
        return cls(plans, ModelFingerprint(str(model), identities), summary)


def load_plans(path: str | os.PathLike[str]) -> Mapping[str, SketchPlan]:
    """Read plans of any form, by the names of their layers.

    The path is a file of `ModelPlans`, the file of one plan, or a folder with a plan ``NAME.safetensors`` for each
    layer. FileNotFoundError if there is no such path. PlanFileError if a file is damaged or holds something else, or
    the folder has no plans.
    """
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"plans: expected a file or folder of plans, got {place}, which does not exist")
    if not place.is_dir() and format_of(place) == FORMAT.name:
        return ModelPlans.load(place)
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not files:
        raise PlanFileError(f"plans: expected files NAME.safetensors in {place}, got none")
    wrong = [file for file in files if format_of(file) not in (PLAN_FORMAT.name, None)]  # None: damaged, or foreign
    if wrong:
        found = format_of(wrong[0])
        made = ": sketchssm calibrate --from makes plans of it" if found == "sketchssm-calibration" else ""
        raise PlanFileError(
            f"{wrong[0]}: expected the plan of a layer, from sketchssm calibrate or plan, got {found}{made}"
        )
    return {file.name.removesuffix(".safetensors"): SketchPlan.load(file) for file in files}
