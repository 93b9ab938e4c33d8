"""Key reduction with DRRQR: a strong rank-revealing QR picks key channels; the other channels are folded into them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.calibrate.sums import added
from sketchssm.calibrate.windows import host_tokens
from sketchssm.layer.checks import check_instance
from sketchssm.layer.recurrence import Layer
from sketchssm.reference.recurrence import Array
from sketchssm.study.baselines.reduced import ChannelMap, ReducedHead, check_sparsity

GROWTH = 1.5
"""The search stops when no swap multiplies the volume by more than this factor: f, the source's value."""

SUPPORT = 1e-7
"""Directions with less than this share of the largest singular value count as absent: a Gram matrix rounds their
squares away."""


def strong_rrqr(gram: Array, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Pick `count` columns of a matrix M by a strong rank-revealing QR (Gu and Eisenstat, 1996, algorithm 4).

    The method needs only ``gram = M^T M (K, K)``. With ``M P = Q [[A, B], [0, C]]``, swapping kept column i for
    dropped column j multiplies the volume ``det A`` by ``rho_ij = sqrt((A^-1 B)_ij^2 + (|C_j| |row i of A^-1|)^2)``.
    Columns start in the order of a pivoted QR, and the pair of the largest rho is swapped until none is above
    `GROWTH`. Each swap makes the volume larger, so the search ends. The source of DRRQR stops after
    at most 20 swaps; this function does not.

    For a matrix whose rank is below `count`, the result is the first columns of the pivoted QR: there is no volume to
    compare. Returns the numbers of the kept columns, and of the others.
    """
    from scipy.linalg import qr, solve_triangular

    root = _root(gram)
    r, order = qr(root, mode="r", pivoting=True)
    while _full_rank(r, count):
        inverse = solve_triangular(r[:count, :count], np.eye(count))
        rest = np.linalg.norm(r[count:, count:], axis=0)
        rho = np.hypot(inverse @ r[:count, count:], np.linalg.norm(inverse, axis=1)[:, None] * rest)
        if rho.max(initial=0.0) <= GROWTH:
            break
        i, j = np.unravel_index(rho.argmax(), rho.shape)
        order[[i, count + j]] = order[[count + j, i]]
        r = qr(root[:, order], mode="r")[0]
    return order[:count].astype(np.int64), order[count:].astype(np.int64)


def _root(gram: Array) -> Array:
    """A matrix whose Gram matrix is the given one."""
    energy, vectors = np.linalg.eigh(gram)
    return np.sqrt(np.maximum(energy, 0.0))[:, None] * vectors.T


def _full_rank(r: Array, count: int) -> bool:
    """Whether the leading block of a triangular factor can be inverted."""
    return bool(np.abs(np.diag(r)[:count]).min() > SUPPORT * np.abs(r).max())


class KeyMoments:
    """Running Gram matrices of a gdn layer's keys and queries, from which DRRQR picks channels.

    Nazari and Rusch (arXiv 2602.04852) and their repository are the source of the strong rank-revealing QR of keys
    and queries together, one per key head, of its bound of 1.5, and of dropping a share of the channels of every head.
    They factorise up to 5000 samples of activations before the layer normalises them. Here samples are normalised:
    queries are scaled to unit length, so that queries and keys have equal weights. All samples count, through their
    Gram matrix.

    Parameters
    ----------
    layer : Layer
        Kind and shape, of kind gdn.

    Attributes
    ----------
    key_gram, query_gram : ndarray of float64, (key_heads, K, K)
        Sums of ``k k^T`` and of ``q q^T / |q|^2`` over tokens.
    tokens : int
        Number of tokens.

    Raises
    ------
    ValueError
        For other kinds than gdn: the source reduces DeltaNet and Gated DeltaNet. Folding needs one
        decay for all channels, and unit keys. `ChannelScores` prunes the other kinds.
    """

    def __init__(self, layer: Layer) -> None:
        check_instance("layer", layer, Layer)
        if not layer.erases or layer.channel_decays:
            raise ValueError(f"layer: DRRQR reduces the keys of gdn, got {layer.kind}; ChannelScores prunes its state")
        self.layer = layer
        shape = (layer.key_heads, layer.key_dim, layer.key_dim)
        self.key_gram: Array = np.zeros(shape)
        self.query_gram: Array = np.zeros(shape)
        self.tokens = 0

    def update(self, q: Any, k: Any, v: Any, g: Any, beta: Any = None) -> None:
        """Add the contribution of some tokens.

        Parameters
        ----------
        q, k : array, (batch, tokens, key_heads, K)
            Queries and keys, normalised and scaled.
        v, g, beta : array
            Values, log-decays and write gates, only checked; see `DecodeHead.step` for the shapes.

        Raises
        ------
        ValueError
            Naming the argument, before anything is added.
        TypeError
            If an argument is not a real floating-point array.
        """
        tokens = host_tokens(self.layer, q, k, v, g, beta)
        heads, key_dim = self.layer.key_heads, self.layer.key_dim
        k, q = (
            np.asarray(x, np.float64).transpose(2, 0, 1, 3).reshape(heads, -1, key_dim) for x in (tokens.k, tokens.q)
        )
        length = np.linalg.norm(q, axis=-1, keepdims=True)
        q = np.divide(q, length, out=np.zeros_like(q), where=length > 0)
        grams = {"key_gram": k.swapaxes(-1, -2) @ k, "query_gram": q.swapaxes(-1, -2) @ q}
        self.__dict__.update(added(self, grams | {"tokens": int(np.prod(tokens.v.shape[:2]))}))

    def reduce(self, sparsity: float) -> KeyReduction:
        """Pick the channels to keep.

        Parameters
        ----------
        sparsity : float
            Share of the channels of every key head to drop, 0 to below 1. The count of kept channels is rounded down,
            as in the source, and at least one.

        Returns
        -------
        KeyReduction
            Kept channels of every key head, and the others as combinations of them.

        Raises
        ------
        ValueError
            If the share is out of range or no tokens were added.
        """
        count = max(int(self.layer.key_dim * (1 - check_sparsity(sparsity)) + 1e-9), 1)
        if not self.tokens:
            raise ValueError("moments: expected some tokens, got none; call update first")
        picked = [strong_rrqr(gram, count) for gram in self.key_gram + self.query_gram]
        kept, dropped = map(np.stack, zip(*picked, strict=True))
        weights = []
        for gram, stay, go in zip(self.key_gram, kept, dropped, strict=True):
            root = _root(gram)
            weights.append(np.linalg.lstsq(root[:, stay], root[:, go], rcond=SUPPORT)[0])
        return KeyReduction(self.layer, kept, dropped, np.stack(weights))


@dataclass(frozen=True, eq=False)
class KeyReduction:
    """Kept key channels, and the others as combinations of them.

    Made by `KeyMoments.reduce`.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    kept : ndarray of int64, (key_heads, n)
        Kept channels.
    dropped : ndarray of int64, (key_heads, K - n)
        The others.
    weights : ndarray, (key_heads, n, K - n)
        Least-squares coefficients over the keys: ``k[dropped] ~ k[kept] @ weights``.
    """

    layer: Layer
    kept: npt.NDArray[np.int64]
    dropped: npt.NDArray[np.int64]
    weights: Array

    def channels(self) -> ChannelMap:
        """Return the maps of queries, keys and states, see `KeyReducedHead`.

        Returns
        -------
        ChannelMap
            The maps.
        """
        plain = ChannelMap.selection(self.kept, self.layer.key_dim)
        spread = plain.lift.copy()  # k ~ spread k[kept]
        for rows, dropped, weights in zip(spread, self.dropped, self.weights, strict=True):
            rows[dropped] = weights.T
        factor = np.linalg.cholesky(spread.swapaxes(-1, -2) @ spread)  # lower
        query = np.linalg.solve(factor, spread.swapaxes(-1, -2))
        return ChannelMap(
            self.kept, query, factor.swapaxes(-1, -2) @ plain.key, query.swapaxes(-1, -2), unit_keys=True
        )


class KeyReducedHead(ReducedHead):
    """The recurrence over the key channels that DRRQR picks.

    The source slices queries and keys, and the layer then normalises the rest. Within a model's weights nothing else
    is possible, because of the short convolutions before the recurrence. A decode head gets queries and keys after the
    convolutions and folds the dropped channels into the kept channels. If ``k = E k[kept]``, with E made of the
    identity and the weights of the reduction, and ``E^T E = L L^T``, the recurrence with keys ``L^T k[kept]`` and
    queries ``L^-1 E^T q`` has the outputs of the full recurrence. Folding is exact if the rank of the keys does not
    exceed the number of kept channels. Other keys keep their lengths, so that no token erases too much. The maps
    belong to the layer and cost no state traffic.

    Parameters
    ----------
    reduction : KeyReduction
        Channels, from `KeyMoments.reduce`.
    num_slots, backend : int and str
        See `StandardHead`; there is no backend "cuda".
    """

    def __init__(self, reduction: KeyReduction, num_slots: int, backend: str = "auto") -> None:
        check_instance("reduction", reduction, KeyReduction)
        self.reduction = reduction
        super().__init__(reduction.layer, reduction.channels(), num_slots, backend)
