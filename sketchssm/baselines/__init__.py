"""Every system that a sketch is compared with, behind the interface of `sketchssm.head.DecodeHead`."""

from sketchssm.baselines.heads import ReplayHead, StandardHead
from sketchssm.baselines.quantised import CopyReadHead, QuantisedHead

__all__ = ["CopyReadHead", "QuantisedHead", "ReplayHead", "StandardHead"]
