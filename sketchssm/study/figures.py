"""Matplotlib without a display: colours, style, and figures as PNG or SVG by the suffix of the file."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from sketchssm.plans.files import write_whole

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
    "svg.hashsalt": "sketchssm",  # fixed names of clip paths and markers, so that files repeat to the byte
}


def load_pyplot() -> Any:
    """Import matplotlib's pyplot without a display; ModuleNotFoundError has the command that installs it."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'sketchssm-decode[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: str | os.PathLike[str]) -> Path:
    """Write a figure to a ``.png`` or ``.svg`` file, all or nothing, and close it.

    Missing folders are made. The same figure gives the same bytes.
    """
    from matplotlib import pyplot

    try:
        target = Path(path)
        if target.suffix not in (".png", ".svg"):
            raise ValueError(f"path: expected a name that ends in .png or .svg, got {target.name!r}")
        target.parent.mkdir(parents=True, exist_ok=True)
        whole, form = io.BytesIO(), target.suffix[1:]
        figure.savefig(whole, format=form, metadata={"Date": None} if form == "svg" else None)
        write_whole(target, whole.getvalue())
    finally:
        pyplot.close(figure)
    return target
