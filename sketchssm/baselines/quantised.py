"""Quantised states (DSQ of Q-Mamba), and quantised copies that only reads see."""

from __future__ import annotations

from typing import Any

import numpy as np

from sketchssm.backends import load_engine
from sketchssm.head import DecodeHead, check_capacity
from sketchssm.recurrence import Layer, check_window

__all__ = ["RESIDUAL_BITS", "CopyReadHead", "QuantisedHead"]

RESIDUAL_BITS = 4
"""Bits of a stored rounding error, where error feedback is on."""


class QuantisedHead(DecodeHead):
    """Keeps every state quantised and requantises it at every token: DSQ of Q-Mamba (Findings of ACL 2025, 551).

    From there come separate scales along both dimensions of the state, found anew whenever it is stored. How they are
    found is this library's choice, as `sketchssm.reference.quantise` says, and so is that a token's output is read
    from the updated state before it is requantised, which a kernel has at hand.

    Error feedback is our own option: what the codes lose is stored too, in 4 bits that share the scales, and added
    back before the next token's decay. It has to be kept for every element, so that a state costs ``bits + 4`` bits
    per element to read and to write, and is then as accurate as a quantiser of almost that many bits.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    num_slots : int
        Number of state slots.
    backend : {"auto", "reference", "cpu"}, default "auto"
        Where to run.
    bits : int, default 8
        Bits per element of the state, 2 to 16.
    error_feedback : bool, default False
        Keep what quantising loses, in 4 more bits per element.

    Raises
    ------
    ValueError
        If `bits` is out of range.
    """

    def __init__(
        self, layer: Layer, num_slots: int, backend: str = "auto", *, bits: int = 8, error_feedback: bool = False
    ) -> None:
        capacity, self.bits = check_capacity(num_slots), check_bits(bits)
        self.error_feedback = bool(error_feedback)
        residual_bits = RESIDUAL_BITS if error_feedback else 0
        engine = load_engine("quantised", backend, layer, capacity, self.bits, residual_bits)
        super().__init__(layer, capacity, *engine)


class CopyReadHead(DecodeHead):
    """Keeps states exact and reads a quantised copy of them between flushes.

    The read-only variant of the paper's appendix *Ablation of Preserving Full-State Updates*: updates wait in a
    window's ring as in `ReplayHead`, and each flush quantises what it has updated. The appendix does not name the
    copy's format. Here it has the scales of `QuantisedHead`, which the printed traffic agrees with, and all ``2^bits``
    levels, at the centres of equal cells: zero is none of them, which costs a recurrence but no copy, and takes a
    third to two thirds off the error of a 2-bit copy.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    num_slots : int
        Number of state slots.
    backend : {"auto", "reference", "cpu"}, default "auto"
        Where to run.
    bits : int, default 4
        Bits per element of the copy, 2 to 16.
    window : int, default 16
        Tokens from one flush to the next (W).

    Raises
    ------
    ValueError
        If an argument is out of range.
    """

    def __init__(
        self, layer: Layer, num_slots: int, backend: str = "auto", *, bits: int = 4, window: int = 16
    ) -> None:
        capacity, self.bits = check_capacity(num_slots), check_bits(bits)
        super().__init__(
            layer, capacity, *load_engine("copy", backend, layer, capacity, check_window(window, least=1), self.bits)
        )


def check_bits(bits: Any) -> int:
    """Check the bits of a code."""
    if isinstance(bits, bool) or not isinstance(bits, int | np.integer) or not 2 <= bits <= 16:
        raise ValueError(f"bits: expected an integer from 2 to 16, got {bits!r}")
    return int(bits)
