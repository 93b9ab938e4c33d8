"""Reduced keys: the choice of channels by its definition, and decode with folded and sliced keys."""

import itertools

import numpy as np
import pytest
from samples import LAYERS, refused, relative, tokens_of

import sketchssm as ss
from sketchssm.reference.recurrence import run
from sketchssm.study.baselines.key_reduction import GROWTH, strong_rrqr

# A few dozen operations of 2^-53 on numbers of size one.
ROUNDING = 1e-13
PRUNABLE = ("mamba2", "kda")


def kahan(size):
    """Kahan's matrix, scaled so that rounding breaks no ties: pivoted QR keeps its order and misjudges its rank."""
    sine, cosine = 0.9, np.sqrt(1 - 0.9**2)
    upper = np.eye(size) - cosine * np.triu(np.ones((size, size)), 1)
    return sine ** np.arange(size)[:, None] * upper * (1 - 1e-6) ** np.arange(size)


class TestStrongQR:
    @pytest.mark.parametrize("matrix", ["random", "kahan", "graded"])
    @pytest.mark.parametrize("count", [1, 7, 15, 16])
    def test_volume_criterion(self, matrix, count, rng):
        """By brute force: no swap of a kept and a dropped column increases the volume by more than f."""
        m = {
            "random": rng.standard_normal((40, 16)),
            "kahan": kahan(16),
            "graded": rng.standard_normal((40, 16)) * 0.5 ** np.arange(16),
        }[matrix]
        gram = m.T @ m
        found, others = strong_rrqr(gram, count)
        assert sorted([*found, *others]) == list(range(16))

        def volume(columns):
            return np.sqrt(np.linalg.det(gram[np.ix_(columns, columns)]))

        base = volume(found)
        for i, j in itertools.product(range(count), range(16 - count)):
            swapped = found.copy()
            swapped[i] = others[j]
            # determinants of Gram matrices of condition 1e8 hold half their digits
            assert volume(swapped) <= base * GROWTH * (1 + 1e-4)
        kept, whole = (np.linalg.svd(x, compute_uv=False) for x in (m[:, found], m))
        bound = np.sqrt(1 + GROWTH**2 * count * (16 - count))  # Gu and Eisenstat, theorem 3.2
        assert (kept >= whole[:count] / bound * (1 - 1e-6)).all()

    def test_a_rank_below_the_count(self, rng):
        m = rng.standard_normal((40, 3)) @ rng.standard_normal((3, 8))
        found, _ = strong_rrqr(m.T @ m, 5)
        assert np.linalg.matrix_rank(m[:, found]) == 3


class TestKeyReduction:
    layer = LAYERS["gdn"]

    @pytest.mark.parametrize("rank", [1, 2, 3])
    def test_folding_is_exact_for_keys_of_low_rank(self, rank, rng):
        """Keys are in few directions, and queries in all."""
        tokens = tokens_of(rng, self.layer, 3, 12, np.float64)
        span = rng.standard_normal((2, self.layer.key_dim, rank))
        k = np.einsum("hkn,bthn->bthk", span, rng.standard_normal((3, 12, 2, rank)))
        tokens = tokens._replace(k=k / np.linalg.norm(k, axis=-1, keepdims=True))
        moments = ss.KeyMoments(self.layer)
        moments.update(*tokens)
        head = ss.KeyReducedHead(moments.reduce(0.5), 3, "reference")
        want, state = run(self.layer, *tokens)
        # weights and factors divide by the kept channels' least singular value: 1e-7 of the largest at least
        assert relative(head.step(*tokens), want) < 1e-7
        assert relative(head.state, state) < 1e-7

    def test_nothing_dropped_is_exact(self, rng):
        tokens = tokens_of(rng, self.layer, 3, 12, np.float64)
        moments = ss.KeyMoments(self.layer)
        moments.update(*tokens)
        head = ss.KeyReducedHead(moments.reduce(0), 3, "reference")
        assert relative(head.step(*tokens), run(self.layer, *tokens)[0]) < ROUNDING

    def test_keys_keep_their_lengths(self, rng):
        """Folded keys too. A longer key would erase more than the state holds, and states would grow without bound."""
        tokens = tokens_of(rng, self.layer, 3, 400, np.float64)
        moments = ss.KeyMoments(self.layer)
        moments.update(*tokens.at(np.s_[:, :10]))
        head = ss.KeyReducedHead(moments.reduce(0.5), 3, "reference")
        tokens.g[...] = 0.0
        tokens.beta[...] = 1.0
        assert np.abs(head.step(*tokens)).max() < 10 * np.abs(tokens.v).max()

    def test_streams(self, rng):
        tokens = tokens_of(rng, self.layer, 3, 12, np.float64)
        whole, parts = ss.KeyMoments(self.layer), ss.KeyMoments(self.layer)
        whole.update(*tokens)
        for part in (np.s_[:, :5], np.s_[:, 5:]):
            parts.update(*tokens.at(part))
        for name in ("key_gram", "query_gram"):
            assert relative(getattr(parts, name), getattr(whole, name)) < ROUNDING
        assert parts.tokens == 36

    def test_refusals(self):
        for kind in PRUNABLE:
            with pytest.raises(ValueError, match=f"DRRQR reduces the keys of gdn, got {kind}"):
                ss.KeyMoments(LAYERS[kind])
        moments = ss.KeyMoments(self.layer)
        refused("moments: expected some tokens, got none", moments.reduce, 0.5)
        refused("sparsity: expected a number from 0 to below 1, got -0.5", moments.reduce, -0.5)
