"""``sketchssm calibrate``: plans from traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sketchssm.cli import options

__all__ = ["command"]


@click.command("calibrate")
@options.trace_files
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Plan file or, for several trace files, the folder of one plan each.",
)
@click.option(
    "--mean-rank",
    type=click.FloatRange(min=1),
    default=7.0,
    show_default=True,
    help="Budget: what all heads would read at this rank.",
)
@options.map_settings
@options.output
def command(
    traces: tuple[Path, ...], out: Path, mean_rank: float, method: str | None, json_file: str | None, **settings: Any
) -> None:
    """Make plans from TRACES, one npz file per layer.

    Bases are fitted on the first two thirds of the calibration sequences and ranks are scored on the rest. Several
    files share one budget: ranks go to the layers and heads that need them.
    """
    import numpy as np

    from sketchssm.cli.output import Output, percent
    from sketchssm.coefficients import CoefficientMap
    from sketchssm.evaluate import allocate
    from sketchssm.evaluate.settings import Settings
    from sketchssm.plan import SketchPlan
    from sketchssm.recurrence import DENSE
    from sketchssm.traces import Traces

    map = CoefficientMap(*(settings.pop(name) for name in ("map_name", "pivots", "ridge")))
    chosen = Settings(map=map, **settings)
    target = plan_paths(traces, out)
    output = Output(json_file)
    layers = []
    with output.progress("calibrating", len(traces)) as step:
        for path in traces:
            step(f"calibrating {path.name}")
            layers.append(chosen.calibrate(Traces.load(path)))
    allocation = allocate(layers, mean_rank, map=chosen.map, method=method)

    rows, report = [], []
    for layer, ranks, path in zip(layers, allocation.ranks, target, strict=True):
        plan = SketchPlan(layer.basis, ranks, chosen.window, chosen.map)
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)
        ideal = layer.scores.retained[range(plan.layer.heads), ranks]
        predicted = np.where(ranks == DENSE, 1.0, ideal).mean()
        reduction = plan.reduction
        rows.append([str(path), plan.layer.kind, ranks_text(ranks), f"{reduction:.2f}x", percent(predicted)])
        report.append(
            {
                "plan": str(path),
                "kind": plan.layer.kind,
                "ranks": ranks,
                "reduction": reduction,
                "retained_ideal": predicted,
            }
        )
    output.table(
        f"Plans at mean rank {mean_rank:g} ({chosen.map}, window {chosen.window}, allocation by {allocation.method})",
        ["plan", "kind", "ranks", "traffic", "retained (ideal map)"],
        rows,
        words=3,
    )
    output.say(
        f"All layers: {allocation.traffic.reduction:.2f}x less state traffic than standard decoding; no table within "
        f"the budget scores better by more than {percent(allocation.gap)}."
    )
    output.finish(
        {
            "plans": report,
            "reduction": allocation.traffic.reduction,
            "gap": allocation.gap,
            "method": allocation.method,
        }
    )


def plan_paths(traces: tuple[Path, ...], out: Path) -> list[Path]:
    """Where each trace file's plan goes: `out` itself for one file, a folder of plans for several."""
    if len(traces) == 1 and not out.is_dir():
        return [out]
    paths = [out / f"{path.stem}.safetensors" for path in traces]
    twice = {path.name for path in paths if sum(other == path for other in paths) > 1}
    if twice:
        raise click.UsageError(f"TRACES: expected files with different names, got {', '.join(sorted(twice))} twice")
    if out.is_file():
        raise click.UsageError(f"--out: expected a folder for {len(traces)} trace files, got the file {out}")
    return paths


def ranks_text(ranks: Any) -> str:
    """Ranks of a layer's heads, in short where there are many."""
    from sketchssm.recurrence import DENSE

    if len(ranks) <= 16:
        return " ".join("full" if rank == DENSE else str(rank) for rank in ranks)
    sketched = ranks[ranks != DENSE]
    span = f"{sketched.min()} to {sketched.max()}, mean {sketched.mean():.2f}" if sketched.size else "none"
    return f"{span}; {int((ranks == DENSE).sum())} full"
