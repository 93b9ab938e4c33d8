"""The whole evaluation: every chosen system on every layer, and its results as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sketchssm.calibrate.traces import named_errors
from sketchssm.plans.files import write_whole
from sketchssm.study.evaluate.measure import Measurement, measure, rounded
from sketchssm.study.evaluate.registry import Entry
from sketchssm.study.evaluate.study import Study

RESULT_FILE = "results.json"
"""File of `Evaluation.save`."""


@dataclass(frozen=True)
class LayerResults:
    """Results of one layer."""

    name: str
    kind: str
    facts: dict[str, Any]  # shape, text, provenance, and the half-life of each head's gates in tokens
    map: str  # name of the coefficient map in use
    systems: list[Measurement]

    def find(self, name: str) -> Measurement | None:
        """Return a system by its name ``family/setting``; None if it was not measured."""
        return next((system for system in self.systems if system.name == name), None)


@dataclass(frozen=True)
class Evaluation:
    """Results of all layers, and their shared settings."""

    settings: dict[str, Any]
    layers: list[LayerResults]

    def plain(self, version: str) -> dict[str, Any]:
        """Return the results, with the version of the library that measured them, as JSON holds them."""
        layers = [
            {
                "name": layer.name,
                "kind": layer.kind,
                **layer.facts,
                "map": layer.map,
                "systems": [system.plain() for system in layer.systems],
            }
            for layer in self.layers
        ]
        return {"version": version, "settings": self.settings, "layers": layers}

    def save(self, folder: Path, version: str) -> Path:
        """Write ``results.json`` into a folder, and return the file."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.plain(version), indent=1, allow_nan=False) + "\n"
        write_whole(folder / RESULT_FILE, text.encode())
        return folder / RESULT_FILE


def evaluate(
    studies: Sequence[Study],
    chosen: Sequence[Sequence[Entry]],
    backend: str = "auto",
    progress: Callable[[str], None] = lambda label: None,
) -> Evaluation:
    """Measure systems on layers with different names.

    `chosen` has the systems to measure on each layer, from `select`. `progress` is called with a label before each
    system.
    """
    if not studies or len(chosen) != len(studies):
        raise ValueError(
            f"chosen: expected systems of each of at least one layer, got {len(chosen)} of {len(studies)}"
        )
    names = [study.traces.name for study in studies]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"traces: expected files with different names, got {', '.join(sorted(twice))} twice")
    layers = []
    for study, own in zip(studies, chosen, strict=True):
        systems = []
        for entry in own:
            progress(f"{study.traces.name}: {entry.name}")
            with named_errors(study.traces):
                systems.append(measure(entry, study, backend))
        layers.append(_results(study, systems))
    settings = asdict(studies[0].settings) | {
        "map": str(studies[0].settings.map),
        "method": studies[0].settings.method or "gradient where the traces have gradients, else error",
        "ranks": list(studies[0].ranks),
        "mean_rank": studies[0].mean_rank,
        "seed": studies[0].seed,
        "every": studies[0].every,
        "backend": backend,
    }
    return Evaluation(settings, layers)


def _results(study: Study, systems: list[Measurement]) -> LayerResults:
    shape = asdict(study.traces.layer)
    facts = {
        **{key: value for key, value in shape.items() if key != "kind"},
        "test_sequences": int(study.traces.test.v.shape[0]),
        "test_tokens": study.length,
        "calibration_tokens": math.prod(study.traces.calib.v.shape[:2]),
        "gradients": study.traces.score_part()[1] is not None,
        "half_life": rounded(study.half_life.tolist()),
        "provenance": study.traces.provenance,
    }
    return LayerResults(study.traces.name, shape["kind"], facts, study.settings.map.name, systems)
