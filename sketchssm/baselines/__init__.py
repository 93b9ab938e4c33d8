"""Every system that a sketch is compared with, behind the interface of `sketchssm.head.DecodeHead`."""

from sketchssm.baselines.heads import ReplayHead, StandardHead

__all__ = ["ReplayHead", "StandardHead"]
