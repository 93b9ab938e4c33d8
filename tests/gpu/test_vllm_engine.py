"""Whole engines of vLLM with heads, on a tiny model of each class of layers, with both model runners of vLLM. The
environment variable `SKETCHSSM_VLLM_SITE` names a folder with vLLM, if Python does not find it. Without vLLM the tests
are skipped. All engines serve the same requests: prompts and outputs of random lengths, some with a common prefix that
the cache has, 16 at a time, in chunks of 128 tokens, in so few blocks that some requests are preempted; some are
aborted. Log-probabilities of decode steps are compared with those of vLLM's prefill of the same tokens, as shares of
their spread. Numbers of vLLM's own decode steps, and of sketches with residuals, are printed only. Standard and replay
heads, full-state heads, and sketches of all 64 columns agree with the prefill to rounding. The map regularises by 1e-4
of the mean diagonal of a state's metric: a singular direction of a state, s^2 times this mean, is read as s^2 / (s^2 +
1e-4) of itself, so that the error is at most sqrt(1e-4) / 2 = 0.5% of the root mean square direction, about bfloat16's
own rounding (0.4%). Each of the two recurrent layers, the residual stream and the logits round to bfloat16: hence a
limit of 3% for the root mean square, and of 10% for that of the worst request. With drafts, compared are the distances
of the engine's tokens to the likeliest ones. Rounding makes a distance at near ties only: it is at most the sum of two
errors of log-probabilities. vLLM loses the accepted tokens of a request that misses a step (docs/vllm.md, Limits),
so that its own distances are large, those of some requests most: heads may add 3% to the root mean square.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks"), str(Path(__file__).parent)]

import vllm_tiny  # noqa: E402
from end_to_end import ENVIRONMENT  # noqa: E402

SITE = os.environ.get("SKETCHSSM_VLLM_SITE")
if not SITE and importlib.util.find_spec("vllm") is None:
    pytest.skip("no vLLM: SKETCHSSM_VLLM_SITE is not set", allow_module_level=True)
pytestmark = pytest.mark.gpu

RUNS = [
    (model, engines, runner)
    for model in vllm_tiny.MODELS
    for engines, runner in (("graphs", "1"), ("graphs", "0"), ("default", "1"), ("drafts", "1"), ("drafts", "0"))
    if (model, engines, runner) != ("mamba2-bailing", "drafts", "1")  # refused: vLLM tells its layers no counts
] + [("gdn", "mtp", "1")]
SECONDS = 400
LIMITS = {"rms": 0.03, "worst_request": 0.1}


@pytest.fixture(scope="module")
def engines(request, tmp_path_factory):
    """Start the processes of all chosen tests at once, as most of their time goes into compiling kernels."""
    paths = [str(ROOT), str(ROOT / "benchmarks"), SITE or "", os.environ.get("PYTHONPATH", "")]
    running = {}
    for model, which, runner in (x.callspec.params["run"] for x in request.session.items if x.path == request.path):
        folder = tmp_path_factory.mktemp(model)
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "VLLM_USE_V2_MODEL_RUNNER": runner,
            "VLLM_CACHE_ROOT": str(folder / "cache"),
        }
        command = [sys.executable, str(Path(__file__).with_name("vllm_engines.py")), model, which, str(folder)]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                command, env=ENVIRONMENT | os.environ | own, stdout=log, stderr=subprocess.STDOUT
            )
        running[model, which, runner] = folder, process

    def results(run):
        folder, process = running[run]
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = f"none after {SECONDS} s"
        file, log = folder / "results", (folder / "log").read_text()
        lines = file.read_text().splitlines() if file.exists() else []
        assert code == 0, f"exit {code}:\n{log[-6000:]}"
        return [json.loads(line) for line in lines]

    yield results
    for _, process in running.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_engines(engines, run, capsys):
    results = engines(run)
    with capsys.disabled():
        for x in results:
            print(f"\n{run}, {x}", end="")
    for x in results:
        name = f"{x['system']}, {x['graphs']}"
        assert "error" not in x, f"{name}: {x['error']}"
        assert x["runner"] == 1 + int(run[2]), name
        # with latent attention requests wait for blocks before they begin
        assert x["preemptions"] > 0 or run[0].startswith("kda") or run[0] == "mamba2-bailing", name
        assert len(set(x["free_blocks"])) == 1, name
        before, after = x["memory"]
        assert after - before < 4 << 20, name  # a hundred states would be 6 MiB
        assert 0 < x["accepted"] < x["drafted"] if run[1] in ("drafts", "mtp") else x["cached_tokens"], name
        limits = LIMITS
        if run[1] in ("drafts", "mtp"):
            limits = {"rms": results[0]["agreement"]["rms"] + LIMITS["rms"]}  # results[0]: vLLM without heads
        for limit, most in limits.items():
            if x["system"] == "coarse":  # what the limits must tell apart
                assert x["agreement"][limit] > 1.5 * most, f"{name}: {limit}"
            elif x["system"] not in ("vllm", "residual"):
                assert x["agreement"][limit] < most, f"{name}: {limit}"
