"""Small layers, tokens and plans shared by test files."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open

from sketchssm.arrays.gates import GateInput
from sketchssm.layer.coefficients import DEFAULT_MAP, FORMS, CoefficientMap
from sketchssm.layer.recurrence import KINDS, Layer, Tokens
from sketchssm.plans.files import KEY
from sketchssm.plans.plan import SketchPlan
from sketchssm.study.tasks import Form, Wording, make_prompts

# Heads share key heads, and all sizes differ: transposed or misgrouped axes change results or fail.
LAYERS = {kind: Layer(kind, heads=4, key_dim=6, value_dim=5, key_heads=2) for kind in KINDS}
HARSH_DECAYS = (0.0, -0.05, -50.0, -np.inf)
HARSH_WRITES = (0.0, 0.5, 1.0)


def tokens_of(rng, layer, batch, length, dtype=np.float32, harsh=False):
    """Tokens ``(batch, length, ...)`` with unit keys, decays of all time scales and write gates in (0, 1). Harsh ones
    draw decays and write gates from the ends of their ranges, and repeat some keys. The values are float32 ones
    whatever the dtype, so that every backend sees the same.
    """

    def draw(*shape):
        return rng.standard_normal((batch, length, *shape))

    shapes = layer.token_shapes()
    q, k, v = draw(*shapes["q"]), draw(*shapes["k"]), draw(*shapes["v"])
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g = -np.exp(draw(*shapes["g"]) * 2 - 3)
    beta = 1 / (1 + np.exp(-draw(*shapes["beta"]))) if layer.erases else None
    if harsh:
        repeated = rng.random((batch, length)) < 0.3
        k[repeated] = k[:1, :1][0, 0]
        # half of the tokens have one decay for all channels, so that a whole head forgets at once
        whole = rng.choice(HARSH_DECAYS, size=(batch, length) + (1,) * (g.ndim - 2))
        g = np.where(rng.random(whole.shape) < 0.5, whole, rng.choice(HARSH_DECAYS, size=g.shape))
        if beta is not None:
            beta = rng.choice(HARSH_WRITES, size=beta.shape)
    return Tokens(*(None if x is None else x.astype(np.float32).astype(dtype) for x in (q, k, v, g, beta)))


REPEATED = "one", "four in turn", "correlated"
"""Keys of `reflections`."""


def reflections(rng, layer, keys, length):
    """Float32 tokens of one row with beta = 2: every window reverses what a state holds along its keys, which repeat.
    Nothing is forgotten, so that an error which is the same in every window adds up.
    """
    tokens = tokens_of(rng, layer, 1, length)
    k = tokens.k
    if keys == "correlated":
        k[...] = k[:, :1] + np.sqrt(1 / 0.999**2 - 1) * k
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
    else:
        k[...] = k[:, np.arange(length) % (1 if keys == "one" else 4)]
    tokens.g[...], tokens.beta[...] = -1e-6, 2
    return tokens


def gate_of(rng, layer, lower_bound=None):
    """Gate of a layer with a decay per channel; with inputs of `raw_of` some channels hardly decay, some quickly."""
    rate_log = np.log(rng.uniform(1, 16, layer.heads))
    return GateInput(rate_log, rng.uniform(-8, 0, (layer.heads, layer.key_dim)), lower_bound)


def raw_of(rng, layer, batch, length):
    """Raw gate inputs ``(batch, length, heads, K)``, float32."""
    return rng.standard_normal((batch, length, layer.heads, layer.key_dim)).astype(np.float32)


def states_of(rng, layer, batch, dtype=np.float32):
    """States whose energy decreases over key directions, like that of real layers."""
    fall = 0.7 ** (np.arange(layer.key_dim) * (1 if layer.key_dim <= 128 else 0.25))  # float32 holds the squares
    return (rng.standard_normal((batch, *layer.state_shape)) * fall).astype(dtype)


class Basis:
    """Stands in for a calibrated `SketchBasis`: the eigenvectors of random metrics."""

    def __init__(self, rng, layer, rank_max=None):
        self.layer = layer
        self.window = 16
        self.rank_max = min(layer.key_dim, layer.value_dim) if rank_max is None else rank_max
        size = layer.key_dim
        mixed = rng.standard_normal((layer.heads, size, size)) * 0.7 ** np.arange(size)
        self.omega = np.linalg.eigh(mixed @ mixed.swapaxes(-1, -2))[1][:, :, ::-1]


def fingerprints(plans):
    """Of plans by the names of their layers."""
    return {name: plan.fingerprint for name, plan in plans.items()}


def plan_of(rng, layer, ranks=2, map=DEFAULT_MAP, pivots=None, ridge=None, **settings):
    """A plan on a `Basis`; one rank stands for all heads. The map takes the parameters that it has."""
    ranks = np.broadcast_to(ranks, layer.heads)
    return SketchPlan(Basis(rng, layer), ranks, map=map_of(map, pivots, ridge), **settings)


def map_of(name, pivots=None, ridge=None):
    """A coefficient map with those of the given parameters that it has."""
    form = FORMS[name]
    return CoefficientMap(name, pivots if form.pivots else None, None if form.ridge is None else ridge)


def parts_of(path):
    """Fields and tensors of a file of the library, for `plans.files.save_file` to write again with changes."""
    with safe_open(path, "np") as file:
        document = json.loads(file.metadata()[KEY])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {name: x for name, x in document.items() if name not in ("format", "version", "sha256")}, tensors


def one_block(parts, slots, make=np.zeros):
    """Memory of all parts in one block a slot, with gaps: the blocks ``(slots, bytes)``, and the parts' arrays."""
    starts, end = [], 0
    for part in parts:
        starts.append(-(-end // part.alignment) * part.alignment)
        end = starts[-1] + part.bytes + part.alignment
    most = max(part.alignment for part in parts)
    block, memory = make((slots, -(-end // most) * most), np.uint8), {}
    for part, start in zip(parts, starts, strict=True):
        rows = block[:, start : start + part.bytes].view(np.uint16 if part.dtype == "bfloat16" else part.dtype)
        memory[part.name] = view = rows.reshape(slots, *part.shape)
        assert view.strides[0] == block.strides[0]
    return block, memory


def refused(start, call, /, *given, **named):
    """Assert that a call is refused, by an error whose message starts with the argument's name."""
    with pytest.raises((TypeError, ValueError), match=f"^{start}"):
        call(*given, **named)


def relative(got, want):
    """Error of a whole array relative to its norm."""
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def same(head, twin):
    """Assert that two heads have bitwise equal cursors and states, also after a flush of their rings."""
    np.testing.assert_array_equal(head.position, twin.position)
    np.testing.assert_array_equal(head.state, twin.state)
    for each in (head, twin):
        each.flush()
    np.testing.assert_array_equal(head.state, twin.state)


def reset_after_nan(head, twin, layer, window, count, rng):
    """Assert that a reset clears a slot with NaN in its ring or state, and that other slots are unaffected."""
    clean, poison = tokens_of(rng, layer, 1, count), tokens_of(rng, layer, 1, count)
    poison.v[...] = np.nan
    for each in (head, twin):
        each.step(*clean, slots=[0])
    head.step(*poison, slots=[1])
    assert np.isnan(head.state[1]).any() == (count > head.position[1])
    head.reset([1])
    np.testing.assert_array_equal(head.state[1], 0)
    tokens = tokens_of(rng, layer, 2, 2 * window + 1)
    np.testing.assert_array_equal(head.step(*tokens), twin.step(*tokens))
    same(head, twin)


def self_answered(likeliest, prompts):
    """Prompts with short questions for models of 64 tokens, with right answers from the model: `likeliest` returns the
    next token of each of some ids. The first tokens of answers depend on the state before the question.
    """

    def encode(text):
        return [2 + 7 * ord(letter) % 62 for letter in text]

    wording = Wording("a", (Form("{key}{value};", "{key}", "{key}"),), tuple("klmnopqr"))
    text = np.random.default_rng(2).integers(2, 64, 400)
    made = make_prompts("keys", text, encode, prompts, np.random.default_rng(0), length=60, wording=wording)
    ids = made.ids.copy()
    for column in np.flatnonzero(made.answers.any(0)):
        ids[:, column] = np.where(made.answers[:, column], likeliest(ids[:, :column])[:, -1], ids[:, column])
    return replace(made, ids=ids)
