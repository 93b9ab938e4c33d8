"""Compare read-only copies with a lower bound on the loss of sketches at the same traffic.

    python benchmarks/sketch_bounds.py traces/gdn-layer5.npz

Least-squares coefficients for every token replace the map: no map reads more from a sketch. With these coefficients,
ranks are allocated by the loss on the test sequences themselves. The lower bound of this allocation holds for every
rank table within the bytes (`sketchssm.calibrate.allocate_ranks`). If a copy loses less than the bound, the basis is
the reason, not the map or the ranks. The bound for a basis fitted to the test sequences shows the possible gain of
another basis. All losses are shares of the energy of the heads' state reads.
"""

import argparse
from pathlib import Path

import numpy as np

from sketchssm import Moments, RankScores, allocate_ranks, fit_basis
from sketchssm.calibrate.plans import Settings
from sketchssm.calibrate.traces import Traces
from sketchssm.plans import traffic
from sketchssm.study.evaluate import Study, entries, measure

CLOSE = 0.995
"""Traffic reductions in this ratio count as equal: ranks are whole numbers."""


def scored(study, basis):
    """Loss of the test sequences at every rank of a basis."""
    scores = RankScores(basis, study.settings.window)
    scores.update(*study.traces.test)
    return scores


def mean_rank_at(study, reduction, rank_max):
    """Mean rank whose sketches have a traffic reduction; None if that takes more than all columns."""
    layer, ranks = study.traces.layer, np.arange(1, rank_max + 1)
    used = traffic.sketch(layer.kind, layer.key_dim, layer.value_dim, ranks, study.settings.window, study.settings.map)
    given = traffic.standard(layer.key_dim, layer.value_dim) / (CLOSE * reduction)
    return float(np.interp(given, used, ranks)) if used[0] <= given <= used[-1] else None


def bounds(study, reduction):
    """Lower bounds at a traffic reduction, for the calibrated and the test basis, and the loss of the best table."""
    moments = Moments(study.traces.layer, window=study.settings.window)
    moments.update(*study.traces.test)
    calibrated, hindsight = (scored(study, basis) for basis in (study.calibrated().basis, fit_basis(moments)))
    mean_rank = mean_rank_at(study, reduction, calibrated.rank_max)
    if mean_rank is None:
        return None
    whole = float(calibrated.objective("error")[:, 0].sum()) or 1.0
    ours, theirs = (allocate_ranks(x, mean_rank, "error", map=study.settings.map) for x in (calibrated, hindsight))
    return {"bound": max(ours.bound, 0) / whole, "found": ours.objective / whole, "test": max(theirs.bound, 0) / whole}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--window", type=int, default=16)
    arguments = parser.parse_args()
    print("| layer | copy | lost | bound | best ranks in hindsight | bound, basis of the test text |")
    print("|---|---|---|---|---|---|")
    for path in arguments.traces:
        study = Study(Traces.load(path), Settings(arguments.window))
        for entry in entries(study, ["read-only"]):
            found = measure(entry, study)
            share, reduction = 1 - found.retained, found.reduction
            if limits := bounds(study, reduction):
                shares = (share, limits["bound"], limits["found"], limits["test"])
                print(
                    f"| {study.traces.name} | {entry.setting} | {' | '.join(f'{x:.3%}' for x in shares)} |", flush=True
                )


if __name__ == "__main__":
    main()
