"""Checks of the arguments of a call: tokens, gates, slots and states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.layer.recurrence import PAD_SLOT, Layer

LARGEST_ERASE = 2 * (1 + 2.0**-6)
"""Largest ``beta |k|^2`` that does not let a state grow, with room for keys rounded to bfloat16 (squares: 2^-7)."""


def check_tokens(layer: Layer, q: Any, k: Any, v: Any, g: Any, beta: Any, *, tokens_axis: bool | None = None) -> bool:
    """Check the shapes of one call's inputs against a layer, and tell whether there is a tokens axis.

    Reads only ``.shape``, so arrays may be of any framework and on any device. `tokens_axis` demands or forbids the
    axis; None accepts both. ValueError names the argument, the expected shape and the given shape.
    """
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    shapes = layer.token_shapes()
    if "beta" not in shapes and beta is not None:
        raise ValueError(f"beta: {layer.kind} has no write gate, expected None, got an array")
    for name in shapes:
        if given[name] is None:
            raise ValueError(f"{name}: {layer.kind} needs an array {_describe(shapes[name])}, got None")
        if not hasattr(given[name], "shape"):
            came = type(given[name]).__name__
            raise ValueError(f"{name}: expected an array {_describe(shapes[name])}, got {came}")
    lead = tuple(v.shape)[: len(v.shape) - 2]
    allowed = {None: (1, 2), True: (2,), False: (1,)}[tokens_axis]
    if len(lead) not in allowed:
        raise ValueError(f"v: expected shape {_describe(shapes['v'], tokens_axis)}, got {tuple(v.shape)}")
    for name, tail in shapes.items():
        shape = tuple(given[name].shape)
        if shape != lead + tail:
            raise ValueError(f"{name}: expected shape {lead + tail}, got {shape}")
    return len(lead) == 2


def _describe(tail: tuple[int, ...], tokens_axis: bool | None = None) -> str:
    axes = {None: "(batch, [tokens,] ", True: "(batch, tokens, ", False: "(batch, "}[tokens_axis]
    return axes + ", ".join(map(str, tail)) + ")"


def check_gates(g: npt.NDArray[Any] | None, beta: npt.NDArray[Any] | None) -> None:
    """Check the values of host gates: g in [-inf, 0] (else the state grows), beta finite. None skips an argument."""
    if g is not None and not (g <= 0).all():
        worst = g.max() if not np.isnan(g).any() else np.nan
        raise ValueError(f"g: expected log-decays <= 0 (-inf allowed), got a value of {worst}")
    if beta is not None and not np.isfinite(beta).all():
        raise ValueError("beta: expected finite numbers, got NaN or infinity")


def check_writes(layer: Layer, k: npt.NDArray[Any], beta: npt.NDArray[Any] | None) -> None:
    """Check that no token of a layer that erases lets the state grow: beta in [0, 2] and ``beta |k|^2`` at most 2."""
    if beta is None or not beta.size:
        return
    if not ((beta >= 0) & (beta <= 2)).all():
        worst = beta.min() if (beta < 0).any() else beta.max()
        raise ValueError(f"beta: expected write gates from 0 to 2, got {worst:g}: are these logits, not gates?")
    wide: Any = np.asarray(k, np.float64 if k.dtype == np.float64 else np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.repeat(np.einsum("...k,...k->...", wide, wide), layer.group, axis=-1)
        erased = beta.astype(squares.dtype) * squares
    if not (erased <= LARGEST_ERASE).all():
        worst = np.nan_to_num(erased, nan=np.inf, posinf=np.inf).max()
        raise ValueError(
            f"k: expected keys with beta |k|^2 <= 2, or states grow, got {worst:g}: are the keys L2-normalised?"
        )


def check_slots(
    slots: Any,
    batch: int,
    capacity: int,
    pad_slot: int = PAD_SLOT,
    name: str = "slots",
    repeats: bool = False,
) -> npt.NDArray[np.int64]:
    """Check and return the state slot ``(batch,)`` of each row, -1 for padding rows.

    None stands for rows 0 to batch - 1. `capacity` is the number of slots that the head holds, `pad_slot` the caller's
    number for padding. `repeats` lets several rows name the same slot.
    """
    if slots is None:
        if batch > capacity:
            raise ValueError(f"{name}: expected an array, as a batch of {batch} exceeds the head's {capacity} slots")
        if 0 <= pad_slot < batch:
            raise ValueError(f"{name}: expected an array, as slot {pad_slot} means padding")
        return np.arange(batch, dtype=np.int64)
    array = np.asarray(slots)
    if array.dtype.kind not in "iu" and array.size:
        raise ValueError(f"{name}: expected integers, got dtype {array.dtype}")
    if array.shape != (batch,):
        raise ValueError(f"{name}: expected shape ({batch},), got {array.shape}")
    expected = f"{name}: expected {pad_slot} (padding) or 0 to {capacity - 1}, got"
    if array.dtype == np.uint64 and batch and array.max() >= max(capacity, pad_slot + 1):  # which int64 may not hold
        raise ValueError(f"{expected} {array.max()}")
    array = array.astype(np.int64)
    if pad_slot != PAD_SLOT:
        outside = array[array == PAD_SLOT]
        if outside.size:
            raise ValueError(f"{expected} {PAD_SLOT}")
        array[array == pad_slot] = PAD_SLOT
    ordered = np.sort(array)  # every step comes here: a few operations for the usual case
    if batch and (ordered[0] < PAD_SLOT or ordered[-1] >= capacity):
        outside = array[(array < PAD_SLOT) | (array >= capacity)]
        raise ValueError(f"{expected} {outside[0]}")
    repeated = ordered[1:] == ordered[:-1]
    if not repeats and repeated.any():
        twice = ordered[1:][repeated & (ordered[1:] != PAD_SLOT)]
        if twice.size:
            raise ValueError(f"{name}: expected each slot at most once, got slot {twice[0]} twice")
    return array


def check_state(layer: Layer, state: Any, batch: int | None = None, name: str = "state") -> None:
    """Check that an array, the argument `name`, can be loaded as states ``(batch, heads, V, K)`` of a layer."""
    shape: Sequence[int] = tuple(getattr(state, "shape", ()))
    rows: Any = "batch" if batch is None else batch
    if len(shape) != 4 or tuple(shape[1:]) != layer.state_shape or (batch is not None and shape[0] != batch):
        want = ", ".join(map(str, (rows, *layer.state_shape)))
        raise ValueError(f"{name}: expected shape ({want}), K last, got {tuple(shape)}")
