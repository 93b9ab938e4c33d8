"""``sketchssm info``: this installation, a plan file, or the plans of a model."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sketchssm.cli import options

if TYPE_CHECKING:
    from sketchssm.plans.plan import SketchPlan

PACKAGES = (
    "numpy",
    "scipy",
    "numba",
    "llvmlite",
    "safetensors",
    "ml_dtypes",
    "matplotlib",
    "cupy",
    "torch",
    "transformers",
    "jax",
)


@click.command("info")
@click.argument("plan", required=False, type=options.PATH)
@options.output
def command(plan: Path | None, json_file: str | None) -> None:
    """Describe this installation or, given a file or a folder, a PLAN or the plans of a model."""
    from sketchssm.cli.output import Output
    from sketchssm.plans.model_plans import ModelPlans, load_plans
    from sketchssm.study.tables import ranks_text

    options.check_files({"PLAN": plan}, json=json_file)
    output = Output(json_file)
    if plan is None:
        title, report = "sketchssm", _installation()
    elif len(plans := load_plans(plan)) > 1 or isinstance(plans, ModelPlans):
        title, report = "Plans of a model", _plans(plan, plans)
    else:
        title, report = "Plan", _plan(plan, *plans.values())
    rows = [
        ["less traffic", f"{value:.2f}x"] if name == "reduction" else [name.replace("_", " "), _text(value)]
        for name, value in report.items()
        if name != "layers"
    ]
    output.table(title, ["", ""], rows, words=2)
    layers = [
        [name, own["kind"], f"{len(heads[0])}", ranks_text(*heads), f"{own['reduction']:.2f}x"]
        for name, own in report.get("layers", {}).items()
        for heads in [(own["ranks"], own["residual_bits"])]
    ]
    output.table("Layers", ["layer", "kind", "heads", "ranks", "less traffic"], layers, words=2)
    output.finish(report)


def _plans(path: Path, plans: Mapping[str, SketchPlan]) -> dict[str, Any]:
    from sketchssm.plans.model_plans import ModelPlans
    from sketchssm.plans.plan import total_reduction

    made, kept = {}, {}
    if isinstance(plans, ModelPlans):
        made = {"model": plans.fingerprint.model} | vars(plans.allocation)
        kept = {name: {"retained_ideal": share} for name, share in made.pop("retained").items()}
        del made["gap"]
    return {
        "file": str(path),
        **made,
        "windows": sorted({plan.window for plan in plans.values()}),
        "maps": sorted({str(plan.map) for plan in plans.values()}),
        "sketch_dtypes": sorted({plan.sketch_dtype for plan in plans.values()}),
        "reduction": total_reduction(plans.values()),
        "layers": {
            name: {"kind": plan.layer.kind}
            | {each: getattr(plan, each) for each in ("ranks", "residual_bits", "reduction")}
            | kept.get(name, {})
            for name, plan in plans.items()
        },
    }


def _installation() -> dict[str, Any]:
    import sketchssm
    from sketchssm import cuda
    from sketchssm.heads.registry import BACKENDS
    from sketchssm.study.bench import available_cores

    lack = cuda.missing()

    return {
        "version": sketchssm.__version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "backends": [name for name in BACKENDS if name != "cuda" or not lack],
        "cuda": lack or "usable",
        "devices": _devices(),
        "cores": available_cores(),
        "compiled_kernels_cached_in": _cache_folder(),
    }


def _version(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    distributions = importlib.metadata.packages_distributions().get(name, [name])
    return importlib.metadata.version(distributions[0])


def _devices() -> list[str]:
    """CUDA devices that CuPy sees."""
    if importlib.util.find_spec("cupy") is None:
        return []
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        return []
    names = [cupy.cuda.runtime.getDeviceProperties(device)["name"].decode() for device in range(count)]
    return [f"cuda:{device} {name}" for device, name in enumerate(names)]


def _cache_folder() -> str:
    """Folder of Numba's compiled kernels: beside the sources unless they are read-only or a folder is named."""
    import sketchssm.cpu

    named = os.environ.get("NUMBA_CACHE_DIR")
    return named or str(Path(sketchssm.cpu.__file__).parent / "__pycache__")


def _plan(path: Path, plan: SketchPlan) -> dict[str, Any]:
    from sketchssm.plans import traffic

    layer = plan.layer
    return {
        "file": str(path),
        "kind": layer.kind,
        "heads": f"{layer.heads} ({layer.key_heads} key heads), K = {layer.key_dim}, V = {layer.value_dim}",
        "window": plan.window,
        "map": f"{plan.map} (stored as {plan.map.storage})",
        "sketch_dtype": plan.sketch_dtype,
        "mean_rank": None if math.isnan(plan.mean_rank) else plan.mean_rank,
        "ranks": plan.ranks.tolist(),
        "residual_bits": plan.residual_bits.tolist(),
        "reduction": plan.reduction,
        "bytes_per_token_and_head": traffic.standard(layer.key_dim, layer.value_dim) / plan.reduction,
    }


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join("full" if item == -1 else str(item) for item in value) or "none"
    if isinstance(value, float):
        return f"{value:.2f}" if value >= 1 else f"{value:g}"
    return "-" if value is None else str(value)
