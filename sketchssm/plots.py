"""Pictures of calibrations and comparisons, as PNG or SVG by the file's suffix; they need matplotlib."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.bench.results import BenchResult
from sketchssm.calibrate.basis import SketchBasis
from sketchssm.evaluate.energy import MapEnergy
from sketchssm.evaluate.systems import SystemResult
from sketchssm.recurrence import DENSE, ROUNDING

__all__ = ["error_against_traffic", "rank_heatmap", "spectrum", "step_times"]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette: told apart with any colour vision."""

MARKERS = "osD^vPX"

STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "font.size": 10,
    "legend.frameon": False,
    "figure.dpi": 130,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "sketchssm",  # names of clip paths and markers, drawn at random otherwise
}


def spectrum(basis: SketchBasis, energies: Sequence[MapEnergy], path: str | os.PathLike[str], title: str = "") -> Path:
    """Draw a basis's spectrum beside what each map retains, with quartiles over heads.

    Parameters
    ----------
    basis : SketchBasis
        Calibrated basis.
    energies : sequence of MapEnergy
        Retained energies on held-out windows, from `retained_energy`.
    path : str or PathLike
        Where to, a name that ends in ``.png`` or ``.svg``.
    title : str, optional
        Name of the layer.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ModuleNotFoundError
        If matplotlib is missing.
    ValueError
        If the suffix is neither.
    """
    pyplot = load_pyplot()
    with pyplot.rc_context(STYLE):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
        total = basis.spectrum.sum(axis=-1, keepdims=True)
        share = basis.spectrum / np.where(total > 0, total, 1.0)
        index = np.arange(1, share.shape[-1] + 1)
        low, middle, high = np.quantile(np.maximum(share, 1e-12), (0.25, 0.5, 0.75), axis=0)
        left.fill_between(index, low, high, color=COLOURS[0], alpha=0.25, linewidth=0, label="quartiles over heads")
        left.plot(index, middle, color=COLOURS[0], label="median head")
        left.set(
            xscale="log",
            yscale="log",
            xlabel="direction (of K)",
            ylabel="share of query energy",
            title="Spectrum of state-weighted queries",
        )
        left.set_ylim(bottom=max(middle[middle > 1e-11].min(initial=1.0) / 3, 1e-9))
        left.legend(loc="lower left")
        plain_ticks(left.xaxis, [t for t in (1, 2, 4, 8, 16, 32, 64, 128, 256) if t <= share.shape[-1]])

        offsets = np.geomspace(0.94, 1.06, len(energies)) if len(energies) > 1 else [1.0]
        for i, (energy, offset) in enumerate(zip(energies, offsets, strict=True)):
            lost = np.maximum(1 - energy.retained, 1e-9)
            low, middle, high = np.quantile(lost, (0.25, 0.5, 0.75), axis=0)
            ranks = np.array(energy.ranks) * offset  # side by side, so that bars don't hide each other
            name = energy.map.name if energy.basis == "calibrated" else f"{energy.basis} basis, {energy.map.name}"
            right.errorbar(
                ranks, middle, yerr=(middle - low, high - middle), color=COLOURS[i % len(COLOURS)],
                marker=MARKERS[i % len(MARKERS)], markersize=5, capsize=2, linewidth=1.4, elinewidth=0.9,
                linestyle="-" if energy.basis == "calibrated" else "--", label=name,
            )  # fmt: skip
        right.set(
            xscale="log",
            yscale="log",
            xlabel="rank G",
            ylabel="lost share of output energy",
            title="State reads on held-out text",
        )
        plain_ticks(right.xaxis, energies[0].ranks)
        right.legend(title="map (median head, quartiles)", fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        if title:
            figure.suptitle(title)
        return save(figure, path)


def rank_heatmap(ranks: Mapping[str, npt.NDArray[Any]], path: str | os.PathLike[str]) -> Path:
    """Draw which head got which rank: one row per layer or allocation.

    Parameters
    ----------
    ranks : mapping of str to ndarray
        Ranks ``(heads,)`` by the row's name; `DENSE` is drawn apart.
    path : str or PathLike
        Where to, a name that ends in ``.png`` or ``.svg``.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ModuleNotFoundError
        If matplotlib is missing.
    ValueError
        If the suffix is neither, or there are no rows.
    """
    if not ranks:
        raise ValueError("ranks: expected at least one row, got none")
    pyplot = load_pyplot()
    heads = max(row.size for row in ranks.values())
    top = max(2, *(int(row.max(initial=1)) for row in ranks.values()))
    full = top + 1
    table = np.full((len(ranks), heads), np.nan)
    for i, row in enumerate(ranks.values()):
        table[i, : row.size] = np.where(row == DENSE, full, row)
    with pyplot.rc_context(STYLE | {"axes.grid": False}):
        size = (min(2.6 + 0.42 * heads, 14), min(1.6 + 0.34 * len(ranks), 14))
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        colours = pyplot.get_cmap("cividis").with_extremes(bad="white", over=COLOURS[1])
        image = axes.imshow(table, cmap=colours, norm="log", aspect="auto", interpolation="nearest")
        image.set_clim(1, top)
        axes.set_xlabel("head")
        axes.set_yticks(range(len(ranks)), list(ranks))
        axes.set_xticks(np.arange(0, heads, max(1, heads // 16)))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        if heads <= 32 and len(ranks) <= 40:
            for i, j in zip(*np.nonzero(~np.isnan(table)), strict=True):
                text = "full" if table[i, j] == full else f"{table[i, j]:.0f}"
                colour = "black" if table[i, j] ** 2 > top else "white"  # by which half of the scale it is in
                axes.text(j, i, text, ha="center", va="center", fontsize=8 if heads <= 16 else 6, color=colour)
        dense = bool((table == full).any())
        bar = figure.colorbar(image, ax=axes, extend="max" if dense else "neither", label="rank G")
        plain_ticks(bar.ax.yaxis, [t for t in (1, 2, 3, 5, 10, 20, 30, 50, 100) if t <= top])
        if dense:
            bar.ax.set_title("full", fontsize=8)
        return save(figure, path)


def error_against_traffic(results: Mapping[str, Sequence[SystemResult]], path: str | os.PathLike[str]) -> Path:
    """Draw the systems' output errors against their traffic reductions.

    Parameters
    ----------
    results : mapping of str to sequence of SystemResult
        Results of `compare` by the layer's name.
    path : str or PathLike
        Where to, a name that ends in ``.png`` or ``.svg``.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ModuleNotFoundError
        If matplotlib is missing.
    ValueError
        If the suffix is neither.
    """
    pyplot = load_pyplot()
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(7.2, 4.6), layout="constrained")
        for i, (layer, systems) in enumerate(results.items()):
            look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
            exact = [s for s in systems if s.output_error <= ROUNDING]
            lossy = sorted((s for s in systems if s.output_error > ROUNDING), key=lambda s: s.reduction)
            axes.plot(
                [s.reduction for s in lossy], [100 * s.output_error for s in lossy], markersize=13, label=layer, **look
            )
            axes.plot(
                [s.reduction for s in exact],
                [0.0] * len(exact),
                linestyle="none",
                fillstyle="none",
                markersize=9,
                clip_on=False,
                **look,
            )
            for s in lossy:
                axes.annotate(
                    s.name.rpartition(" ")[2], (s.reduction, 100 * s.output_error), color="white", fontsize=7,
                    fontweight="bold", ha="center", va="center",
                )  # fmt: skip
        for s in (s for systems in list(results.values())[:1] for s in systems if s.output_error <= ROUNDING):
            axes.annotate(
                s.name, (s.reduction, 0), xytext=(0, 10), textcoords="offset points", fontsize=9, rotation=45
            )
        axes.set(
            xlabel="state traffic, times less than standard decoding",
            ylabel="relative output error on held-out text (%)",
            xlim=(0, None),
            ylim=(0, None),
        )
        axes.margins(0.06)
        axes.legend(title="sketch by mean rank\n(hollow: exact systems)", loc="upper left", markerscale=0.6)
        return save(figure, path)


def step_times(results: Sequence[BenchResult], path: str | os.PathLike[str]) -> Path:
    """Draw what a step takes, amortised over a window, against the batch: one panel a shape and window.

    Parameters
    ----------
    results : sequence of BenchResult
        Results of a benchmark.
    path : str or PathLike
        Where to, a name that ends in ``.png`` or ``.svg``.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ModuleNotFoundError
        If matplotlib is missing.
    ValueError
        If the suffix is neither, or there are no results.
    """
    if not results:
        raise ValueError("results: expected at least one, got none")
    pyplot = load_pyplot()
    panels = list(dict.fromkeys((r.shape, r.window) for r in results))
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    with pyplot.rc_context(STYLE):
        size = (4.6 * columns, 3.7 * rows)
        figure, grid = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
        for axes, (shape, window) in zip(grid.flat, panels, strict=False):
            mine = [r for r in results if (r.shape, r.window) == (shape, window)]
            for i, system in enumerate(dict.fromkeys(r.system for r in mine)):
                own = sorted((r for r in mine if r.system == system), key=lambda r: r.batch)
                axes.plot(
                    [r.batch for r in own],
                    [r.microseconds for r in own],
                    color=COLOURS[i % len(COLOURS)],
                    marker=MARKERS[i % len(MARKERS)],
                    label=system,
                )
            axes.set(xscale="log", yscale="log", xlabel="batch", ylabel="step, microseconds")
            axes.set_title(f"{shape}, W = {window}")
            plain_ticks(axes.xaxis, sorted({r.batch for r in mine}))
            axes.legend(fontsize=8)
        for axes in list(grid.flat)[len(panels) :]:
            axes.remove()
        return save(figure, path)


def plain_ticks(axis: Any, ticks: Sequence[int]) -> None:
    """Label a logarithmic axis with the numbers themselves."""
    from matplotlib.ticker import NullLocator

    axis.set_ticks(list(ticks), labels=[str(tick) for tick in ticks])
    axis.set_minor_locator(NullLocator())


def load_pyplot() -> Any:
    """Import matplotlib's pyplot without a display, or say what to install."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'sketchssm[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: str | os.PathLike[str]) -> Path:
    """Write a figure and close it; the same figure gives the same bytes."""
    from matplotlib import pyplot

    target = Path(path)
    try:
        if target.suffix not in (".png", ".svg"):
            raise ValueError(f"path: expected a name that ends in .png or .svg, got {target.name!r}")
        figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    finally:
        pyplot.close(figure)
    return target
