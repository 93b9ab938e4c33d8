"""The paper's baselines as systems.

Every function takes a layer, its calibration tokens ``(sequences, tokens, ...)`` from zero states, and the tokens from
one flush to the next (window), even if the method does not use all three. The systems are in the order of the
function's settings; for kinds that the method excludes there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from sketchssm.calibrate.moments import Moments
from sketchssm.heads.head import DecodeHead
from sketchssm.layer.recurrence import Layer, Tokens
from sketchssm.plans import traffic
from sketchssm.study.baselines import (
    ChannelScores,
    CopyReadHead,
    KeyMoments,
    KeyReducedHead,
    PrunedHead,
    QuantisedHead,
    low_rank_projection,
)
from sketchssm.study.systems import System

SPARSITIES = (0.375, 0.5, 0.625, 0.75)
"""Shares of a state that the paper prunes."""


def quantised_systems(
    layer: Layer, tokens: Tokens, window: int = 16, *, bits: Sequence[int] = (10, 8, 6, 4)
) -> list[System]:
    """List states of some `bits`, requantised at every token."""
    size = (layer.key_dim, layer.value_dim)
    return [
        _system(
            f"DSQ {each} bits", partial(QuantisedHead, layer, bits=each), layer, traffic.compressed(*size, bits=each)
        )
        for each in bits
    ]


def pruned_systems(
    layer: Layer, tokens: Tokens, window: int = 16, *, sparsities: Sequence[float] = SPARSITIES
) -> list[System]:
    """List states without a share of the key channels, by the scores of GHOST; none for gdn."""
    if layer.erases and not layer.channel_decays:
        return []
    scores = ChannelScores(layer)
    scores.update(*tokens)
    masks = [(share, scores.keep(share)) for share in sparsities]
    return [
        _system(f"GHOST {share:.1%}", partial(PrunedHead, layer, keep), layer, _sparse(layer, float(keep.mean())))
        for share, keep in masks
    ]


def key_reduced_systems(
    layer: Layer, tokens: Tokens, window: int = 16, *, sparsities: Sequence[float] = SPARSITIES
) -> list[System]:
    """List recurrences without a share of the key channels, picked by DRRQR; only for gdn."""
    if not layer.erases or layer.channel_decays:
        return []
    moments = KeyMoments(layer)
    moments.update(*tokens)
    reductions = [(share, moments.reduce(share)) for share in sparsities]
    return [
        _system(
            f"DRRQR {share:.1%}",
            partial(KeyReducedHead, reduction),
            layer,
            _sparse(layer, reduction.kept.shape[-1] / layer.key_dim),
        )
        for share, reduction in reductions
    ]


def read_only_systems(
    layer: Layer,
    tokens: Tokens,
    window: int = 16,
    *,
    bits: Sequence[int] = (8, 6, 4, 2),
    ranks: Sequence[int] = (16, 8, 4),
) -> list[System]:
    """List exact states with approximate reads: copies of some `bits`, then low-rank reads of one rank for all heads.

    Ranks above min(K, V) are left out.
    """
    size = (layer.key_dim, layer.value_dim)
    systems = []
    for each in bits:
        build = partial(CopyReadHead, layer, bits=each, window=window)
        systems.append(_system(f"{each}-bit copy", build, layer, traffic.read_only_copy(*size, each, window)))
    fitting = [rank for rank in ranks if rank <= min(size)]
    if fitting:
        moments = Moments(layer, window=window)
        moments.update(*tokens)
    for rank in fitting:
        build = partial(CopyReadHead, layer, projection=low_rank_projection(moments, rank), window=window)
        moved = ((window - 1) * 2 * rank * layer.value_dim + traffic.standard(*size)) / window  # columns in bfloat16
        systems.append(_system(f"low-rank read {rank}", build, layer, moved))
    return systems


def _system(name: str, build: Callable[[int, str], DecodeHead], layer: Layer, used: float) -> System:
    """A system that moves `used` bytes per head and token."""
    return System(name, build, traffic.standard(layer.key_dim, layer.value_dim) / used)


def _sparse(layer: Layer, left: float) -> float:
    """Bytes with a share of the key channels left."""
    return traffic.compressed(layer.key_dim, layer.value_dim, sparsity=1 - left)
