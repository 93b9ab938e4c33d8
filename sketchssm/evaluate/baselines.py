"""Entries of the paper's baselines, for `sketchssm.evaluate.systems.compare`.

Every function takes a layer, calibration tokens and a window, whether or not the method uses all three, and returns an
empty list for a kind that the method excludes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sketchssm import traffic
from sketchssm.baselines import CopyReadHead, QuantisedHead
from sketchssm.baselines.quantised import RESIDUAL_BITS
from sketchssm.evaluate.systems import System
from sketchssm.recurrence import Layer, Tokens

__all__ = ["SPARSITIES", "key_reduced_systems", "pruned_systems", "quantised_systems", "read_only_systems"]

SPARSITIES = (0.375, 0.5, 0.625, 0.75)
"""Shares of a state that the paper prunes."""


def quantised_systems(
    layer: Layer,
    tokens: Tokens,
    window: int = 16,
    *,
    bits: Sequence[int] = (10, 8, 6, 4),
    error_feedback: bool | Sequence[bool] = False,
) -> list[System]:
    """List quantised states, with and without error feedback as asked.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    tokens : Tokens
        Not used: the scales follow the state.
    window : int, default 16
        Not used: a state is requantised at every token.
    bits : sequence of int, default (10, 8, 6, 4)
        Bits per element.
    error_feedback : bool or sequence of bool, default False
        Whether rounding errors are kept; a sequence lists both.

    Returns
    -------
    list of System
        Entries for `compare`, by error feedback, then in the order of `bits`.
    """
    whole = traffic.standard(layer.key_dim, layer.value_dim)
    systems = []
    for feedback in (error_feedback,) if isinstance(error_feedback, bool) else error_feedback:
        for each in bits:
            stored = each + (RESIDUAL_BITS if feedback else 0)
            used = traffic.compressed(layer.key_dim, layer.value_dim, bits=stored)
            name = f"DSQ {each} bits" + (" with feedback" if feedback else "")
            build = partial(QuantisedHead, layer, bits=each, error_feedback=feedback)
            systems.append(System(name, build, whole / used))
    return systems


def pruned_systems(
    layer: Layer, tokens: Tokens, window: int = 16, *, sparsities: Sequence[float] = SPARSITIES
) -> list[System]:
    """List states pruned by GHOST."""
    return []


def key_reduced_systems(
    layer: Layer, tokens: Tokens, window: int = 16, *, sparsities: Sequence[float] = SPARSITIES
) -> list[System]:
    """List states reduced by DRRQR."""
    return []


def read_only_systems(layer: Layer, tokens: Tokens, window: int = 16, *, bits: Sequence[int] = (4, 2)) -> list[System]:
    """List exact states with approximate reads.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    tokens : Tokens
        Calibration sequences ``(sequences, tokens, ...)``.
    window : int, default 16
        Tokens from one flush to the next.
    bits : sequence of int, default (4, 2)
        Bits per element of quantised copies.

    Returns
    -------
    list of System
        Entries for `compare`.
    """
    size = (layer.key_dim, layer.value_dim)
    whole = traffic.standard(*size)
    return [
        System(
            f"{each}-bit copy",
            partial(CopyReadHead, layer, bits=each, window=window),
            whole / traffic.read_only_copy(*size, each, window),
        )
        for each in bits
    ]
