"""Errors of sketches with a flush every 16, 32, 64 and 128 tokens, refreshed between flushes, on recorded traces.

    python benchmarks/refreshes.py traces/*.npz --json benchmarks/results/refreshes.json

Each file is calibrated on its calibration sequences; the errors are those of its test sequences in float64: squared
error of all outputs over their energy, mean over heads, at uniform ranks and window 16.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

import sketchssm as ss
from sketchssm.calibrate.plans import calibrate
from sketchssm.calibrate.refreshes import refresh_errors

EVERY = (16, 32, 64, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--maps", nargs="+", default=["ridge", "lowrank", "prior", "offline"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--sketch-dtype", default="float32", help="float32 and bfloat16 are not rounded here")
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args()
    rows = []
    print(f"{'trace':16}{'map':9}{'rank':>5}  " + "".join(f"{every:>9}" for every in EVERY))
    for path in args.traces:
        traces = ss.Traces.load(path)
        basis = calibrate(traces).basis
        for name in args.maps:
            for rank in args.ranks:
                errors = []
                for every in EVERY:
                    ranks = [rank] * traces.layer.heads
                    plan = ss.SketchPlan(basis, ranks, 16, name, args.sketch_dtype, flush_every=every)
                    measured = refresh_errors(plan, *traces.test)
                    errors.append(float(np.square(measured.head_refreshed).mean()))
                found = dict(zip(EVERY, errors, strict=True))
                rows.append({"trace": path.stem, "map": name, "rank": rank, "errors": found})
                print(f"{path.stem:16}{name:9}{rank:5}  " + "".join(f"{error:9.5f}" for error in errors), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"sketch_dtype": args.sketch_dtype, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
