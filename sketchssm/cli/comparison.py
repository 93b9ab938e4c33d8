"""The tables of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sketchssm.cli.output import Output, scientific
from sketchssm.evaluate.claims import claims
from sketchssm.evaluate.evaluation import Evaluation, LayerResults
from sketchssm.evaluate.findings import BAND, LEAST, ablations, growth, headline, times
from sketchssm.evaluate.measure import Measurement
from sketchssm.evaluate.pictures import representative

__all__ = ["ablation_rows", "growth_rows", "headline_rows", "show_evaluation", "system_rows"]

Table = tuple[list[str], list[list[str]]]

WIDTH = 4
"""Layers side by side in one table."""


def show_evaluation(output: Output, evaluation: Evaluation) -> None:
    """Print what an evaluation found."""
    layers = evaluation.layers
    low, high = BAND
    for start in range(0, len(layers), WIDTH):
        part = layers[start : start + WIDTH]
        columns = ["system", *(layer.name for layer in part)]
        output.table("Systems: output error @ traffic reduction", columns, system_rows(part))
    output.say("Relative errors of all outputs against the float64 recurrence, on held-out text.")
    for start in range(0, len(layers), WIDTH):
        part = layers[start : start + WIDTH]
        _show(
            output,
            "Ablations: times the full method's output error, points of retained energy lost",
            ablation_rows(part),
        )
        _show(
            output,
            "Growth over tokens: errors of the last quarter over the first, outputs / states",
            growth_rows(part),
        )
    _show(
        output,
        f"The sketch at {low:g}x to {high:g}x against compressed states at {LEAST:g}x or more",
        headline_rows(layers),
    )
    _show_claims(output, layers)


def _show(output: Output, title: str, table: Table) -> None:
    columns, rows = table
    if rows:
        output.table(title, columns, rows)


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
    """What replacing each part costs, one row per ablation."""
    found = {layer.name: {a.setting: a for a in ablations(layer)} for layer in layers}
    rows = []
    for setting in dict.fromkeys(setting for own in found.values() for setting in own):
        lost = [own.get(setting) for own in found.values()]
        rows.append([setting, *("-" if a is None else f"{a.error:.2f}x {100 * a.retained:+.1f}" for a in lost)])
    return ["replaced", *found], rows


def growth_rows(layers: Sequence[LayerResults]) -> Table:
    """How errors go on over tokens, one row per system."""
    found = {layer.name: {g.name: g for g in growth(layer, representative(layer))} for layer in layers}
    rows = []
    for name in dict.fromkeys(name for own in found.values() for name in own):
        grown = [own.get(name) for own in found.values()]
        rows.append([name, *("-" if g is None else f"{factor(g.output)} / {factor(g.state)}" for g in grown)])
    return ["system", *found], rows


def headline_rows(layers: Sequence[LayerResults]) -> Table:
    """Sketches against compressed states, one row per layer that has both."""
    rows = []
    for found in map(headline, layers):
        worst, best, rival = found.worst, found.best, found.rival
        if worst is not None and best is not None and rival is not None:
            margins = f"{factor(found.margin)} to {factor(times(rival.output_error, best.output_error))}"
            shown = [f"{s.setting} {_cell(s)}" for s in (worst, best)]
            rows.append([found.layer, *shown, f"{rival.setting} {_cell(rival)}", margins])
    return ["layer", "worst sketch", "best sketch", "best compressed state", "sketch has less, times"], rows


def factor(times: float | None) -> str:
    """Format how many times one number is another; a dash where it means nothing."""
    return "-" if times is None else f"{times:.2f}x"


def _cell(system: Measurement | None) -> str:
    return "-" if system is None else f"{scientific(system.output_error)} @{system.reduction:.2f}x"


def _show_claims(output: Output, layers: Sequence[LayerResults]) -> None:
    differing = [claim for claim in claims(layers) if not claim.holds]
    if not differing:
        return
    output.say("\nWhere these traces differ from the paper:")
    for claim in differing:
        output.say(f"* {claim.says}")
        for name, (good, numbers) in claim.layers.items():
            if not good:
                output.say(f"    not {name}: {numbers}")
        output.say(f"  {claim.reason}")
