"""CUDA kernels: the head's clock, and windows of any length."""

import numpy as np
import pytest
from gpu.cuda_pairs import ReplayEngine, SketchEngine, poisoned, run_served
from gpu.cuda_support import EXACT, LAYERS, RANKS, STORED, full_reads, make_plan
from host import fixtures
from samples import relative

from sketchssm.arrays.options import EngineOptions
from sketchssm.cuda import workspaces
from sketchssm.layer.recurrence import FULL_STATE
from sketchssm.reference import engines as reference

cupy, pytestmark = fixtures.of_kernels, fixtures.cold


@pytest.mark.parametrize(
    ("name", "window", "activation", "phase"),
    [
        *(("mamba2", 16, "bfloat16", 3), ("gdn", 16, "bfloat16", 15), ("kda", 16, "bfloat16", 0)),
        *(("mamba2-80", 4, "float32", 1), ("gdn-96", 8, "float16", None), ("kda-64", 4, "bfloat16", 2)),
    ],
)
def test_rows_flush_with_the_clock(name, window, activation, phase, rng, cupy):
    """Windows of all lengths end with a token; without a clock only full ones do, and `flush` folds the others."""
    layer = LAYERS[name]
    device = poisoned(ReplayEngine(layer, 5, window, activation_dtype=activation, output_dtype="float32", phase=phase))
    oracle = reference.ReplayEngine(layer, 5, window, EngineOptions(phase=phase))
    got, want, folded = run_served(device, oracle, layer, 5 * window, activation, rng, cupy)
    if phase is not None:
        assert len(set(folded)) > window // 2
    assert relative(got, want) < EXACT
    assert relative(device.state.get(), oracle.state) < EXACT


@pytest.mark.parametrize(("name", "kind"), [("mamba2", "lowrank"), ("gdn", "ridge"), ("kda", "lowrank")])
def test_sketches_of_short_windows(name, kind, rng, cupy):
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng, map=kind)
    device = poisoned(SketchEngine(plan, 4, output_dtype="float32", phase=5))
    oracle = reference.SketchEngine(plan, 4, options=EngineOptions(phase=5))
    got, want, folded = run_served(device, oracle, layer, 50, "bfloat16", rng, cupy)
    full_state = plan.ranks == FULL_STATE
    assert len(set(folded)) > 5
    assert relative(got[:, ~full_state], want[:, ~full_state]) < STORED["bfloat16"]
    assert relative(got[:, full_state], want[:, full_state]) < full_reads()
    assert relative(device.state.get(), oracle.state) < EXACT


def test_the_clock_moves_on_once_a_step_of_many_rows(rng, cupy, monkeypatch):
    """A batch beyond the kernels' most rows comes in parts."""
    monkeypatch.setattr(workspaces, "MAX_ROWS", 2)
    layer = LAYERS["kda-64"]
    device = poisoned(ReplayEngine(layer, 5, 4, output_dtype="float32", phase=1))
    oracle = reference.ReplayEngine(layer, 5, 4, EngineOptions(phase=1))
    got, want, _ = run_served(device, oracle, layer, 12, "bfloat16", rng, cupy)
    assert relative(got, want) < EXACT
