"""``sketchssm bench --arrivals``: steps while requests arrive and leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sketchssm.bench import ArrivalsReport, ArrivalsResult, Case
    from sketchssm.cli.output import Output

__all__ = ["time_and_show"]


def time_and_show(cases: Sequence[Case], backend: str, output: Output, **settings: Any) -> ArrivalsReport:
    """Time cases by `sketchssm.bench.time_arrivals` and print tables."""
    from sketchssm import bench

    with output.progress("timing", len(cases) + (backend == "cuda")) as step:
        report = bench.time_arrivals(cases, backend, progress=step, **settings)
    headings = ["system", "rows", "batch", "step", "of lockstep", "slowest", "speed", "error", "of states"]
    for (shape, window), group in groupby(report.results, lambda r: (r.shape, r.window)):
        mine = list(group)
        title = f"{shape}, W = {window}, {report.layers} layers, on {mine[0].backend}: microseconds of a layer's step"
        output.table(title, headings, _rows(mine), words=2)
    output.say(
        f"Requests have {report.mean_tokens:g} tokens on average. step: mean over layers and steps; of lockstep: over "
        "the same sketch's\nstep in lockstep; slowest: the slowest step of all layers over their mean; speed: "
        "standard's step over it.\nErrors are relative, of one row against the same system and requests in float64."
    )
    for message in report.not_timed:
        output.say(message)
    return report


def _rows(results: Sequence[ArrivalsResult]) -> Iterator[list[str]]:
    from sketchssm.cli.output import scientific

    for i, (_, group) in enumerate(groupby(results, lambda r: r.batch)):
        if i:
            yield []
        mine = list(group)
        standard = next((r.microseconds for r in mine if r.system == "standard"), None)
        for r in mine:
            yield [
                r.system, r.mode, f"{r.batch}", f"{r.microseconds:.1f}",
                "-" if r.system == "standard" else f"{r.over_lockstep:.3f}",
                f"{r.slowest:.2f}",
                "-" if standard is None else f"{standard / r.microseconds:.2f}x",
                scientific(r.error), scientific(r.state_error),
            ]  # fmt: skip
