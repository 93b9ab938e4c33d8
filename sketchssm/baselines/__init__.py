"""Baselines: the systems that a sketch is compared with, as heads with the interface of `DecodeHead`."""

from sketchssm.baselines.heads import ReplayHead, StandardHead
from sketchssm.baselines.key_reduction import KeyMoments, KeyReducedHead, KeyReduction
from sketchssm.baselines.low_rank import low_rank_basis, low_rank_plan
from sketchssm.baselines.pruning import ChannelScores, PrunedHead
from sketchssm.baselines.quantised import CopyReadHead, QuantisedHead

__all__ = [
    "ChannelScores",
    "CopyReadHead",
    "KeyMoments",
    "KeyReducedHead",
    "KeyReduction",
    "PrunedHead",
    "QuantisedHead",
    "ReplayHead",
    "StandardHead",
    "low_rank_basis",
    "low_rank_plan",
]
