"""Benchmarks and comparisons on a device at tiny sizes: checks their reports, not the speed."""

import json
import warnings

import numpy as np
import pytest
from click.testing import CliRunner
from gpu.cuda_support import LAYERS

from sketchssm.calibrate.plans import Settings
from sketchssm.calibrate.traces import Traces
from sketchssm.cli import main
from sketchssm.study import bench
from sketchssm.study.evaluate import Study, entries, measure

pytestmark = pytest.mark.gpu

# outputs leave in bf16, sketches are stored in it: a few roundings of 2^-9 in a row; states are float32's
ROUNDED, EXACT = 1.2e-2, 2e-6


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda", "kda-raw"])
def test_all_systems(name):
    layer = LAYERS[name]
    gate = bench.random_gate(layer) if name == "kda-raw" else None
    ranks = bench.spread_ranks(layer.heads, 5)
    systems = bench.systems(layer, 4, [bench.random_plan(layer, ranks, 4, m) for m in ("lowrank", "ridge")], gate)
    assert bench.compile_all(systems) > 0
    work = bench.Workload(layer, 3, 4, raw_gate=gate is not None)
    for system in systems:
        result = bench.measure_device("tiny", system, work, 1e12, seconds=0, duty=0.5)
        assert result.backend == "cuda"
        assert result.error < ROUNDED
        assert result.state_error < EXACT
        assert len(result.positions) == 4
        assert 0 < result.microseconds < 1e4
        assert result.microseconds == pytest.approx(np.mean(result.positions))


def test_bandwidth():
    assert 1e11 < bench.device_bandwidth(256, 3) < 1e14
    assert bench.device_name()


@pytest.mark.parametrize("peer", bench.PEERS, ids=lambda peer: peer.name)
def test_peers(peer):
    if lack := peer.missing():
        pytest.skip(f"{lack} is not installed")
    layer = next(layer for layer in bench.SHAPES.values() if layer.kind == peer.kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        result = bench.measure_peer("tiny", peer, bench.Workload(layer, 2, 4), 1e12, seconds=0)
    assert result.error < ROUNDED
    assert result.state_error < EXACT
    assert 0 < result.microseconds < 1e4


def test_command(tmp_path):
    arguments = ["bench", "--shape", "qwen3-next", "--batch", "1,2", "--seconds", "0", "--peers", "--json"]
    done = CliRunner().invoke(main, [*arguments, str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["copy_bandwidth"] > 1e11
    assert {r["system"] for r in report["results"]} >= {"standard", "replay"}
    assert all(r["error"] < ROUNDED for r in report["results"])


def test_evaluation():
    """Inputs on the host, states on the device."""
    study = Study(Traces.shipped("gdn"), Settings(16), ranks=(4,), mean_rank=4, every=64)
    listed = {entry.name: entry for entry in entries(study)}
    for name in ("exact/standard", "exact/replay", "sketch/lowrank-4"):
        found, judge = (measure(listed[name], study, backend) for backend in ("cuda", "reference"))
        assert found.backend == "cuda"
        assert found.state_error < EXACT
        assert found.output_error == pytest.approx(judge.output_error, rel=0.05, abs=EXACT)


@pytest.mark.parametrize("map", ["lowrank", "ridge"])
def test_arrivals(map):
    """Graphs whose slots change between replays, in every mode; the clocks of two layers differ."""
    layer = LAYERS["gdn"]
    plan = bench.random_plan(layer, bench.spread_ranks(layer.heads, 5), 4, map)
    case = bench.Case("tiny", layer, 6, 4, [plan])
    report = bench.time_arrivals([case], "cuda", layers=2, steps=40, mean_tokens=9, duty=0.5)
    assert [r.mode for r in report.results] == ["arrivals", "lockstep", "clock", "no clock"]
    for result in report.results:
        assert result.backend == "cuda"
        assert result.error < ROUNDED
        assert result.state_error < EXACT
        assert 0 < result.microseconds < 1e4
        assert len(result.steps) == 40
