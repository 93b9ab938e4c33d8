"""What the reports of the CPU benchmarks have in common."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sketchssm.study import bench


def new_report() -> dict[str, Any]:
    """Commit, date, device and command of this run, and no rows yet."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"{cpu_model()}, {bench.available_cores()} cores",
        "command": " ".join(["python", *sys.argv]),
        "rows": [],
    }


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def write(report: dict[str, Any], path: Path | None) -> None:
    """Write a report as JSON; None: nowhere."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
