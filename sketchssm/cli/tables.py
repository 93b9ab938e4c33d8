"""The tables of an evaluation, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from sketchssm.cli.output import Output, percent, scientific
from sketchssm.evaluate.evaluation import LayerResults
from sketchssm.evaluate.measure import Measurement
from sketchssm.evaluate.registry import FULL_METHOD

__all__ = ["Table", "ablations", "details", "show", "show_all", "systems"]

WIDTH = 4
"""Layers side by side in one table of the terminal."""

ERRORS = "Errors are relative norms against the float64 recurrence, on held-out text"


class Table(NamedTuple):
    """A table: the first `words` columns are text, an empty row is a rule, the note explains the columns."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str
    words: int = 1


def show(output: Output, table: Table) -> None:
    """Print a table, unless it is empty, with its note."""
    if table.rows:
        output.table(table.title, table.columns, table.rows, words=table.words)
        output.say(table.note)


def show_all(output: Output, layers: Sequence[LayerResults]) -> None:
    """Print the systems and the ablations; with a single layer also details of each system."""
    parts = [layers[start : start + WIDTH] for start in range(0, len(layers), WIDTH)]
    shown = [details(layers)] if len(layers) == 1 else [systems(part) for part in parts]
    for table in [*shown, *map(ablations, parts)]:
        show(output, table)


def systems(layers: Sequence[LayerResults]) -> Table:
    """One row per system, one cell per layer; a rule between families."""
    columns = ["system", *(layer.name for layer in layers)]
    note = f"{ERRORS}: the norm of the error of all outputs over the norm of the outputs."
    return Table("Systems: output error @ traffic reduction", columns, list(_system_rows(layers)), note)


def details(layers: Sequence[LayerResults], times: Mapping[tuple[str, str], float] | None = None) -> Table:
    """One row per layer and system; with microseconds per token by layer and system, also times."""
    columns = ["layer", "system", "less traffic", "output error", "at flush", "state error", "retained"]
    rows: list[list[str]] = []
    for layer in layers:
        for family in dict.fromkeys(s.family for s in layer.systems):
            rows += [[]] if rows else []
            for s in (s for s in layer.systems if s.family == family):
                errors = map(scientific, (s.output_error, s.flush_error, s.state_error))
                row = [layer.name, s.name, f"{s.reduction:.2f}x", *errors, percent(s.retained)]
                rows.append(row if times is None else [*row, *_time(times, layer.name, s.name)])
    note = (
        f"{ERRORS}. at flush: the largest error of the token of a flush. retained: share of the energy of the "
        "state reads, mean over heads."
    )
    if times is None:
        return Table("Systems", columns, rows, note, 2)
    note += " us/token: time of a step over its rows, amortised over a window."
    return Table("Systems", [*columns, "us/token", "speed"], rows, note, 2)


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


def _system_rows(layers: Sequence[LayerResults]) -> Iterator[list[str]]:
    names = dict.fromkeys((s.family, s.name) for layer in layers for s in layer.systems)
    for i, family in enumerate(dict.fromkeys(family for family, _ in names)):
        if i:
            yield []
        for name in (name for own, name in names if own == family):
            found = [layer.find(name) for layer in layers]
            yield [name, *("-" if s is None else f"{scientific(s.output_error)} @{s.reduction:.2f}x" for s in found)]


def _against(system: Measurement | None, base: Measurement) -> str:
    if system is None:
        return "-"
    times = f"{system.output_error / base.output_error:.2f}x" if base.output_error else "-"
    return f"{times} {100 * (base.retained - system.retained):+.1f}"


def _time(times: Mapping[tuple[str, str], float], layer: str, name: str) -> list[str]:
    """Time of a token, and how many times faster than standard decode; dashes for systems that were not timed."""
    if (layer, name) not in times:
        return ["-", "-"]
    return [f"{times[layer, name]:.2f}", f"{times[layer, 'exact/standard'] / times[layer, name]:.2f}x"]
