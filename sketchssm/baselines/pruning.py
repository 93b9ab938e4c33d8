"""State pruning with GHOST's scores: channels that are driven weakly or heard weakly are dropped."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.baselines.reduced import ChannelMap, ReducedHead, check_sparsity
from sketchssm.calibrate.windows import host_tokens
from sketchssm.recurrence import Layer, Tokens, check_state
from sketchssm.reference.recurrence import Array, per_head, step

__all__ = ["ChannelScores", "PrunedHead"]


class ChannelScores:
    """Running sums of GHOST's score of every key channel (Menezes and Kyrillidis, arXiv 2602.11408).

    A channel's score is the root mean, over tokens, of its controllability times its observability: of the energy of
    its row of the state, over the group's heads and all value channels, times the square of the query's entry, paired
    token by token. That is exactly the mean squared error of the outputs that zeroing what is read from the channel
    would cost, and needs forward passes alone.

    From the source come the score, its sum over the value heads that share a key head, and the pooling of all key
    heads of a layer before the lowest are dropped. It recalibrates layer by layer while it prunes a model; here each
    layer's traces are what the unpruned model gave it.

    Parameters
    ----------
    layer : Layer
        Kind and shape, of kind mamba2 or kda.

    Attributes
    ----------
    layer : Layer
        As given.
    energy : ndarray of float64, (key_heads, K)
        Sum of the squared scores over tokens.
    tokens : int
        Number of tokens.

    Raises
    ------
    ValueError
        For gdn: the source covers Mamba-2 and the paper's comparison adds kda, whose decay is by channel, too; for gdn
        that comparison reduces keys instead, see `KeyMoments`.
    """

    def __init__(self, layer: Layer) -> None:
        if layer.kind == "gdn":
            raise ValueError("layer: GHOST prunes mamba2 and kda, got gdn; KeyMoments reduces its keys instead")
        self.layer = layer
        self.energy: Array = np.zeros((layer.key_heads, layer.key_dim))
        self.tokens = 0

    def update(self, q: Any, k: Any, v: Any, g: Any, beta: Any = None, *, state: npt.ArrayLike | None = None) -> Array:
        """Add what some tokens contribute.

        Parameters
        ----------
        q, k : array, (batch, tokens, key_heads, K)
            Queries and keys, normalised and scaled.
        v : array, (batch, tokens, heads, V)
            Values.
        g : array, (batch, tokens, heads) or, for kda, (batch, tokens, heads, K)
            Log-decays, <= 0.
        beta : array, (batch, tokens, heads), optional
            Write gates; None for mamba2.
        state : array_like, (batch, heads, V, K), optional
            States that the sequences start from, such as those that the call before returned; default zeros.

        Returns
        -------
        ndarray, (batch, heads, V, K)
            States after the last token, to go on with.

        Raises
        ------
        ValueError
            Naming the argument, before anything is added.
        TypeError
            If an argument is not a real floating-point array.
        """
        layer = self.layer
        inputs = per_head(layer, host_tokens(layer, q, k, v, g, beta))
        batch, length = inputs.v.shape[:2]
        current = np.zeros((batch, layer.heads, layer.key_dim, layer.value_dim))
        if state is not None:
            start = np.asarray(state, dtype=np.float64)
            check_state(layer, start, batch)
            current = start.swapaxes(-1, -2)
        energy = np.zeros((layer.heads, layer.key_dim))
        for t in range(length):
            token = Tokens(*(x if x is None else x[:, t] for x in inputs))
            current, _ = step(current, *token)
            energy += (np.square(current).sum(axis=-1) * np.square(token.q)).sum(axis=0)
        self.energy += energy.reshape(layer.key_heads, layer.group, layer.key_dim).sum(axis=1)
        self.tokens += batch * length
        return np.ascontiguousarray(current.swapaxes(-1, -2))

    def __add__(self, other: ChannelScores) -> ChannelScores:
        """Scores over both sets of traces; ValueError unless the layers agree."""
        if not isinstance(other, ChannelScores):
            return NotImplemented
        if self.layer != other.layer:
            raise ValueError(f"scores: expected the same layer to add, got {self.layer} and {other.layer}")
        total = ChannelScores(self.layer)
        total.energy, total.tokens = self.energy + other.energy, self.tokens + other.tokens
        return total

    @property
    def scores(self) -> Array:
        """Root mean square of what each channel adds to outputs, ``(key_heads, K)``."""
        return np.sqrt(self.energy / max(self.tokens, 1))

    def keep(self, sparsity: float) -> npt.NDArray[np.bool_]:
        """Choose the channels that stay.

        Parameters
        ----------
        sparsity : float
            Share of all key heads' channels to drop, 0 to below 1. Every key head keeps at least one.

        Returns
        -------
        ndarray of bool, (key_heads, K)
            True where a channel stays: those of the highest scores.

        Raises
        ------
        ValueError
            If the share is out of range or there is nothing to score by.
        """
        count = round((1 - check_sparsity(sparsity)) * self.energy.size)
        if not self.tokens:
            raise ValueError("scores: expected some tokens, got none; call update first")
        rank = self.energy.copy()
        rank[np.arange(rank.shape[0]), rank.argmax(axis=-1)] = np.inf
        order = np.argsort(-rank, axis=None, kind="stable")
        keep = np.zeros(rank.size, dtype=np.bool_)
        keep[order[: max(count, rank.shape[0])]] = True
        return keep.reshape(rank.shape)


class PrunedHead(ReducedHead):
    """Keeps only some key channels of every state, as GHOST prunes Mamba-2.

    What is left is a smaller recurrence of the same kind: the entries of queries, keys and, for kda, decays of the
    dropped channels are not used, and their rows of a state read as zero. Keys and queries are not normalised again:
    a pruned model whose layer normalises them afterwards would do so, which measured worse on every trace of kda.

    Parameters
    ----------
    layer : Layer
        Kind and shape, of kind mamba2 or kda.
    keep : array_like of bool, (key_heads, K)
        True where a channel stays, from `ChannelScores.keep`.
    num_slots : int
        Number of state slots.
    backend : {"auto", "reference", "cpu"}, default "auto"
        Where to run.

    Attributes
    ----------
    keep : ndarray of bool, (key_heads, K)
        As given.

    Raises
    ------
    ValueError
        For gdn, or if `keep` does not fit the layer or leaves a key head without a channel.
    """

    def __init__(self, layer: Layer, keep: npt.ArrayLike, num_slots: int, backend: str = "auto") -> None:
        ChannelScores(layer)  # refuses gdn
        self.keep = np.asarray(keep)
        shape = (layer.key_heads, layer.key_dim)
        if self.keep.dtype != np.bool_ or self.keep.shape != shape:
            raise ValueError(f"keep: expected bool of shape {shape}, got {self.keep.dtype} of {self.keep.shape}")
        counts = self.keep.sum(axis=-1)
        if not counts.all():
            raise ValueError(f"keep: expected a channel in every key head, got none in {int(np.argmin(counts))}")
        order = np.argsort(~self.keep, axis=-1, kind="stable")[:, : counts.max()]
        kept = np.where(np.arange(counts.max()) < counts[:, None], order, -1)
        super().__init__(layer, ChannelMap.selection(kept, layer.key_dim), num_slots, backend)
