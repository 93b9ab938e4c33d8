"""Print the tables that docs/evaluation.md quotes from a report of evaluate_traces.py, as Markdown.

    python benchmarks/trace_tables.py benchmarks/results/evaluate-traces.json

The first table compares sketches of the map in use at 9x to 11x less traffic with the best quantised, pruned or
key-reduced state at 4x or more. The others: each read-only variant against the best sketches that move no more bytes
(in bfloat16 and in int8), ablations against the full method, and the growth of errors over tokens.
"""

import argparse
import json
from pathlib import Path

BAND = (9.0, 11.0)
LEAST = 4.0
RIVALS = ("quantised", "pruned", "key-reduced")
SAME = 1 - 1e-6
"""Traffic reductions in this ratio are equal up to rounding."""
CLOSE = 0.995
"""Traffic reductions in this ratio count as equal: ranks are whole numbers."""


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


def copies(layers):
    """Per read-only variant, the best sketches of each form with no more traffic, over that variant's error."""
    for layer in layers:
        forms = sketches(layer), families(layer, "narrow")
        for name, copy in families(layer, "read-only").items():
            row = [layer["name"], f"{name} {copy['reduction']:.1f}x"]
            for own in forms:
                enough = {n: s for n, s in own.items() if s["reduction"] >= CLOSE * copy["reduction"]}
                sketch, found = best(enough)
                row.append(f"{sketch} {found['output_error'] / copy['output_error']:.2f}" if found else "-")
            yield row


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
    copies: ("layer", "read-only variant", "sketch, its error over the variant's", "in int8"),
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
