"""Print the tables that docs/evaluation.md quotes from a report of evaluate_traces.py, as Markdown.

    python benchmarks/trace_tables.py benchmarks/results/evaluate-traces.json

The first table compares sketches of the map in use at 9x to 11x less traffic with the best quantised, pruned or
key-reduced state at 4x or more. The others: ablations against the full method, and the growth of errors over tokens.
"""

import argparse
import json
from pathlib import Path

BAND = (9.0, 11.0)
LEAST = 4.0
RIVALS = ("quantised", "pruned", "key-reduced")
SAME = 1 - 1e-6
"""Traffic reductions in this ratio are equal up to rounding."""


def families(layer, *names):
    """Systems of some families by name."""
    return {name: s for name, s in layer["systems"].items() if name.partition("/")[0] in names}


def sketches(layer):
    """Sketches of the map in use."""
    map_name = layer["map"].partition("(")[0]
    return {name: s for name, s in families(layer, "sketch").items() if name.startswith(f"sketch/{map_name}-")}


def best(systems):
    """Name and results of the system with the smallest output error."""
    return min(systems.items(), key=lambda item: item[1]["output_error"], default=(None, None))


def growth(curve):
    """Mean of the last quarter of a curve over that of the first."""
    quarter = max(len(curve) // 4, 1)
    return sum(curve[-quarter:]) / sum(curve[:quarter])


def headline(layers):
    """Worst and best sketch in the band, and the error of the best compressed state over their errors."""
    for layer in layers:
        band = [s["output_error"] for s in sketches(layer).values() if BAND[0] <= s["reduction"] <= BAND[1]]
        compressed = families(layer, *RIVALS)
        name, rival = best({n: s for n, s in compressed.items() if s["reduction"] >= LEAST * SAME})
        if band and rival:
            less = [f"{rival['output_error'] / error:.2g}" for error in (max(band), min(band))]
            yield [
                layer["name"], f"{max(band):.1e} to {min(band):.1e}",
                f"{name} {rival['output_error']:.1e} at {rival['reduction']:.2f}x", " to ".join(less),
                f"{max(float('inf') if life is None else life for life in layer['half_life']):.0f}",
            ]  # fmt: skip


def ablations(layers):
    """Smallest and largest output error of each ablation over the full method's, over all layers."""
    ratios = {}
    for layer in layers:
        full = layer["systems"].get("ablation/full-method")
        for name, s in families(layer, "ablation").items() if full else ():
            ratios.setdefault(name, []).append(s["output_error"] / full["output_error"])
    for name, found in ratios.items():
        yield [name, f"{min(found):.2f} to {max(found):.2f}"]


def growths(layers):
    """Growth of the errors of outputs and states over tokens, smallest and largest of each family."""
    for layer in layers:
        for family in (*RIVALS, "sketch"):
            own = sketches(layer) if family == "sketch" else families(layer, family)
            for what in ("output_error", "state_error"):
                grown = [growth(s[f"{what}_over_tokens"]) for s in own.values() if s[what] > 1e-6]
                if grown:
                    yield [layer["name"], family, what, f"{min(grown):.2f} to {max(grown):.2f}"]


TABLES = {
    headline: ("layer", "sketch, worst to best in the band", "best compressed state", "its error / sketch's",
               "longest half-life"),
    ablations: ("ablation", "output error over the full method's"),
    growths: ("layer", "family", "error of", "last quarter over first"),
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    layers = json.loads(parser.parse_args().report.read_text())["layers"]
    for table, columns in TABLES.items():
        print("", *(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *table(layers))), sep="\n")


if __name__ == "__main__":
    main()
