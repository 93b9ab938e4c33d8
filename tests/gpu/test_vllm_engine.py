"""Whole engines of vLLM 0.26 with heads against vLLM alone, on tiny models of the three kinds. The environment
variable `SKETCHSSM_VLLM_SITE` names a folder with vLLM, if Python does not find it. Without vLLM the tests are
skipped. All engines serve the same requests, which must take the same tokens: prompts and outputs of random lengths,
16 at a time, in chunks of 128 tokens, in so few blocks that some requests are preempted; some are aborted. Compared
are log-probabilities, as shares of their spread, with vLLM's own in eager mode when it serves one request at a time.
vLLM's other passes are printed only: its gdn starts a prompt of one token from the state of the block's former
request. Standard and replay heads, heads that read their full states, and sketches of all 64 columns give vLLM's
outputs to rounding. The exact map regularises by 1e-4 of the mean diagonal of a state's metric: a singular direction
of a state, s^2 times this mean, is read as s^2 / (s^2 + 1e-4) of itself, so that the error is at most sqrt(1e-4) / 2 =
0.5% of the root mean square direction, about bfloat16's own rounding (0.4%). Each of the two recurrent layers, the
residual stream and the logits round to bfloat16: hence a limit of 3% for the root mean square, and of 10% for that of
the worst request.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from end_to_end import ENVIRONMENT  # noqa: E402
from vllm_forced import compare  # noqa: E402

SITE = os.environ.get("SKETCHSSM_VLLM_SITE")
if not SITE and importlib.util.find_spec("vllm") is None:
    pytest.skip("no vLLM: SKETCHSSM_VLLM_SITE is not set", allow_module_level=True)
pytestmark = pytest.mark.gpu

KINDS = ("mamba2", "gdn", "kda")
SECONDS = 300
LIMITS = {"rms": 0.03, "worst_request": 0.1}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Start all processes at once, as most of their time goes into compiling kernels; results by kind and graphs."""
    paths = [str(ROOT), str(ROOT / "benchmarks"), SITE or "", os.environ.get("PYTHONPATH", "")]
    running = {}
    for kind in KINDS:
        for graphs in ("none,decode", "default", *["drafts"] * (kind != "kda")):  # vLLM's kda takes no drafts
            folder = tmp_path_factory.mktemp(kind)
            own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "VLLM_CACHE_ROOT": str(folder / "cache")}
            command = [sys.executable, str(Path(__file__).with_name("vllm_engines.py")), kind, graphs, str(folder)]
            with (folder / "log").open("w") as log:
                process = subprocess.Popen(
                    command, env=ENVIRONMENT | os.environ | own, stdout=log, stderr=subprocess.STDOUT
                )
            running[kind, graphs] = folder, process

    def results(kind, graphs):
        folder, process = running[kind, graphs]
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = f"none after {SECONDS} s"
        file, log = folder / "results", (folder / "log").read_text()
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines], "" if code == 0 else f"exit {code}:\n{log[-6000:]}"

    yield results
    for _, process in running.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("graphs", ["none,decode", "default"])
@pytest.mark.parametrize("kind", KINDS)
def test_engines(engines, kind, graphs, capsys):
    results, error = engines(kind, graphs)
    assert results, error
    reference = engines(kind, "none,decode")[0][0]["alone"]
    assert results[0]["system"] == "vllm"
    passes = [(f"{x['system']}, {x['graphs']}", x["logprobs"]) for x in results]
    passes.insert(1, ("vllm again", results[0]["again"]))
    found = {name: compare(logprobs, reference) for name, logprobs in passes}
    with capsys.disabled():
        for name, agreement in found.items():
            print(f"\n{kind}, {name}: { {key: round(x, 4) for key, x in agreement.items()} }", end="")
        for x in results:
            shown = {name: x[name] for name in ("preemptions", "memory", "free_blocks", "start_seconds", "seconds")}
            print(f"\n{kind}, {x['system']}, {x['graphs']}: {shown}", end="")
    assert not error, error
    for result in results:
        name = f"{result['system']}, {result['graphs']}"
        assert result["preemptions"] > 0, name
        assert len(set(result["free_blocks"])) == 1, name
        before, after = result["memory"]
        assert after - before < 4 << 20, name  # a hundred states would be 6 MiB
    for name, agreement in found.items():
        for limit, most in LIMITS.items():
            if name.startswith("coarse"):  # what the limits must tell apart
                assert agreement[limit] > 2 * most, f"{name}: {limit}"
            elif not name.startswith("vllm"):
                assert agreement[limit] < most, f"{name}: {limit}"


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_drafts(engines, kind, capsys):
    """Speculative decoding: each engine's tokens are vLLM's likeliest ones, up to rounding. A gap is the distance of a
    token's log-probability to the likeliest one's, by vLLM without drafts. Rounding makes a gap at near ties only: it
    is at most the sum of two errors of log-probabilities. So the limits are those above.
    """
    results, error = engines(kind, "drafts")
    assert not error, error
    for x in results:
        name = f"{x['system']}, {x['graphs']}"
        gaps = [np.array(gap) / x["spread"] for gap in x["gaps"]]
        found = {
            "rms": float(np.sqrt(np.mean(np.concatenate(gaps) ** 2))),
            "worst_request": max(float(np.sqrt(np.mean(gap**2))) for gap in gaps),
        }
        with capsys.disabled():
            shown = {key: x[key] for key in ("preemptions", "drafted", "accepted", "memory", "free_blocks", "spread")}
            print(f"\n{kind}, drafts, {name}: { {key: round(gap, 4) for key, gap in found.items()} } {shown}", end="")
        assert x["preemptions"] > 0, name
        assert 0 < x["accepted"] < x["drafted"], name
        assert len(set(x["free_blocks"])) == 1, name
        before, after = x["memory"]
        assert after - before < 4 << 20, name  # a hundred states would be 6 MiB
        for limit, most in LIMITS.items():
            if x["system"] == "coarse":  # what the limits must tell apart
                assert found[limit] > 2 * most, f"{name}: {limit}"
            elif x["system"] != "vllm":
                assert found[limit] < most, f"{name}: {limit}"
