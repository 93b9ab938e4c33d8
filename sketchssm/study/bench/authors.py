"""The authors' sketched decode (SNU-ARC/SketchSSM), timed in a process of its own, as it has the same import name."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

from sketchssm.layer.recurrence import FULL_STATE
from sketchssm.plans.plan import SketchPlan
from sketchssm.study.bench.results import WRONG, BenchResult, step_bytes
from sketchssm.study.systems import sketch_system
from sketchssm.study.tables import number

LIMIT = 300
"""Seconds for compiling and timing one case."""


def process(
    plan: SketchPlan, batch: int, folder: Path, seconds: float, duty: float
) -> subprocess.CompletedProcess[str]:
    """Run `authors_process` in the folder of their package, with the layer, ranks and window of a plan."""
    layer = plan.layer
    sizes = layer.heads, layer.key_heads, layer.key_dim, layer.value_dim
    given = {
        "kind": layer.kind,
        "sizes": [batch, *sizes, plan.window, plan.ranks.tolist()],
        "seconds": seconds,
        "duty": duty,
    }
    program = resources.files("sketchssm.study.bench").joinpath("authors_process.py").read_text()
    command = [sys.executable, "-c", program, json.dumps(given)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT, check=False)


def measure_authors(
    shape: str,
    plan: SketchPlan,
    batch: int,
    bandwidth: float,
    folder: Path,
    *,
    seconds: float = 0.05,
    duty: float = 1.0,
) -> BenchResult:
    """Time their step with a plan's ranks and window; `folder` holds their package ``sketchssm``.

    `authors_process` says what a step is. `seconds` and `duty` are as for `measure_device`. Bytes are those of our
    sketch with the same ranks. RuntimeError if they have no such kernel, the process fails or its results are wrong.
    """
    layer = plan.layer
    if layer.channel_decays and not layer.erases:
        raise RuntimeError("there are no kernels of theirs for gla")
    if ((plan.ranks == FULL_STATE) | (plan.ranks == layer.key_dim)).any():
        raise RuntimeError("only ranks below K, without full states, are timed")
    try:
        done = process(plan, batch, folder, seconds, duty)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"no result within {LIMIT} seconds") from error
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    if not max(found["errors"]) < WRONG:
        raise RuntimeError(f"errors of {found['errors'][0]:.1e} (outputs) and {found['errors'][1]:.1e} (states)")
    name = f"SNU-ARC sketch G={number(plan.mean_rank)}"
    needed = step_bytes(sketch_system(plan, name), layer, batch, plan.window, on_device=True)
    errors = (found["errors"][0], found["errors"][1])
    return BenchResult.of((shape, name, "peer"), batch, found["positions"], needed, bandwidth, errors, 0.0)
