"""Tables of benchmark results: a table for each shape and window, with a rule between batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeVar

from sketchssm.study.bench.arrivals import ArrivalsReport, ArrivalsResult
from sketchssm.study.bench.cases import Report
from sketchssm.study.bench.results import BenchResult
from sketchssm.study.tables import Table, ruled, scientific

Result = TypeVar("Result", BenchResult, ArrivalsResult)


def time_tables(report: Report) -> list[Table]:
    """Tables of the results of `time_cases`; the last one has a note."""

    def row(r: BenchResult) -> list[str]:
        read = _time(r.read_microseconds, r.read_fraction)
        flush = _time(r.flush_microseconds, r.flush_fraction)
        step = _time(r.microseconds, r.fraction)
        return [r.system, f"{r.batch}", read, flush, step, f"{r.bytes / 1e6:.2f}", f"{r.gigabytes_per_second:.1f}"]

    note = (
        f"Floor: the bytes that a step must move at the copy's {report.copy_bandwidth / 1e9:.1f} GB/s. step: "
        "amortised over a window, with its MB and GB/s;\nspeed: standard's step over it. Errors are relative, of one "
        "row against the same system in float64."
    )
    columns = ["system", "batch", "read", "flush", "step", "MB", "GB/s"]
    return _tables(report.results, "microseconds, and share of the floor", columns, row, note)


def arrival_tables(report: ArrivalsReport) -> list[Table]:
    """Tables of the results of `time_arrivals`; the last one has a note."""

    def row(r: ArrivalsResult) -> list[str]:
        relative = "-" if r.system == "standard" else f"{r.over_lockstep:.3f}"
        return [r.system, r.mode, f"{r.batch}", f"{r.microseconds:.1f}", relative, f"{r.slowest:.2f}"]

    note = (
        f"Requests have {report.mean_tokens:g} tokens on average. step: mean over layers and steps; of lockstep: over "
        "the same sketch's\nstep in lockstep; slowest: the slowest step of all layers over their mean; speed: "
        "standard's step over it.\nErrors are relative, of one row against the same system and requests in float64."
    )
    columns = ["system", "rows", "batch", "step", "of lockstep", "slowest"]
    what = f"microseconds of a layer's step, {report.layers} layers"
    return _tables(report.results, what, columns, row, note, words=2)


def _tables(
    results: Sequence[Result],
    what: str,
    columns: list[str],
    row: Callable[[Result], list[str]],
    note: str,
    words: int = 1,
) -> list[Table]:
    """Tables of some columns, of the speed relative to standard decode of the same batch, and of the errors."""
    standard = {(r.shape, r.window, r.batch): r.microseconds for r in results if r.system == "standard"}

    def cells(r: Result) -> list[str]:
        base = standard.get((r.shape, r.window, r.batch))
        speed = "-" if base is None else f"{base / r.microseconds:.2f}x"
        return [*row(r), speed, scientific(r.error), scientific(r.state_error)]

    tables: list[Table] = []
    for (shape, window, backend), group in groupby(results, lambda r: (r.shape, r.window, r.backend)):
        title = f"{shape}, W = {window}, on {backend}: {what}"
        rows = ruled(group, lambda r: r.batch, cells)
        tables.append(Table(title, [*columns, "speed", "error", "of states"], rows, words=words))
    return [*tables[:-1], *(table._replace(note=note) for table in tables[-1:])]


def _time(microseconds: float, share: float) -> str:
    text = f"{microseconds:.1f}" if microseconds < 1000 else f"{microseconds:.0f}"
    return f"{text} {f'{100 * share:.0f}%':>4}"
