"""The benchmark of whole models, as far as it needs neither vLLM nor a GPU."""

import argparse
import json
from pathlib import Path

import pytest
from test_benchmark_scripts import script

from sketchssm import bench
from sketchssm.plan import SketchPlan
from sketchssm.recurrence import Layer


@pytest.fixture(scope="module")
def models():
    return script("vllm_models")


@pytest.fixture(scope="module")
def run():
    return script("end_to_end")


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
    plan = SketchPlan.load(f"{plans}/layers.26.safetensors")
    assert (plan.layer, plan.window) == (bench.SHAPES["kimi-linear"], 16)


@pytest.mark.parametrize(
    "kernel, kind",
    [
        ("_selective_scan_update_kernel", "state"),
        ("read_step", "state"),
        ("commit", "state"),
        ("_mamba", "inputs"),
        ("_causal_conv1d_update_kernel", "convolution"),
        ("fused_moe_kernel", "MoE"),
        ("flash_fwd_kernel", "attention"),
        ("nvjet_hsh_128x256", "weights"),
        ("vectorized_elementwise_kernel", "other"),
    ],
)
def test_kinds_of_kernels(run, kernel, kind):
    assert run.kind_of(kernel) == kind


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
    file = tmp_path / "results.json"
    run.finish(results, argparse.Namespace(json=str(file)))
    written = json.loads(file.read_text())["results"]
    assert [result["tokens_equal"] for result in written[:6:3]] == [1.0, 0.75]
    assert "first_tokens" not in written[0]
    run.draw(results, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
