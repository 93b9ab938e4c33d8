"""Sketches in codes on a device, against the reference of the same format."""

import numpy as np
import pytest
from gpu.cuda_support import (
    EXACT,
    LAYERS,
    NEIGHBOURS,
    RIDGE,
    SketchEngine,
    compare_window,
    error,
    make_plan,
    make_tokens,
    round_to,
    run_pair,
    slot_table,
    split_codes,
    stored_as,
    tokens_to_device,
)
from gpu.draft_graphs import SLOTS, check_graph

import sketchssm as ss
from sketchssm.layer.recurrence import FULL_STATE
from sketchssm.reference import engines as reference

# engines without a warmup() compile at their first step
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:loading kernel:RuntimeWarning")]

SHAPES = "mamba2", "gdn", "kda", "mamba2-80", "gdn-96", "kda-64"


@pytest.mark.parametrize("stored", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["mamba2", "mamba2-80", "gdn-96", "kda-64"])
def test_every_code_is_exact(name, stored, rng, cupy):
    """Reads of a few bf16 numbers through their codes: widening loses nothing, subnormal numbers included.

    The scale is a power of two. Where a number is half-way between two codes, the device's division may take the other
    one, so numbers are codes here.
    """
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize([9, 17, 3], layer.heads), rng, map="offline")
    plan.omega[...] = plan.projection[...] = np.eye(*plan.omega.shape[1:])
    device, oracle = SketchEngine(plan, 3, stored, output_dtype="float32"), reference.SketchEngine(plan, 3, stored)
    shape = (3, *layer.state_shape)
    if stored == "int8":
        codes = rng.integers(-127, 128, shape).astype(float)
        codes[:, :, 5] = 127
    else:
        codes = np.ldexp(rng.integers(8, 16, shape) * rng.choice([-1, 1], shape), rng.integers(-9, 5, shape))
        codes = np.where(rng.uniform(size=shape) < 0.2, rng.integers(-7, 8, shape) * 2.0**-9, codes)
        codes[:, :, 5] = 448
    start = round_to(codes / 32, "bfloat16")
    assert compare_window(device, oracle, start, "bfloat16", rng, cupy) < 1e-5


@pytest.mark.parametrize(  # every shape and format with one type, every kind and format with the other
    ("name", "stored", "activation"),
    [
        *((name, stored, "bfloat16") for name in SHAPES for stored in ("int8", "int8+int4")),
        *((name, "int8", "float32") for name in SHAPES[:3]),
        *((name, "int8+int4", "float32") for name in SHAPES[3:]),
    ],
)
def test_codes_of_the_split_form(name, stored, activation, rng, cupy):
    """Every code, its place and its scale are the reference's; the error is as above."""
    device, oracle, start = split_codes(LAYERS[name], stored, activation, rng)
    assert compare_window(device, oracle, start, activation, rng, cupy) < 1e-5


@pytest.mark.parametrize(
    ("name", "ranks", "kind", "stored", "window", "activation"),
    [
        ("mamba2", [5, 1, 17, FULL_STATE, 8, 3, 40, 7], "ridge", "int8", 16, "bfloat16"),
        ("mamba2", [5, 1, 16, FULL_STATE], "ridge", "int8", 16, "bfloat16"),
        ("gdn", [7, FULL_STATE, 16, 2], "ridge", "int8", 16, "bfloat16"),
        ("gdn", [7, 33, 16, 2], "ridge", "fp8", 32, "bfloat16"),
        ("kda", [9, 33, 1], "ridge", "int8", 16, "bfloat16"),
        ("kda", [9, 16, FULL_STATE], "lowrank", "int8", 16, "bfloat16"),
        ("gdn-96", [9, 33], "lowrank", "fp8", 8, "bfloat16"),
        ("mamba2-80", [9, FULL_STATE, 40, 1], "prior", "int8", 4, "float16"),
        ("kda-64", [5, 17], "offline", "int8", 16, "float32"),
        ("mamba2", [5, 1, 17, FULL_STATE, 8, 3, 40, 7], "ridge", "int8+int4", 16, "bfloat16"),
        ("gdn", [7, FULL_STATE, 16, 2], "ridge", "int8+int4", 16, "bfloat16"),
        ("gdn", [7, 33, 16, 2], "exact", "int8+int4", 32, "bfloat16"),
        ("kda", [9, 16, FULL_STATE], "ridge", "int8+int4", 16, "bfloat16"),
        ("gdn-96", [9, 33], "ridge", "int8+int4", 8, "bfloat16"),
        ("mamba2-80", [9, FULL_STATE, 40, 1], "ridge", "int8+int4", 8, "bfloat16"),
        ("mamba2-80", [9, FULL_STATE, 40, 1], "ridge", "int8+int4", 4, "float16"),
        ("kda-64", [5, 17], "ridge", "int8+int4", 16, "float32"),
    ],
)
def test_reads(name, ranks, kind, stored, window, activation, rng, cupy):
    layer = LAYERS[name]
    ranks = np.resize(ranks, layer.heads)
    settings = {"map": kind, "ridge": RIDGE[kind], "window": window}
    plan = make_plan(layer, ranks, rng, **settings, **stored_as(stored, ranks))
    device = SketchEngine(plan, 6, stored, activation_dtype=activation, output_dtype="float32")
    device.sketch.view(np.uint8)[...] = 0xFF
    device.reset(cupy.arange(6))
    oracle = reference.SketchEngine(plan, 6, stored)
    start = rng.standard_normal((6, *layer.state_shape)).astype(np.float32)
    device.load_state(cupy.asarray(start), cupy.arange(6))
    oracle.load_state(start.astype(np.float64), np.arange(6))
    length = 2 * window + 8
    tokens = make_tokens(layer, 4, length, activation, rng)
    got, want, where = run_pair(device, oracle, layer, tokens, slot_table(4, 6, length, rng), activation)
    flushes, full_state = where == window - 1, plan.ranks == FULL_STATE
    assert flushes.any()
    assert error(got[flushes], want[flushes]) < EXACT
    assert error(device.state.get(), oracle.state) < EXACT
    assert not full_state.any() or error(got[~flushes][:, full_state], want[~flushes][:, full_state]) < EXACT
    assert error(got[~flushes][:, ~full_state], want[~flushes][:, ~full_state]) < NEIGHBOURS[stored]


@pytest.mark.parametrize("stored", ["int8", "int8+int4"])
@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_rows_do_not_depend_on_their_batch(name, stored, rng, cupy):
    layer = LAYERS[name]
    ranks = np.resize([7, 16, 3], layer.heads)
    plan = make_plan(layer, ranks, rng, map="ridge", ridge=0.001, **stored_as(stored, ranks))
    tokens = make_tokens(layer, 7, 20, "bfloat16", rng)
    start = cupy.asarray(rng.standard_normal((7, *layer.state_shape)).astype(np.float32))

    def run(rows):
        engine = SketchEngine(plan, 7, stored, output_dtype="float32")
        engine.load_state(start, cupy.arange(7))
        own = tokens_to_device(type(tokens)(*(x if x is None else x[rows] for x in tokens)), "bfloat16")
        out = cupy.zeros((len(rows), 20, layer.heads, layer.value_dim), np.float32)
        engine.step(own, cupy.asarray(np.array(rows)), out)
        return out.get()

    assert np.array_equal(run(list(range(7)))[4], run([4])[0])


@pytest.mark.parametrize(
    ("name", "kind", "stored"),
    [
        *(("mamba2", "ridge", "int8"), ("gdn", "ridge", "int8"), ("kda", "lowrank", "int8")),
        *((name, "ridge", "int8+int4") for name in ("mamba2", "gdn", "kda")),
    ],
)
def test_graph_of_drafts(name, kind, stored, rng, cupy):
    layer = LAYERS[name]
    ranks = np.resize([7, 16, FULL_STATE], layer.heads)
    plan = make_plan(layer, ranks, rng, map=kind, ridge=RIDGE[kind], **stored_as(stored, ranks))
    head = ss.SketchHead(plan, SLOTS, "cuda", output_dtype="float32")
    head.warmup(drafts=True)
    check_graph(cupy, head, ss.SketchHead(plan, SLOTS, "reference"), rng, 300, NEIGHBOURS[stored])
