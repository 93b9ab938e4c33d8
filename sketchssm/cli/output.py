"""Output of commands: tables for people, JSON for machines, and plan files."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from sketchssm.plans.files import write_whole

if TYPE_CHECKING:
    from sketchssm.plans.model_plans import ModelPlans
    from sketchssm.plans.plan import SketchPlan

QUIET = 30.0
"""Seconds without a sign after which a step writes a line, where no bar is shown."""


class Output:
    """Output of a command; with JSON for standard output ("-"), tables and progress go to standard error."""

    def __init__(self, json_file: str | None) -> None:
        self._json_file = json_file
        self.console = _console(stderr=json_file == "-")
        if not self.console.is_terminal:
            self.console.width = max(self.console.width, 120)  # a file or a pipe has no width to respect

    def say(self, text: str = "") -> None:
        """Print a line of text."""
        self.console.print(text)

    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "", words: int = 1
    ) -> None:
        """Print the fields of a `sketchssm.study.tables.Table`, unless it has no rows."""
        if not rows:
            return
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=any(columns))
        for i, column in enumerate(columns):
            table.add_column(column, justify="left" if i < words else "right", overflow="fold")
        for row in rows:
            if row:
                table.add_row(*row)
            else:
                table.add_section()
        self.console.print(f"\n{title}", style="bold")
        self.console.print(table)
        if note:
            self.say(note)

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Step]:
        """Show a progress bar on standard error while the block runs or, without a terminal, a line now and then."""
        console = _console(stderr=True)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
        )
        how: Any = {"transient": True, "disable": not console.is_terminal, "speed_estimate_period": math.inf}
        with Progress(*columns, console=console, **how) as progress:
            yield Step(progress, progress.add_task(label, total=total))

    def finish(self, results: dict[str, Any]) -> None:
        """Write the results as JSON if the command was given a file; missing folders are made."""
        if self._json_file is None:
            return
        text = json.dumps(plain(results), indent=1, allow_nan=False)
        if self._json_file == "-":
            print(text)
        else:
            path = Path(self._json_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, f"{text}\n".encode())


def _console(stderr: bool) -> Console:
    """A console that prints text as it is: names and paths of the user may look like markup or an emoji code.

    Characters that the encoding of the stream lacks are escaped, so that no table ends a command.
    """
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


class Step:
    """A progress bar of the current step, or lines in its place."""

    def __init__(self, progress: Progress, task: Any) -> None:
        self._progress, self._task = progress, task
        self._started, self._told = False, time.monotonic()

    def __call__(self, label: str) -> None:
        """Finish the step before and begin the one with this label."""
        self._progress.update(self._task, description=label, advance=1 if self._started else 0)
        self._started = True
        if self._progress.disable and time.monotonic() - self._told > QUIET:
            task = self._progress.tasks[0]
            self._progress.console.print(f"{label} ({task.completed} of {task.total} steps done)")
            self._told = time.monotonic()


def plain(value: Any) -> Any:
    """Convert results to values that JSON can hold: arrays to lists, numbers that are not finite to null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def plan_paths(traces: Sequence[Path], place: str) -> list[Path]:
    """Plan file of each trace file: `place` itself for one trace file, unless it is a folder or a slash ends it.

    A file in the folder `place` for several.
    """
    out = Path(place)
    if len(traces) == 1 and not out.is_dir() and not place.endswith("/"):
        return [out]
    paths = [out / f"{path.stem}.safetensors" for path in traces]
    if twice := sorted({path.name for path in paths if paths.count(path) > 1}):
        raise click.UsageError(f"TRACES: expected files with different names, got {', '.join(twice)} twice")
    if out.is_file() or (out.suffix == ".safetensors" and not out.is_dir()):
        raise click.UsageError(f"--out: expected a folder for {len(traces)} trace files, got the file {out}")
    return paths


def save_plans(plans: Iterable[SketchPlan | ModelPlans], files: Iterable[Path]) -> None:
    """Write plans to their files; missing folders are made."""
    for plan, path in zip(plans, files, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)
