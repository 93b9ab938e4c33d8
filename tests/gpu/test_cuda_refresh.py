"""Refreshes between flushes on a device, against the reference of the same format."""

import numpy as np
import pytest
from gpu.cuda_support import (
    EXACT,
    LAYERS,
    SketchEngine,
    error,
    make_plan,
    make_tokens,
    named_gate,
    refreshed_plan,
    run_pair,
    slot_table,
    tokens_to_device,
    with_blocks,
)
from gpu.draft_graphs import upload

import sketchssm as ss
from sketchssm.layer.recurrence import Layer
from sketchssm.reference import engines as reference

# engines without a warmup() compile at their first step
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:loading kernel:RuntimeWarning")]

# Twice the bounds of tests/test_cuda_host_refresh.py, which has the reasons: rings here have up to 32 windows.
REFRESHED = {"float32": 2e-4, "bfloat16": 2.4e-2, "int8": 3e-2, "fp8": 7e-2, "int8+int4": 0.12}
RANKS = [7, 16, 3, 33]


@pytest.mark.parametrize(
    ("name", "kind", "stored", "window", "windows", "activation"),
    [
        ("mamba2", "ridge", "bfloat16", 16, 4, "bfloat16"),
        ("gdn", "ridge", "bfloat16", 16, 4, "bfloat16"),
        ("kda", "ridge", "bfloat16", 16, 4, "bfloat16"),
        ("mamba2", "ridge", "int8", 16, 2, "bfloat16"),
        ("gdn", "ridge", "int8", 8, 8, "bfloat16"),
        ("kda", "ridge", "fp8", 16, 2, "bfloat16"),
        ("gdn", "ridge", "float32", 16, 2, "bfloat16"),
        ("kda-raw", "exact", "bfloat16", 8, 3, "bfloat16"),
        ("mamba2-80", "offline", "bfloat16", 4, 32, "float16"),
        ("gdn-96", "ridge", "bfloat16", 32, 2, "float32"),
        ("kda-64", "offline", "int8", 32, 4, "bfloat16"),
        ("gdn", "lowrank", "bfloat16", 16, 4, "bfloat16"),
        ("kda", "lowrank", "int8", 16, 2, "bfloat16"),
        ("mamba2", "prior", "float32", 16, 4, "bfloat16"),
        ("gdn-96", "prior", "fp8", 4, 4, "float16"),
        ("gdn", "ridge", "int8+int4", 16, 4, "bfloat16"),
        ("mamba2-80", "ridge", "int8+int4", 8, 3, "float32"),
    ],
)
def test_reads(name, kind, stored, window, windows, activation, rng, cupy):
    """Rows at all positions of their rings, padding; gates of 0, -50 and -inf among the rest."""
    plan = refreshed_plan(LAYERS[name], RANKS, rng, kind, window, windows, stored)
    layer, every, gate = plan.layer, plan.flush_every, named_gate(name, plan.layer, rng)
    device = SketchEngine(plan, 6, stored, activation_dtype=activation, output_dtype="float32", gate=gate)
    device.sketch.view(np.uint8)[...] = 0xFF
    device.reset(cupy.arange(6))
    oracle = reference.SketchEngine(plan, 6, "float32" if stored == "bfloat16" else stored)
    start = rng.standard_normal((6, *layer.state_shape)).astype(np.float32)
    device.load_state(cupy.asarray(start), cupy.arange(6))
    oracle.load_state(start.astype(np.float64), np.arange(6))
    length = 2 * every + 8
    tokens = make_tokens(layer, 5, length, activation, rng, gate=gate)
    got, want, where = run_pair(device, oracle, layer, tokens, slot_table(5, 6, length, rng), activation, gate)
    flushes = where == every - 1
    assert flushes.any()
    assert np.array_equal(device.position.get(), oracle.position)
    assert error(got[flushes], want[flushes]) < EXACT
    assert error(device.state.get(), oracle.state) < EXACT
    assert error(got[~flushes], want[~flushes]) < REFRESHED[stored]
    device.flush(cupy.arange(6))
    oracle.flush(np.arange(6))
    assert error(device.state.get(), oracle.state) < EXACT


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_results_do_not_depend_on_blocks(name, rng, cupy):
    """One block folds and refreshes all heads, or as many blocks as fit; bit for bit."""
    plan = refreshed_plan(LAYERS[name], RANKS, rng, windows=4)
    start = cupy.asarray(rng.standard_normal((7, *plan.layer.state_shape)).astype(np.float32))
    tokens = make_tokens(plan.layer, 7, 140, "bfloat16", rng)

    def run(rows, blocks=None):
        engine = SketchEngine(plan, 7, output_dtype="float32")
        engine.warmup()
        if blocks:
            with_blocks(engine, blocks)
            engine._refresh[0]._most = blocks
        engine.load_state(start, cupy.arange(7))
        own = tokens_to_device(type(tokens)(*(x if x is None else x[rows] for x in tokens)), "bfloat16")
        out = cupy.zeros((len(rows), 140, plan.layer.heads, plan.layer.value_dim), np.float32)
        engine.step(own, cupy.asarray(np.array(rows)), out)
        return out.get(), engine.state.get()

    out, state = run(list(range(7)))
    for blocks in (1, 3):
        other, after = run(list(range(7)), blocks)
        assert np.array_equal(out, other)
        assert np.array_equal(state, after)
    assert np.array_equal(out[4], run([4])[0][0])


@pytest.mark.parametrize(("kind", "rows", "phase"), [("mamba2", 64, 5), ("gdn", 96, None), ("kda", 64, 40)])
def test_a_captured_graph(kind, rows, phase, rng, cupy):
    """One graph of a step serves all positions; rows are due at different steps, or at the clock's."""
    layer = {
        "mamba2": Layer("mamba2", 32, 128, 64, 8),
        "gdn": Layer("gdn", 32, 128, 128, 16),
        "kda": Layer("kda", 32, 128, 128, 32),
    }[kind]
    plan = make_plan(layer, np.resize([8, 12, 5], layer.heads), rng, map="ridge", ridge=0.001, flush_every=64)
    head, plain = (ss.SketchHead(plan, rows, "cuda", output_dtype="float32", phase=phase) for _ in range(2))
    start = cupy.asarray(rng.standard_normal((rows, *layer.state_shape)).astype(np.float32))
    slots = cupy.arange(rows)
    for each in (head, plain):
        each.warmup("bfloat16")
        each.load_state(start, slots)
    given = [upload(cupy, make_tokens(layer, rows, 1, "bfloat16", rng)) for _ in range(4)]
    held = upload(cupy, make_tokens(layer, rows, 1, "bfloat16", rng))
    out, want = (cupy.empty((rows, 1, layer.heads, layer.value_dim), np.float32) for _ in range(2))
    active = cupy.arange(rows)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        head.step(*held, slots=active, out=out)
        graph = stream.end_capture()
        for t in range(150):
            for to, x in zip(held, given[t % 4], strict=True):
                if to is not None:
                    to[...] = x
            who = np.arange(rows)
            who[: rows // 2] = np.where((np.arange(rows // 2) + t) % 5 == 0, -1, who[: rows // 2])  # rows fall behind
            active[...] = cupy.asarray(who)
            graph.launch(stream)
            plain.step(*given[t % 4], slots=active, out=want)
            assert bool((out == want).all()), t
        assert bool((head.position == plain.position).all())
        assert len(np.unique(head.position.get())) > 1 or phase is not None
        assert bool((head.state == plain.state).all())
        stream.synchronize()
