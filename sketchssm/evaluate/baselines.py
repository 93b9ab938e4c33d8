"""The paper's baselines as systems.

Every function takes a layer, calibration tokens and a window, even if the method does not use all three, and returns
an empty list for kinds that the method excludes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sketchssm import traffic
from sketchssm.baselines import (
    ChannelScores,
    CopyReadHead,
    KeyMoments,
    KeyReducedHead,
    PrunedHead,
    QuantisedHead,
    low_rank_plan,
)
from sketchssm.baselines.quantised import RESIDUAL_BITS
from sketchssm.calibrate.moments import Moments
from sketchssm.recurrence import Layer, Tokens
from sketchssm.systems import System, sketch_system

__all__ = ["SPARSITIES", "key_reduced_systems", "pruned_systems", "quantised_systems", "read_only_systems"]

SPARSITIES = (0.375, 0.5, 0.625, 0.75)
"""Shares of a state that the paper prunes."""


def quantised_systems(
    layer: Layer,
    tokens: Tokens,
    window: int = 16,
    *,
    bits: Sequence[int] = (10, 8, 6, 4),
    error_feedback: bool | Sequence[bool] = False,
) -> list[System]:
    """List quantised states, with and without error feedback.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    tokens : Tokens
        Not used: scales are computed from the state.
    window : int, default 16
        Not used: a state is requantised at every token.
    bits : sequence of int, default (10, 8, 6, 4)
        Bits per element.
    error_feedback : bool or sequence of bool, default False
        Whether rounding errors are stored; a sequence lists several choices.

    Returns
    -------
    list of System
        By error feedback, then in the order of `bits`.
    """
    whole = traffic.standard(layer.key_dim, layer.value_dim)
    systems = []
    for feedback in _each(error_feedback):
        for each in bits:
            stored = each + (RESIDUAL_BITS if feedback else 0)
            used = traffic.compressed(layer.key_dim, layer.value_dim, bits=stored)
            name = f"DSQ {each} bits" + (" with feedback" if feedback else "")
            build = partial(QuantisedHead, layer, bits=each, error_feedback=feedback)
            systems.append(System(name, build, whole / used))
    return systems


def pruned_systems(
    layer: Layer, tokens: Tokens, window: int = 16, *, sparsities: Sequence[float] = SPARSITIES
) -> list[System]:
    """List states pruned by the scores of GHOST.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    tokens : Tokens
        Calibration sequences ``(sequences, tokens, ...)`` that start from a zero state.
    window : int, default 16
        Not used: a pruned state is updated at every token.
    sparsities : sequence of float, default (0.375, 0.5, 0.625, 0.75)
        Shares of the key channels to drop.

    Returns
    -------
    list of System
        In the order of `sparsities`; none for gdn.
    """
    if layer.kind == "gdn":
        return []
    scores = ChannelScores(layer)
    scores.update(*tokens)
    masks = [scores.keep(share) for share in sparsities]
    return [
        System(f"GHOST {share:.1%}", partial(PrunedHead, layer, keep), _pruned_reduction(layer, keep.mean()))
        for share, keep in zip(sparsities, masks, strict=True)
    ]


def key_reduced_systems(
    layer: Layer,
    tokens: Tokens,
    window: int = 16,
    *,
    sparsities: Sequence[float] = SPARSITIES,
    fold: bool | Sequence[bool] = True,
) -> list[System]:
    """List recurrences over the key channels picked by DRRQR.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    tokens : Tokens
        Calibration sequences ``(sequences, tokens, ...)``.
    window : int, default 16
        Not used: a reduced state is updated at every token.
    sparsities : sequence of float, default (0.375, 0.5, 0.625, 0.75)
        Shares of the key channels to drop.
    fold : bool or sequence of bool, default True
        Whether dropped channels are folded into the kept ones; a sequence lists several choices.

    Returns
    -------
    list of System
        By `fold`, then in the order of `sparsities`; only for gdn.
    """
    if layer.kind != "gdn":
        return []
    moments = KeyMoments(layer)
    moments.update(*tokens)
    reductions = [moments.reduce(share) for share in sparsities]
    systems = []
    for folds in _each(fold):
        for share, reduction in zip(sparsities, reductions, strict=True):
            name = f"DRRQR {share:.1%}" + ("" if folds else " sliced")
            left = reduction.kept.shape[-1] / layer.key_dim
            systems.append(
                System(name, partial(KeyReducedHead, reduction, fold=folds), _pruned_reduction(layer, left))
            )
    return systems


def read_only_systems(
    layer: Layer,
    tokens: Tokens,
    window: int = 16,
    *,
    bits: Sequence[int] = (8, 6, 4, 2),
    ranks: Sequence[int] = (16, 8, 4),
) -> list[System]:
    """List exact states with approximate reads: quantised copies and fixed low-rank reads.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    tokens : Tokens
        Calibration sequences ``(sequences, tokens, ...)`` that start from a zero state.
    window : int, default 16
        Tokens from one flush to the next.
    bits : sequence of int, default (8, 6, 4, 2)
        Bits per element of the copies.
    ranks : sequence of int, default (16, 8, 4)
        Ranks of the low-rank reads, one for all heads; ranks above min(K, V) are left out.

    Returns
    -------
    list of System
        Copies in the order of `bits`, then low-rank reads in the order of `ranks`.
    """
    size = (layer.key_dim, layer.value_dim)
    whole = traffic.standard(*size)
    systems = []
    for each in bits:
        reduction = whole / traffic.read_only_copy(*size, each, window)
        systems.append(System(f"{each}-bit copy", partial(CopyReadHead, layer, bits=each, window=window), reduction))
    fitting = [rank for rank in ranks if rank <= min(size)]
    if fitting:
        moments = Moments(layer, window=window)
        moments.update(*tokens)
        systems += [sketch_system(low_rank_plan(moments, rank), f"low-rank read {rank}") for rank in fitting]
    return systems


def _each(choice: bool | Sequence[bool]) -> Sequence[bool]:
    """One choice or several, as several."""
    return (choice,) if isinstance(choice, bool) else choice


def _pruned_reduction(layer: Layer, left: float) -> float:
    """Traffic reduction with a share of the key channels kept."""
    size = (layer.key_dim, layer.value_dim)
    return traffic.standard(*size) / traffic.compressed(*size, sparsity=1 - float(left))
