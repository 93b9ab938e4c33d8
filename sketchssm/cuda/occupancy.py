"""How many blocks of a flush share a multiprocessor."""

from __future__ import annotations

from sketchssm.layer.recurrence import Layer

__all__ = ["blocks_per_multiprocessor"]

FLUSH_BLOCKS = {
    ("mamba2", 64): 4,
    ("mamba2", 80): 3,
    ("mamba2", 96): 2,
    ("gdn", 64): 3,
    ("gdn", 80): 2,
    ("gdn", 96): 2,
    ("gdn", 128): 2,
}
"""Blocks of the flush on a multiprocessor that registers leave room for, by kind and value_dim; otherwise one.
Measured on H200: spilt registers cost more than fewer blocks."""

MOST_DENSE_BLOCKS = 3
"""The same for dense maps, whose flushes have one more warp."""


def blocks_per_multiprocessor(layer: Layer, raw_keys: bool, dense: bool) -> int:
    """Blocks of the flush for which a multiprocessor has registers.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    raw_keys : bool
        RAW_KEYS in ``flush_stages.cuh``.
    dense : bool
        Whether the map is dense.

    Returns
    -------
    int
        At least 1.
    """
    blocks = FLUSH_BLOCKS.get((layer.kind, layer.value_dim), 1) if raw_keys else 1
    return min(blocks, MOST_DENSE_BLOCKS) if dense else blocks
