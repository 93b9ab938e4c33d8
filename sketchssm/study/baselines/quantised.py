"""Quantised states (DSQ of Q-Mamba), and quantised copies for reads alone."""

from __future__ import annotations

from sketchssm.heads.backends import load_engine
from sketchssm.heads.head import DecodeHead, check_capacity
from sketchssm.heads.registry import System
from sketchssm.layer.recurrence import Layer, check_integer, check_window

MODULES = {"reference": "sketchssm.reference.baselines", "cpu": "sketchssm.cpu.quantised"}
QUANTISED = System("quantised", {backend: f"{module}:QuantisedEngine" for backend, module in MODULES.items()})
COPY = System("copy", {backend: f"{module}:CopyEngine" for backend, module in MODULES.items()})


class QuantisedHead(DecodeHead):
    """Quantised states, requantised at every token: DSQ of Q-Mamba (Findings of ACL 2025, 551).

    DSQ has separate scales along both dimensions of the state, computed whenever the state is stored. Two choices are
    this library's: the computation of the scales (`sketchssm.reference.quantise`), and that the output of a token is
    read from the updated state before its quantisation, when a kernel has the state in registers.

    Parameters
    ----------
    layer, num_slots, backend : Layer, int and str
        See `StandardHead`; there is no backend "cuda".
    bits : int, default 8
        Bits per element of the state, 2 to 16.

    Raises
    ------
    ValueError
        If `bits` is out of range.
    """

    def __init__(self, layer: Layer, num_slots: int, backend: str = "auto", *, bits: int = 8) -> None:
        capacity, self.bits = check_capacity(num_slots), check_integer("bits", bits, 2, 16)
        super().__init__(layer, capacity, *load_engine(QUANTISED, backend, layer, capacity, self.bits))


class CopyReadHead(DecodeHead):
    """Exact states, with reads between flushes from a quantised copy.

    A read-only variant of the paper's appendix *Ablation of Preserving Full-State Updates*: updates wait in the ring
    as in `ReplayHead`, and each flush quantises the updated state. The appendix does not name the format of the copy.
    Here the copy has the scales of `QuantisedHead`, whose bytes agree with the printed traffic, and all ``2^bits``
    levels at the centres of equal cells. Zero is not a level: this would add noise to a recurrence at every token, but
    not to a copy. It removes a third to two thirds of the error of a 2-bit copy.

    Parameters
    ----------
    layer, num_slots, backend : Layer, int and str
        See `StandardHead`; there is no backend "cuda".
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
        capacity, self.bits = check_capacity(num_slots), check_integer("bits", bits, 2, 16)
        super().__init__(
            layer, capacity, *load_engine(COPY, backend, layer, capacity, check_window(window, least=1), self.bits)
        )
