"""The whole evaluation: every system on every layer, kept as it is finished, written as CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sketchssm
from sketchssm.evaluate.measure import Measurement, RankCurve, measure, rank_curves, rounded
from sketchssm.evaluate.registry import Entry
from sketchssm.evaluate.store import Store
from sketchssm.evaluate.study import Study
from sketchssm.files import layer_fields, write_whole

__all__ = ["Evaluation", "LayerResults", "evaluate"]


@dataclass(frozen=True)
class LayerResults:
    """What an evaluation found on one layer.

    Attributes
    ----------
    name, kind : str
        Layer.
    facts : dict
        Its shape, its test text, where the traces come from, and the half-life of each head's gates in tokens.
    map : str
        The coefficient map in use.
    systems : list of Measurement
        Decode systems.
    curves : list of RankCurve
        Retained energy by map and rank; empty where no sketch was asked for.
    """

    name: str
    kind: str
    facts: dict[str, Any]
    map: str
    systems: list[Measurement]
    curves: list[RankCurve]

    @property
    def half_life(self) -> list[float]:
        """Half-lives of the heads' gates in tokens, infinite ones included."""
        return [math.inf if life is None else life for life in self.facts["half_life"]]

    def find(self, name: str) -> Measurement | None:
        """Return a system by its name ``family/setting``; None if it was not measured."""
        return next((system for system in self.systems if system.name == name), None)


@dataclass(frozen=True)
class Evaluation:
    """Results of all layers, and the settings that they were made with."""

    settings: dict[str, Any]
    layers: list[LayerResults]

    def plain(self) -> dict[str, Any]:
        """Return what JSON holds of it."""
        layers = [
            {
                "name": layer.name,
                "kind": layer.kind,
                **layer.facts,
                "map": layer.map,
                "systems": [system.plain() for system in layer.systems],
                "curves": [curve.plain() for curve in layer.curves],
            }
            for layer in self.layers
        ]
        return {"version": sketchssm.__version__, "settings": self.settings, "layers": layers}

    def save(self, folder: Path) -> list[Path]:
        """Write ``results.json``, ``results.csv`` and ``drift.csv``.

        Parameters
        ----------
        folder : Path
            Where to; made if missing.

        Returns
        -------
        list of Path
            The files.
        """
        folder.mkdir(parents=True, exist_ok=True)
        texts = {
            "results.json": json.dumps(self.plain(), indent=1, allow_nan=False) + "\n",
            "results.csv": _csv(RESULT_COLUMNS, _result_rows(self.layers)),
            "drift.csv": _csv(DRIFT_COLUMNS, _drift_rows(self.layers)),
        }
        for name, text in texts.items():
            write_whole(folder / name, text.encode())
        return [folder / name for name in texts]


def evaluate(
    studies: Sequence[Study],
    chosen: Sequence[Sequence[Entry]],
    folder: Path | None = None,
    backend: str = "auto",
    progress: Callable[[str], None] = lambda label: None,
) -> Evaluation:
    """Measure systems on layers, leaving out what an earlier run has finished.

    Parameters
    ----------
    studies : sequence of Study
        Layers, with names of their own.
    chosen : sequence of sequence of Entry
        Systems to measure on each, from `select`.
    folder : Path, optional
        Where finished parts are kept, under ``parts``; default nowhere.
    backend : str, default "auto"
        Where to decode.
    progress : callable, optional
        Called with a label before each system, and once more per layer before its rank curves.

    Returns
    -------
    Evaluation
        All results.

    Raises
    ------
    ValueError
        If there are no layers, two have one name, or `chosen` has not one entry for each.
    """
    if not studies or len(chosen) != len(studies):
        raise ValueError(
            f"chosen: expected systems of each of at least one layer, got {len(chosen)} of {len(studies)}"
        )
    names = [study.traces.name for study in studies]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"traces: expected files with different names, got {', '.join(sorted(twice))} twice")
    store = Store(None if folder is None else folder / "parts")
    layers = [_layer(study, own, store, backend, progress) for study, own in zip(studies, chosen, strict=True)]
    return Evaluation(_settings(studies[0], backend), layers)


def _layer(
    study: Study, entries: Sequence[Entry], store: Store, backend: str, progress: Callable[[str], None]
) -> LayerResults:
    name = study.traces.name
    digest = f"{study.digest} {backend}"

    def measured(entry: Entry) -> Measurement:
        progress(f"{name}: {entry.name}")
        return _measurement(store.get(digest, name, entry.name, lambda: measure(entry, study, backend).plain()))

    systems = [measured(entry) for entry in entries]
    progress(f"{name}: rank curves")
    curves = []
    if any(entry.family == "sketch" for entry in entries):
        ranks = repr(tuple(study.ranks))
        curves = store.get(f"{digest} {ranks}", name, "curves", lambda: [c.plain() for c in rank_curves(study)])
    shape = layer_fields(study.traces.layer)
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
    return LayerResults(name, shape["kind"], facts, study.settings.map.name, systems, [RankCurve(**c) for c in curves])


def _settings(study: Study, backend: str) -> dict[str, Any]:
    """What all layers share, for the record."""
    shared = {"ranks": list(study.ranks), "mean_rank": study.mean_rank, "seed": study.seed, "every": study.every}
    allocation = study.method or "gradient where the traces have gradients, else error"
    return {
        **asdict(study.settings),
        "map": study.settings.map.name,
        "allocation": allocation,
        **shared,
        "backend": backend,
    }


def _measurement(part: dict[str, Any]) -> Measurement:
    """A measurement from JSON, where a number that is not finite became null: an error beyond bounds."""

    def bounded(value: Any, beyond: float) -> Any:
        return (
            [bounded(item, beyond) for item in value]
            if isinstance(value, list)
            else beyond
            if value is None
            else value
        )

    fixed = dict(part)
    for field in ("output_error", "state_error"):
        fixed[field], fixed[f"head_{field}"] = (bounded(part[f"{x}{field}"], math.inf) for x in ("", "head_"))
    fixed["retained"], fixed["head_retained"] = (bounded(part[x], -math.inf) for x in ("retained", "head_retained"))
    fixed["drift"] = {key: bounded(curve, math.inf) for key, curve in part["drift"].items()}
    return Measurement(**fixed)


RESULT_COLUMNS = (
    "layer", "kind", "family", "setting", "head", "rank", "reduction", "output_error", "state_error", "retained",
)  # fmt: skip
DRIFT_COLUMNS = ("layer", "kind", "family", "setting", "tokens", "output_error", "state_error")


def _result_rows(layers: Sequence[LayerResults]) -> Iterator[list[Any]]:
    """One row per system for all heads together, then one per head."""
    for layer in layers:
        for s in layer.systems:
            lead = [layer.name, layer.kind, s.family, s.setting]
            yield [*lead, "all", "", s.reduction, s.output_error, s.state_error, s.retained]
            for head, errors in enumerate(zip(s.head_output_error, s.head_state_error, s.head_retained, strict=True)):
                yield [*lead, head, "" if s.ranks is None else s.ranks[head], s.reduction, *errors]


def _drift_rows(layers: Sequence[LayerResults]) -> Iterator[list[Any]]:
    for layer in layers:
        for s in layer.systems:
            for point in zip(s.drift["tokens"], s.drift["output_error"], s.drift["state_error"], strict=True):
                yield [layer.name, layer.kind, s.family, s.setting, *point]


def _csv(columns: Sequence[str], rows: Iterator[list[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
