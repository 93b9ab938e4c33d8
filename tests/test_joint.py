"""Joint allocation of ranks and residual bits: scores of the stored form, and tables within a budget of traffic."""

import itertools

import numpy as np
import pytest
from samples import refused, tokens_of

import sketchssm as ss
from sketchssm.calibrate.windows import host_tokens
from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.recurrence import Layer
from sketchssm.plans import traffic
from sketchssm.plans.basis import SketchBasis
from sketchssm.plans.plan import total_reduction
from sketchssm.reference.residual import residual_read
from sketchssm.reference.walk import walk

LAYERS = {
    "mamba2": Layer("mamba2", 3, 24, 16),
    "gdn": Layer("gdn", 4, 16, 24, 2),
    "kda": Layer("kda", 2, 24, 24),
}
SMALL = LAYERS["gdn"]
PAIRS = [(rank, bits) for rank in (1, 4) for bits in (1, 3)]
MAP = CoefficientMap("subspace")


def traces(seed, layer, length=40):
    rng = np.random.default_rng(seed)
    tokens = tokens_of(rng, layer, 2, length)
    return tokens, rng.standard_normal(tokens.v.shape)


def scored(layer=SMALL, tokens=None, grad=None, basis=None, weight=None, **settings):
    settings = {"window": 8, "ranks": (1, 4), "bits": (1, 3)} | settings
    scores = ss.JointScores(basis or SketchBasis.random(layer, 6), **settings)
    if tokens is None:
        tokens, grad = traces(0, layer)
    scores.update(*tokens, grad=grad, weight=weight)
    return scores


def filled(paired, isotropic=None, layer=None):
    """Scores with given means ``(heads, 2 ranks, 2 bits)``."""
    paired = np.asarray(paired, dtype=np.float64)
    layer = layer or Layer("gdn", len(paired), 128, 128)
    scores = ss.JointScores(SketchBasis.random(layer, 4), ranks=(1, 4), bits=(1, 3))
    scores.weighting, scores.samples = "gradient", np.ones(layer.heads, dtype=np.int64)
    scores.paired, scores.error = paired, paired.copy()
    scores.isotropic = np.zeros_like(paired) if isotropic is None else np.asarray(isotropic, dtype=np.float64)
    return scores


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kind", LAYERS)
def test_scores_are_errors_of_what_the_reference_reads(kind, form):
    layer, (tokens, grad) = LAYERS[kind], traces(1, LAYERS[kind])
    basis = SketchBasis.random(layer, 6)
    scores = scored(layer, tokens, grad, basis, sketch_dtype=form)
    omega = basis.omega[..., :4].astype(np.float64)
    want = {name: np.zeros((layer.heads, 4)) for name in ("paired", "error", "isotropic")}
    count, energy = np.zeros(layer.heads), np.zeros(layer.heads)

    def visit(reads):
        energy[:] += np.square(reads.queries @ reads.state).sum((0, 2, 3))
        count[:] += reads.queries.shape[-2] * reads.state.shape[0]
        for head, row, (at, (rank, bits)) in itertools.product(
            range(layer.heads), range(reads.state.shape[0]), enumerate(PAIRS)
        ):
            state, x = reads.state[row, head], reads.queries[row, head]
            columns = omega[head, :, :rank]
            served = residual_read(SketchFormat.of(form), MAP, state, columns, bits=bits)
            delta = x @ (served.T - state)
            want["error"][head, at] += np.square(delta).sum()
            share = np.square(served.T - state).sum() / np.square(state).sum()
            want["isotropic"][head, at] += len(x) * share
            slope = grad[:, reads.tokens][row, :, head]
            want["paired"][head, at] += np.square((slope * delta).sum(-1)).sum()

    walk(layer, host_tokens(layer, *tokens), 8, visit)
    assert np.array_equal(scores.samples, count)
    assert scores.energy == pytest.approx(energy)
    chosen = scores.retained(np.full(layer.heads, 4), np.full(layer.heads, 3))
    assert chosen == pytest.approx(1 - want["error"][:, 3].sum() / energy.sum(), rel=1e-3)
    assert scores.retained(np.full(layer.heads, ss.FULL_STATE), np.zeros(layer.heads, int)) == 1
    for name, sums in want.items():
        # codes at the edge of two levels may differ with the rounding of a basis; next to none do
        np.testing.assert_allclose(getattr(scores, name).reshape(layer.heads, 4), sums, rtol=1e-3, err_msg=name)


def test_zero_states_are_no_samples_and_leave_no_error():
    tokens, grad = traces(2, SMALL)
    tokens.v[0] = 0
    scores, one = scored(tokens=tokens, grad=grad), scored(tokens=tokens.at(np.s_[1:]), grad=grad[1:])
    for name in ("samples", "paired", "error", "isotropic"):
        np.testing.assert_allclose(getattr(scores, name), getattr(one, name), rtol=1e-12)
    assert (one.samples == 7 * 4).all()  # five windows of 8, the first from a zero state


def test_states_whose_squares_vanish_leave_no_error():
    """Those of strong decays; their relative error would be 0 / 0."""
    tokens, grad = traces(2, SMALL)
    tokens.v[0] *= 1e-25
    grad = grad.astype(np.float32)  # all in float32
    scores, one = scored(tokens=tokens, grad=grad), scored(tokens=tokens.at(np.s_[1:]), grad=grad[1:])
    for name in ("paired", "error", "isotropic"):
        np.testing.assert_allclose(getattr(scores, name), getattr(one, name), rtol=1e-5, err_msg=name)


def test_some_windows_calls_and_sums():
    tokens, grad = traces(3, SMALL, 48)
    basis = SketchBasis.random(SMALL, 6)
    some = scored(tokens=tokens, grad=grad, basis=basis, every=2)  # windows 1, 3 and 5
    assert (some.samples == 2 * 7 * 3).all()
    parts = scored(tokens=tokens.at(np.s_[:1]), grad=grad[:1], basis=basis, every=2)
    parts += scored(tokens=tokens.at(np.s_[1:]), grad=grad[1:], basis=basis, every=2)
    whole = scored(tokens=tokens, grad=grad, basis=basis)
    halves = ss.JointScores(basis, 8, ranks=(1, 4), bits=(1, 3))
    carry = halves.update(*tokens.at(np.s_[:, :19]), grad=grad[:, :19])
    halves.update(*tokens.at(np.s_[:, 19:]), grad=grad[:, 19:], carry=carry)
    for one, other in ((some, parts), (whole, halves)):
        for name in ("samples", "paired", "error", "isotropic"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-9)


def test_against_exhaustive_search():
    rng = np.random.default_rng(4)
    layer = Layer("gdn", 3, 128, 128)

    def cost(rank, bits):
        form = {"sketch_dtype": "int8", "residual_bits": bits}
        return float(traffic.sketch_read("gdn", 128, 128, rank, 16, MAP, **form))

    costs = np.array([*(cost(*pair) for pair in PAIRS), 2 * 128 * 128])
    for reduction in (4.0, 8.0, 9.5, 11.0):
        scores = filled(rng.exponential(size=(3, 2, 2)), rng.exponential(size=(3, 2, 2)), layer)
        allocation = ss.allocate_joint(scores, reduction)
        # shares of the sum at rank 1 with 1 bit: the nearest to 2 and 2 that come first
        values = sum(x / x[:, 0, 0].sum() for x in (scores.paired, scores.isotropic)).reshape(3, 4)
        values = np.append(values, np.zeros((3, 1)), axis=1)
        tables = list(itertools.product(range(5), repeat=3))
        sums = [values[range(3), table].sum() for table in tables if costs[list(table)].sum() <= allocation.budget]
        assert allocation.budget == pytest.approx(3 * (32 / reduction - 2) * 4 * 128 * 128 / 15, rel=1e-9)
        assert allocation.bound <= min(sums) * (1 + 1e-12)
        assert min(sums) <= allocation.objective * (1 + 1e-12)
        assert allocation.objective - min(sums) <= allocation.gap * allocation.objective + 1e-12
        chosen = [
            4 if rank == ss.FULL_STATE else PAIRS.index((rank, bits))
            for rank, bits in zip(allocation.ranks, allocation.residual_bits, strict=True)
        ]
        assert values[range(3), chosen].sum() == pytest.approx(allocation.objective)
        assert costs[chosen].sum() == allocation.traffic.read_bytes <= allocation.budget
        plan = ss.SketchPlan(SketchBasis.random(layer, 4), allocation, map="subspace")
        assert plan.sketch_dtype == "int8"
        assert plan.reduction == pytest.approx(allocation.traffic.reduction, rel=1e-12)
        assert plan.reduction >= reduction * (1 - 1e-9)


def test_layers_share_one_budget():
    layers = [Layer("gdn", 2, 128, 128), Layer("mamba2", 3, 128, 64)]
    needy, easy = np.array([[9.0, 3], [5, 1]]), np.array([[0.09, 0.03], [0.05, 0.01]])
    scores = [filled([needy] * 2, layer=layers[0]), filled([easy] * 3, layer=layers[1])]
    allocation = ss.allocate_joint(scores, 10.0)
    assert [own.shape for own in allocation.ranks] == [own.shape for own in allocation.residual_bits] == [(2,), (3,)]
    assert allocation.residual_bits[0].min() >= allocation.residual_bits[1].max()
    plans = [
        ss.SketchPlan(SketchBasis.random(layer, 4), own, 16, "subspace", "int8", bits)
        for layer, own, bits in zip(layers, allocation.ranks, allocation.residual_bits, strict=True)
    ]
    assert total_reduction(plans) == pytest.approx(allocation.traffic.reduction, rel=1e-12)
    assert total_reduction(plans) >= 10 * (1 - 1e-9)


NEEDY, EASY = [[100, 1], [90, 0.9]], [[1, 0.9], [0.9, 0.8]]


def test_answers_count_as_much_as_text_on_any_scale():
    """Text needs the first head, and answers the second; either alone would starve the other."""
    text, asked = filled([NEEDY, EASY, EASY]), filled([EASY, NEEDY, EASY])
    want = ss.allocate_joint(text, 9.7, asked)
    assert want.residual_bits.tolist() == [3, 3, 1]
    assert want.method == "joint"
    for scale in (1e-6, 1e6):
        scaled = filled(scale * asked.paired)
        assert ss.allocate_joint(text, 9.7, scaled).residual_bits.tolist() == [3, 3, 1]
        assert ss.allocate_joint(filled(scale * text.paired), 9.7, asked).residual_bits.tolist() == [3, 3, 1]
    longer = filled(asked.paired * np.array([7, 1, 1])[:, None, None])
    longer.samples[0] = 7  # means, not sums
    assert ss.allocate_joint(text, 9.7, longer).objective == pytest.approx(want.objective)


def test_without_questions_the_isotropic_error_counts():
    text = filled([NEEDY, EASY, EASY], [EASY, EASY, NEEDY])
    assert ss.allocate_joint(text, 9.7).residual_bits.tolist() == [3, 1, 3]
    # with questions the isotropic error does not
    asked = filled([EASY, NEEDY, EASY])
    assert ss.allocate_joint(text, 9.7, asked).residual_bits.tolist() == [3, 3, 1]
    assert ss.allocate_joint(text).budget == ss.allocate_joint(text, 9).budget
    assert ss.allocate_joint(text, answers=asked).budget == ss.allocate_joint(text, 10).budget


def test_without_gradients_errors_count():
    tokens, grad = traces(5, SMALL)
    basis = SketchBasis.random(SMALL, 6)
    blind = scored(tokens=tokens, basis=basis)
    assert not blind.paired.any()
    allocation = ss.allocate_joint(blind, 1.5)
    assert allocation.method == "joint-error"
    assert allocation.objective < 2  # both errors at rank 1 with 1 bit
    refused("answers: expected scores", ss.allocate_joint, scored(tokens=tokens, grad=grad, basis=basis), 1.5, blind)


def test_weights_count_squared_errors():
    """One weight scales all errors; tokens of weight zero are left out."""
    tokens, grad = traces(5, SMALL)
    basis, weight = SketchBasis.random(SMALL, 6), np.full(grad.shape[:-1], 3.0)
    scores = scored(tokens=tokens, basis=basis, weight=weight)
    np.testing.assert_allclose(scores.paired, 3 * scores.error, rtol=1e-6)  # products in float32
    assert ss.allocate_joint(scores, 1.5).method == "joint-perturbation"
    weight[:, ::2] = 0
    part = scored(tokens=tokens, basis=basis, weight=weight)
    assert (part.paired < scores.paired).all() and (part.paired > 0).all()


def test_every_head_keeps_a_bit():
    scores = filled(np.zeros((3, 2, 2)) + np.array([1, 0, 0])[:, None, None], layer=Layer("gdn", 3, 128, 128))
    assert ss.allocate_joint(scores, 12.0).residual_bits.tolist() == [1, 1, 1]
    default = ss.JointScores(SketchBasis.random(SMALL, 16))
    assert default.ranks == (1, 2, 3, 4, 6, 8, 12, 16)
    assert default.bits == (1, 2, 3)
    assert ss.JointScores(SketchBasis.random(SMALL, 5)).ranks == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"ranks": (0, 2)}, "^ranks: expected numbers from 1 to 6, got 0"),
        ({"ranks": (7,)}, "^ranks: expected numbers from 1 to 6, got 7"),
        ({"ranks": ()}, "^ranks: expected at least one"),
        ({"bits": (0, 1)}, "^bits: expected numbers from 1 to 3, got 0"),
        ({"sketch_dtype": "int4"}, "int4"),
    ],
)
def test_settings_are_checked(settings, match):
    with pytest.raises(ValueError, match=match):
        ss.JointScores(SketchBasis.random(SMALL, 6), 8, **settings)


def test_refusals():
    scores = scored()
    # rank 1 with 1 bit: 2048 bytes of codes, 512 of scales, 260 of a column and a row, 32 of erase vectors
    most = 32 * 65536 / (15 * (2048 + 512 + 260 + 32) + 2 * 65536)
    assert (ss.allocate_joint(filled(np.ones((2, 2, 2))), most).ranks == 1).all()
    refused(f"reduction: expected at most {most:.4g}, .* got", ss.allocate_joint, filled(np.ones((2, 2, 2))), 12.2)
    for wrong in (0, np.nan, "4", True):
        refused("reduction: expected a finite number above 0", ss.allocate_joint, scores, wrong)
    with pytest.raises(ValueError, match="at least one layer"):
        ss.allocate_joint([], 2)
    with pytest.raises(ValueError, match=r"samples of at least one head .* layer 1"):
        ss.allocate_joint([scores, ss.JointScores(SketchBasis.random(SMALL, 6), 8, ranks=(1, 4), bits=(1, 3))], 2)
    tokens, grad = traces(0, SMALL)
    refused("scores: expected gradients, got only zeros", ss.allocate_joint, scored(tokens=tokens, grad=0 * grad), 1.5)
    refused("answers: expected the layers, ranks, bits", ss.allocate_joint, scores, 1.5, scored(bits=(1, 2)))
    refused(r"scores: expected ranks \(1, 4\), bits \(1,", ss.allocate_joint, [scores, scored(ranks=(1, 2))], 1.5)
    with pytest.raises(ValueError, match=r"^scores: expected finite sums"):
        broken = scored()
        broken.isotropic[0, 0, 0] = np.nan
        ss.allocate_joint(broken, 1.5)
    with pytest.raises(ValueError, match="expected the same bits to add"):
        scores + scored(bits=(1, 2))
    refused("scores: expected", ss.allocate_joint, SketchBasis.random(SMALL, 6), 2)
