"""Layers, inputs, plans and tolerances for tests of the CUDA kernels."""

import numpy as np
import pytest
from samples import gate_of, map_of

from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.recurrence import FULL_STATE, Layer, Tokens
from sketchssm.plans.plan import SketchPlan

LAYERS = {
    "mamba2": Layer("mamba2", 16, 128, 64, 2),
    "mamba2-80": Layer("mamba2", 4, 64, 80, 1),
    "mamba2-128": Layer("mamba2", 2, 128, 128, 1),  # raw keys with two places for states
    "gdn": Layer("gdn", 4, 128, 128, 2),
    "gdn-96": Layer("gdn", 2, 64, 96, 2),
    "kda": Layer("kda", 3, 128, 128, 3),
    "kda-64": Layer("kda", 2, 64, 64, 1),
    "kda-raw": Layer("kda", 3, 128, 128, 3),  # raw gate inputs
    "kda-64-bounded": Layer("kda", 2, 64, 64, 1),
    "olmo-hybrid": Layer("gdn", 3, 96, 192, 3),  # 24 lanes have four channels each
    "falcon-h1": Layer("mamba2", 3, 256, 128, 1),  # an odd group: tiles of one head
    "nemotron-h-56b": Layer("mamba2", 4, 256, 64, 1),
    "gla": Layer("gla", 2, 128, 64, 1),
    "gla-raw": Layer("gla", 2, 96, 48, 2),
}
RANKS = {"mamba2": [5, 1, 15, FULL_STATE, 16, 8], "gdn": [7, FULL_STATE, 16, 2], "kda": [9, 13, 1], "gla": [6, 11]}

# float32 arithmetic over a few hundred tokens; the reference takes the same rounded inputs in float64
EXACT = 2e-6
# Both sides round the same states of 16 bits, except for float32's errors (1e-7), which move about 1 element in 10^4
# to the other neighbour: by 2^-8 (bf16), which is 4e-5 of the norm. A missing or a second rounding is an error of 1e-3
# (bf16) or 1.4e-4 (fp16), and a rounding toward zero twice as much.
TIPPED = {"bfloat16": 1.5e-4, "float16": 5e-5}
# bf16 rounds by 2^-9 at most
ROUNDED = 2.0**-8
# bf16 sketches and maps (8 bits): a few roundings of relative size 2^-9 in a row; float32 ones: several times the
# 2^-16 that two bf16 slices leave out of the basis, of the state and of U in S U
STORED = {"bfloat16": 1.2e-2, "float32": 1e-4}
# The kernels compute U and S U with 11 bits of the state and 8 of the basis, so a part of their codes is the neighbour
# of the reference's: 1 / 127 of the largest number. Measured on the host: up to 8.5e-3.
STORED["int8"] = 1.2e-2
RIDGE = {"lowrank": 0.1, "ridge": 0.001}


def full_reads(stored="bfloat16", state_dtype="float32"):
    """Error of reads of full-state heads: as that of states, or of their shadows in bf16."""
    shadows = SketchFormat.of(stored).shadows(state_dtype)
    return ROUNDED if shadows else TIPPED.get(state_dtype, EXACT)


def thorough(*cases):
    """Cases of a test that the host runs with SKETCHSSM_THOROUGH=1 only."""
    return [pytest.param(*case, marks=pytest.mark.thorough) for case in cases]


def round_to(x, activation):
    """Values rounded to an activation type, as float32."""
    import ml_dtypes

    types = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
    return x.astype(types[activation]).astype(np.float32)


def to_device(x, activation):
    """A float32 array on the device in an activation type; bf16 as its bits."""
    import cupy
    import ml_dtypes

    if activation == "bfloat16":
        return cupy.asarray(np.ascontiguousarray(x.astype(ml_dtypes.bfloat16).view(np.uint16)))
    return cupy.asarray(np.ascontiguousarray(x.astype(activation)))


def named_gate(name, layer, rng):
    """The gate of a layer by its name: the softplus ("raw"), fla's bounded gate ("bounded") or None."""
    if not name.endswith(("raw", "bounded")):
        return None
    return gate_of(rng, layer, -5.0 if name.endswith("bounded") else None)


def make_tokens(layer, batch, tokens, activation, rng, *, hard_gates=True, gate=None):
    """Host inputs ``(batch, tokens, ...)``, representable in the activation type. Every other head has gates of all
    strengths: where all are mild, kda's flush makes its Gram matrix in another way. With a gate g is raw.
    """
    shape = (batch, tokens)
    q, k = rng.standard_normal((2, *shape, layer.key_heads, layer.key_dim))
    q, k = q / np.linalg.norm(q, axis=-1, keepdims=True), k / np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((*shape, layer.heads, layer.value_dim))
    gates = (layer.key_dim,) if layer.channel_decays else ()
    g = -(rng.uniform(0.0, 0.2, (*shape, layer.heads, *gates)) ** 2)
    if hard_gates:
        draw = rng.uniform(size=g.shape)
        draw[:, :, ::2] = 1.0
        g = np.where(draw < 0.02, -50.0, np.where(draw < 0.03, -np.inf, np.where(draw < 0.1, 0.0, g)))
    if gate is not None:
        hard = {-50.0: 100.0, -np.inf: np.inf, 0.0: -np.inf}
        raw = rng.standard_normal(g.shape)
        g = round_to(np.select([g == x for x in hard], list(hard.values()), raw), activation)
    beta = rng.uniform(0.1, 1.0, (*shape, layer.heads)).astype(np.float32) if layer.erases else None
    return Tokens(*(round_to(x, activation) for x in (q, k, v)), g.astype(np.float32), beta)


def tokens_to_device(tokens, activation, gate=None):
    narrow = "qkv" if gate is None else "qkvg"
    return Tokens(
        *(
            None if x is None else to_device(x, activation if name in narrow else "float32")
            for name, x in tokens._asdict().items()
        )
    )


def make_plan(layer, ranks, rng, map="lowrank", pivots=None, ridge=0.1, window=16, sketch_dtype="bfloat16"):
    """A plan with random bases."""
    ranks = np.asarray(ranks)
    draw = rng.standard_normal((layer.heads, layer.key_dim, layer.key_dim))
    omega = np.linalg.qr(draw)[0][:, :, : max(int(ranks.max()), 1)]
    plan = SketchPlan.__new__(SketchPlan)
    plan._fill(layer, {"omega": omega, "ranks": ranks}, window, map_of(map, pivots, ridge), sketch_dtype, 0)
    return plan


def separable_states(plan, slots, rng):
    """States ``(slots, heads, V, K)`` whose split form has the same codes in every backend. Bases are the first unit
    vectors, in place of the plan's. Columns of U have no value channel in common, so the Gram matrix is diagonal. All
    numbers are integers of up to 8 bits, with such largest numbers that no code is halfway between two. Columns differ
    in energy, in a random order.
    """
    layer = plan.layer
    plan.omega[...] = np.eye(*plan.omega.shape[1:])
    states = rng.integers(-9, 10, (slots, *layer.state_shape)).astype(float)
    for slot, head in np.ndindex(slots, layer.heads):
        rank = plan.ranks[head]
        if rank == FULL_STATE:
            continue
        owner = np.arange(layer.value_dim) % rank
        rows = np.zeros((rank, layer.key_dim))
        for g in range(rank):
            column, row = ((63, 3), (15, 7))[rng.integers(2)]
            own = rng.integers(-column, column + 1, np.count_nonzero(owner == g))
            own[0], rows[g, rank:] = column, rng.integers(-row, row + 1, layer.key_dim - rank)
            rows[g, g], rows[g, rng.integers(rank, layer.key_dim)] = 1, -row
            states[slot, head, owner == g] = own[:, None] * rows[g]
    return states.astype(np.float32)


def slot_table(batch, slots, tokens, rng):
    """Random distinct slots of each row at each token, some of them padding."""
    table = np.stack([rng.permutation(slots)[:batch] for _ in range(tokens)])
    table[rng.uniform(size=table.shape) < 0.2] = -1
    return table.astype(np.int64)


def token(tokens, t, rows=slice(None)):
    return Tokens(*(None if x is None else np.ascontiguousarray(x[rows, t : t + 1]) for x in tokens))
