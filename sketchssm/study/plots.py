"""Pictures of evaluations, as PNG or SVG by the suffix of the file; they need matplotlib."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sketchssm.layer.recurrence import ROUNDING
from sketchssm.study.evaluate.evaluation import LayerResults
from sketchssm.study.evaluate.measure import Measurement
from sketchssm.study.evaluate.registry import FULL_METHOD
from sketchssm.study.figures import COLOURS, MARKERS, STYLE, load_pyplot, save

PICTURES = ("error-against-traffic", "drift-of-outputs", "drift-of-states")
"""Pictures of `draw`; the names of their files."""

GREY_MARKERS = "ovs*hp"

COLUMNS = 3
"""Panels side by side."""

BAND = (9.0, 11.0)
"""Traffic reductions at which the paper's sketches keep their accuracy."""

LEAST = 4.0
"""Pictures over tokens show each kind of compressed state at its setting with the next larger traffic reduction."""

BELOW = f"errors below {ROUNDING:.0e}, float32 rounding, are drawn on the dotted line"


def draw(layers: Sequence[LayerResults], folder: Path, suffix: str = ".png") -> dict[str, Path]:
    """Draw every picture of an evaluation that the results have data for, one panel per layer; files by picture."""
    makers: tuple[Callable[[Sequence[LayerResults], Path], Path | None], ...] = (
        _error_against_traffic,
        lambda shown, path: _over_tokens(shown, path, "output_error", "outputs"),
        lambda shown, path: _over_tokens(shown, path, "state_error", "states"),
    )
    made = [make(layers, path) for make, path in zip(makers, picture_files(folder, suffix), strict=True)]
    return {name: path for name, path in zip(PICTURES, made, strict=True) if path is not None}


def picture_files(folder: Path, suffix: str = ".png") -> list[Path]:
    """Files that `draw` may write: one for each of `PICTURES`."""
    return [folder / f"{name}{suffix}" for name in PICTURES]


def _error_against_traffic(layers: Sequence[LayerResults], path: Path) -> Path | None:
    """The accuracy figure of the paper, with output error instead of accuracy."""
    shown = [[s for s in layer.systems if s.family != "ablation"] for layer in layers]
    lossy = [[s for s in own if s.output_error < np.inf] for own in shown]
    if all(s.output_error <= ROUNDING for own in lossy for s in own):
        return None
    looks = _looks(layers)
    pyplot = load_pyplot()
    with pyplot.rc_context(STYLE):
        title = f"Output error against state traffic, held-out text\n({BELOW})"
        figure, panels = _panels(pyplot, [layer.name for layer in layers], title)
        for axes, own in zip(panels, lossy, strict=True):
            axes.axvspan(*BAND, color="#eeeeee", zorder=0)
            for name, look in looks.items():
                curve = sorted((s for s in own if series(s.name) == name), key=lambda s: s.reduction)
                if curve:
                    errors = np.maximum([s.output_error for s in curve], ROUNDING)
                    axes.plot([s.reduction for s in curve], errors, label=name, **look)
            axes.axhline(ROUNDING, color="black", linewidth=0.8, linestyle=":")
            axes.set(xscale="log", yscale="log")
        low, high = panels[0].get_xlim()
        for axes in panels:
            _plain_ticks(axes.xaxis, [t for t in (1, 2, 4, 8, 16, 32, 64) if low <= t <= high])
        return _finish(
            figure, panels, "times less state traffic (grey: 9 to 11)", "relative error of the outputs", path
        )


def _over_tokens(layers: Sequence[LayerResults], path: Path, field: str, what: str) -> Path | None:
    """Errors over tokens of one system per curve."""
    shown = [_representative(layer) for layer in layers]
    if max((len(s.drift["tokens"]) for own in shown for s in own), default=0) < 2:
        return None
    looks = _looks(layers)
    pyplot = load_pyplot()
    with pyplot.rc_context(STYLE):
        title = f"Error of the {what} over tokens\n({BELOW})"
        figure, panels = _panels(pyplot, [layer.name for layer in layers], title)
        for axes, layer, own in zip(panels, layers, shown, strict=True):
            for s in own:
                name = f"sketch/{layer.map}" if s.family == "ablation" else series(s.name)
                curve = np.clip(np.array(s.drift[field]), ROUNDING, 1e3)
                look = looks.get(name, {"color": COLOURS[0]}) | {"markersize": 3}
                axes.plot(s.drift["tokens"], curve, label=s.name, **look)
            axes.axhline(ROUNDING, color="black", linewidth=0.8, linestyle=":")
            axes.set_yscale("log")
        return _finish(figure, panels, "tokens since the start of the sequence", f"relative error of the {what}", path)


def series(name: str) -> str:
    """Name of a system's curve: its name without the number that varies, ``sketch/ridge`` for ``sketch/ridge-8``."""
    family, _, setting = name.partition("/")
    return f"{family}/{re.sub(r'(^|-)[0-9.]+(-bits?)?(?=-|$)', '', setting).strip('-')}"


def _curves(layer: LayerResults, *families: str) -> dict[str, list[Measurement]]:
    """Systems of some families by the curve that they belong to."""
    curves: dict[str, list[Measurement]] = {}
    for s in layer.systems:
        if s.family in families:
            curves.setdefault(series(s.name), []).append(s)
    return curves


def _representative(layer: LayerResults) -> list[Measurement]:
    """One system per curve for pictures over tokens: the full method, and of the others the one nearest above 4x."""
    base = layer.find(f"ablation/{FULL_METHOD}")
    chosen = [] if base is None else [base]
    others = {s.family: None for s in layer.systems if s.family not in ("ablation", "sketch", "exact")}
    for own in _curves(layer, *others).values():
        enough = [s for s in own if s.reduction >= LEAST * (1 - 1e-6)]
        chosen.append(min(enough or own, key=lambda s: abs(s.reduction - LEAST)))
    return chosen


def _look(i: int) -> dict[str, Any]:
    """Colour and marker of curve i: every pair of them before one repeats."""
    colour, marker = i % len(COLOURS), (i + i // len(COLOURS)) % len(MARKERS)
    return {"color": COLOURS[colour], "marker": MARKERS[marker], "markersize": 5}


def _looks(layers: Sequence[LayerResults]) -> dict[str, dict[str, Any]]:
    """Colour and style of each curve: the study's map first and thick, other sketches grey."""
    own = {f"sketch/{layer.map}" for layer in layers}
    drawn = [s.name for layer in layers for s in layer.systems if s.family != "ablation"]
    listed = sorted(dict.fromkeys(map(series, drawn)), key=lambda name: name not in own)
    grey = [name for name in listed if name.startswith("sketch/") and name not in own]
    looks: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(name for name in listed if name not in grey):
        looks[name] = _look(i) | {"linewidth": 2.4 if name in own else 1.3, "zorder": 4 if name in own else 3}
    for i, name in enumerate(grey):
        looks[name] = {"color": "#888888", "marker": GREY_MARKERS[i % len(GREY_MARKERS)], "markersize": 4}
        looks[name] |= {"linewidth": 0.8, "linestyle": "--", "fillstyle": "none"}
    return looks


def _panels(pyplot: Any, titles: Sequence[str], title: str) -> tuple[Any, list[Any]]:
    """A figure with one panel per title, all with the same axes."""
    columns = min(COLUMNS, len(titles))
    rows = -(-len(titles) // columns)
    shared: Any = {"sharex": True, "sharey": True, "squeeze": False, "layout": "constrained"}
    figure, grid = pyplot.subplots(rows, columns, figsize=(max(3.6 * columns, 6.5), 3.0 * rows + 0.8), **shared)
    figure.suptitle(title, fontsize=11)
    panels = list(grid.flat)
    for spare in panels[len(titles) :]:
        spare.set_visible(False)
    for axes, name in zip(panels, titles, strict=False):
        axes.set_title(name.replace("$", r"\$"), fontsize=10)  # a dollar sign of the user does not begin a formula
    return figure, panels[: len(titles)]


def _finish(figure: Any, panels: Sequence[Any], x: str, y: str, path: Path) -> Path:
    """Label the axes, add one legend below all panels, for which the figure grows, and write the file."""
    columns = min(COLUMNS, len(panels))
    for axes in panels[-columns:]:  # above an empty place, too
        axes.set_xlabel(x)
        axes.tick_params(labelbottom=True)
    for axes in panels[::columns]:
        axes.set_ylabel(y)
    seen: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            seen.setdefault(label, handle)
    if seen:
        width, height = figure.get_size_inches()
        columns = max(1, int(width / (0.063 * max(map(len, seen)) + 0.5)))  # inches of a letter, and of a marker
        figure.set_size_inches(width, height + 0.2 * -(-len(seen) // columns))
        figure.legend(list(seen.values()), list(seen), loc="outside lower center", fontsize=9, ncols=columns)
    return save(figure, path)


def _plain_ticks(axis: Any, ticks: Sequence[int]) -> None:
    """Label a logarithmic axis with the numbers themselves."""
    from matplotlib.ticker import NullLocator

    axis.set_ticks(list(ticks), labels=[str(tick) for tick in ticks])
    axis.set_minor_locator(NullLocator())
