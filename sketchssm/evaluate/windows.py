"""The windows of a trace: states at window starts and the effective queries that read them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sketchssm.calibrate.windows import SketchReads, host_tokens, walk
from sketchssm.recurrence import Layer, Tokens
from sketchssm.reference.recurrence import Array

__all__ = ["Windows", "collect_windows"]


class Windows(NamedTuple):
    """Every whole window of some sequences that starts from a nonzero state, in the paper's orientation.

    ``states (n, heads, K, V)`` are the states at the windows' starts and ``queries (n, heads, W - 1, K)`` the
    effective queries that read them: the flush token, the last of a window, reads the new state.
    """

    states: Array
    queries: Array


def collect_windows(layer: Layer, tokens: Tokens, window: int) -> Windows:
    """Cut sequences into windows.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    tokens : Tokens
        Sequences ``(sequences, tokens, ...)`` that start from a zero state.
    window : int
        Tokens from one flush to the next.

    Returns
    -------
    Windows
        In float64. The first window of a sequence is left out: its state is zero, and so is what is read from it.

    Raises
    ------
    ValueError
        If the sequences are shorter than two windows.
    """
    length = tokens.v.shape[1] // window * window
    if length < 2 * window:
        raise ValueError(
            f"tokens: expected sequences of at least two windows of {window} tokens, got {tokens.v.shape[1]} tokens"
        )
    found: list[SketchReads] = []
    whole = Tokens(*(None if x is None else x[:, :length] for x in tokens))
    walk(layer, host_tokens(layer, *whole), window, None, found.append)
    return Windows(
        np.concatenate([reads.state for reads in found]), np.concatenate([reads.queries for reads in found])
    )
