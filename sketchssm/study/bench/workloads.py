"""Workloads: random inputs and plans, and the systems to time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.arrays.gates import GateInput
from sketchssm.cuda import MAX_RANK
from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.formats import DEFAULT_FORMAT
from sketchssm.layer.recurrence import FULL_STATE, Layer, Tokens
from sketchssm.plans.basis import SketchBasis
from sketchssm.plans.plan import SketchPlan
from sketchssm.study.systems import System, exact_systems, sketch_system
from sketchssm.study.tables import number

SPREAD = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.6, 2.2)
"""Ranks of eight heads over their mean, with the long tail of an allocation."""

Array = npt.NDArray[Any]


def spread_ranks(heads: int, mean: int, limit: int = MAX_RANK) -> npt.NDArray[np.int64]:
    """Make ranks of at least 1 that differ from head to head as in an allocation.

    The mean is exact if `heads` is a multiple of 8 and `limit` allows it. Columns that `limit`, the largest rank,
    takes from some heads go to the others. The default is the largest of backend "cuda".
    """
    eight = np.maximum(np.round(mean * np.array(SPREAD)), 1).astype(np.int64)
    eight[-1] = max(8 * mean - eight[:-1].sum(), 1)
    eight = np.minimum(eight, limit)
    while (left := 8 * mean - eight.sum()) > 0 and (below := np.flatnonzero(eight < limit)).size:
        eight[below[-left:]] += 1  # the largest first
    return np.resize(eight, heads)


def random_gate(layer: Layer, seed: int = 0) -> GateInput:
    """Draw the gate of a layer of kda or gla with the distributions that initialise such layers.

    Rates are 1 to 16; a raw input of 0 gives a step of 0.001 to 0.1.
    """
    rng = np.random.default_rng(seed)
    step = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), (layer.heads, layer.key_dim)))
    return GateInput(np.log(rng.uniform(1, 16, layer.heads)), np.log(np.expm1(step)))


def random_tokens(layer: Layer, batch: int, tokens: int, seed: int = 0, raw_gate: bool = False) -> Tokens:
    """Draw float32 inputs ``(batch, tokens, ...)`` of a layer: unit keys and queries, slow decay.

    `raw_gate` tells whether g holds raw gate inputs.
    """
    rng = np.random.default_rng(seed)
    drawn: dict[str, Array] = {}
    for name, tail in layer.token_shapes().items():
        shape = (batch, tokens, *tail)
        if name == "g" and raw_gate:
            drawn[name] = rng.standard_normal(shape, dtype=np.float32)
        elif name == "g":
            drawn[name] = -rng.random(shape, dtype=np.float32) / 10
        elif name == "beta":
            drawn[name] = rng.random(shape, dtype=np.float32)
        else:
            x = rng.standard_normal(shape, dtype=np.float32)
            drawn[name] = x if name == "v" else x / np.linalg.norm(x, axis=-1, keepdims=True)
    return Tokens(*(drawn.get(name) for name in Tokens._fields))


def token_at(tokens: Tokens, t: int) -> Tokens:
    """Take token t of each row, contiguous as a layer of a model would pass it."""
    return Tokens(*(None if x is None else np.ascontiguousarray(x) for x in tokens.at(np.s_[:, t])))


def random_plan(
    layer: Layer,
    rank: int | npt.NDArray[np.int64],
    window: int,
    map: str | CoefficientMap,
    seed: int = 0,
    sketch_dtype: str = DEFAULT_FORMAT,
    residual_bits: int = 0,
) -> SketchPlan:
    """Make a plan with random bases, as times do not depend on the values; one rank for all heads, or each head's."""
    ranks = np.broadcast_to(rank, layer.heads)
    basis = SketchBasis.random(layer, int(ranks.max()), seed, window=window)
    return SketchPlan(basis, ranks, window, map, sketch_dtype, residual_bits=residual_bits)


def systems(
    layer: Layer,
    window: int,
    plans: Sequence[SketchPlan],
    gate: GateInput | None = None,
    state_dtype: str = "float32",
) -> list[System]:
    """List the systems of a benchmark: standard, replay, and one sketch per plan."""
    return exact_systems(layer, window, gate, state_dtype) + [
        sketch_system(plan, _name(plan), gate, state_dtype) for plan in plans
    ]


def _name(plan: SketchPlan) -> str:
    """Name of a sketch in tables."""
    form = "" if plan.sketch_dtype == DEFAULT_FORMAT else f" {plan.sketch_dtype}"
    bits = sorted({int(bits) for bits in plan.residual_bits[plan.ranks != FULL_STATE]})
    residual = f" + {' or '.join(map(str, bits))} bits" if any(bits) else ""
    return f"sketch G={number(plan.mean_rank)} {plan.map.name}{form}{residual}"
