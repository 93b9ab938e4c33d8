"""The benchmark of whole models, as far as it needs neither vLLM nor a GPU."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_benchmark_scripts import script

from sketchssm.layer.recurrence import Layer
from sketchssm.plans.plan import SketchPlan
from sketchssm.study import bench


def script_fixture(name):
    return pytest.fixture(scope="module")(lambda: script(name))


models = script_fixture("vllm_models")
run = script_fixture("end_to_end")
profile = script_fixture("vllm_profile")
agreement = script_fixture("vllm_agreement")


def layer_of(config):
    """The recurrent layers of a configuration."""
    if config["model_type"] == "nemotron_h":
        heads, value, key = config["mamba_num_heads"], config["mamba_head_dim"], config["ssm_state_size"]
        return Layer("mamba2", heads, key, value, config["n_groups"])
    if config["model_type"] == "qwen3_next":
        heads, keys = config["linear_num_value_heads"], config["linear_num_key_heads"]
        return Layer("gdn", heads, config["linear_key_head_dim"], config["linear_value_head_dim"], keys)
    own = config["linear_attn_config"]
    return Layer("kda", own["num_heads"], own["head_dim"], own["head_dim"])


def test_models_have_the_shapes_of_the_benchmarks(models):
    for name, config in models.MODELS.items():
        assert layer_of(config()) == bench.SHAPES[name]


def test_models_and_plans(models, tmp_path):
    folder = models.write_model("kimi-linear", tmp_path)
    assert json.loads(Path(folder, "config.json").read_text())["dtype"] == "bfloat16"
    plans = models.write_plans("kimi-linear", tmp_path, 7, "lowrank")
    plan = SketchPlan.load(f"{plans}/layers.15.safetensors")
    assert (plan.layer, plan.window) == (bench.SHAPES["kimi-linear"], 16)


@pytest.mark.parametrize(
    "kernel, kind",
    [
        ("_selective_scan_update_kernel", "state"),
        ("delta_inputs", "inputs"),
        ("_causal_conv1d_update_kernel", "convolution"),
        ("fused_moe_kernel", "MoE"),
        ("flash_fwd_kernel", "attention"),
        ("nvjet_hsh_128x256", "weights"),
        ("vectorized_elementwise_kernel", "other"),
    ],
)
def test_kinds_of_kernels(profile, kernel, kind):
    assert profile.kind_of(kernel) == kind


def test_shares(profile):
    """Two steps of 10 ms: kernels that overlap take time each, and the device rests for what none covers."""

    def event(name, begin, end, device="DeviceType.CUDA", note=False):
        times = SimpleNamespace(start=begin, end=end)
        return SimpleNamespace(name=name, device_type=device, time_range=times, is_user_annotation=note)

    events = [
        event("read_step", 0, 4000), event("flush_step", 3000, 6000), event("nvjet", 6000, 10000),
        event("read_step", 12000, 18000), event("aten::mm", 0, 20000, "DeviceType.CPU"),
        event("note", 0, 20000, note=True),
    ]  # fmt: skip
    found = profile.shares(SimpleNamespace(events=lambda: events), 0.02, 2)
    assert found["step_ms"] == 10
    assert found["kinds_ms"] == pytest.approx({"state": 6.5, "weights": 2.0, "host": 2.0})
    assert found["kernels"][0] == {"name": "read_step", "ms": 5.0, "launches": 1.0}


def test_times(run):
    assert run.spread([]) == {}
    times = run.spread([0.001 * (i + 1) for i in range(101)])
    assert times == pytest.approx({"p50": 51.0, "p90": 91.0, "p99": 100.0, "slowest": 101.0})


def test_results_and_picture(run, tmp_path):
    pytest.importorskip("matplotlib")
    results = []
    for i, system in enumerate(run.SYSTEMS):
        tokens = [[1, 2, 3, 4 + i]]
        common = {"model": "m", "system": system, "tokens_per_s": 100.0 * (1 + i), "first_tokens": tokens}
        results += [common | {"part": "decode"}, common | {"part": "mix"}]
        results.append(common | {"part": "profile", "profile": {"kinds_ms": {"state": 3.0 - i / 2, "host": 1.0}}})
    results[0]["gpu"] = "a device"
    file = tmp_path / "results.json"
    run.finish(results, argparse.Namespace(json=str(file), commit="abc"))
    report = json.loads(file.read_text())
    assert (report["commit"], report["device"]) == ("abc", "a device")
    written = report["results"]
    assert [result["tokens_equal"] for result in written[:6:3]] == [1.0, 0.75]
    assert "first_tokens" not in written[0]
    run.draw(results, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_agreement(agreement):
    result = agreement.summary([[0.0, 0.0], [0.0, 5**0.5]], 5**0.5)
    assert (result["requests"], result["tokens"]) == (2, 4)
    assert result["rms"] == pytest.approx(0.5)
    assert result["largest"] == pytest.approx(1.0)
    assert result["worst_request"] == pytest.approx(0.5**0.5)


def test_requests(agreement):
    requests = agreement.draw_requests(50, (1, 4), (5, 6), 7, 0, shared=9)
    assert {len(prompt) for prompt, _ in requests} == {1, 2, 3, 10, 11, 12}
    assert len({tuple(prompt[:9]) for prompt, _ in requests[::3]}) == 1
    assert {count for _, count in requests} == {5}
    assert {token for prompt, _ in requests for token in prompt} == set(range(7))


def test_blocks(run):
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in (2048, 2048, 16)]
    groups[1].kv_cache_spec.num_speculative_blocks = 3
    assert run.blocks_of(groups, 10, 33) == 1 + 10 * (1 + 1 + 3 + 3)


@pytest.mark.parametrize(
    "parts, engines",
    [("decode,mix", ["decode,mix"]), ("agree", ["agree"]), ("decode,agree,mix", ["decode,mix", "agree"])],
)
def test_parts_that_share_an_engine(run, parts, engines):
    assert run.engines_of(parts) == engines
