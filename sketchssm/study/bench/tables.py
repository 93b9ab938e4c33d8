"""Tables of benchmark results: a table for each shape and window, with a rule between batches."""

from __future__ import annotations

from itertools import groupby

from sketchssm.study.bench.cases import Report
from sketchssm.study.bench.results import BenchResult
from sketchssm.study.tables import Table, ruled, scientific


def time_tables(report: Report) -> list[Table]:
    """Tables of the results of `time_cases`; the last one has a note."""
    standard = {(r.shape, r.window, r.batch): r.microseconds for r in report.results if r.system == "standard"}

    def row(r: BenchResult) -> list[str]:
        base = standard.get((r.shape, r.window, r.batch))
        speed = "-" if base is None else f"{base / r.microseconds:.2f}x"
        read = _time(r.read_microseconds, r.read_fraction)
        flush = _time(r.flush_microseconds, r.flush_fraction)
        cells = [r.system, f"{r.batch}", read, flush, _time(r.microseconds, r.fraction), f"{r.bytes / 1e6:.2f}"]
        return [*cells, f"{r.gigabytes_per_second:.1f}", speed, scientific(r.error), scientific(r.state_error)]

    note = (
        f"Floor: the bytes that a step must move at the copy's {report.copy_bandwidth / 1e9:.1f} GB/s. step: "
        "amortised over a window, with its MB and GB/s;\nspeed: standard's step over it. Errors are relative, of one "
        "row against the same system in float64."
    )
    columns = ["system", "batch", "read", "flush", "step", "MB", "GB/s", "speed", "error", "of states"]
    tables: list[Table] = []
    for (shape, window, backend), group in groupby(report.results, lambda r: (r.shape, r.window, r.backend)):
        title = f"{shape}, W = {window}, on {backend}: microseconds, and share of the floor"
        tables.append(Table(title, columns, ruled(group, lambda r: r.batch, row)))
    return [*tables[:-1], *(table._replace(note=note) for table in tables[-1:])]


def _time(microseconds: float, share: float) -> str:
    text = f"{microseconds:.1f}" if microseconds < 1000 else f"{microseconds:.0f}"
    return f"{text} {f'{100 * share:.0f}%':>4}"
