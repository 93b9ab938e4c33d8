"""Baselines: the systems that a sketch is compared with, as heads with the interface of `DecodeHead`."""

from sketchssm.study.baselines.key_reduction import KeyMoments, KeyReducedHead, KeyReduction
from sketchssm.study.baselines.low_rank import low_rank_projection
from sketchssm.study.baselines.pruning import ChannelScores, PrunedHead
from sketchssm.study.baselines.quantised import CopyReadHead, QuantisedHead

__all__ = [
    "ChannelScores",
    "CopyReadHead",
    "KeyMoments",
    "KeyReducedHead",
    "KeyReduction",
    "PrunedHead",
    "QuantisedHead",
    "low_rank_projection",
]
