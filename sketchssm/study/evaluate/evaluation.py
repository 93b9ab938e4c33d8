"""The whole evaluation: every chosen system on every layer; finished results are kept, and written as JSON."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sketchssm.calibrate.traces import named_errors
from sketchssm.plans.files import source_digest, write_whole
from sketchssm.study.evaluate.measure import Measurement, measure, rounded
from sketchssm.study.evaluate.registry import Entry
from sketchssm.study.evaluate.study import Study

RESULT_FILE = "results.json"
"""File of `Evaluation.save`."""

PART_FORMAT = 1
"""Version of the content of a kept part; it enters the part's key."""

SOURCES = ("**/*.py", "cuda_src/**/*.cu*", "../cuda_src/**/*.cu*")
"""All sources that a result may depend on; the CUDA sources of an installed package, and of a checkout."""


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
    folder: Path | None = None,
    backend: str = "auto",
    progress: Callable[[str], None] = lambda label: None,
) -> Evaluation:
    """Measure systems on layers with different names; results of an earlier run in the same folder are used again.

    `chosen` has the systems to measure on each layer, from `select`. Finished parts are kept below `folder`, under
    ``parts``. `progress` is called with a label before each system.
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
                systems.append(_measured(entry, study, folder, backend))
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


def _measured(entry: Entry, study: Study, folder: Path | None, backend: str) -> Measurement:
    """A measurement, from its file if the folder has one, else made and kept.

    The key of a file is a digest of traces, settings and the library's sources. A file with another key, or a broken
    one, counts as missing. Made measurements go by way of JSON too, so that both are the same to the last digit.
    """
    if folder is None:
        return Measurement.of(measure(entry, study, backend).plain())
    named = f"{PART_FORMAT} {source_digest(*SOURCES)} {study.digest} {backend} {entry.name}"
    key = hashlib.sha256(named.encode()).hexdigest()
    path = folder / "parts" / study.traces.name / f"{entry.name.replace('/', '--')}.json"
    part = _kept(path, key)
    if part is None:
        part = measure(entry, study, backend).plain()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, _text({"key": key, "sum": _sum(part), "part": part}).encode())
    return Measurement.of(part)


def _kept(path: Path, key: str) -> Any:
    """A part from its file; None if it is missing, stale or broken."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        good = held["key"] == key and held["sum"] == _sum(held["part"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return held["part"] if good else None


def _sum(part: Any) -> str:
    return hashlib.sha256(_text(part).encode()).hexdigest()


def _text(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


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
        "digest": study.digest,
    }
    return LayerResults(study.traces.name, shape["kind"], facts, study.settings.map.name, systems)
