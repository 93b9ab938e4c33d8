"""Quantised states and quantised copies for reads: `sketchssm.reference.quantise` in float32.

States are kept as what their codes stand for, not as the codes: that is all that shows in results, and the byte model
counts the codes. Quantising is a pass of its own after a token, so these engines' times say nothing of what a fused
kernel would take.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import numpy.typing as npt

from sketchssm.cpu.jit import njit, parallel
from sketchssm.cpu.layout import Array
from sketchssm.cpu.replay import ReplayEngine
from sketchssm.cpu.standard import StandardEngine
from sketchssm.recurrence import Layer, Tokens
from sketchssm.reference.quantise import Grid

__all__ = ["CopyEngine", "QuantisedEngine"]


class QuantisedEngine(StandardEngine):
    """The recurrence on quantised states: what a token leaves is requantised before the next one finds it.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    num_slots : int
        Number of state slots.
    bits : int
        Bits per element.
    residual_bits : int
        Bits per element of the residuals; 0 for none.
    """

    def __init__(self, layer: Layer, num_slots: int, bits: int, residual_bits: int) -> None:
        super().__init__(layer, num_slots)
        self.bits, self.residual_bits = bits, residual_bits

    def step(self, tokens: Tokens, slots: npt.NDArray[np.int64], out: Array) -> None:
        """See `sketchssm.backends.Engine`."""
        for t in range(out.shape[1]):
            out[:, t] = _one_token(super().step, tokens, t, slots, out)
            self._requantise(slots)

    def load_state(self, state: Array, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.backends.Engine`."""
        super().load_state(state, slots)
        self._requantise(slots)

    def _requantise(self, slots: npt.NDArray[np.int64]) -> None:
        states = self._memory.padded_state
        _round_trip(states, states, slots, *_grid(self.bits, True), *_grid(self.residual_bits, True))


class CopyEngine(ReplayEngine):
    """Buffered replay that reads a quantised copy of the state between flushes.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    num_slots : int
        Number of state slots.
    window : int
        Tokens from one flush to the next (W).
    bits : int
        Bits per element of the copy.
    """

    def __init__(self, layer: Layer, num_slots: int, window: int, bits: int) -> None:
        super().__init__(layer, num_slots, window)
        self.bits = bits
        states = self._memory.padded_state
        self._copy = self._memory.own("served", states.size).reshape(states.shape)

    def step(self, tokens: Tokens, slots: npt.NDArray[np.int64], out: Array) -> None:
        """See `sketchssm.backends.Engine`."""
        for t in range(out.shape[1]):
            out[:, t] = _one_token(super().step, tokens, t, slots, out)
            live = slots[slots >= 0]
            self._renew(live[self.position[live] == 0])

    def load_state(self, state: Array, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.backends.Engine`."""
        super().load_state(state, slots)
        self._renew(slots)

    def flush(self, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.backends.Engine`."""
        super().flush(slots)
        self._renew(slots)

    def reset(self, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.backends.Engine`."""
        super().reset(slots)
        self._renew(slots)

    def _renew(self, slots: npt.NDArray[np.int64]) -> None:
        states = self._memory.padded_state
        _round_trip(states, self._copy, slots, *_grid(self.bits, False), *_grid(0, True))


def _one_token(
    step: Callable[[Tokens, Array, Array], None], tokens: Tokens, t: int, slots: npt.NDArray[np.int64], out: Array
) -> Array:
    """Output ``(batch, heads, V)`` of one token of several."""
    part = np.empty_like(out[:, t : t + 1])
    step(Tokens(*(None if x is None else x[:, t : t + 1] for x in tokens)), slots, part)
    return part[:, 0]


def _grid(bits: int, zero: bool) -> tuple[np.float32, np.float32]:
    """Largest code and shift of a grid, in the kernel's type."""
    grid = Grid.of(bits, zero)
    return np.float32(grid.top), np.float32(grid.shift)


@parallel
def _round_trip(
    states: Array, stored: Array, slots: Array, top: float, shift: float, residual_top: float, residual_shift: float
) -> None:
    """Quantise the states of some slots, ``(slots, heads, V, K)``, into `stored`, which may be `states` itself."""
    heads = states.shape[1]
    for unit in numba.prange(slots.size * heads):
        slot, head = slots[unit // heads], unit % heads
        if slot >= 0:
            _round_trip_one(states[slot, head], stored[slot, head], top, shift, residual_top, residual_shift)


@njit
def _round_trip_one(
    state: Array, stored: Array, top: float, shift: float, residual_top: float, residual_shift: float
) -> None:
    """Quantise one state, by loops over one row at a time that compile to vector instructions."""
    values, keys = state.shape
    rows, columns = np.zeros(values, np.float32), np.zeros(keys, np.float32)
    line, step = np.empty(keys, np.float32), np.empty(keys, np.float32)
    size = state.view(np.int32)
    for v in range(values):
        peak = np.int32(0)
        for k in range(keys):
            # magnitudes compare like their bits do, and a maximum of integers may be taken in any order
            peak = max(peak, size[v, k] & np.int32(0x7FFFFFFF))
        rows.view(np.int32)[v] = peak
    _bfloat16_above(rows)
    for v in range(values):
        scale = rows[v]
        if scale > 0:
            for k in range(keys):
                share = abs(state[v, k]) / scale
                columns[k] = share if share > columns[k] else columns[k]
    _bfloat16_above(columns)
    for v in range(values):
        scale = rows[v]
        for k in range(keys):
            line[k] = state[v, k]  # `stored` may be `state`
            step[k] = scale * columns[k] / (top + shift)
            line[k] -= _nearest(line[k], step[k], top, shift)
        if residual_top > 0:
            for k in range(keys):
                fine = step[k] / (np.float32(2) * (residual_top + residual_shift))
                line[k] -= _nearest(line[k], fine, residual_top, residual_shift)
        for k in range(keys):
            stored[v, k] = state[v, k] - line[k]


@njit
def _nearest(value: float, step: float, top: float, shift: float) -> float:
    """What the nearest code of a number stands for; without branches, so that loops of it become vectors."""
    code = np.rint(value / (step if step > 0 else np.float32(1)) - shift) + shift
    code = top if code > top else code
    return (-top if code < -top else code) * step


@njit
def _bfloat16_above(x: Array) -> None:
    """Round numbers of at least 0 up to bfloat16, in place."""
    bits = x.view(np.int32)
    for i in range(x.size):
        bits[i] = (bits[i] + 0xFFFF) & ~0xFFFF
