"""The picture of a comparison: perplexity and recall of systems against their traffic.

    python examples/lm/figure.py lm-gdn.json lm-gdn-read-only.json "lm-gdn-uniform.json:uniform ranks" --out lm.svg
    python examples/lm/figure.py lm-gdn-copies.json --upper divergence --out lm-copies.svg

Files of one model share a column. The text after a file's colon is a note; lines of files with notes are dashed or
dotted.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from sketchssm.study.figures import COLOURS, MARKERS, STYLE, load_pyplot, save

UPPER = ("perplexity", "divergence")
"""Measures of the upper row: increase of perplexity, or divergence of the next token's distribution."""

FLOOR = 1e-3
"""Increases of perplexity are drawn on a logarithmic scale above this value, on a linear scale below."""

ALIKE = {"key-reduced": "pruned"}
"""Families that share a colour, because no kind has both."""

EXACT = "#777777"
"""Colour of exact systems."""

DASHES = ("-", "--", ":")
"""Line styles: without a note, and of successive notes."""


@dataclass(frozen=True)
class Comparison:
    """The results of one model.

    Attributes
    ----------
    model : str
        Name of the model.
    results : list of Result
        Results of the systems; each family is one line. The first is standard decode.
    without : float
        Recall with the states wiped.
    """

    model: str
    results: list
    without: float


def draw(comparisons, path, upper_row="perplexity"):
    """Draw comparisons side by side into a PNG or SVG file, with one of the measures `UPPER` in the upper row."""
    pyplot, diverges = load_pyplot(), upper_row == "divergence"
    families = list(dict.fromkeys(x.family for each in comparisons for x in each.results))
    if diverges:  # exact systems diverge by rounding alone
        families.remove("exact")
    plain = [family.partition(":")[0] for family in families]
    notes = list(dict.fromkeys(["", *(family.partition(":")[2] for family in families)]))
    colours = list(dict.fromkeys(ALIKE.get(family, family) for family in plain if family != "exact"))
    most = max(x.reduction for each in comparisons for x in each.results)
    with pyplot.rc_context(STYLE):
        size = 3.2 * len(comparisons) + 1.2, 7.4
        figure, grid = pyplot.subplots(2, len(comparisons), figsize=size, squeeze=False, sharex=True, sharey="row")
        for comparison, (upper, lower) in zip(comparisons, grid.T, strict=True):
            for family, base in zip(families, plain, strict=True):
                members = sorted((x for x in comparison.results if x.family == family), key=lambda x: x.reduction)
                traffic = [x.reduction for x in members]
                exact = base == "exact"
                look = {
                    "color": EXACT if exact else COLOURS[colours.index(ALIKE.get(base, base)) % len(COLOURS)],
                    "marker": MARKERS[list(dict.fromkeys(plain)).index(base) % len(MARKERS)],
                    "linestyle": DASHES[notes.index(family.partition(":")[2]) % len(DASHES)],
                    "fillstyle": "full" if family == base else "none",
                    "markersize": 5,
                    "linewidth": 1.2,
                    "label": family.replace(":", ", "),
                }
                if diverges:
                    more, errors = [x.divergence for x in members], [x.divergence_error for x in members]
                else:
                    more = [x.perplexity - comparison.results[0].perplexity for x in members]
                    errors = [x.perplexity * x.increase_error for x in members]
                upper.errorbar(traffic, more, errors, **look)
                lower.plot(traffic, [100 * x.recall for x in members], **look)
            if diverges:
                upper.set_yscale("log")
            else:
                upper.set_yscale("symlog", linthresh=FLOOR)
            upper.set(title=comparison.model)
            lower.axhline(100 * comparison.without, color="#777777", linewidth=0.8, label="states wiped after prefill")
            lower.set(xlabel="traffic, times less than standard", xlim=(0, 1.04 * most), ylim=(-3, 103))
        if diverges:
            grid[0, 0].set_ylabel("divergence from standard decode (nats)")
        else:
            grid[0, 0].set(ylabel="perplexity above standard decode", ylim=(-2 * FLOOR, None))  # shared by all panels
        grid[1, 0].set_ylabel("needles recalled (%)")
        handles, labels = grid[1, 0].get_legend_handles_labels()
        columns = max(1, len(comparisons))
        below = (0.19 * -(-len(labels) // columns) + 0.2) / size[1]
        figure.tight_layout(rect=(0, below, 1, 1))
        figure.legend(handles, labels, loc="lower center", ncols=columns, fontsize=9)
        return save(figure, path)


def load(names):
    """Read result files, each with an optional note after a colon, into one comparison per model."""
    found = {}
    for name in names:
        file, _, note = str(name).partition(":")
        report = json.loads(Path(file).read_text())
        model = report.get("model") or report["kind"]  # older files have only the kind
        kept = found.setdefault(model, Comparison(model, [], report["recall_without_states"]))
        for system in (SimpleNamespace(**fields) for fields in report["systems"]):
            if note:
                system.family += f":{note}"
            twin = any((x.family, x.name) == (system.family, system.name) for x in kept.results)
            if not twin and not system.family.startswith("exact:"):
                kept.results.append(system)
    return list(found.values())


def main(given=None):
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="files of evaluate.py, each with an optional note after a colon")
    parser.add_argument("--upper", choices=UPPER, default=UPPER[0], help="measure of the upper row")
    parser.add_argument("--out", type=Path, required=True, help="a name that ends in .png or .svg")
    options = parser.parse_args(given)
    print(f"written: {draw(load(options.files), options.out, options.upper)}")


if __name__ == "__main__":
    sys.exit(main())
