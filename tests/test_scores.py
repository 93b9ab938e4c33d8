"""Rank scores: residuals against least squares at every rank, and sums for any division of the traces."""

import numpy as np
import pytest
from samples import LAYERS, refused, tokens_of

import sketchssm as ss
from sketchssm.arrays.space import Space
from sketchssm.calibrate import prefixes
from sketchssm.calibrate.plans import mean_retained
from sketchssm.layer.recurrence import FULL_STATE, KINDS
from sketchssm.plans.basis import SketchBasis
from sketchssm.reference.recurrence import per_head, run
from sketchssm.reference.window import Ring, effective_query

W = 5


def prefix_basis(sketch):
    return prefixes.prefix_basis(Space(), sketch, "float64")


SUMS = ("error", "paired", "weighted")


def scores_of(layer, rank_max=4, seed=0):
    return ss.RankScores(SketchBasis.random(layer, rank_max, seed, window=W))


def traces_of(rng, layer, batch, length):
    tokens = tokens_of(rng, layer, batch, length, np.float64)
    return tokens, rng.standard_normal(tokens.v.shape)


def residual(sketch, output):
    """Residual of the best combination of sketch columns, by an SVD; float32 noise counts as dependence."""
    return output - sketch @ (np.linalg.pinv(sketch, rcond=1e-7) @ output)


def brute_force(layer, omega, tokens, grad, weight=None):
    heads = per_head(layer, tokens)
    batch, length = tokens.v.shape[:2]
    ranks = omega.shape[-1] + 1
    error, paired, weighted = np.zeros((3, layer.heads, ranks))
    samples = np.zeros(layer.heads, dtype=int)
    for start in range(W, length, W):
        start_state = run(layer, *tokens.at(np.s_[:, :start]))[1]
        for t in range(start, min(start + W - 1, length)):
            for b, h in np.ndindex(batch, layer.heads):
                S0 = start_state[b, h].T
                if not S0.any():
                    continue
                x = effective_query(heads.q[b, t, h], Ring(*heads.at(np.s_[b, start : t + 1, h])[1:]))
                slope = grad[b, t, h]
                square = slope @ slope if weight is None else weight[b, t, h] * layer.value_dim
                for G in range(ranks):
                    delta = residual(S0.T @ omega[h, :, :G], S0.T @ x) if G else S0.T @ x
                    error[h, G] += delta @ delta
                    paired[h, G] += (slope @ delta) ** 2 if weight is None else weight[b, t, h] * delta @ delta
                    weighted[h, G] += square * np.square(S0.T @ x - delta).sum()
                samples[h] += 1
    return error, paired, weighted, samples


@pytest.mark.parametrize("weighting", ("gradient", "perturbation"))
@pytest.mark.parametrize("kind", KINDS)
def test_definition(kind, weighting, rng):
    layer = LAYERS[kind]
    tokens, grad = traces_of(rng, layer, 2, 3 * W + 3)
    weight = None if weighting == "gradient" else rng.exponential(size=grad.shape[:-1]) * 1e-9
    scores = scores_of(layer)
    scores.update(*tokens, **({"grad": grad} if weight is None else {"weight": weight}))
    assert scores.weighting == weighting
    *sums, samples = brute_force(layer, scores._omega, tokens, grad, weight)
    for name, want in zip(SUMS, sums, strict=True):
        # a column of the sums at a time is relative to column 0: residuals are differences of whole outputs
        assert np.abs(getattr(scores, name) - want).max() < 1e-10 * want.max()
    assert np.array_equal(scores.samples, samples)
    np.testing.assert_allclose(scores.objective(), sums[1] / samples[:, None], rtol=0, atol=1e-10 * sums[1].max())
    np.testing.assert_allclose(scores.retained[:, 0], 0.0)


def test_errors_fall_with_rank(rng):
    layer = LAYERS["kda"]
    scores = scores_of(layer, rank_max=5)
    scores.update(*traces_of(rng, layer, 4, 43)[0])
    assert (np.diff(scores.error) <= 0).all()
    # V = 5 columns span every output: what is left is the rounding of a difference of energies
    assert (scores.error[:, 5] < 1e-14 * scores.error[:, 0]).all()


def dependent_sketches(rng):
    """Sketches whose columns repeat, vanish or are combinations of earlier ones, at every place."""
    for columns in np.ndindex(2, 2, 2, 2):
        sketch = rng.standard_normal((6, 4))
        for i, kind in enumerate(columns):
            if kind:
                sketch[:, i] = sketch[:, :i] @ rng.standard_normal(i)  # no earlier column: zeros
        yield sketch
    # axis-aligned: the direction that Householder QR makes up is one that a later column needs
    yield np.eye(6)[:, [0, 0, 1, 2]]
    yield np.eye(4)[:, [2, 2, 0, 3]] * [1.0, 1e-6, 1e-12, 1e6]
    yield np.zeros((3, 3))


def test_prefix_basis_of_dependent_columns(rng):
    for sketch in dependent_sketches(rng):
        basis = prefix_basis(sketch)
        norms = np.linalg.norm(basis, axis=0)
        # columns are orthonormal to float64, or exactly zero
        assert np.abs(basis.T @ basis - np.diag(norms > 0)).max() < 1e-14
        for G in range(1, sketch.shape[1] + 1):
            unit = sketch[:, :G] / np.maximum(np.linalg.norm(sketch[:, :G], axis=0), 1e-300)
            want = unit @ np.linalg.pinv(unit, rcond=1e-7)
            # dependent up to 1e-16 of random combinations, which pinv sees at their condition number
            assert np.abs(basis[:, :G] @ basis[:, :G].T - want).max() < 1e-11


@pytest.mark.parametrize(("distance", "counts"), [(1e-6, True), (1e-8, False)])
def test_prefix_basis_of_close_columns(distance, counts):
    """A column counts if it is further from the span of those before than float32 rounds: 1e-7 of its norm."""
    basis = prefix_basis(np.eye(3)[:, :2] @ [[1.0, 1.0], [0.0, distance]])
    assert basis.any(axis=0).tolist() == [True, counts]


def test_low_rank_and_zero_states(rng):
    """Early states of rank below G, a basis direction that no state has, and heads that hold nothing."""
    layer = LAYERS["mamba2"]
    tokens, grad = traces_of(rng, layer, 1, 2 * W)
    tokens.k[:, :, 0, 0] = 0.0
    tokens.v[:, :, 3] = 0.0
    for t in range(W):
        tokens.k[:, t] = tokens.k[:, t % 2]  # two keys: a state of rank 2
    basis = SketchBasis.random(layer, 5, window=W)
    basis.omega[0] = np.eye(6)[:, :5]  # its first column reads nothing of heads that share key head 0
    scores = ss.RankScores(basis)
    scores.update(*tokens, grad=grad)
    *sums, samples = brute_force(layer, basis.omega, tokens, grad)
    assert scores.samples.tolist() == samples.tolist() == [W - 1] * 3 + [0]
    for name, want in zip(SUMS, sums, strict=True):
        # as above: relative to whole outputs
        assert np.abs(getattr(scores, name) - want).max() < 1e-10 * want.max()
    assert scores.error[0, 0] == scores.error[0, 1]
    for method in ("gradient", "error"):
        assert not scores.objective(method)[3].any()
    assert (scores.retained[3] == 1).all()


def test_methods(rng):
    layer = LAYERS["gdn"]
    tokens, grad = traces_of(rng, layer, 2, 23)
    scores = scores_of(layer)
    scores.update(*tokens, grad=grad)
    n = scores.samples[:, None]
    assert np.array_equal(scores.objective(), scores.paired / n)
    assert np.array_equal(scores.objective("error"), scores.error / n)
    # of random noise with the energy of each read, in any direction
    np.testing.assert_allclose(scores.noise_objective(), scores.weighted / n / layer.value_dim, rtol=1e-14)
    # the scale of gradients cancels in the error-only score
    bigger = scores_of(layer)
    bigger.update(*tokens._replace(v=2.0 * tokens.v), grad=4.0 * grad)
    np.testing.assert_allclose(bigger.objective("error"), 4 * scores.objective("error"), rtol=1e-12)
    np.testing.assert_allclose(bigger.objective("gradient"), 64 * scores.objective("gradient"), rtol=1e-12)


def test_error_only(rng):
    layer = LAYERS["gdn"]
    tokens, grad = traces_of(rng, layer, 2, 12)
    scores, graded = scores_of(layer), scores_of(layer)
    scores.update(*tokens)
    graded.update(*tokens, grad=grad)
    assert np.array_equal(scores.error, graded.error)
    assert np.array_equal(scores.objective(), scores.objective("error"))
    with pytest.raises(ValueError, match="needs gradients"):
        scores.objective("gradient")
    for one, other, came in ((scores, grad, "grad after neither"), (graded, None, "neither after grad")):
        with pytest.raises(ValueError, match=f"the same one, or neither, at every update, got {came}$"):
            one.update(*tokens, grad=other)
    with pytest.raises(ValueError, match="the same weighting"):
        scores + graded


def test_mean_retained(rng):
    """Of the energy of all heads at their ranks; a head that reads its full state retains all."""
    layer = LAYERS["gdn"]
    scores = scores_of(layer)
    assert mean_retained(scores, np.ones(4, dtype=int)) == 1  # nothing to lose
    tokens = tokens_of(rng, layer, 2, 20)
    tokens.v[:, :, 3] *= 1e-9
    scores.update(*tokens)
    ranks, energy = np.array([FULL_STATE, 1, 4, 2]), scores.error[:, 0]
    lost = scores.error[1, 1] + scores.error[2, 4]  # head 3 does not count
    # sums of a few float64
    assert mean_retained(scores, ranks) == pytest.approx(1 - lost / energy.sum(), rel=1e-14)


def test_refusals(rng):
    layer = LAYERS["gdn"]
    tokens, grad = traces_of(rng, layer, 2, 12)
    scores = scores_of(layer)
    for wrong in (grad[:, :-1], np.full_like(grad, np.nan)):
        with pytest.raises(ValueError, match="grad"):
            scores.update(*tokens, grad=wrong)
        with pytest.raises(ValueError, match="weight"):
            scores.update(*tokens, weight=wrong[..., 0])
    refused("weight: expected numbers of at least 0, got -", scores.update, *tokens, weight=grad[..., 0])
    with pytest.raises(ValueError, match=r"^grad, weight: expected the same one, .* got grad and weight$"):
        scores.update(*tokens, grad=grad, weight=np.abs(grad[..., 0]))
    assert scores.weighting is None and not scores.samples.any()
    with pytest.raises(ValueError, match="method"):
        scores.objective("loss")
    with pytest.raises(ValueError, match="rank"):
        ss.RankScores(SketchBasis.random(layer, 4), rank_max=5)
    with pytest.raises(ValueError, match="same basis"):
        scores + scores_of(layer, seed=1)
    with pytest.raises(ValueError, match="same rank_max"):
        scores + scores_of(layer, rank_max=3)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_tokens(kind, rng):
    """Products in float32: errors relative to what a rank leaves, not to the whole read."""
    layer = ss.Layer(kind, 4, 32, 24, 2)
    wide = tokens_of(rng, layer, 3, 100, np.float64)
    grad = 1e-25 * rng.standard_normal(wide.v.shape)  # whose squares float32 cannot hold
    basis = SketchBasis.random(layer, 16)
    exact, single = ss.RankScores(basis), ss.RankScores(basis)
    exact.update(*wide, grad=grad)
    narrow = [None if x is None else x.astype(np.float32) for x in (*wide, grad)]
    single.update(*narrow[:5], grad=narrow[5])
    for name in SUMS:
        np.testing.assert_allclose(getattr(single, name), getattr(exact, name), rtol=1e-4, atol=1e-200)
    assert np.array_equal(single.samples, exact.samples)
    if kind == "gdn":
        for mean in (2, 6):
            assert np.array_equal(ss.allocate_ranks(single, mean).ranks, ss.allocate_ranks(exact, mean).ranks)
