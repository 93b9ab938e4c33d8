"""Quantised states (DSQ of Q-Mamba), and copies for reads alone."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from sketchssm.heads.backends import load_engine
from sketchssm.heads.head import DecodeHead, check_capacity
from sketchssm.heads.registry import System
from sketchssm.layer.checks import as_array, check_integer
from sketchssm.layer.recurrence import Layer, check_window

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
        capacity, bits = check_capacity(num_slots), check_integer("bits", bits, 2, 16)
        super().__init__(layer, capacity, *load_engine(QUANTISED, backend, layer, capacity, bits))


class CopyReadHead(DecodeHead):
    """Exact states, with reads between flushes from a copy: quantised, or projected on a fixed subspace.

    The read-only variants of the paper's appendix *Ablation of Preserving Full-State Updates*: updates wait in the
    ring as in `ReplayHead`, and each flush copies the updated state. The appendix does not name the format of a
    quantised copy. Here it has the scales of `QuantisedHead`, whose bytes agree with the printed traffic, and all
    ``2^bits`` levels at the centres of equal cells. Zero is not a level: this would add noise to a recurrence at every
    token, but not to a copy. It removes a third to two thirds of the error of a 2-bit copy.

    Parameters
    ----------
    layer, num_slots, backend : Layer, int and str
        See `StandardHead`; there is no backend "cuda".
    bits : int, default 4
        Bits per element of the copy, 2 to 16.
    window : int, default 16
        Tokens from one flush to the next (W).
    projection : array_like, (heads, K, K), optional
        A projection, such as that of `low_rank_projection`: the copy is the projected state, and `bits` has no effect.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """

    def __init__(
        self,
        layer: Layer,
        num_slots: int,
        backend: str = "auto",
        *,
        bits: int = 4,
        window: int = 16,
        projection: npt.ArrayLike | None = None,
    ) -> None:
        capacity = check_capacity(num_slots)
        copy: Any = check_integer("bits", bits, 2, 16)
        if projection is not None:
            copy, shape = as_array("projection", projection), (layer.heads, layer.key_dim, layer.key_dim)
            if copy.shape != shape or copy.dtype.kind != "f":
                raise ValueError(f"projection: expected floats of shape {shape}, got {copy.dtype} of {copy.shape}")
        engine = load_engine(COPY, backend, layer, capacity, check_window(window, least=1), copy)
        super().__init__(layer, capacity, *engine)
