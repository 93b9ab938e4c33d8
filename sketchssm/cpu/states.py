"""States that are stored in 16 bits: widened to float32 in scratch memory, and rounded when they are stored.

A full-state head of a float32 state may have a copy in bfloat16, which reads use instead: its shadow.
"""

from __future__ import annotations

from sketchssm.cpu.jit import njit
from sketchssm.cpu.layout import BFLOAT16, Record
from sketchssm.cpu.llvm import LANES
from sketchssm.cpu.packed import SHADOW, field
from sketchssm.cpu.simd import Pointer, bfloats, floats, halves, load, store


@njit
def widen(m: Record, address: int, first: int, buf: Pointer, target: int, count: int) -> None:
    """Load 16-bit elements into scratch memory."""
    for c in range(0, count, LANES):
        if m.state_type == BFLOAT16:
            store(buf, target + c, load(bfloats(address), first + c))
        else:
            store(buf, target + c, load(halves(address), first + c))


@njit
def narrow(m: Record, buf: Pointer, source: int, address: int, first: int, count: int) -> None:
    """Store numbers from scratch memory in 16 bits, and leave the rounded numbers in scratch memory."""
    for c in range(0, count, LANES):
        if m.state_type == BFLOAT16:
            store(bfloats(address), first + c, load(buf, source + c))
        else:
            store(halves(address), first + c, load(buf, source + c))
    widen(m, address, first, buf, source, count)


@njit
def shade(m: Record, slot: int, head: int) -> None:
    """Store the state of a full-state head in its shadow, if heads have shadows."""
    if m.shadow:
        size = m.values * m.keys
        first, shadow = slot * m.state_stride + head * size, slot * m.shadow_stride + field(m, head, SHADOW)
        for c in range(0, size, LANES):
            store(bfloats(m.shadow), shadow + c, load(floats(m.state), first + c))
