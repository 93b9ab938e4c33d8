"""Sketches in codes on the CUDA kernels, against the reference of the same format."""

import numpy as np
import pytest
from gpu.cuda_pairs import SketchEngine, check_sketch, compare_window, poisoned, split_codes
from gpu.cuda_support import LAYERS, RANKS, RIDGE, make_plan, make_tokens, thorough, tokens_to_device
from host import fixtures, heads
from samples import relative

import sketchssm as ss
from sketchssm.layer.recurrence import FULL_STATE, Layer
from sketchssm.reference import engines as reference

cupy, host, pytestmark = fixtures.of_kernels, fixtures.of_host, fixtures.cold

# Engine and reference err by the same codes, the kernels also by these roundings. Measured: up to 1.07.
AS_GOOD = 1.1
SHAPES = "mamba2", "gdn", "kda", "mamba2-80", "gdn-96", "kda-64"


class Oracle:
    """The reference in a format; `exact` gets the outputs of one whose sketches are not rounded."""

    def __init__(self, plan, slots):
        self.coded, self.plain = (reference.SketchEngine(plan, slots, name) for name in ("int8", "float32"))
        self.exact = []

    def __getattr__(self, name):
        return getattr(self.coded, name)

    def load_state(self, state, slots):
        self.coded.load_state(state, slots)
        self.plain.load_state(state, slots)

    def step(self, tokens, slots, out):
        self.coded.step(tokens, slots, out)
        self.exact.append(np.empty_like(out))
        self.plain.step(tokens, slots, self.exact[-1])


@pytest.mark.parametrize(
    ("layer", "ranks", "kind", "window", "activation"),
    [
        ("gdn", RANKS["gdn"], "ridge", 16, "bfloat16"),
        ("kda", RANKS["kda"], "ridge", 16, "bfloat16"),
        ("mamba2", RANKS["mamba2"], "lowrank", 16, "bfloat16"),
        ("gdn-96", [5, 16], "lowrank", 16, "float32"),
        ("mamba2-80", [9, FULL_STATE, 14, 1], "ridge", 4, "float16"),
        ("kda", [9, 16, 1], "lowrank", 8, "bfloat16"),
        *thorough(
            ("mamba2", RANKS["mamba2"], "ridge", 16, "bfloat16"),
            ("kda", [9, FULL_STATE, 16], "ridge", 16, "bfloat16"),  # two epilogue warps
            ("gdn", RANKS["gdn"], "lowrank", 16, "bfloat16"),
            ("kda", [9, FULL_STATE, 16], "lowrank", 16, "bfloat16"),  # two places for columns of U
            ("mamba2-80", [9, 13, 1], "lowrank", 8, "bfloat16"),
            ("gdn-96", [9, 15], "ridge", 8, "bfloat16"),
            ("kda-64", [5, 16], "ridge", 32, "float32"),
            ("kda-64", [9, 3], "lowrank", 16, "bfloat16"),
        ),
    ],
)
def test_reads(layer, ranks, kind, window, activation, rng, cupy):
    """Mixed ranks, full-state heads, padding, staggered windows; gates of 0, -50 and -inf among the rest."""
    layer = LAYERS[layer]
    plan = make_plan(layer, np.resize(ranks, layer.heads), rng, map=kind, ridge=RIDGE[kind], window=window)
    oracle = Oracle(plan, 5)
    got, want, sketched = check_sketch(plan, "int8", activation, rng, oracle=oracle)
    exact = sketched(np.stack([x[:, 0] for x in oracle.exact], axis=1))
    assert relative(sketched(got), exact) < AS_GOOD * relative(sketched(want), exact)


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        *((name, "bfloat16") for name in SHAPES[:4]),
        ("kda", "float32"),
        *thorough(*((name, "bfloat16") for name in SHAPES[4:]), *((name, "float32") for name in SHAPES[:2])),
    ],
)
def test_codes_of_the_split_form(name, activation, rng, cupy):
    """Every code, its place and its scale are the reference's; two slices of weights and queries lose the rest."""
    device, oracle, start = split_codes(LAYERS[name], activation, rng)
    assert compare_window(poisoned(device), oracle, start, activation, rng, cupy) < 1e-5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["ridge", "lowrank"])
def test_a_state_that_is_not_finite(kind, bad, rng, host):
    """Its reads are NaN; no other head's are."""
    layer = Layer("gdn", 4, 64, 64, 2)
    plan = make_plan(layer, [7, 5, 3, FULL_STATE], rng, map=kind, ridge=RIDGE[kind], window=8)
    engine = poisoned(SketchEngine(plan, 2, "int8", activation_dtype="bfloat16", output_dtype="float32"))
    start = rng.standard_normal((2, *layer.state_shape)).astype(np.float32)
    start[1, 1, 5, 7] = bad
    engine.load_state(host.asarray(start), host.arange(2))
    out = host.zeros((2, 3, 4, 64), np.float32)
    engine.step(tokens_to_device(make_tokens(layer, 2, 3, "bfloat16", rng), "bfloat16"), host.arange(2), out)
    spoilt = ~np.isfinite(out.get())
    assert spoilt[1, :, 1].any()
    spoilt[1, :, 1] = False
    assert not spoilt.any()


def test_a_state_of_zeros_reads_as_zeros(rng, host):
    layer = Layer("gdn", 4, 64, 64, 2)
    plan = make_plan(layer, [7, 5, 3, FULL_STATE], rng, map="ridge", ridge=1e-3, window=8)
    engine = poisoned(SketchEngine(plan, 1, "int8", activation_dtype="bfloat16", output_dtype="float32"))
    engine.load_state(host.zeros((1, *layer.state_shape), np.float32), host.arange(1))
    out = host.full((1, 1, 4, 64), np.nan, np.float32)
    tokens = make_tokens(layer, 1, 1, "bfloat16", rng)
    engine.step(tokens_to_device(tokens._replace(v=np.zeros_like(tokens.v)), "bfloat16"), host.arange(1), out)
    assert not out.get().any()


def test_bytes(rng, host):
    """A slot's sketches are the bytes of the format, each head padded to 128, behind the full-state head's shadow."""
    plan = make_plan(heads.LAYER, [8, FULL_STATE], rng, map="ridge", window=4, sketch_dtype="int8")
    head = ss.SketchHead(plan, 2, "cuda", activation_dtype="bfloat16")
    part = {part.name: part for part in head.parts}["sketch"]
    assert part.dtype == "uint8"
    assert part.shape == (2 * 64 * 80 + -(-(8 * 144 + 4 * 8) // 128) * 128,)
