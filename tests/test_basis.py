"""Sketch bases: optimal by the paper's loss, nested, orthonormal in both senses, and finite for all moments."""

import numpy as np
import pytest
from samples import LAYERS, parts_of, refused, tokens_of

import sketchssm as ss
from sketchssm.layer.coefficients import MAPS
from sketchssm.layer.recurrence import KINDS
from sketchssm.plans.basis import FORMAT
from sketchssm.plans.files import FileFormatError, save_file

W = 5
LAYER = LAYERS["gdn"]


def moments_of(rng, kind="gdn", batch=3, **settings):
    layer = LAYERS[kind]
    moments = ss.Moments(layer, window=W, **settings)
    moments.update(*tokens_of(rng, layer, batch, 40, np.float64))
    return moments


def given_moments(state_gram, query_gram):
    """Moments of one sample with given sums, for K of the first head and V = K."""
    heads, key_dim = state_gram.shape[:2]
    moments = ss.Moments("mamba2", heads, key_dim, key_dim, window=W)
    moments.state_gram, moments.query_gram, moments.samples[:] = state_gram, query_gram, 1
    return moments


def offline_loss(e0, queries, basis):
    """Equation m-subspace-objective by least squares, for samples with E[x x^T] = queries."""
    values, vectors = np.linalg.eigh(e0)
    root = vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T
    z = root @ np.linalg.cholesky(queries)  # columns with sum z z^T = C_z
    fitted = root @ basis @ np.linalg.lstsq(root @ basis, z, rcond=None)[0]
    return np.square(z - fitted).sum()


def spans(a):
    return a @ np.linalg.pinv(a)


def check_orthonormal(basis):
    # a handful of float64 Householder steps
    assert np.abs(basis.omega.swapaxes(-1, -2) @ basis.omega - np.eye(basis.rank_max)).max() < 1e-13


@pytest.mark.parametrize("kind", KINDS)
def test_optimal_by_the_papers_loss(kind, rng):
    moments = moments_of(rng, kind)
    basis = ss.fit_basis(moments)
    check_orthonormal(basis)
    assert (basis.retained <= 1).all()
    first = basis.omega[..., 0]  # its sign, and with it that of the following columns, does not depend on LAPACK
    assert (np.take_along_axis(first, np.abs(first).argmax(axis=-1)[:, None], axis=-1) > 0).all()
    for head in range(basis.layer.heads):
        e0 = moments.state_gram[head] / moments.samples[head]
        queries = moments.query_gram[head] / moments.samples[head]
        total = offline_loss(e0, queries, np.zeros((basis.layer.key_dim, 1)))
        # two ways to one number of float64; relative to the total, since tails are differences
        assert abs(basis.spectrum[head].sum() - total) < 1e-11 * total
        for rank in range(1, basis.rank_max + 1):
            loss = offline_loss(e0, queries, basis.omega[head, :, :rank])
            assert abs(loss - basis.spectrum[head, rank:].sum()) < 1e-11 * total
            assert abs(1 - loss / total - basis.retained[head, rank - 1]) < 1e-11
            for _ in range(5):
                other = rng.standard_normal((basis.layer.key_dim, rank))
                near = basis.omega[head, :, :rank] + 1e-3 * other
                assert min(offline_loss(e0, queries, other), offline_loss(e0, queries, near)) >= loss - 1e-11 * total


def test_sign_and_scale_do_not_depend_on_the_sums_scale(rng):
    moments = moments_of(rng)
    basis = ss.fit_basis(moments)
    moments.state_gram *= 4.0
    moments.query_gram *= 4.0
    scaled = ss.fit_basis(moments)
    # powers of two change no digit, and the trace is divided out
    assert np.array_equal(scaled.omega, basis.omega)
    assert np.array_equal(scaled.spectrum, 16 * basis.spectrum)


@pytest.mark.parametrize("support", [1, 3, 5])
def test_singular_state_metric(support, rng):
    """States in few directions: E0's pseudo-inverse there, and valid columns beyond."""
    size = 6
    states = rng.standard_normal((2, size, support))
    queries = rng.standard_normal((2, size, 20))
    moments = given_moments(states @ states.swapaxes(-1, -2), queries @ queries.swapaxes(-1, -2))
    basis = ss.fit_basis(moments)
    check_orthonormal(basis)
    small = ss.fit_basis(moments, support + 1)
    for name in ("omega", "retained"):  # a smaller rank_max keeps the first columns, up to the rounding of another QR
        np.testing.assert_allclose(getattr(small, name), getattr(basis, name)[..., : support + 1], atol=1e-12)
    assert not basis.spectrum[:, support:].any()
    # rank `support` holds everything: an exact 1 up to the sum's rounding
    np.testing.assert_allclose(basis.retained[:, support - 1 :], 1.0, rtol=1e-14)
    for head in range(2):
        assert np.abs(spans(basis.omega[head, :, :support]) - spans(states[head])).max() < 1e-10
        # what is left follows the queries: the first such column holds most of their energy outside the support
        outside = queries[head] - spans(states[head]) @ queries[head]
        seen = np.square(basis.omega[head, :, support:].T @ outside).sum(axis=1)
        assert (np.diff(seen) <= 1e-9 * seen[0]).all()


def test_nothing_seen(rng):
    size = 4
    gram = np.cov(rng.standard_normal((size, 50)))
    none = np.zeros_like(gram)
    basis = ss.fit_basis(given_moments(np.stack([none, none, gram]), np.stack([none, gram, none])))
    check_orthonormal(basis)
    assert all(np.isfinite(getattr(basis, name)).all() for name in ("omega", "spectrum", "retained"))
    assert np.array_equal(basis.retained[[0, 2]], np.ones((2, size)))
    # only states, or only queries, lead to their own principal directions
    leading = np.linalg.eigh(gram)[1][:, ::-1]
    for head in (1, 2):
        for rank in range(1, size):
            # eigenvectors to float64, less the spectrum's gaps of a few tenths
            assert np.abs(spans(basis.omega[head, :, :rank]) - spans(leading[:, :rank])).max() < 1e-12


def test_no_samples():
    """Moments without samples: fresh moments, traces of a single window, and traces that write nothing."""
    moments = ss.Moments("kda", 2, 8, 4)
    refused("moments: expected samples .*, got none: .* longer than the window of 16", ss.fit_basis, moments)
    tokens = tokens_of(np.random.default_rng(0), moments.layer, 2, 40)
    for empty in (tokens.at(np.s_[:, :16]), tokens._replace(q=0 * tokens.q, k=0 * tokens.k)):
        moments.update(*empty)
        refused("moments: expected samples", ss.fit_basis, moments)


def test_a_dead_head_makes_a_valid_plan(rng):
    """A head without writes is no error."""
    layer = LAYERS["kda"]
    tokens = tokens_of(rng, layer, 2, 20)
    tokens.v[:, :, 2] = 0
    moments = ss.Moments(layer, window=W)
    moments.update(*tokens)
    assert (moments.samples == 0).tolist() == [False, False, True, False]
    basis = ss.fit_basis(moments)
    check_orthonormal(basis)
    assert (basis.retained[2] == 1).all()
    for name in MAPS:
        ss.SketchPlan(basis, [2, 4, 4, 1], map=name)


@pytest.mark.parametrize(("share", "counts"), [(1e-9, True), (1e-11, False)])
def test_support_of_the_state_metric(share, counts):
    """Eigenvalues of E0 count down to 1e-10 of the largest."""
    gram = np.diag([1.0, 0.5, share])[None]
    basis = ss.fit_basis(given_moments(gram, np.eye(3)[None]))
    assert (basis.spectrum[0] > 0).tolist() == [True, True, counts]


def test_random_baseline():
    basis = ss.SketchBasis.random(LAYER, 4, seed=3)
    check_orthonormal(basis)
    assert np.isnan(basis.spectrum).all() and np.isnan(basis.retained).all() and basis.retained.shape == (4, 4)
    again, other = ss.SketchBasis.random(LAYER, 4, seed=3), ss.SketchBasis.random(LAYER, 4, seed=4)
    assert np.array_equal(again.omega, basis.omega) and np.abs(other.omega - basis.omega).max() > 0.1
    default = ss.SketchBasis.random(LAYER, 3)
    assert default.window == 16
    assert np.array_equal(default.omega, ss.SketchBasis.random(LAYER, 3, seed=0).omega)


@pytest.mark.parametrize("columns", [0, 6])
def test_a_file_of_too_many_or_no_columns(columns, tmp_path, rng):
    path = tmp_path / "basis.safetensors"
    ss.fit_basis(moments_of(rng)).save(path)
    fields, tensors = parts_of(path)
    for name in ("omega", "retained"):
        tensors[name] = np.resize(tensors[name], (*tensors[name].shape[:-1], columns))
    save_file(path, FORMAT, tensors, fields)
    with pytest.raises(FileFormatError, match=rf"rank_max: expected an integer from 1 to .*, got {columns}"):
        ss.SketchBasis.load(path)
