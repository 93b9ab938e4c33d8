"""Pictures of an evaluation, one panel per layer; they need matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sketchssm.evaluate.evaluation import LayerResults
from sketchssm.evaluate.measure import Measurement
from sketchssm.evaluate.registry import FULL, series
from sketchssm.plots import COLOURS, MARKERS, STYLE, load_pyplot, plain_ticks, rank_heatmap, save
from sketchssm.recurrence import ROUNDING

__all__ = ["draw", "representative"]

BAND = (9.0, 11.0)
"""Traffic reductions at which the paper's sketches keep their accuracy."""

LEAST = 4.0
"""Compressed states are shown over tokens at the setting nearest above this reduction."""

COLUMNS = 3
GREY_MARKERS = "ovs*h"
FLOOR = 1e-8
"""Where an error of zero is drawn."""


def draw(layers: Sequence[LayerResults], folder: Path, suffix: str = ".png") -> dict[str, Path]:
    """Draw every picture that the results have data for.

    Parameters
    ----------
    layers : sequence of LayerResults
        Results.
    folder : Path
        Where to.
    suffix : {".png", ".svg"}, default ".png"
        Format.

    Returns
    -------
    dict of str to Path
        Files by the picture's name.

    Raises
    ------
    ModuleNotFoundError
        If matplotlib is missing.
    """
    makers: dict[str, Callable[[Sequence[LayerResults], Path], Path | None]] = {
        "error-against-traffic": _error_against_traffic,
        "retained-by-rank": _retained_by_rank,
        "drift-of-outputs": lambda shown, path: _drift(shown, path, "output_error", "outputs"),
        "drift-of-states": lambda shown, path: _drift(shown, path, "state_error", "states"),
        "ranks": _ranks,
    }
    made = {name: make(layers, folder / f"{name}{suffix}") for name, make in makers.items()}
    return {name: path for name, path in made.items() if path is not None}


def _panels(pyplot: Any, layers: Sequence[LayerResults], title: str) -> tuple[Any, list[Any]]:
    """A figure with one panel per layer, all with the same axes."""
    columns = min(COLUMNS, len(layers))
    rows = -(-len(layers) // columns)
    size = (3.3 * columns + 2.6, 3.0 * rows + 0.5)
    figure, grid = pyplot.subplots(rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False)
    figure.set_layout_engine("constrained")
    figure.suptitle(title)
    axes = list(grid.flat)
    for spare in axes[len(layers) :]:
        spare.set_visible(False)
    for axis, layer in zip(axes, layers, strict=False):
        axis.set_title(layer.name, fontsize=10)
    return figure, axes[: len(layers)]


def _finish(figure: Any, axes: Sequence[Any], x: str, y: str, path: Path) -> Path:
    figure.supxlabel(x, fontsize=10)
    figure.supylabel(y, fontsize=10)
    seen: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            seen.setdefault(label, handle)
    if seen:
        figure.legend(list(seen.values()), list(seen), loc="outside right center", fontsize=9)
    return save(figure, path)


def _looks(layers: Sequence[LayerResults], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A look for each curve: the map in use stands out, other sketches are grey."""
    own = {f"sketch/{layer.map}" for layer in layers}
    listed = sorted(dict.fromkeys(names), key=lambda name: name not in own)
    grey = [name for name in listed if name.startswith("sketch/") and name not in own]
    looks: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(name for name in listed if name not in grey):
        looks[name] = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "markersize": 5}
        looks[name] |= {"linewidth": 2.4 if name in own else 1.3, "zorder": 4 if name in own else 3}
    for i, name in enumerate(grey):
        looks[name] = {"color": "#888888", "marker": GREY_MARKERS[i % len(GREY_MARKERS)], "markersize": 4}
        looks[name] |= {"linewidth": 0.8, "linestyle": "--", "fillstyle": "none"}
    return looks


def _error_against_traffic(layers: Sequence[LayerResults], path: Path) -> Path | None:
    """The paper's accuracy figure in terms of output error."""
    shown = [[s for s in layer.systems if s.family != "ablation"] for layer in layers]
    lossy = [[s for s in own if ROUNDING < s.output_error < np.inf] for own in shown]
    if not any(lossy):
        return None
    looks = _looks(layers, [series(s.name) for own in lossy for s in own])
    pyplot = load_pyplot()
    with pyplot.rc_context(STYLE):
        figure, axes = _panels(pyplot, layers, "Output error against state traffic, held-out text")
        for axis, own, every in zip(axes, lossy, shown, strict=True):
            axis.axvspan(*BAND, color="#eeeeee", zorder=0)
            for name, look in looks.items():
                curve = sorted((s for s in own if series(s.name) == name), key=lambda s: s.reduction)
                if curve:
                    axis.plot([s.reduction for s in curve], [s.output_error for s in curve], label=name, **look)
            for s in every:
                if s.output_error <= ROUNDING:
                    axis.axvline(s.reduction, color="black", linewidth=0.8, linestyle=":")
                    axis.text(s.reduction, 0.98, f" {s.setting}: exact", rotation=90, fontsize=7, va="top", ha="right",
                              transform=axis.get_xaxis_transform())  # fmt: skip
            axis.set(xscale="log", yscale="log")
        low, high = axes[0].get_xlim()
        for axis in axes:
            plain_ticks(axis.xaxis, [t for t in (1, 2, 4, 6, 9, 11, 16) if low <= t <= high])
        x = "state traffic, times less than standard decoding (grey: 9 to 11)"
        return _finish(figure, axes, x, "relative error of the outputs", path)


def _retained_by_rank(layers: Sequence[LayerResults], path: Path) -> Path | None:
    """Mean over heads with quartiles, by map."""
    layers = [layer for layer in layers if layer.curves]
    if not layers:
        return None
    pyplot = load_pyplot()
    with pyplot.rc_context(STYLE):
        figure, axes = _panels(pyplot, layers, "What a sketch loses of the state reads' energy, all heads at one rank")
        for axis, layer in zip(axes, layers, strict=True):
            for i, curve in enumerate(layer.curves):
                lost = np.maximum(1 - np.array(curve.retained), 1e-6)
                low, high = np.quantile(lost, (0.25, 0.75), axis=0)
                label = curve.map if curve.basis == "calibrated" else f"{curve.map}, {curve.basis} basis"
                look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "markersize": 4}
                axis.plot(curve.ranks, lost.mean(axis=0), label=label, **look)
                axis.fill_between(curve.ranks, low, high, color=look["color"], alpha=0.12, linewidth=0)
            axis.set(xscale="log", yscale="log")
        for axis in axes:
            plain_ticks(axis.xaxis, layers[0].curves[0].ranks)
        y = "1 - retained (mean, quartiles)"
        return _finish(figure, axes, "rank G", y, path)


def representative(layer: LayerResults) -> list[Measurement]:
    """Choose one system per curve for pictures over tokens: the base sketch, else the one nearest above 4x."""
    base = layer.find(f"ablation/{FULL}")
    chosen = [] if base is None else [base]
    groups: dict[str, list[Measurement]] = {}
    for s in layer.systems:
        if s.family not in ("ablation", "sketch", "exact"):
            groups.setdefault(series(s.name), []).append(s)
    for own in groups.values():
        enough = [s for s in own if s.reduction >= LEAST * (1 - 1e-6)]
        chosen.append(min(enough or own, key=lambda s: abs(s.reduction - LEAST)))
    return chosen


def _drift(layers: Sequence[LayerResults], path: Path, field: str, what: str) -> Path | None:
    shown = [representative(layer) for layer in layers]
    if max((len(s.drift["tokens"]) for own in shown for s in own), default=0) < 2:
        return None
    lossy = [s for layer in layers for s in layer.systems if s.family not in ("ablation", "exact")]
    looks = _looks(layers, [series(s.name) for s in lossy])  # as in the picture of traffic
    pyplot = load_pyplot()
    with pyplot.rc_context(STYLE):
        figure, axes = _panels(pyplot, layers, f"Error of the {what} over tokens")
        for axis, layer, own in zip(axes, layers, shown, strict=True):
            for s in own:
                name = f"sketch/{layer.map}" if s.family == "ablation" else series(s.name)
                curve = np.clip(np.array(s.drift[field]), FLOOR, 1e3)
                look = looks.get(name, {"color": COLOURS[0]}) | {"markersize": 3}
                axis.plot(s.drift["tokens"], curve, label=s.name, **look)
            axis.set_yscale("log")
        return _finish(figure, axes, "tokens since the sequence's start", f"relative error of the {what}", path)


def _ranks(layers: Sequence[LayerResults], path: Path) -> Path | None:
    """Ranks that each allocation gives to the heads."""
    rows = {}
    for layer in layers:
        for s in layer.systems:
            if s.setting.startswith("allocation-") and s.ranks and not s.setting.endswith("uniform"):
                rows[f"{layer.name}, by {s.setting.removeprefix('allocation-')}"] = np.array(s.ranks)
    return rank_heatmap(rows, path) if rows else None
