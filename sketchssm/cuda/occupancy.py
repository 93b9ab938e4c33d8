"""How many blocks of a flush share a multiprocessor, and how fast the first reads of a block follow one another."""

from __future__ import annotations

from collections.abc import Mapping

from sketchssm.layer.recurrence import Layer

FLUSH_BLOCKS = {
    (False, 64): 4,
    (False, 80): 3,
    (False, 96): 2,
    (False, 128): 1,
    (True, 64): 3,
    (True, 80): 2,
    (True, 96): 2,
    (True, 128): 2,
}
"""Blocks of the flush on a multiprocessor that registers leave room for, by `erases` and value_dim. Measured on H200:
spilt registers cost more than fewer blocks."""

MOST_WARPS = 20
"""Warps of these blocks together, for other value_dim."""

MOST_DENSE_BLOCKS = 3
"""The same for dense maps, whose flushes have one more warp."""


def blocks_per_multiprocessor(layer: Layer, raw_keys: bool, dense: bool) -> int:
    """Blocks of the flush for which a multiprocessor has registers; `raw_keys` is RAW_KEYS in ``flush/stages.cuh``."""
    if not raw_keys:
        return 1
    others = max(1, MOST_WARPS // (layer.value_dim // 16 + 2))  # two warps beside those of 16 value rows each
    blocks = FLUSH_BLOCKS.get((layer.erases, layer.value_dim), others)
    return min(blocks, MOST_DENSE_BLOCKS) if dense else blocks


LEAST_PACE = 16
"""Bytes per cycle and multiprocessor at which the first reads of a block follow one another. Measured on H200, which
delivers 18.8, and kept for devices that deliver less."""

PACE_SHARE = 0.85
"""The same as a share of what memory delivers, for faster devices."""


def read_pace(attributes: Mapping[str, int]) -> int:
    """Bytes per cycle that the warps of a block of the read request at first, from a device's attributes (PACE)."""
    names = "MemoryClockRate", "GlobalMemoryBusWidth", "ClockRate", "MultiProcessorCount"
    memory_clock, bits, clock, processors = (attributes.get(name, 0) for name in names)
    delivered = memory_clock * 2 * bits / 8 / (clock * processors) if clock * processors else 0.0
    return max(LEAST_PACE, int(PACE_SHARE * delivered))
