"""Shadows of full-state heads: flushes, loads and folds before drafts write them, and reads use them."""

import ml_dtypes
import numpy as np
import pytest
from gpu.cuda_pairs import SketchEngine, load_same, poisoned, step_both
from gpu.cuda_support import EXACT, LAYERS, ROUNDED, make_tokens, tokens_to_device
from host import fixtures
from samples import plan_of, relative

from sketchssm.layer.recurrence import FULL_STATE
from sketchssm.reference import engines as reference

cupy, pytestmark = fixtures.of_kernels, fixtures.cold


def check_shadows(engine, full):
    """A slot's sketches begin with the rounded states of its full-state heads."""
    states = engine.state.get()[:, full].astype(ml_dtypes.bfloat16)
    stored = engine.sketch.get().view(np.uint8)[:, : states[0].nbytes]
    assert np.array_equal(stored, states.reshape(len(states), -1).view(np.uint8))


@pytest.mark.parametrize(
    ("name", "ranks", "map", "stored", "activation"),
    [
        ("gdn", [7, FULL_STATE, FULL_STATE, 2], "ridge", "bfloat16", "bfloat16"),
        ("gdn", [7, FULL_STATE, 3, FULL_STATE], "subspace", "int8", "bfloat16"),  # fold warps encode
        ("gdn-96", [FULL_STATE, FULL_STATE], "ridge", "int8", "bfloat16"),  # no head has a sketch
        ("kda-64", [FULL_STATE, 5], "lowrank", "int8", "bfloat16"),  # beside sketch warps
        ("kda-64", [5, FULL_STATE], "subspace", "bfloat16", "bfloat16"),  # encode.cu
        ("mamba2-80", [FULL_STATE, 4, 9, FULL_STATE], "ridge", "bfloat16", "float16"),
    ],
)
def test_every_fold_and_load_writes_shadows(name, ranks, map, stored, activation, rng, cupy):
    layer, ranks, everything = LAYERS[name], np.array(ranks), np.arange(4)
    full, window = ranks == FULL_STATE, 8
    bits = np.where(full, 0, 2) if map == "subspace" else 0
    plan = plan_of(rng, layer, ranks, map, window=window, sketch_dtype=stored, residual_bits=bits)
    device = SketchEngine(plan, 4, stored, activation_dtype=activation, output_dtype="float32")
    oracle = reference.SketchEngine(plan, 4, stored)
    poisoned(device).sketch.view(np.uint8)[...] = 0xFF
    load_same(device, oracle, rng)
    check_shadows(device, full)

    def tokens(rows, length):
        drawn = make_tokens(layer, rows, length, activation, rng, hard_gates=False)
        if layer.erases:
            drawn.beta[0] *= 1.5  # a window that is folded token by token
        return drawn

    def step(slots, length):
        got, want = step_both(device, oracle, tokens(len(slots), length), np.array(slots), activation)
        check_shadows(device, full)
        return got[:, :, full], want[:, :, full]

    got, want = step([0, 1, 2], window)
    assert relative(got[:, -1], want[:, -1]) < EXACT
    assert ROUNDED / 16 < relative(got[:, :-1], want[:, :-1]) < ROUNDED  # by the shadow
    step([2, 3], 5)
    step([0, 3], 4)  # one flushes
    device.flush(cupy.arange(4))
    oracle.flush(everything)
    check_shadows(device, full)
    step([1, 2], 6)
    drafts = tokens(3, 3)
    out, want = cupy.zeros(drafts.v.shape, np.float32), np.empty(drafts.v.shape)
    device.draft(tokens_to_device(drafts, activation), None, cupy.asarray(everything[1:]), out)  # two fold first
    oracle.draft(drafts, np.full(3, 3), everything[1:], want)
    check_shadows(device, full)
    assert ROUNDED / 16 < relative(out.get()[:, :, full], want[:, :, full]) < ROUNDED
    assert relative(device.state.get(), oracle.state) < EXACT
    device.reset(cupy.asarray([1]))
    check_shadows(device, full)
