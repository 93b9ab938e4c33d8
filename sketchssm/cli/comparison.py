"""The tables of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sketchssm.cli.output import Output, scientific
from sketchssm.evaluate.evaluation import Evaluation, LayerResults
from sketchssm.evaluate.measure import Measurement
from sketchssm.evaluate.registry import FULL

__all__ = ["ablation_rows", "show_evaluation", "system_rows"]

Table = tuple[list[str], list[list[str]]]

WIDTH = 4
"""Layers side by side in one table."""


def show_evaluation(output: Output, evaluation: Evaluation) -> None:
    """Print what an evaluation found."""
    layers = evaluation.layers
    for start in range(0, len(layers), WIDTH):
        part = layers[start : start + WIDTH]
        columns = ["system", *(layer.name for layer in part)]
        output.table("Systems: output error @ traffic reduction", columns, system_rows(part))
    output.say("Relative errors of all outputs against the float64 recurrence, on held-out text.")
    for start in range(0, len(layers), WIDTH):
        head, rows = ablation_rows(layers[start : start + WIDTH])
        if rows:
            title = "Ablations: times the full method's output error, points of retained energy lost"
            output.table(title, head, rows)


def system_rows(layers: Sequence[LayerResults]) -> Iterator[list[str]]:
    """One row per system, one cell per layer; an empty row between families."""
    names = dict.fromkeys((s.family, s.name) for layer in layers for s in layer.systems)
    families = dict.fromkeys(family for family, _ in names)
    for i, family in enumerate(families):
        if i:
            yield []
        for name in (name for own, name in names if own == family):
            yield [name, *(_cell(layer.find(name)) for layer in layers)]


def ablation_rows(layers: Sequence[LayerResults]) -> Table:
    """What replacing each part costs, one row per ablation; layers without the full method are left out."""
    full = {layer.name: base for layer in layers if (base := layer.find(f"ablation/{FULL}")) is not None}
    shown = [layer for layer in layers if layer.name in full]
    names = dict.fromkeys(s.name for layer in shown for s in layer.systems if s.family == "ablation")
    rows = []
    for name in (name for name in names if name != f"ablation/{FULL}"):
        cells = [_against(layer.find(name), full[layer.name]) for layer in shown]
        rows.append([name.partition("/")[2], *cells])
    return ["replaced", *full], rows


def _against(system: Measurement | None, base: Measurement) -> str:
    """Times the full method's output error, and points of retained energy lost."""
    if system is None:
        return "-"
    times = f"{system.output_error / base.output_error:.2f}x" if base.output_error else "-"
    return f"{times} {100 * (base.retained - system.retained):+.1f}"


def _cell(system: Measurement | None) -> str:
    return "-" if system is None else f"{scientific(system.output_error)} @{system.reduction:.2f}x"
