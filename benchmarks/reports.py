"""What the reports of the benchmarks have in common: where, when and how they were made, and their files."""

from __future__ import annotations

import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def about(device: str, commit: str | None = None, arguments: Sequence[object] | None = None) -> dict[str, Any]:
    """Device, date, commit and command of this run.

    `commit` is that of a copy that is no clone. `arguments` take the place of those of the command line.
    """
    given = sys.argv[1:] if arguments is None else map(str, arguments)
    return {
        "device": device,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit or git_commit(),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *given]),
    }


def git_commit() -> str:
    """The clone's commit, or an empty string."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def cpu_model() -> str:
    """Name and number of this machine's cores."""
    from sketchssm.study import bench

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{name}, {bench.available_cores()} cores"


def write(report: dict[str, Any], path: Path | None, inner: str | None = None) -> None:
    """Write a report as JSON; None: nowhere. What fits the pattern `inner` stands on one line each."""
    if path is None:
        return
    text = json.dumps(report, indent=1)
    if inner is not None:
        text = re.sub(inner, lambda found: " ".join(found[0].split()), text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


INNER_TABLES = r"\{[^{}]+\}"
"""The innermost tables of a report, for `write`."""
