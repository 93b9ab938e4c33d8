"""Second moments: which samples count, and sums that do not depend on how traces are divided."""

import copy
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import LAYERS, parts_of, refused, relative, tokens_of

import sketchssm as ss
from sketchssm.calibrate import windows
from sketchssm.calibrate.chunks import advance
from sketchssm.calibrate.moments import FORMAT
from sketchssm.calibrate.windows import Carry
from sketchssm.layer.recurrence import KINDS
from sketchssm.plans.files import FileFormatError, save_file
from sketchssm.reference.recurrence import per_head, run
from sketchssm.reference.window import Ring, effective_query

W = 5  # short windows keep the brute force cheap; nothing depends on 16
SUMS = ("state_gram", "query_gram")


def make_traces(layer, batch, length, seed, harsh=False):
    return tokens_of(np.random.default_rng(seed), layer, batch, length, np.float64, harsh)


def moments_of(layer, **settings):
    return ss.Moments(layer, window=W, **settings)


def accumulators(layer):
    """New sums of both classes."""
    return {"moments": moments_of(layer), "scores": ss.RankScores(ss.SketchBasis.random(layer, 4, window=W))}


def close(a, b):
    """Sums of a few hundred float64 products agree to 1e-12 of their size in any order."""
    for name in SUMS:
        assert relative(getattr(a, name), getattr(b, name)) <= 1e-12
    assert np.array_equal(a.samples, b.samples)


def brute_force(layer, tokens):
    """Token by token from the definitions: the recurrence for states and outputs, M_{1:t}^T q for queries."""
    heads = per_head(layer, tokens)
    batch, length = tokens.v.shape[:2]
    state_gram = np.zeros((layer.heads, layer.key_dim, layer.key_dim))
    query_gram, samples = np.zeros_like(state_gram), np.zeros(layer.heads, dtype=int)
    for start in range(0, length, W):
        start_state = run(layer, *tokens.at(np.s_[:, 0:start]))[1]
        for t in range(start, min(start + W - 1, length)):
            for b in range(batch):
                for h in range(layer.heads):
                    S0 = start_state[b, h].T
                    if not S0.any():
                        continue
                    ring = Ring(*(heads.at(np.s_[b, start : t + 1, h])[1:]))
                    x = effective_query(heads.q[b, t, h], ring)
                    state_gram[h] += S0 @ S0.T
                    query_gram[h] += np.outer(x, x)
                    samples[h] += 1
    return state_gram, query_gram, samples


@pytest.mark.parametrize("kind", KINDS)
def test_definition(kind):
    layer = LAYERS[kind]
    tokens = make_traces(layer, 2, 3 * W + 2, 0)
    moments = moments_of(layer)
    moments.update(*tokens)
    state_gram, query_gram, samples = brute_force(layer, tokens)
    # the delta rule's triangular solve against a product of transitions: some tens of float64 roundings
    assert relative(moments.state_gram, state_gram) <= 1e-12
    assert relative(moments.query_gram, query_gram) <= 1e-12
    assert np.array_equal(moments.samples, samples)
    # by hand: windows 2 and 3 have W - 1 reads each, the open one has 2, the first none, in each of 2 sequences
    assert (moments.samples == 2 * (2 * (W - 1) + 2)).all()


@settings(max_examples=60)
@given(
    made=st.sampled_from(["moments", "scores"]),
    harsh=st.booleans(),
    kind=st.sampled_from(KINDS),
    cuts=st.lists(st.integers(0, 23), max_size=5).map(sorted),
    row=st.integers(0, 3),
    grouped=st.booleans(),
    graded=st.booleans(),
    seed=st.integers(0, 5),
)
def test_any_cut_gives_the_same_sums(made, harsh, kind, cuts, row, grouped, graded, seed):
    layer = LAYERS[kind]
    tokens = make_traces(layer, 3, 23, seed, harsh)
    grad = np.random.default_rng(seed).standard_normal(tokens.v.shape) if graded and made == "scores" else None
    whole, parts = (accumulators(layer)[made] for _ in range(2))

    def more(index):
        return {} if grad is None else {"grad": grad[index]}

    end = whole.update(*tokens, **more(np.s_[:]))
    for rows in (slice(0, row), slice(row, 3)):
        own, carry = accumulators(layer)[made], None
        for start, stop in zip([0, *cuts], [*cuts, 23], strict=True):
            part = rows, slice(start, stop)
            with mock.patch.object(windows, "HOST_BYTES", 1 if grouped else windows.HOST_BYTES):
                carry = own.update(*tokens.at(part), carry=carry, **more(part))
        assert carry.position == end.position == 23 % W
        # the same operations in the same order, except for the batch of BLAS calls
        np.testing.assert_allclose(carry.state, end.state[rows], rtol=1e-10, atol=1e-13)
        parts = parts + own
    if made == "moments":
        close(parts, whole)
        return
    for name in ("error", "paired", "weighted"):
        # the same float64 sums in another order; clipped residuals keep the roundings of whole outputs
        want = getattr(whole, name)
        assert np.abs(getattr(parts, name) - want).max() <= 1e-11 * want.max(initial=0.0)
    assert np.array_equal(parts.samples, whole.samples)
    assert parts.weighting == whole.weighting == ("error" if grad is None else "gradient")


@pytest.mark.parametrize(("kind", "window", "largest"), [("gdn", 2, 5 * 6), ("kda", W, 6 * W**2)])
def test_groups_of_rows_bound_the_memory(kind, window, largest, monkeypatch):
    """The largest array of a group, a state or kda's decays between a window's tokens, fits in a block."""
    layer = LAYERS[kind]
    tokens = make_traces(layer, 5, 2 * window, 1)
    seen = []
    monkeypatch.setattr(windows, "HOST_BYTES", 2 * 8 * layer.heads * largest)
    monkeypatch.setattr(ss.Moments, "_add", lambda self, space, reads, *rest: seen.append(reads.queries.shape[:3]))
    ss.Moments(layer, window=window).update(*tokens)
    assert seen == [(2, layer.heads, 1), (2, layer.heads, 1), (1, layer.heads, 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_zero_states_count_nothing(kind):
    layer = LAYERS[kind]
    tokens = make_traces(layer, 1, 4 * W, 2)
    tokens.v[:, : 2 * W, 1] = 0.0  # head 1 writes nothing for two windows: its first nonzero state starts window 4
    tokens.g[:, 2 * W - 1, 2] = -np.inf  # head 2 forgets all but the flush token's own write
    moments = moments_of(layer)
    moments.update(*tokens)
    assert moments.samples.tolist() == [3 * (W - 1), W - 1, 3 * (W - 1), 3 * (W - 1)]
    assert all(np.isfinite(getattr(moments, name)).all() for name in SUMS)


def test_a_given_state():
    """Its first window counts. A state may be float32 as engines hold it; sums are in float64 all the same."""
    layer = LAYERS["gdn"]
    tokens = make_traces(layer, 2, W, 3)
    state = np.random.default_rng(0).standard_normal((2, *layer.state_shape)).astype(np.float32)
    single, double = moments_of(layer), moments_of(layer)
    assert Carry(state).position == 0
    single.update(*tokens, carry=Carry(state))
    double.update(*tokens, carry=Carry(state.astype(np.float64)))
    assert (single.samples == 2 * (W - 1)).all()
    for name in SUMS:
        assert np.array_equal(getattr(single, name), getattr(double, name))


def test_carry_shares_no_memory():
    layer = LAYERS["gdn"]
    tokens = make_traces(layer, 1, W + 2, 7)
    carry = moments_of(layer).update(*tokens)
    kept = carry.ring.k.copy()
    tokens.k[...] = 0.0
    assert np.array_equal(carry.ring.k, kept)


def test_file_refusals(tmp_path):
    path = tmp_path / "m.safetensors"
    moments = moments_of(LAYERS["gdn"])
    moments.state_gram[0, 0, 0] = np.nan
    moments.save(path)
    with pytest.raises(FileFormatError, match="state_gram"):
        ss.Moments.load(path)
    fields, tensors = parts_of(path)
    tensors["state_gram"] = np.zeros_like(tensors["state_gram"])
    save_file(path, FORMAT, tensors, fields | {"weighting": "output"})
    with pytest.raises(FileFormatError, match="weighting: this version does not have 'output'; collect the moments"):
        ss.Moments.load(path)


@pytest.mark.parametrize("other", [{"window": 4}, {"value_dim": 4}, {"kind": "kda"}], ids=lambda x: next(iter(x)))
def test_only_like_moments_add(other):
    base = {"kind": "gdn", "heads": 4, "key_dim": 6, "value_dim": 5}
    with pytest.raises(ValueError, match="to add"):
        ss.Moments(**base) + ss.Moments(**(base | other))
    with pytest.raises(TypeError):
        ss.Moments(**base) + 1


@pytest.mark.parametrize("made", ["moments", "scores"])
@pytest.mark.parametrize(
    ("spoil", "error", "match"),
    [
        (lambda t: t._replace(g=t.g + 10), ValueError, "g: "),
        (lambda t: t._replace(v=t.v * np.nan), ValueError, "v: "),
        (lambda t: t._replace(beta=t.beta * np.inf), ValueError, "beta: "),
        (lambda t: t._replace(beta=t.beta - 1), ValueError, r"beta: .* 0 to 2, got -0\..*logits, not gates"),
        (lambda t: t._replace(beta=4 * t.beta), ValueError, r"beta: .* 0 to 2, got 3\..*logits, not gates"),
        (lambda t: t._replace(k=8 * t.k), ValueError, r"k: .*got \d\d\.\d+: are the keys L2-normalised"),
        (lambda t: t._replace(k=1e200 * t.k), ValueError, r"k: .*got inf: are the keys L2-normalised"),
        (lambda t: t._replace(v=1e60 * t.v), ValueError, "q, k, v: .*at most 1e.100, got .*are keys normalised"),
        (lambda t: t._replace(v=1e180 * t.v), ValueError, "q, k, v: .*at most 1e.100, got"),
        (lambda t: t._replace(q=t.q[..., :-1]), ValueError, "q: "),
        (lambda t: t.at(np.s_[:, 0]), ValueError, "v: expected shape"),
        (lambda t: t._replace(k=t.k.astype(complex)), TypeError, "k: "),
    ],
)
def test_refusals_leave_no_trace(spoil, error, match, made):
    owner = accumulators(LAYERS["gdn"])[made]
    before = copy.deepcopy(vars(owner))
    with pytest.raises(error, match=f"^{match}"):
        owner.update(*spoil(make_traces(owner.layer, 2, 2 * W, 9)))
    np.testing.assert_equal(vars(owner), before)


@pytest.mark.parametrize("made", ["moments", "scores"])
def test_an_interrupted_update_adds_nothing(made, monkeypatch):
    """So that the call can be repeated."""
    owner, calls = accumulators(LAYERS["gdn"])[made], []
    before = copy.deepcopy(vars(owner))

    def interrupted(*inputs):
        calls.append(advance(*inputs))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(windows, "advance", interrupted)
    monkeypatch.setattr(windows, "HOST_BYTES", 1)
    with pytest.raises(KeyboardInterrupt):
        owner.update(*make_traces(owner.layer, 2, 4 * W, 9))
    np.testing.assert_equal(vars(owner), before)


def test_keys_at_the_ends_of_the_range():
    """A gate of 2 with keys of norm 1 in bfloat16, gates of 0, and keys of mamba2 of any norm."""
    layer = LAYERS["gdn"]
    tokens = make_traces(layer, 2, 2 * W, 9)
    keys = tokens.k.astype(ml_dtypes.bfloat16).astype(np.float32)
    moments_of(layer).update(*tokens._replace(k=keys, beta=np.full_like(tokens.beta, 2.0)))
    moments_of(layer).update(*tokens._replace(k=60 * keys, beta=0 * tokens.beta))
    tokens = make_traces(LAYERS["mamba2"], 2, 2 * W, 9)
    moments_of(LAYERS["mamba2"]).update(*tokens._replace(k=60 * tokens.k))


def test_carry_refusals():
    layer = LAYERS["gdn"]
    tokens = make_traces(layer, 2, W + 2, 10)
    moments = moments_of(layer)
    carry = moments.update(*tokens)
    refused("carry: state: expected shape", moments.update, *tokens.at(np.s_[:1]), carry=carry)
    refused("carry: .*fewer than 2", ss.Moments("gdn", 4, 6, 5, 2, window=2).update, *tokens, carry=carry)
    refused("carry: .*beta", moments.update, *tokens, carry=Carry(carry.state, carry.ring._replace(beta=None)))


def test_a_layer_stands_for_the_sizes():
    layer = ss.Layer("gdn", 4, 6, 5, 2)
    assert ss.Moments(layer, window=8).layer == ss.Moments("gdn", 4, 6, 5, 2, window=8).layer == layer
    for sizes, named in (
        ((layer, 4), "heads"),
        (("gdn",), "heads"),
        (("gdn", 4), "key_dim"),
        (("gdn", 4, 6), "value"),
    ):
        with pytest.raises(ValueError, match=f"^{named}"):
            ss.Moments(*sizes)


@pytest.mark.parametrize("harsh", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_tokens(kind, harsh):
    """Products in float32, sums in float64: a basis of the same subspace as float64's."""
    layer = ss.Layer(kind, 4, 32, 24, 2)
    wide = tokens_of(np.random.default_rng(3), layer, 3, 200, np.float64, harsh)
    exact, single = ss.Moments(layer), ss.Moments(layer)
    exact.update(*wide)
    carry = single.update(*(None if x is None else x.astype(np.float32) for x in wide))
    assert carry.state.dtype == np.float32
    assert np.array_equal(exact.samples, single.samples)
    for name in SUMS:
        # some hundred roundings of float32; repeated keys amplify them
        assert relative(getattr(single, name), getattr(exact, name)) < 2e-6
    metric = exact.state_gram / exact.samples[:, None, None]
    queries = exact.query_gram / exact.samples[:, None, None]
    for rank in (1, 4, 8):
        energies = []
        for basis in (ss.fit_basis(exact), ss.fit_basis(single)):
            omega = basis.omega[..., :rank]
            weighted = metric @ omega
            inner = np.linalg.inv(omega.swapaxes(-1, -2) @ weighted)
            energies.append(np.trace(inner @ (weighted.swapaxes(-1, -2) @ queries @ weighted), axis1=-2, axis2=-1))
        assert np.abs(energies[0] / energies[1] - 1).max() < 1e-4


def test_what_float32_cannot_hold_is_computed_in_float64():
    layer = LAYERS["gdn"]
    tokens = tokens_of(np.random.default_rng(3), layer, 2, 20)
    one, large = moments_of(layer), moments_of(layer)
    one.update(*tokens)
    large.update(*tokens._replace(v=tokens.v * np.float32(2.0**80)))
    # float32 products of the first, float64 products of the second
    assert relative(large.state_gram * 2.0**-160, one.state_gram) < 1e-6


def test_blas_threads_are_as_before():
    from threadpoolctl import threadpool_info

    before = threadpool_info()
    moments_of(LAYERS["gdn"]).update(*make_traces(LAYERS["gdn"], 2, 3 * W, 9))
    assert threadpool_info() == before
