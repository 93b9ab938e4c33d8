"""State pruning with GHOST's scores: key channels with little controllability times observability are dropped."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.calibrate.sums import added
from sketchssm.calibrate.windows import host_tokens
from sketchssm.layer.checks import as_array, check_instance
from sketchssm.layer.recurrence import Layer
from sketchssm.reference.recurrence import Array, per_head, step
from sketchssm.study.baselines.reduced import ChannelMap, ReducedHead, check_sparsity


class ChannelScores:
    """Running sums of GHOST's score of every key channel (Menezes and Kyrillidis, arXiv 2602.11408).

    The score of a channel is the root of the mean over tokens of its controllability times its observability. These
    are the energy of its row of the state, over the heads of the group and all value channels, and the square of the
    query's entry, multiplied token by token. The mean is exactly the squared output error of zeroing the reads of the
    channel. Forward passes are enough to compute the score.

    The source has the score, its sum over the value heads that share a key head, and the pooling of all key heads of a
    layer before the lowest are dropped. The source recalibrates layer by layer while it prunes a model. Here the
    traces of each layer come from the unpruned model.

    Parameters
    ----------
    layer : Layer
        Kind and shape, of any kind but gdn.

    Attributes
    ----------
    energy : ndarray of float64, (key_heads, K)
        Sum of the squared scores over tokens.
    tokens : int
        Number of tokens.

    Raises
    ------
    ValueError
        For gdn. The source covers Mamba-2, and the paper's comparison adds kda, whose decay is per channel. For gdn
        the paper compares with key reduction, see `KeyMoments`.
    """

    def __init__(self, layer: Layer) -> None:
        check_instance("layer", layer, Layer)
        if layer.erases and not layer.channel_decays:
            raise ValueError(f"layer: GHOST prunes other kinds than {layer.kind}; KeyMoments reduces its keys instead")
        self.layer = layer
        self.energy: Array = np.zeros((layer.key_heads, layer.key_dim))
        self.tokens = 0

    def update(self, q: Any, k: Any, v: Any, g: Any, beta: Any = None) -> None:
        """Add the contribution of some tokens, of sequences that start from zero states.

        Parameters
        ----------
        q, k, v, g, beta : array
            See `DecodeHead.step`, with a tokens axis.

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
        energy = np.zeros((layer.heads, layer.key_dim))
        for t in range(length):
            token = inputs.at(np.s_[:, t])
            current, _ = step(current, *token)
            energy += (np.square(current).sum(axis=-1) * np.square(token.q)).sum(axis=0)
        energy = energy.reshape(layer.key_heads, layer.group, layer.key_dim).sum(axis=1)
        self.__dict__.update(added(self, {"energy": energy, "tokens": batch * length}))

    @property
    def scores(self) -> Array:
        """Root mean square contribution of each channel to the outputs, ``(key_heads, K)``."""
        return np.sqrt(self.energy / max(self.tokens, 1))

    def keep(self, sparsity: float) -> npt.NDArray[np.bool_]:
        """Choose the channels to keep.

        Parameters
        ----------
        sparsity : float
            Share of all key heads' channels to drop, 0 to below 1. Every key head keeps at least one.

        Returns
        -------
        ndarray of bool, (key_heads, K)
            True for kept channels: those with the highest scores.

        Raises
        ------
        ValueError
            If the share is out of range or no tokens were added.
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
    """The recurrence over some key channels of every state, as GHOST prunes Mamba-2.

    The entries of queries, keys and, for kda, decays of dropped channels are not used, and the rows of those channels
    in a state read as zero. Keys and queries are not normalised again: normalising measured worse on every trace of
    kda.

    Parameters
    ----------
    layer : Layer
        Kind and shape, of any kind but gdn.
    keep : array_like of bool, (key_heads, K)
        True for kept channels, from `ChannelScores.keep`.
    num_slots, backend : int and str
        See `StandardHead`; there is no backend "cuda".

    Raises
    ------
    ValueError
        For gdn, or if `keep` does not fit the layer or leaves a key head without a channel.
    """

    def __init__(self, layer: Layer, keep: npt.ArrayLike, num_slots: int, backend: str = "auto") -> None:
        ChannelScores(layer)  # refuses gdn
        self.keep = as_array("keep", keep)
        shape = (layer.key_heads, layer.key_dim)
        if self.keep.dtype != np.bool_ or self.keep.shape != shape:
            raise ValueError(f"keep: expected bool of shape {shape}, got {self.keep.dtype} of {self.keep.shape}")
        counts = self.keep.sum(axis=-1)
        if not counts.all():
            raise ValueError(f"keep: expected a channel in every key head, got none in {int(np.argmin(counts))}")
        order = np.argsort(~self.keep, axis=-1, kind="stable")[:, : counts.max()]
        kept = np.where(np.arange(counts.max()) < counts[:, None], order, -1)
        super().__init__(layer, ChannelMap.selection(kept, layer.key_dim), num_slots, backend)
