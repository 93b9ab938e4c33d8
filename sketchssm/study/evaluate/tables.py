"""The tables of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from sketchssm.study.evaluate.evaluation import LayerResults
from sketchssm.study.evaluate.measure import Measurement
from sketchssm.study.evaluate.registry import FULL_METHOD
from sketchssm.study.tables import Table, percent, ruled, scientific

WIDTH = 4
"""Layers side by side in one table of the terminal."""

ERRORS = "Errors are relative norms against the float64 recurrence, on held-out text"


def all_tables(layers: Sequence[LayerResults]) -> list[Table]:
    """Systems and ablations, a few layers side by side; of a single layer the details of each system."""
    parts = [layers[start : start + WIDTH] for start in range(0, len(layers), WIDTH)]
    shown = [details(layers)] if len(layers) == 1 else [systems(part) for part in parts]
    return [*shown, *map(ablations, parts)]


def systems(layers: Sequence[LayerResults]) -> Table:
    """One row per system, one cell per layer; a rule between families."""
    names = dict.fromkeys((s.family, s.name) for layer in layers for s in layer.systems)

    def row(name: tuple[str, str]) -> list[str]:
        found = [layer.find(name[1]) for layer in layers]
        return [name[1], *("-" if s is None else f"{scientific(s.output_error)} @{s.reduction:.2f}x" for s in found)]

    rows = ruled(names, lambda name: name[0], row)
    note = f"{ERRORS}: the norm of the error of all outputs over the norm of the outputs."
    return Table("Systems: output error @ traffic reduction", ["system", *(x.name for x in layers)], rows, note)


def details(layers: Sequence[LayerResults]) -> Table:
    """One row per layer and system."""

    def row(pair: tuple[str, Measurement]) -> list[str]:
        layer, s = pair
        errors = map(scientific, (s.output_error, s.flush_error, s.state_error))
        return [layer, s.name, f"{s.reduction:.2f}x", *errors, percent(s.retained)]

    columns = ["layer", "system", "less traffic", "output error", "at flush", "state error", "retained"]
    note = (
        f"{ERRORS}. at flush: the largest error of the token of a flush. retained: share of the energy of the "
        "state reads of all heads."
    )
    pairs = [(layer.name, s) for layer in layers for s in layer.systems]
    return Table("Systems", columns, ruled(pairs, lambda pair: (pair[0], pair[1].family), row), note, 2)


def ablations(layers: Sequence[LayerResults]) -> Table:
    """One row per replaced part; layers without the full method are left out."""
    full = {layer.name: base for layer in layers if (base := layer.find(f"ablation/{FULL_METHOD}")) is not None}
    shown = [layer for layer in layers if layer.name in full]
    names = dict.fromkeys(s.name for layer in shown for s in layer.systems if s.family == "ablation")
    rows = [
        [name.partition("/")[2], *(_against(layer.find(name), full[layer.name]) for layer in shown)]
        for name in names
        if name != f"ablation/{FULL_METHOD}"
    ]
    title = "Ablations: output error relative to the full method's, points of retained energy lost"
    note = (
        "One part of the full method is replaced. Negative points are gained. Another map, pivot count or window also "
        "changes the traffic."
    )
    return Table(title, ["replaced", *full], rows, note)


def _against(system: Measurement | None, base: Measurement) -> str:
    if system is None:
        return "-"
    times = f"{system.output_error / base.output_error:.2f}x" if base.output_error else "-"
    return f"{times} {100 * (base.retained - system.retained):+.1f}"
