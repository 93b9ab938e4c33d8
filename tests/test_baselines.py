"""Each baseline's bounds, scores and optima, as its method defines them."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import LAYERS, refused, relative, states_of, tokens_of

import sketchssm as ss
from sketchssm.layer.recurrence import KINDS
from sketchssm.reference.quantise import Grid, round_trip, scales
from sketchssm.reference.recurrence import per_head, run, step
from sketchssm.reference.window import Ring, effective_query

# A few dozen operations of 2^-53 on numbers of size one.
ROUNDING = 1e-13
PRUNABLE = ("mamba2", "kda")


def moments_of(layer, tokens, window):
    moments = ss.Moments(layer, window=window)
    moments.update(*tokens)
    return moments


def expanded(layer, per_key_head):
    return layer.expand_keys(np.asarray(per_key_head), axis=0)


class TestQuantiser:
    @given(st.integers(0, 2**32 - 1), st.integers(2, 16), st.booleans(), st.floats(-30, 30))
    def test_error_bound_from_the_scales(self, seed, bits, zero, size):
        """No element is off by more than half a step of its row's and column's scale, with any outliers."""
        rng = np.random.default_rng(seed)
        rows, columns = np.exp(3 * rng.standard_normal((2, 9, 1))), np.exp(3 * rng.standard_normal((2, 1, 7)))
        state = 10.0**size * rows * columns * rng.standard_normal((2, 9, 7))
        r, c = scales(state)
        assert (np.abs(state) <= r * c).all()
        half = r * c / (2 ** (bits - 1) - 1) / 2 if zero else r * c / 2**bits
        # the bound itself is a product of rounded numbers
        assert (np.abs(round_trip(state, bits, zero=zero) - state) <= half * (1 + 1e-12)).all()

    def test_scales_are_bfloat16_and_tight(self, rng):
        """Scales have sixteen bits, as the byte model counts, and exceed their bounds by 2^-7 at most."""
        state = states_of(rng, LAYERS["gdn"], 5, np.float64)
        for scale in scales(state):
            as_bits = scale.astype(np.float32).view(np.uint32)
            np.testing.assert_array_equal(as_bits & 0xFFFF, 0)
            np.testing.assert_array_equal(scale.astype(np.float32), scale)
        rows, columns = scales(state)
        assert (np.abs(state).max(axis=-1, keepdims=True) >= rows / (1 + 2**-7)).all()
        assert ((np.abs(state) / rows).max(axis=-2, keepdims=True) >= columns / (1 + 2**-7)).all()

    @pytest.mark.parametrize("zero", [True, False])
    @pytest.mark.parametrize("bits", [2, 4, 8])
    def test_codes_of_codes_are_themselves(self, bits, zero, rng):
        """With given scales quantised values do not change again; the grid has all levels of its bits."""
        state = states_of(rng, LAYERS["gdn"], 5, np.float64)
        grid, (rows, columns) = Grid.of(bits, zero), scales(state)
        spacing = grid.step(rows * columns)
        codes = grid.encode(state, spacing)
        np.testing.assert_array_equal(grid.encode(codes * spacing, spacing), codes)
        every = np.unique(grid.encode(np.linspace(-1, 1, 10**4), grid.step(np.ones(()))))
        assert every.size == (2**bits - 1 if zero else 2**bits)
        assert (0 in every) == zero

    @pytest.mark.parametrize("bits", [4, 6, 8])
    def test_an_idle_state_settles(self, bits, rng):
        """Repeated quantisation of an unchanged state does not add up errors, although scales are computed anew."""
        state = states_of(rng, ss.Layer("gdn", 3, 40, 50), 2, np.float64)
        once = last = round_trip(state, bits)
        for _ in range(50):
            last = round_trip(last, bits)
        # only the second quantisation adds a little, where a scale has changed by its own rounding
        assert np.linalg.norm(last - state) < 1.1 * np.linalg.norm(once - state)

    def test_zeros_and_nan(self):
        state = np.zeros((3, 4))
        np.testing.assert_array_equal(round_trip(state, 4), 0)
        np.testing.assert_array_equal(round_trip(state, 4, zero=False), 0)
        state[1, 2] = np.nan
        with np.errstate(invalid="ignore"):
            assert np.isnan(round_trip(state, 4)[1, 2])


class TestCopies:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("bits", [2, 4])
    def test_only_reads_err(self, kind, bits, rng):
        """Between flushes the error of an output is the error of the copy, read with the effective query."""
        layer = LAYERS[kind]
        tokens, start = tokens_of(rng, layer, 1, 8, np.float64), states_of(rng, layer, 1, np.float64)
        head = ss.CopyReadHead(layer, 1, "reference", bits=bits, window=8)
        head.load_state(start)
        output, (want, state) = head.step(*tokens), run(layer, *tokens, state=start)
        assert relative(head.state, state) < ROUNDING
        lost = round_trip(start[0], bits, zero=False) - start[0]
        q, k, v, g, beta = per_head(layer, tokens)
        for t, h in itertools.product(range(7), range(layer.heads)):
            ring = Ring(*(x[0, : t + 1, h] for x in (k, v, g)), None if beta is None else beta[0, : t + 1, h])
            want[0, t, h] += lost[h] @ effective_query(q[0, t, h], ring)
        assert relative(output, want) < ROUNDING

    def test_error_does_not_grow(self, rng):
        """Every flush copies an exact state anew, while a quantised state keeps its errors."""
        layer = LAYERS["mamba2"]
        tokens = tokens_of(rng, layer, 8, 1024, np.float64)
        tokens.g[...] = -1e-3
        want = run(layer, *tokens)[0]
        growth = []
        for head in (ss.CopyReadHead(layer, 8, "cpu", bits=6), ss.QuantisedHead(layer, 8, "cpu", bits=6)):
            lost, size = (np.square(x).sum(axis=(0, 2, 3)) for x in (head.step(*tokens) - want, want))
            growth.append((lost[-256:].sum() / size[-256:].sum()) / (lost[16:272].sum() / size[16:272].sum()))
        copied, quantised = growth
        assert copied < 1.5
        assert quantised > 3


class TestGhost:
    @pytest.mark.parametrize("kind", PRUNABLE)
    def test_score_is_the_error_of_a_channel_left_out(self, kind, rng):
        """Of the reads, squared, by brute force, token by token."""
        layer = LAYERS[kind]
        tokens = tokens_of(rng, layer, 2, 12, np.float64)
        scores = ss.ChannelScores(layer)
        scores.update(*tokens)
        lost = np.zeros((layer.key_heads, layer.key_dim))
        inputs = per_head(layer, tokens)
        state = np.zeros((2, layer.heads, layer.key_dim, layer.value_dim))
        for t in range(12):
            state, output = step(state, *inputs.at(np.s_[:, t]))
            for row, h, n in np.ndindex(2, layer.heads, layer.key_dim):
                without = np.delete(state[row, h], n, axis=0).T @ np.delete(inputs.q[row, t, h], n)
                lost[h // layer.group, n] += np.sum((output[row, h] - without) ** 2)
        assert relative(scores.scores, np.sqrt(lost / 24)) < ROUNDING

    @pytest.mark.parametrize("kind", PRUNABLE)
    def test_streams(self, kind, rng):
        layer = LAYERS[kind]
        tokens = tokens_of(rng, layer, 3, 10, np.float64)
        whole, parts = ss.ChannelScores(layer), ss.ChannelScores(layer)
        whole.update(*tokens)
        for part in (np.s_[:2], np.s_[2:]):
            parts.update(*tokens.at(part))
        assert relative(parts.scores, whole.scores) < ROUNDING
        assert parts.tokens == whole.tokens == 30

    def test_key_heads_are_pooled(self):
        """The highest scores of the layer are kept, and at least one channel of every key head."""
        scores = ss.ChannelScores(ss.Layer("mamba2", 6, 4, 5, key_heads=3))
        scores.energy = np.array([[9.0, 8, 7, 6], [5, 4, 3, 2], [0.1, 0.2, 0.3, 0.0]])
        scores.tokens = 1
        np.testing.assert_array_equal(
            scores.keep(0.5), np.array([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 1, 0]], dtype=bool)
        )
        assert scores.keep(0).all()
        np.testing.assert_array_equal(scores.keep(0.99).sum(axis=-1), 1)

    @pytest.mark.parametrize("kind", PRUNABLE)
    def test_a_pruned_head_is_the_masked_recurrence(self, kind, rng):
        layer = LAYERS[kind]
        # heads keep different numbers of channels
        keep = np.array([[1, 0, 1, 1, 0, 0], [0, 1, 0, 0, 0, 1]], dtype=bool)
        tokens, start = tokens_of(rng, layer, 3, 9, np.float64, harsh=True), states_of(rng, layer, 3, np.float64)
        head = ss.PrunedHead(layer, keep, 3, "reference")
        head.load_state(start)
        masked = tokens._replace(q=tokens.q * keep, k=tokens.k * keep)
        want, state = run(layer, *masked, state=start * expanded(layer, keep)[:, None])
        assert relative(head.step(*tokens), want) < ROUNDING
        assert relative(head.state, state) < ROUNDING
        whole = ss.PrunedHead(layer, np.ones_like(keep), 3, "reference")
        assert relative(whole.step(*tokens), run(layer, *tokens)[0]) < ROUNDING

    def test_refusals(self):
        layer = LAYERS["mamba2"]
        with pytest.raises(ValueError, match="GHOST prunes other kinds than gdn"):
            ss.ChannelScores(LAYERS["gdn"])
        with pytest.raises(ValueError, match="GHOST prunes other kinds than gdn"):
            ss.PrunedHead(LAYERS["gdn"], np.ones((2, 6), bool), 1)
        refused(r"keep: expected bool of shape \(2, 6\), got int64", ss.PrunedHead, layer, np.ones((2, 6), int), 1)
        refused("keep: expected a channel in every key", ss.PrunedHead, layer, np.array([[True] * 6, [False] * 6]), 1)
        scores = ss.ChannelScores(layer)
        refused("scores: expected some tokens, got none", scores.keep, 0.5)
        refused("sparsity: expected a number from 0 to below 1, got 1", scores.keep, 1)


class TestLowRankReads:
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_subspace_is_optimal_for_the_mean_gram_matrix(self, kind, rng):
        """It loses the energy of the trailing eigenvalues: no subspace of its dimension loses less."""
        layer = LAYERS[kind]
        moments = moments_of(layer, tokens_of(rng, layer, 4, 40, np.float64), 8)
        gram = moments.state_gram / moments.samples[:, None, None]
        energy = np.linalg.eigvalsh(gram)
        total = energy.sum(axis=-1)
        for rank in range(1, layer.value_dim + 1):
            p = ss.low_rank_projection(moments, rank)
            left = total - np.einsum("hij,hji->h", p, gram)
            np.testing.assert_allclose(p @ p, p, atol=ROUNDING)
            np.testing.assert_allclose(left, energy[:, :-rank].sum(axis=-1), rtol=0, atol=ROUNDING * total.max())

    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_read_projects_directly(self, kind, backend, rng):
        layer = LAYERS[kind]
        p = ss.low_rank_projection(moments_of(layer, tokens_of(rng, layer, 4, 40, np.float64), 8), 3)
        head = ss.CopyReadHead(layer, 1, backend, projection=p)
        tokens, start = tokens_of(rng, layer, 1, 1, np.float64), states_of(rng, layer, 1, np.float64)
        head.load_state(start)
        output, want = head.step(*tokens), run(layer, *tokens, state=start)[0]
        q, k, v, g, beta = per_head(layer, tokens)
        for h in range(layer.heads):
            ring = Ring(*(x[0, :, h] for x in (k, v, g)), None if beta is None else beta[0, :, h])
            x = effective_query(q[0, 0, h], ring)
            want[0, 0, h] += start[0, h] @ (p[h] @ x - x)
        assert relative(output, want) < (1e-12 if backend == "reference" else 1e-5)

    def test_refusals(self, rng):
        layer = LAYERS["gdn"]
        empty = ss.Moments("gdn", 4, 6, 5, 2)
        refused("moments: expected samples of every head", ss.low_rank_projection, empty, 2)
        refused("rank: expected 1 to", ss.low_rank_projection, moments_of(layer, tokens_of(rng, layer, 2, 40), 8), 6)
        refused("projection: expected floats of shape", ss.CopyReadHead, layer, 1, "reference", projection=np.eye(6))
