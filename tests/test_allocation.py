"""Allocated ranks: within the budget, certified, and as good as an exhaustive search on small layers."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import map_of, refused

import sketchssm as ss
from sketchssm.calibrate.allocation import METHODS, budget_of
from sketchssm.layer.coefficients import MAPS
from sketchssm.layer.recurrence import Layer
from sketchssm.plans import traffic
from sketchssm.plans.basis import SketchBasis

SMALL = Layer("gdn", 4, 32, 24)


def scores_of(layer, error, paired=None):
    """Scores with given curves ``(heads, rank_max + 1)``, as if one sample had been seen."""
    error = np.asarray(error, dtype=np.float64)
    one = Layer(layer.kind, 1, layer.key_dim, layer.value_dim)  # the basis is not used, so that of one head suffices
    scores = ss.RankScores(SketchBasis.random(one, error.shape[1] - 1))
    scores.layer, scores.error, scores.samples = layer, error, np.ones(layer.heads, dtype=np.int64)
    if paired is not None:
        scores.weighting = "gradient"
        scores.paired = np.asarray(paired, dtype=np.float64)
        scores.weighted = np.maximum(error[:, :1] - error, 0.0)
    return scores


def falling(rng, heads, rank_max):
    """Curves that decrease with rank, with plateaus and steps, over three decades of scale."""
    steps = rng.exponential(size=(heads, rank_max + 1)) * (rng.random((heads, rank_max + 1)) < 0.6)
    curves = np.cumsum(steps[:, ::-1], axis=1)[:, ::-1]
    return curves * 10 ** rng.uniform(-3, 0, size=(heads, 1))


def cost_of(layer, rank, map="ridge"):
    return float(traffic.sketch_read(layer.kind, layer.key_dim, layer.value_dim, rank, 16, map))


def exhaustive(layer, curves, budget, **how):
    """Least sum of scores over all rank tables within the budget."""
    full = cost_of(layer, ss.FULL_STATE)
    ranks = [G for G in range(1, curves.shape[1]) if cost_of(layer, G, **how) < full]
    options = [(cost_of(layer, G, **how), G) for G in ranks] + [(full, None)]
    best = np.inf
    for table in itertools.product(options, repeat=layer.heads):
        if sum(cost for cost, _ in table) <= budget:
            best = min(best, sum(0.0 if G is None else curves[h, G] for h, (_, G) in enumerate(table)))
    return best


def check(allocation, layer, curves, map="ridge"):
    used = sum(cost_of(layer, rank, map) for rank in allocation.ranks)
    value = sum(0.0 if rank == ss.FULL_STATE else curves[h, rank] for h, rank in enumerate(allocation.ranks))
    assert used == allocation.traffic.read_bytes <= allocation.budget
    # sums of a few float64 in another order
    assert value == pytest.approx(allocation.objective, rel=1e-12, abs=1e-300)
    assert allocation.bound <= allocation.objective * (1 + 1e-12) + 1e-300
    assert allocation.gap >= 0


def certify(allocation, optimum, curves):
    """The bound is below the optimum, and the gap covers what is lost, to the rounding of sums whose terms cancel."""
    assert allocation.bound <= optimum + 1e-12 * curves.max()
    assert allocation.objective - optimum <= allocation.gap * allocation.objective + 1e-11 * curves.max()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    mean_rank=st.one_of(st.integers(1, 7), st.floats(1, 7)),
    map=st.sampled_from([map_of(name, pivots=2) for name in MAPS]),
    monotone=st.booleans(),
    rank_max=st.sampled_from([None, 6, 4, 1]),
)
def test_against_exhaustive_search(seed, mean_rank, map, monotone, rank_max):
    rng = np.random.default_rng(seed)
    curves = falling(rng, 4, 6) if monotone else rng.exponential(size=(4, 7))
    allocation = ss.allocate_ranks(scores_of(SMALL, curves), mean_rank, map=map, rank_max=rank_max)
    check(allocation, SMALL, curves, map)
    assert max(allocation.ranks) <= (rank_max or 6)
    optimum = exhaustive(SMALL, curves[:, : (rank_max or 6) + 1], allocation.budget, map=map)
    certify(allocation, optimum, curves)
    assert optimum <= allocation.objective + 1e-12 * curves.max()


def test_budget_is_the_mean_ranks(rng):
    curves = falling(rng, 4, 12)
    scores = scores_of(SMALL, curves)
    for mean_rank in (1, 2.5, 7):
        allocation = ss.allocate_ranks(scores, mean_rank)
        # equation m-allocation: B = N mean_rank tau_sk, exact in float64
        assert allocation.budget == 4 * mean_rank * 2 * (24 + 32 + 16)
        sketched = allocation.ranks[allocation.ranks != ss.FULL_STATE]
        if sketched.size == 4:
            assert sketched.mean() <= mean_rank
        reduction = traffic.reduction("gdn", 32, 24, allocation.ranks, 16)
        # one sum against one mean
        assert allocation.traffic.reduction == pytest.approx(reduction, rel=1e-14)


def test_enough_for_all_is_all_full_states(rng):
    curves = falling(rng, 4, 6) + 1
    allocation = ss.allocate_ranks(scores_of(SMALL, curves), 100)
    assert (allocation.ranks == ss.FULL_STATE).all()
    assert allocation.objective == allocation.gap == allocation.bound == 0


def test_heads_of_one_curve_share_what_there_is():
    """Every other head changes its rank at the same price, and the budget has room for half of these heads."""
    curves = (0.5 ** np.arange(13))[None].repeat(40, axis=0)
    curves[1::2] *= 0.7
    allocation = ss.allocate_ranks(scores_of(Layer("gdn", 40, 32, 24), curves), 5.25)
    # of equals the first; two gains, because an unstable sort may keep the order of an array of equals
    assert allocation.ranks.tolist() == [6, 5] * 10 + [5] * 20
    # the optimum of a convex curve: only the bisected price's rounding is left
    assert allocation.gap < 1e-12


def test_the_largest_of_equal_moves_comes_first():
    """Two heads gain equally per byte at one price, and the budget has room for either, but not for both."""
    small, large = Layer("gdn", 1, 32, 24), Layer("gdn", 1, 64, 64)  # 144 and 288 bytes a rank
    curves = [cost * np.array([[3.0, 2, 1, 1]]) for cost in (144, 288)]  # powers of two apart: rounded alike
    scores = [scores_of(layer, curve) for layer, curve in zip((small, large), curves, strict=True)]
    ranks = ss.allocate_ranks(scores, 1.75).ranks
    assert [own.tolist() for own in ranks] == [[1], [2]]


def test_a_move_may_take_all_that_is_left():
    """Rank 2 lies above the line from rank 1 to rank 3, so no price leads to rank 2."""
    curves = np.array([[12.0, 10, 6, 0]])
    allocation = ss.allocate_ranks(scores_of(Layer("gdn", 1, 32, 24), curves), 2)
    assert allocation.ranks == 2
    assert allocation.traffic.read_bytes == allocation.budget


def test_layers_share_one_budget(rng):
    one, two = Layer("gdn", 3, 32, 24), Layer("mamba2", 5, 16, 40)
    curves = [falling(rng, 3, 8), 50 * falling(rng, 5, 5)]
    scores = [scores_of(layer, curve) for layer, curve in zip((one, two), curves, strict=True)]
    allocation = ss.allocate_ranks(scores, 3)
    assert [ranks.shape for ranks in allocation.ranks] == [(3,), (5,)]
    used = sum(cost_of(layer, rank) for layer, own in zip((one, two), allocation.ranks, strict=True) for rank in own)
    assert used == allocation.traffic.read_bytes <= allocation.budget == 3 * cost_of(one, 3) + 5 * cost_of(two, 3)
    standard = 3 * traffic.standard(32, 24) + 5 * traffic.standard(16, 40)
    bytes_used = sum(
        traffic.sketch(layer.kind, layer.key_dim, layer.value_dim, own, 16).sum()
        for layer, own in zip((one, two), allocation.ranks, strict=True)
    )
    assert allocation.traffic.reduction == pytest.approx(standard / bytes_used, rel=1e-14)
    # sharing can only help: each layer's own table is one of those within the joint budget
    apart = sum(ss.allocate_ranks(own, 3).objective for own in scores)
    assert allocation.bound <= apart
    assert allocation.objective <= apart + allocation.gap * allocation.objective
    assert allocation.gap < 0.5  # not trivial, though the layers score different ranks


def test_methods(rng):
    curves = falling(rng, 4, 8) + 1e-3
    error_only = scores_of(SMALL, curves)
    paired = curves[::-1]
    graded = scores_of(SMALL, curves, paired)
    methods = [method for method in METHODS if method != "perturbation"]
    results = {method: ss.allocate_ranks(graded, 4, method) for method in methods}
    assert len(set(results.values())) == len(methods)  # equal only to itself
    with pytest.raises(AttributeError):
        results["error"].ranks = results["gradient"].ranks
    assert ss.allocate_ranks(error_only, 4).method == "error"
    assert ss.allocate_ranks(graded, 4).method == "gradient"
    assert ss.allocate_ranks([graded, error_only], 4).method == "error"
    probed = scores_of(SMALL, curves, paired)
    probed.weighting = "perturbation"
    assert ss.allocate_ranks(probed, 4).method == "perturbation"
    assert np.array_equal(
        ss.allocate_ranks(probed, 4).ranks, ss.allocate_ranks(scores_of(SMALL, curves, paired), 4).ranks
    )
    assert ss.allocate_ranks([graded, probed], 4).method == "error"
    for scores, method in ((graded, "perturbation"), (probed, "gradient")):
        refused(f"method: '{method}' needs (gradients|weights), and the scores", ss.allocate_ranks, scores, 4, method)
    assert np.array_equal(results["error"].ranks, ss.allocate_ranks(error_only, 4).ranks)
    assert np.array_equal(results["gradient"].ranks, ss.allocate_ranks(scores_of(SMALL, paired), 4).ranks)
    uniform = results["uniform"]
    assert (uniform.ranks == 4).all() and uniform.objective == pytest.approx(paired[:, 4].sum())
    assert uniform.bound == results["gradient"].bound and uniform.gap >= results["gradient"].gap
    assert (ss.allocate_ranks(error_only, 4.9, "uniform").ranks == 4).all()
    assert (ss.allocate_ranks(error_only, 8, "uniform").ranks == 8).all()  # the largest rank that is scored


def test_a_large_model(rng):
    """5120 heads of 60 ranks: the certificate is tight, as one head is a small part of the sum."""
    layer = Layer("mamba2", 5120, 128, 64)
    curves = falling(rng, 5120, 60)
    allocation = ss.allocate_ranks(scores_of(layer, curves), 5)
    check(allocation, layer, curves)
    # the relaxation's gap is at most one head's substitution; the heads' scores differ over three decades
    assert allocation.gap < 1e-4


@pytest.mark.parametrize(
    ("mean_rank", "method", "match"),
    [
        (0.5, None, "mean_rank"),
        *((wrong, None, "mean_rank: expected a finite number of at least 1") for wrong in (np.nan, np.inf, "4", True)),
        (9, "uniform", "mean_rank"),
        (2, "loss", "method: expected one of gradient, perturbation, error, uniform, got 'loss'"),
        (2, "gradient", "needs gradients"),
    ],
)
def test_refusals(mean_rank, method, match, rng):
    with pytest.raises(ValueError, match=match):
        ss.allocate_ranks(scores_of(SMALL, falling(rng, 4, 8)), mean_rank, method)


def test_rank_scores_do_not_allocate_beside_residuals(rng):
    scores = scores_of(SMALL, falling(rng, 4, 8))
    form = {"map": "subspace", "residual_bits": 2}
    assert (ss.allocate_ranks(scores, 3, "uniform", **form).ranks == 3).all()
    for method in (None, "error"):
        refused("method: expected 'uniform' with residual bits, got", ss.allocate_ranks, scores, 3, method, **form)


def test_no_samples(rng):
    fresh = ss.RankScores(SketchBasis.random(SMALL, 8))
    match = r"^scores: expected samples .*, got none for layer 1: .* longer than the window of 16 tokens"
    with pytest.raises(ValueError, match=match):
        ss.allocate_ranks([scores_of(SMALL, falling(rng, 4, 8)), fresh], 4)
    with pytest.raises(ValueError, match="at least one layer"):
        ss.allocate_ranks([], 4)


@pytest.mark.parametrize("method", [None, "gradient"])
def test_gradients_of_zero(method, rng):
    """Float16 without loss scaling gives zeros; rank 1 for every head would be the result."""
    curves = falling(rng, 4, 8)
    layers = [scores_of(SMALL, curves, curves), scores_of(SMALL, curves, 0 * curves)]
    refused(r"scores: '\w+' needs gradients, got only zeros for layer 1$", ss.allocate_ranks, layers, 4, method)
    assert ss.allocate_ranks(layers, 4, "error").method == "error"


def test_a_dead_head_gets_rank_1(rng):
    scores = scores_of(SMALL, falling(rng, 4, 8) * [[1], [1], [0], [1]])
    scores.samples[2] = 0
    assert ss.allocate_ranks(scores, 4).ranks[2] == 1


def test_scores_of_any_range():
    """The price is found to float64's last digit even if it is tiny beside the largest score."""
    curves = 0.5 ** np.arange(9.0) * np.array([[1e30], [1e-10], [1e-10], [1e-10]])
    # a budget of one full read and 19 ranks: the first head takes the one, equal heads share the others
    allocation = ss.allocate_ranks(scores_of(SMALL, curves), 7.45)
    assert allocation.ranks[0] == ss.FULL_STATE
    assert sorted(allocation.ranks[1:]) == [6, 6, 7]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("name", ["error", "paired", "weighted"])
def test_scores_that_are_no_sums_of_squares(name, wrong, rng):
    curves = falling(rng, 4, 6)
    layers = [scores_of(SMALL, curves.copy(), curves.copy()) for _ in range(2)]
    getattr(layers[1], name).flat[3] = wrong
    refused("scores: expected finite sums of at least 0, .* layer 1: are the keys", ss.allocate_ranks, layers, 3)


@pytest.mark.parametrize(
    ("given", "budget"),
    [
        *(({}, (7, 9)), ({"asked": True}, (7, 10)), ({"reduction": 8}, (7, 8)), ({"mean_rank": 4}, (4, None))),
        *(({"map": "ridge"}, (7, None)), ({"map": "subspace"}, (7, 9))),
        *(({"method": "uniform"}, (7, None)), ({"method": "error"}, (7, 9))),
    ],
)
def test_a_budget_has_residuals_unless_other_settings_exclude_them(given, budget):
    assert budget_of(**{"mean_rank": None, "reduction": None} | given) == budget
