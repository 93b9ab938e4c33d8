"""Evaluate every system on trace files and keep the table: the results of `sketchssm evaluate` without those per head.

    python benchmarks/evaluate_traces.py traces/*.npz

The table goes to --json, by default benchmarks/results/evaluate-traces.json. Other options are those of
`sketchssm evaluate`:

    python benchmarks/evaluate_traces.py traces/*.npz sketchssm/calibrate/data/*.npz --window 32 \\
        --ranks 10,12,14,16,18 --json benchmarks/results/evaluate-traces-w32.json
"""

import argparse
import json
from pathlib import Path

from reports import about, write

from sketchssm.cli import main as sketchssm

HERE = Path(__file__).parent
KEPT = ("reduction", "output_error", "state_error", "retained", "objective")


def short(curve):
    """A curve with three significant digits."""
    return [None if x is None else float(f"{x:.3g}") for x in curve]


def table(results):
    """Results of each layer, one row per system: errors, and errors over tokens. Results per head are left out."""
    layers = []
    for layer in results["layers"]:
        facts = {name: value for name, value in layer.items() if name != "systems"}
        systems = {
            f"{s['family']}/{s['setting']}": {name: s[name] for name in KEPT if s[name] is not None}
            | {f"{name}_over_tokens": short(s["drift"][name]) for name in ("output_error", "state_error")}
            for s in layer["systems"]
        }
        layers.append(facts | {"points": layer["systems"][0]["drift"]["tokens"], "systems": systems})
    return {"version": results["version"], "settings": results["settings"], "layers": layers}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, default=HERE / "results" / "evaluate-traces.json")
    arguments, options = parser.parse_known_args()
    sketchssm(
        ["evaluate", *map(str, arguments.traces), *options, "--json", str(arguments.json)], standalone_mode=False
    )
    made = about("CPU", arguments=[*(path.name for path in arguments.traces), *options])
    numbers = r"\[[^][{}]+\]"
    write(made | table(json.loads(arguments.json.read_text())), arguments.json, numbers)


if __name__ == "__main__":
    main()
