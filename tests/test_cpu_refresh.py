"""Refreshes of the `cpu` backend against the reference."""

import numpy as np
import pytest
from samples import plan_of, relative, states_of, tokens_of

import sketchssm as ss
from sketchssm.layer.coefficients import MAPS
from sketchssm.layer.recurrence import KINDS, Layer

WINDOW, EVERY = 4, 12

# Float32 rounding through a map (a ridge of 1e-2), see tests/test_cpu_engines.py. Storage in bfloat16 rounds each
# element of a sketch and of a map by 2^-9, at each refresh again. Codes of 8 bits are those of the reference but for
# ties; a code off by one moves its element by 1 / 127 of the largest.
STORED = {"float32": 2e-5, "bfloat16": 1e-2, "int8": 1e-2, "fp8": 1e-2, "int8+int4": 1e-2}


def larger(kind, rng, **settings):
    """A layer for the kernels of the CPU, and a plan with refreshes and different ranks."""
    layer = Layer(kind, heads=4, key_dim=24, value_dim=20, key_heads=2)
    return layer, plan_of(rng, layer, [2, 3, 5, 7], window=WINDOW, flush_every=EVERY, ridge=0.01, **settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "dtype"), [
    *((name, dtype) for name in MAPS for dtype in ("float32", "bfloat16", "int8", "fp8")), ("ridge", "int8+int4"),
])  # fmt: skip
def test_the_cpu_backend(kind, name, dtype, rng):
    """Outputs of four rings, and states, follow the reference in every format."""
    wide = {"wide": [0, 1, 3, 7]} if dtype == "int8+int4" else {}
    layer, plan = larger(kind, rng, map=name, sketch_dtype=dtype, **wide)
    tokens, start = tokens_of(rng, layer, 2, 4 * EVERY + 3), states_of(rng, layer, 2)
    outputs, states = [], []
    for backend in ("reference", "cpu"):
        head = ss.SketchHead(plan, 2, backend)
        head.load_state(start)
        outputs.append(head.step(*tokens))
        states.append(np.array(head.state))
    assert relative(outputs[1], outputs[0]) < STORED[dtype]
    assert relative(states[1], states[0]) < 1e-6  # float32 sums over four rings


@pytest.mark.parametrize("kind", KINDS)
def test_harsh_gates_on_the_cpu(kind, rng):
    """Full forgets, repeated keys and write gates of 0 and 1 inside a ring, and rows at different positions."""
    layer, plan = larger(kind, rng, sketch_dtype="float32")
    heads = [ss.SketchHead(plan, 3, backend) for backend in ("reference", "cpu")]
    start = states_of(rng, layer, 3)
    for head in heads:
        head.load_state(start)
    for slots in ([0], [1, 0], [2, 0, 1], [1, 2]) * 3:
        tokens = tokens_of(rng, layer, len(slots), 5, harsh=True)
        want, got = (head.step(*tokens, slots=slots) for head in heads)
        assert np.isfinite(got).all()
        assert np.abs(got - want).max() < 20 * STORED["float32"] * max(1.0, np.abs(want).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exponent", [-45, 45])
def test_small_and_large_states_on_the_cpu(kind, exponent, rng):
    """Where float32 cannot hold the squares of its factors, a refresh forms the surrogate, with the same result."""
    layer, plan = larger(kind, rng, sketch_dtype="float32")
    tokens, start = tokens_of(rng, layer, 2, 2 * EVERY), states_of(rng, layer, 2)
    outputs = []
    for scale in (0, exponent):
        head = ss.SketchHead(plan, 2, "cpu")
        head.load_state(np.ldexp(start, scale))
        outputs.append(np.ldexp(head.step(*tokens._replace(v=np.ldexp(tokens.v, scale))), -scale))
    # the factors and the formed surrogate round differently
    assert 0 < relative(outputs[1], outputs[0]) < STORED["float32"]
