"""An evaluation as one page of HTML that needs no other file."""

from __future__ import annotations

import base64
import math
import tempfile
from pathlib import Path

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

import sketchssm
from sketchssm.plans.files import write_whole
from sketchssm.study.evaluate.evaluation import Evaluation, LayerResults
from sketchssm.study.evaluate.tables import ablations, details, systems
from sketchssm.study.plots import draw
from sketchssm.study.tables import Table

FACTS = {
    "heads": "heads",
    "key heads": "key_heads",
    "K": "key_dim",
    "V": "value_dim",
    "test sequences": "test_sequences",
    "test tokens": "test_tokens",
    "calibration tokens": "calibration_tokens",
    "gradients": "gradients",
}
"""Columns of the table of layers, and the facts in them."""

HALF_LIFE = (
    "Half-life: tokens after which the gates of a head have halved a write, for the fastest, the median and the "
    "slowest head. For kda, of the slow channels of a head."
)


def write_page(evaluation: Evaluation, path: Path) -> Path:
    """Write the report with all pictures in it; ModuleNotFoundError if matplotlib is missing."""
    layers = evaluation.layers
    with tempfile.TemporaryDirectory() as folder:
        files = draw(layers, Path(folder), ".svg").items()
        pictures = {name: base64.b64encode(file.read_bytes()).decode() for name, file in files}
    environment = Environment(
        loader=PackageLoader("sketchssm", "cli"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    facts = [
        [layer.name, layer.kind, *(str(layer.facts[name]) for name in FACTS.values()), _lives(layer)]
        for layer in layers
    ]
    text = environment.get_template("report.html").render(
        version=sketchssm.__version__,
        count=len({s.name for layer in layers for s in layer.systems}),
        pictures=pictures,
        layers=Table("Layers", ["layer", "kind", *FACTS, "half-life of gates, tokens"], facts, HALF_LIFE),
        ablations=ablations(layers),
        systems=details(layers) if len(layers) == 1 else systems(layers),
        sources=[(layer.name, layer.facts["provenance"], layer.facts["digest"]) for layer in layers],
        settings=", ".join(f"{name} {value}" for name, value in evaluation.settings.items() if value is not None),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode())
    return path


def _lives(layer: LayerResults) -> str:
    lives = layer.half_life
    return " / ".join("never" if math.isinf(x) else f"{x:.0f}" for x in (min(lives), np.median(lives), max(lives)))
