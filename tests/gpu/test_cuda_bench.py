"""Benchmarks and comparisons on a device at tiny sizes: checks their reports, not the speed."""

import warnings

import numpy as np
import pytest
from gpu.cuda_support import LAYERS

from sketchssm.study import bench

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
