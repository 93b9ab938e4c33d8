"""Traces, window by window: the state at each window's start and the effective queries that read it.

Moments and rank scores are sums over the same samples, which this module defines. A sample is a token that decoding
reads through the sketch: positions 1 to W - 1 of a window, since the flush token reads the exact state. A window that
starts from a zero state of a head (a sequence's first window, or after a full forget) has no samples of that head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sketchssm.arrays import interop
from sketchssm.layer.checks import check_gates, check_state, check_tokens, check_writes
from sketchssm.layer.recurrence import Layer, Tokens, check_instance
from sketchssm.reference.recurrence import Array, per_head
from sketchssm.reference.window import Ring, fold, read_window

__all__ = ["Carry", "SketchReads", "added", "host_tokens", "take_array", "walk"]

BLOCK_BYTES = 2**27
"""Batch rows are walked in groups. The largest array of a group (states, or decays between tokens) is below this."""

LARGEST_SUM = 1e100
"""Largest moment or score: the product of two, over all heads, still has room in float64."""


@dataclass(frozen=True)
class Carry:
    """Positions of sequences; a later call continues from there.

    `state (batch, heads, V, K)` are the states at the open window's start. `ring` are the raw inputs of the open
    window's tokens in float64, ``(batch, heads, tokens, ...)``.
    """

    state: npt.NDArray[Any]
    ring: Ring | None = None

    @property
    def position(self) -> int:
        """Tokens in the open window."""
        return 0 if self.ring is None else int(self.ring.k.shape[-2])


class SketchReads(NamedTuple):
    """Tokens of one window that are read through the sketch.

    ``state (batch, heads, K, V)`` is S0, and ``live (batch, heads)`` is True for a nonzero S0. ``queries
    (batch, heads, n, K)`` are effective queries. ``rows`` and ``tokens`` are the tokens' places in the arrays of the
    call.
    """

    state: Array
    live: npt.NDArray[np.bool_]
    queries: Array
    rows: slice
    tokens: slice


def take_array(array: Any, name: str) -> npt.NDArray[Any]:
    """Copy or view a real floating-point array on the host and check that it is finite."""
    host = interop.to_host(array, name)
    if not interop.is_real(host.dtype):
        raise TypeError(f"{name}: expected a real floating-point array, got dtype {host.dtype}")
    if name != "g" and not np.isfinite(host).all():
        raise ValueError(f"{name}: expected finite numbers, got NaN or infinity")
    return host


def host_tokens(layer: Layer, q: Any, k: Any, v: Any, g: Any, beta: Any) -> Tokens:
    """Check the traces ``(batch, tokens, ...)`` of one call and return them on the host, with unchanged types."""
    check_tokens(layer, q, k, v, g, beta, tokens_axis=True)
    given = zip(Tokens._fields, (q, k, v, g, beta), strict=True)
    tokens = Tokens(*(None if x is None else take_array(x, name) for name, x in given))
    check_gates(tokens.g, tokens.beta)
    check_writes(layer, tokens.k, tokens.beta)
    return tokens


def added(owner: object, sums: dict[str, Any]) -> dict[str, Any]:
    """Running sums of an object with some more added, by name; ValueError if one is so large that products overflow.

    The object stays as it is. ``owner.__dict__.update(added(owner, sums))`` is one operation: an interrupt comes
    before or after it.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        totals = {name: getattr(owner, name) + more for name, more in sums.items()}
        for name, total in totals.items():
            if not (np.abs(total) <= LARGEST_SUM).all():
                cause = "grad" if name in ("paired", "weighted", "sensitivity") else "q, k, v"
                raise ValueError(
                    f"{cause}: expected inputs with a {name} of at most {LARGEST_SUM:g}, got {np.abs(total).max():g}: "
                    "are keys normalised, and values and gradients scaled?"
                )
    return totals


def walk(
    layer: Layer, tokens: Tokens, window: int, carry: Carry | None, visit: Callable[[SketchReads], None]
) -> Carry:
    """Run sequences and visit every token that is read through the sketch.

    `tokens` are host arrays ``(batch, tokens, ...)`` from `host_tokens`. `carry` has the positions of the sequences;
    None stands for zero states and an empty window. `visit` is called in order for each part of a window within the
    call that has a nonzero state. The result has the positions after the last token, and shares no memory with the
    caller's arrays.
    """
    batch = tokens.v.shape[0]
    carry = _checked(layer, carry, batch, window)
    row_bytes = 8 * layer.heads * max(layer.gate_channels * window**2, layer.key_dim * layer.value_dim)
    step = max(1, BLOCK_BYTES // row_bytes)
    starts = range(0, max(batch, 1), step)  # the position of an empty batch advances too
    with np.errstate(over="ignore", invalid="ignore"):  # `added` refuses sums that are not finite
        ends = [_walk_rows(layer, tokens, window, carry, visit, slice(start, start + step)) for start in starts]
    states, rings = zip(*ends, strict=True)
    return Carry(np.concatenate([state.swapaxes(-1, -2) for state in states]), _joined(rings, axis=0))


def _walk_rows(
    layer: Layer, tokens: Tokens, window: int, carry: Carry, visit: Callable[[SketchReads], None], rows: slice
) -> tuple[Array, Ring]:
    """One group of batch rows: returns S0 ``(batch, heads, K, V)`` and the ring of the open window."""
    state: Array = np.asarray(carry.state[rows], dtype=np.float64).swapaxes(-1, -2)
    assert carry.ring is not None
    ring = _cut(carry.ring, rows)
    length = tokens.v.shape[1]
    start = 0
    while start < length:
        opened = ring.k.shape[-2]
        stop = min(length, start + window - opened)
        new = per_head(layer, tokens.at(np.s_[rows, start:stop]))
        new = Tokens(*(None if x is None else np.ascontiguousarray(x.swapaxes(1, 2)) for x in new))
        ring = _joined([ring, Ring(new.k, new.v, new.g, new.beta)], axis=2)
        reads = min(stop - start, window - 1 - opened)
        live = np.any(state, axis=(-1, -2), keepdims=True)[..., 0, 0]
        if reads > 0 and live.any():
            prefix = _cut(ring, slice(None), opened + reads)
            queries = read_window(new.q[..., :reads, :], prefix).queries
            visit(SketchReads(state, live, queries, rows, slice(start, start + reads)))
        if opened + stop - start == window:
            state = fold(state, ring)
            ring = _cut(ring, slice(None), 0)
        start = stop
    return state, ring


def _joined(rings: Sequence[Ring], axis: int) -> Ring:
    """Concatenate rings along rows (axis 0) or tokens (axis 2)."""
    k, v, g = (np.concatenate([getattr(ring, name) for ring in rings], axis=axis) for name in "kvg")
    gates = [ring.beta for ring in rings if ring.beta is not None]
    return Ring(k, v, g, np.concatenate(gates, axis=axis) if gates else None)


def _cut(ring: Ring, rows: slice, count: int | None = None) -> Ring:
    """Some rows of a ring, and its first tokens or all of them."""
    k, v, g = (x[rows, :, :count] for x in (ring.k, ring.v, ring.g))
    return Ring(k, v, g, None if ring.beta is None else ring.beta[rows, :, :count])


def _checked(layer: Layer, carry: Carry | None, batch: int, window: int) -> Carry:
    """Check a carry and give it a ring. None becomes zero states with an empty ring."""
    lead = (batch, layer.heads)
    shapes = (layer.key_dim, layer.value_dim, layer.gate_channels)
    k, v, g = (np.zeros((*lead, 0, size)) for size in shapes)
    empty = Ring(k, v, g, np.zeros((*lead, 0)) if layer.erases else None)
    if carry is None:
        return Carry(np.zeros((batch, *layer.state_shape)), empty)
    check_instance("carry", carry, Carry)
    check_state(layer, carry.state, batch)
    take_array(carry.state, "carry")
    if carry.ring is None:
        return Carry(carry.state, empty)
    if carry.position >= window:
        raise ValueError(f"carry: expected an open window of fewer than {window} tokens, got {carry.position}")
    for name, have, want in zip(Ring._fields, carry.ring, empty, strict=True):
        shape = None if want is None else (*lead, carry.position, *want.shape[3:])
        got = None if have is None else have.shape
        if got != shape:
            raise ValueError(f"carry: expected a ring with {name} of shape {shape}, got {got}")
    return carry
