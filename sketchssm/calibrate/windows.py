"""Traces, window by window: the state at each window's start and the effective queries that read it.

Moments and scores are sums over the same samples, which this module defines. A sample is a token that decoding
reads through the sketch: positions 1 to W - 1 of a window, since the flush token reads the exact state. A window that
starts from a zero state of a head (a sequence's first window, or after a full forget) has no samples of that head.

Arrays of CuPy, and of PyTorch on a GPU, stay there: `sketchssm.calibrate.chunks` computes in their library. All others
are computed in NumPy, by one thread for each core.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sketchssm.arrays import interop
from sketchssm.arrays.space import Space
from sketchssm.calibrate.chunks import FORGOTTEN, advance, chunks_of
from sketchssm.calibrate.cores import on_cores
from sketchssm.layer.calls import LARGEST_ERASE, check_gates, check_state, check_tokens, check_writes
from sketchssm.layer.checks import check_instance
from sketchssm.layer.recurrence import Layer, Tokens
from sketchssm.reference.window import Ring

HOST_BYTES, DEVICE_BYTES = 2**21, 2**28
"""Largest array of a block of windows, rows and heads (states, or decays between tokens): what a core's cache holds
in part, or a small part of a GPU's memory."""

PAIRS = 8
"""Rows and heads of a block on the host: enough for NumPy's time per call to be small."""


@dataclass(frozen=True)
class Carry:
    """Positions of sequences; a later call continues from there.

    `state (batch, heads, V, K)` are the states at the open window's start. `ring` are the raw inputs of the open
    window's tokens, ``(batch, heads, tokens, ...)``. Arrays are of the kind of the tokens.
    """

    state: Any
    ring: Ring | None = None

    @property
    def position(self) -> int:
        """Tokens in the open window."""
        return 0 if self.ring is None else int(self.ring.k.shape[-2])


class Reads(NamedTuple):
    """A block of windows of some rows and heads, for their tokens that are read through the sketch.

    ``states (rows, heads, windows, V, K)`` are states at the windows' starts, and ``live (rows, heads, windows)`` is
    True where they are nonzero. ``queries (rows, heads, windows, W, K)`` are effective queries: zero where the state
    is zero, and for tokens that are no samples of this call. ``counts`` are each window's samples of a live head,
    ``numbers`` the windows' places in the call, and ``slope (rows, heads, windows, W, V)`` the gradients, scaled, with
    the zeros of the queries; with a last axis of 1 it has roots of weights.
    """

    states: Any
    live: Any
    queries: Any
    counts: list[int]
    numbers: range
    slope: Any
    heads: slice


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


def take_tokens(layer: Layer, q: Any, k: Any, v: Any, g: Any, beta: Any) -> tuple[Space, Tokens, Any]:
    """Check the traces of one call as `host_tokens`, and return them where they are: on one device, or on the host.

    Numbers on a device are not waited for: the last result is one there that tells whether they pass, or True.
    """
    space, given = Space(v), Tokens(q, k, v, g, beta)
    if not (space.on_device and all(x is None or space.holds(x) for x in given)):
        return Space(), host_tokens(layer, *given), True
    check_tokens(layer, *given, tokens_axis=True)
    floats = [
        getattr(space.xp, name) for name in ("float64", "float32", "float16", "bfloat16") if hasattr(space.xp, name)
    ]
    if any(x is not None and x.dtype not in floats for x in given):
        host_tokens(layer, *given)  # raises, and names the argument
    with space.exact():
        return space, given, _plausible(space, layer, given)


def _plausible(space: Space, layer: Layer, tokens: Tokens) -> Any:
    """Whether numbers on a device pass `host_tokens`; False also where the sum of finite ones is not."""
    xp = space.xp
    total = sum(x.sum(dtype=xp.float64) for x in (tokens.q, tokens.k, tokens.v))
    good = (tokens.g <= 0).all() & (abs(total) < math.inf)
    if tokens.beta is not None:
        squares = xp.square(space.cast(tokens.k, "float32")).sum(-1)[..., None]
        beta = tokens.beta.reshape(*squares.shape[:-1], layer.group)
        good = good & ((beta >= 0) & (beta <= 2) & (beta * squares <= LARGEST_ERASE)).all()
    return good


def visit(
    space: Space,
    layer: Layer,
    tokens: Tokens,
    window: int,
    carry: Carry | None,
    add: Callable[[Reads], None],
    *,
    dtype: str,
    grad: Any = None,
    scale: float = 1.0,
) -> Carry:
    """Run sequences and visit every token that is read through the sketch.

    `tokens`, and gradients `grad (batch, tokens, heads, V or 1)`, are arrays of a space, from `take_tokens`. `carry`
    has the positions of the sequences; None stands for zero states and an empty window. `add` is called for blocks of
    windows, on several threads but never for one head at once. Gradients come divided by `scale`. The result has the
    positions after the last token, and shares no memory with the caller's arrays.
    """
    batch = tokens.v.shape[0]
    carry = _checked(space, layer, carry, batch, window, dtype)
    run = _Run(space, layer, tokens, window, carry, add, dtype, grad, scale)
    ends = space.zeros((batch, *layer.state_shape), dtype)
    if space.on_device:
        with space.exact():
            run.heads(slice(0, layer.heads), batch or 1, ends)
    else:
        step = min(layer.heads, PAIRS)
        groups = [slice(start, min(start + step, layer.heads)) for start in range(0, layer.heads, step)]

        def on_host(own: slice) -> None:
            with np.errstate(over="ignore", invalid="ignore"):  # sums that are not finite are refused later
                run.heads(own, max(1, PAIRS // step), ends)

        on_cores(on_host, groups)
    return Carry(ends, run.open_ring())


@dataclass
class _Run:
    """One call of `visit`."""

    space: Space
    layer: Layer
    tokens: Tokens
    window: int
    carry: Carry
    add: Callable[[Reads], None]
    dtype: str
    grad: Any
    scale: float

    def heads(self, heads: slice, rows: int, ends: Any) -> None:
        """Run some heads of all sequences, `rows` sequences at a time, and write their last states."""
        limit = DEVICE_BYTES if self.space.on_device else HOST_BYTES
        gates = self.layer.gate_channels * self.window**2
        unit = (8 if self.dtype == "float64" else 4) * max(gates, self.layer.key_dim * self.layer.value_dim)
        fits = max(1, limit // (unit * (heads.stop - heads.start)))  # windows of rows
        rows = min(rows, fits)
        for start in range(0, self.tokens.v.shape[0], rows):
            self._rows(slice(start, start + rows), heads, fits // rows, ends)

    def _rows(self, rows: slice, heads: slice, step: int, ends: Any) -> None:
        """Run some heads of some rows, `step` windows at a time."""
        opened, length = self.carry.position, self.tokens.v.shape[1]
        whole = (opened + length) // self.window
        last = -(-(opened + length) // self.window)
        state = self.space.array(self.carry.state[rows, heads], self.dtype)
        first = 0
        while first < last:
            stop = min(first + step, last)
            state = self._block(rows, heads, range(first, stop), whole, state)
            first = stop
        ends[rows, heads] = state

    def _block(self, rows: slice, heads: slice, numbers: range, whole: int, state: Any) -> Any:
        """Visit some windows and return the state at the start of the open window, or of the next."""
        space, xp = self.space, self.space.xp
        tokens = self._taken(rows, heads, numbers)
        opened, end = self.carry.position, self.carry.position + self.tokens.v.shape[1]
        counts = []
        for number in numbers:
            start = number * self.window
            counts.append(max(0, min(start + self.window - 1, end) - max(start, opened)))
        tokens.q[..., -1, :] = 0.0  # the flush token
        chunks = chunks_of(space, tokens, self.dtype)
        states, last = advance(space, chunks, state, self.dtype)
        live = states.reshape(*states.shape[:3], -1).any(-1)
        if any(counts) and (space.on_device or live.any()):
            queries = xp.where(live[..., None, None], chunks.queries, 0.0)
            slope = None
            if self.grad is not None:
                slope = self._windows(self.grad, None, rows, heads, numbers, self.dtype)
                slope[..., -1, :] = 0.0
                slope = xp.where(live[..., None, None], slope * (1 / self.scale), 0.0)
            self.add(Reads(states, live, queries, counts, numbers, slope, heads))
        return last if whole >= numbers.stop else states[:, :, whole - numbers.start]

    def _taken(self, rows: slice, heads: slice, numbers: range) -> Tokens:
        """Inputs of some windows, ``(rows, heads, windows, W, ...)``, with zeros before and after the call's."""
        ring = self.carry.ring
        assert ring is not None
        g = self.tokens.g if self.layer.channel_decays else self.tokens.g[..., None]
        q = self._windows(self.tokens.q, None, rows, heads, numbers, self.dtype)
        k = self._windows(self.tokens.k, ring.k[rows, heads], rows, heads, numbers, self.dtype)
        v = self._windows(self.tokens.v, ring.v[rows, heads], rows, heads, numbers, self.dtype)
        g = self._windows(g, ring.g[rows, heads], rows, heads, numbers, "float64")
        g = self.space.xp.clip(g, FORGOTTEN, 0.0)
        if ring.beta is None:
            return Tokens(q, k, v, g, None)
        beta = self.tokens.beta[..., None]
        beta = self._windows(beta, ring.beta[rows, heads][..., None], rows, heads, numbers, self.dtype)
        return Tokens(q, k, v, g, beta[..., 0])

    def _windows(self, x: Any, before: Any, rows: slice, heads: slice, numbers: range, dtype: str) -> Any:
        """One input of some windows, of value or of key heads; `before` are its values in the carry's open window."""
        opened = self.carry.position
        start, stop = (max(0, edge * self.window - opened) for edge in (numbers.start, numbers.stop))
        part = x[rows, start:stop].swapaxes(1, 2)
        space, group = self.space, self.layer.heads // part.shape[1]
        if heads.start % group or heads.stop % group:
            part, group = part[:, [head // group for head in range(heads.start, heads.stop)]], 1
        else:  # without an array of numbers, for which a device is waited
            part = part[:, heads.start // group : heads.stop // group]
        lead = part.shape[0], heads.stop - heads.start
        whole = space.empty((*lead, len(numbers) * self.window, part.shape[-1]), dtype)
        at = opened if not numbers.start else 0
        end = at + part.shape[2]
        if at:
            whole[:, :, :at] = 0 if before is None else space.array(before, dtype)
        whole.reshape(*part.shape[:2], group, *whole.shape[2:])[..., at:end, :] = part[:, :, None]
        if end < whole.shape[2]:
            whole[:, :, end:] = 0
        return whole.reshape(*lead, len(numbers), self.window, part.shape[-1])

    def open_ring(self) -> Ring | None:
        """The open window's raw inputs after the call; None without tokens."""
        length = self.tokens.v.shape[1]
        opened = self.carry.position
        left = (opened + length) % self.window
        number = (opened + length) // self.window
        if not left:
            return None
        every = slice(0, self.layer.heads)
        rows = slice(0, self.tokens.v.shape[0])
        taken = self._taken(rows, every, range(number, number + 1))
        cut: Any = (None if x is None else x[:, :, 0, :left] for x in taken[1:])
        return Ring(*cut)


def _checked(space: Space, layer: Layer, carry: Carry | None, batch: int, window: int, dtype: str) -> Carry:
    """Check a carry and give it a ring. None becomes zero states with an empty ring."""
    lead = (batch, layer.heads)
    shapes = (layer.key_dim, layer.value_dim, layer.gate_channels)
    k, v, g = (np.zeros((*lead, 0, size)) for size in shapes)
    empty = Ring(k, v, g, np.zeros((*lead, 0)) if layer.erases else None)
    if carry is None:
        return Carry(space.zeros((batch, *layer.state_shape), dtype), empty)
    check_instance("carry", carry, Carry)
    check_state(layer, carry.state, batch, "carry: state")
    if not Space(carry.state).on_device:
        take_array(carry.state, "carry")
    if carry.ring is None:
        return Carry(carry.state, empty)
    if carry.position >= window:
        raise ValueError(f"carry: expected an open window of fewer than {window} tokens, got {carry.position}")
    for name, have, want in zip(Ring._fields, carry.ring, empty, strict=True):
        shape = None if want is None else (*lead, carry.position, *want.shape[3:])
        got = None if have is None else tuple(have.shape)
        if got != shape:
            raise ValueError(f"carry: expected a ring with {name} of shape {shape}, got {got}")
    return carry
