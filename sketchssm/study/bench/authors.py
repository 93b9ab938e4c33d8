"""The authors' sketched decode (SNU-ARC/SketchSSM), timed in a process of its own, as it has the same import name."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

from sketchssm.layer.recurrence import FULL_STATE, Layer
from sketchssm.plans.plan import SketchPlan
from sketchssm.study.bench.results import BenchResult, step_bytes
from sketchssm.study.systems import sketch_system
from sketchssm.study.tables import number

WRONG = 0.05
"""A larger relative error is not rounding: bf16 leaves 4e-3."""

LIMIT = 300
"""Seconds for compiling and timing one case."""


def unsupported(layer: Layer, plan: SketchPlan) -> str:
    """Why a plan of ours has no counterpart among the kernels that are timed; empty if it has."""
    if not layer.erases or layer.channel_decays or (layer.key_dim, layer.value_dim) != (128, 128):
        return "only their gdn kernels, K = V = 128, are timed"
    if plan.window % 16 or (plan.ranks == FULL_STATE).any():
        return "only windows of a multiple of 16 and ranks without full states are timed"
    return ""


def measure_authors(
    shape: str, plan: SketchPlan, batch: int, bandwidth: float, folder: Path, *, seconds: float = 0.05
) -> BenchResult:
    """Time their step with a plan's ranks and window; `folder` holds their package ``sketchssm``.

    A step is their decode function: l2norm, gates, ring, read or flush; not the rotation of queries and keys. Bytes
    are those of our sketch with the same ranks. RuntimeError if the process fails or its results are wrong.
    """
    if why := unsupported(plan.layer, plan):
        raise RuntimeError(why)
    given = {
        "batch": batch,
        "heads": plan.layer.heads,
        "key_heads": plan.layer.key_heads,
        "window": plan.window,
        "ranks": plan.ranks.tolist(),
        "seconds": seconds,
    }
    program = resources.files("sketchssm.study.bench").joinpath("authors_process.py").read_text()
    command = [sys.executable, "-c", program, json.dumps(given)]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"no result within {LIMIT} seconds") from error
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    if not max(found["errors"]) < WRONG:
        raise RuntimeError(f"errors of {found['errors'][0]:.1e} (outputs) and {found['errors'][1]:.1e} (states)")
    name = f"SNU-ARC sketch G={number(plan.mean_rank)}"
    needed = step_bytes(sketch_system(plan, name), plan.layer, batch, plan.window, on_device=True)
    errors = (found["errors"][0], found["errors"][1])
    return BenchResult.of((shape, name, "peer"), batch, found["positions"], needed, bandwidth, errors, 0.0)
