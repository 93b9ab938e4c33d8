"""Sketches in few bits on the CPU: against the reference, which rounds to the same codes, and against float64."""

import numpy as np
import pytest
from samples import plan_of, relative, reset_after_nan, states_of, tokens_of

import sketchssm as ss
from sketchssm.layer.coefficients import MAPS
from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.recurrence import FULL_STATE, KINDS, Layer

WINDOW = 8
# Error of a read against the sketch in float64: 0.3 of a step of absmax / 127.
ERROR = 0.01
# V and K of more and of less than a vector; ranks of a vector and more
LAYERS = {
    "small": ({"heads": 4, "key_dim": 6, "value_dim": 5, "key_heads": 2}, [FULL_STATE, 5, 3, 1]),
    "odd": ({"heads": 4, "key_dim": 33, "value_dim": 20, "key_heads": 1}, [16, 20, FULL_STATE, 7]),
    "long": ({"heads": 2, "key_dim": 64, "value_dim": 128, "key_heads": 2}, [9, 3]),
}


def coded(rng, layer, ranks, name):
    return plan_of(rng, layer, ranks, window=WINDOW, map=name, sketch_dtype="int8")


def agree(got, want):
    """Assert that reads are equal, except after flushes that rounded a number halfway to another code. Float32 is off
    by 1e-7 times a condition number, so about one number in 1e4 lies on the other side. A read then differs by a share
    of the code's step.
    """
    got, want = got.astype(np.float64), want.astype(np.float64)
    assert np.isfinite(got).all()
    size = np.sqrt(np.square(want).mean(axis=(0, 1, 3), keepdims=True))
    error = np.abs(got - want).max(axis=-1, keepdims=True) / size
    assert np.quantile(error, 0.75) < 2e-5
    assert error.max() < 4 / 127  # steps of a code


# each map with each kind and shape, and each kind with each shape
@pytest.mark.parametrize(
    ("name", "kind", "shape"),
    [(name, kind, list(LAYERS)[(i + j) % 3]) for i, name in enumerate(MAPS) for j, kind in enumerate(KINDS)],
)
def test_reads(name, kind, shape, rng):
    """Windows, and drafts after a load: 20 tokens flush twice."""
    sizes, ranks = LAYERS[shape]
    layer = Layer(kind, **sizes)
    plan = coded(rng, layer, ranks, name)
    tokens, start = tokens_of(rng, layer, 4, 20, np.float64), states_of(rng, layer, 4)
    drafts = tokens_of(rng, layer, 4, 3, np.float64)
    outputs = []
    for backend, dtype in (("cpu", None), ("reference", None), ("reference", "float32")):
        head = ss.SketchHead(plan, 4, backend, sketch_dtype=dtype)
        head.load_state(start)
        outputs.append(np.concatenate([head.step(*tokens), head.step(*drafts, draft=True)], axis=1))
    got, want, unrounded = outputs
    sketched = np.array(ranks) != FULL_STATE
    agree(got[:, :, sketched], want[:, :, sketched])
    full = got[:, :, ~sketched], want[:, :, ~sketched]
    # a shadow rounds numbers by at most 2^-9
    assert sketched.all() or relative(*full) < 2.0**-9
    error = relative(got[:, :, sketched], unrounded[:, :, sketched])
    assert ERROR / 50 < error < ERROR


@pytest.mark.parametrize("name", MAPS)
def test_states_of_any_size(name, layer, rng):
    """A power of two changes only scales, except that norms may round differently, with the effect of a tie."""
    plan = coded(rng, layer, [FULL_STATE, 5, 3, 1], name)
    head = ss.SketchHead(plan, 3, "cpu")
    tokens, start = tokens_of(rng, layer, 3, 7), states_of(rng, layer, 3)
    start[1, :, :, 1:] *= 1e-9  # one large direction, as after a window with the same key

    def run(exponent):
        head.load_state(np.ldexp(start, exponent))
        return np.ldexp(head.step(*tokens._replace(v=np.ldexp(tokens.v, exponent))).astype(np.float64), -exponent)

    want = run(0)
    for exponent in (-85, -66, -30, 40, 66, 110):
        agree(run(exponent), want)
    for exponent in (-140, -120, -100):
        assert np.isfinite(run(exponent)).all()
    head.load_state(np.zeros_like(start))
    np.testing.assert_array_equal(head.step(*tokens._replace(v=np.zeros_like(tokens.v))), 0)


@pytest.mark.parametrize("name", MAPS)
def test_a_state_that_is_not_finite(name, layer, rng):
    """Reads of its sketch are NaN, those of other slots unaffected, and a reset clears it."""
    plan = coded(rng, layer, [FULL_STATE, 5, 3, 1], name)
    head, twin = (ss.SketchHead(plan, 5, "cpu") for _ in range(2))
    reset_after_nan(head, twin, layer, WINDOW, WINDOW, rng)
    poison = tokens_of(rng, layer, 1, WINDOW)
    poison.v[...] = np.nan
    head.step(*poison, slots=[3])
    last = tokens_of(rng, layer, 1, 1)
    assert np.isnan(head.step(*last, slots=[3])).all()


def test_bytes():
    """The bytes of sketch and map are those of the byte model where K and V need no padding, but for alignment."""
    layer = Layer("mamba2", 4, 128, 64, 1)
    plan = coded(np.random.default_rng(0), layer, [12, 8, 7, FULL_STATE], "ridge")
    kept = {part.name: part.bytes for part in ss.SketchHead.parts_of(plan, "cpu", state_dtype="float16")}
    want = SketchFormat.of("int8").bytes(plan.map, plan.ranks[:3], 128, 64)
    assert want.sum() <= kept["sketch"] < want.sum() + 5 * 64
