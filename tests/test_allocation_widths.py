"""Ranks and widths of sketches in few bits, allocated under one budget."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_allocation import SMALL, certify, falling, scores_of

import sketchssm as ss
from sketchssm.layer.formats import FORMATS, SketchFormat
from sketchssm.layer.recurrence import Layer
from sketchssm.plans import traffic
from sketchssm.plans.basis import SketchBasis


def pairs_of(form, rank_max):
    """Ranks and columns in 8 bits that a head may take."""
    return [(G, w) for G in range(1, rank_max + 1) for w in (range(G + 1) if form.mixed else (G,))]


def score_of(form, curve, rank, wide):
    """The docstring's equation."""
    lead, tail = form.code.noise, (form.tail or form.code).noise
    return curve[rank] + lead * (curve[0] - curve[wide]) + tail * (curve[wide] - curve[rank])


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    mean_rank=st.floats(1, 5),
    name=st.sampled_from(["float32", "int8", "fp8", "int8+int4"]),
)
def test_widths_against_exhaustive_search(seed, mean_rank, name):
    """Three heads of rank 4 and less: ranks and widths within the budget, certified."""
    form, layer = SketchFormat.of(name), Layer("gdn", 3, 32, 24)
    curves = falling(np.random.default_rng(seed), 3, 4)
    allocation = ss.allocate_ranks(scores_of(layer, curves), mean_rank, sketch_dtype=name)
    assert allocation.sketch_dtype == name
    assert (allocation.wide is None) == (not form.mixed)

    def cost(rank, wide):
        narrow = {"sketch_dtype": name, "wide": wide if form.mixed else None}
        return float(traffic.sketch_read("gdn", 32, 24, rank, 16, **narrow))

    assert allocation.budget == pytest.approx(3 * cost(mean_rank, mean_rank / 2), rel=1e-14)
    wide = allocation.ranks if allocation.wide is None else allocation.wide
    chosen = [(int(G), 0 if ss.FULL_STATE == G else int(w)) for G, w in zip(allocation.ranks, wide, strict=True)]
    assert sum(cost(*pair) for pair in chosen) == allocation.traffic.read_bytes <= allocation.budget
    value = sum(0 if G == ss.FULL_STATE else score_of(form, curves[h], G, w) for h, (G, w) in enumerate(chosen))
    assert value == pytest.approx(allocation.objective, rel=1e-12, abs=1e-300)
    tables = [
        (sum(cost(*pair) for pair in table), sum(score_of(form, curves[h], *pair) for h, pair in enumerate(table)))
        for table in itertools.product(pairs_of(form, 4), repeat=3)
    ]
    best = min(value for used, value in tables if used <= allocation.budget)
    certify(allocation, best, curves)


def test_widths_go_where_energy_is():
    """One column has nearly all energy and gets 8 bits: 4 bits would lose more of it than the energy of the others."""
    curves = np.array([np.r_[1.0, 0.02 * 0.9 ** np.arange(12)]])
    allocation = ss.allocate_ranks(scores_of(Layer("gdn", 1, 32, 24), curves), 6, sketch_dtype="int8+int4")
    assert 1 <= allocation.wide < allocation.ranks


def test_widths_where_gradients_avoid_the_output():
    """The first column has nearly all energy, and errors in its direction have no effect; its noise has any direction.

    A head of noisy 4-bit columns alone would score 0.092 x 1 + 0.01, and with one column in 8 bits about 0.013.
    """
    energy = np.array([np.r_[1.0, 0.02 * 0.9 ** np.arange(12)]])
    paired = np.array([np.r_[0.02, 0.02 * 0.9 ** np.arange(12)]])
    layer = Layer("gdn", 1, 32, 24)
    scores = scores_of(layer, energy, paired, sensitivity=[24.0])
    allocation = ss.allocate_ranks(scores, 6, sketch_dtype="int8+int4")
    rank, wide = int(allocation.ranks[0]), int(allocation.wide[0])
    assert 1 <= wide < rank
    lost = FORMATS["int8+int4"].noise(1.0 - energy[0, rank], 1.0 - energy[0, wide])
    assert allocation.objective == pytest.approx(paired[0, rank] + lost, rel=1e-12)  # the same float64 numbers


def test_uniform_widths_and_plans(rng):
    layers = [SMALL, Layer("mamba2", 5, 16, 40)]
    scores = [scores_of(layer, falling(rng, layer.heads, 8)) for layer in layers]
    allocation = ss.allocate_ranks(scores, 7.5, "uniform", sketch_dtype="int8+int4")
    for layer, table in zip(layers, allocation.tables, strict=True):
        plan = ss.SketchPlan(SketchBasis.random(layer, 8), table)
        assert plan.sketch_dtype == "int8+int4"
        assert (plan.ranks == 7).all()
        assert (plan.wide == 3).all()
    assert allocation.traffic.read_bytes <= allocation.budget
    one = ss.allocate_ranks(scores[0], 3, sketch_dtype="int8")
    assert ss.SketchPlan(SketchBasis.random(SMALL, 8), one).sketch_dtype == "int8"
    assert [table.ranks.tolist() for table in one.tables] == [one.ranks.tolist()]


def test_half_the_bytes_for_the_same_ranks(rng):
    """In int8 a mean rank costs half, except for the scales and the erase vectors."""
    scores = scores_of(Layer("mamba2", 4, 32, 24), falling(rng, 4, 12))
    wide, narrow = (ss.allocate_ranks(scores, 5, sketch_dtype=name) for name in ("bfloat16", "int8"))
    assert narrow.budget == wide.budget / 2 + 4 * 5 * 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sketch_dtype": "int4"}, "sketch_dtype: expected one of"),
        ({"sketch_dtype": "int8+int4", "map": "prior"}, r"sketch_dtype: 'int8\+int4' serves the maps exact and ridge"),
    ],
)
def test_refuses_a_format(settings, message, rng):
    with pytest.raises(ValueError, match="^" + message):
        ss.allocate_ranks(scores_of(SMALL, falling(rng, 4, 6)), 3, **settings)
