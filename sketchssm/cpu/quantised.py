"""Quantised states, and copies for reads: `sketchssm.reference.quantise` in float32.

Memory holds the values of the codes, not the codes: results are the same, and the byte model counts the codes.
Quantising is a separate pass after a token, so times of these engines do not predict those of a fused kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from numba import carray

from sketchssm.arrays.options import DEFAULTS, EngineOptions
from sketchssm.cpu.jit import Kernel, njit, pasted
from sketchssm.cpu.layout import Memory, Record, call_record
from sketchssm.cpu.packed import full_states
from sketchssm.cpu.parts import Array, standard_parts, window_parts
from sketchssm.cpu.replay import ReplayEngine
from sketchssm.cpu.simd import floats, integers
from sketchssm.cpu.standard import StandardEngine
from sketchssm.cpu.workers import SERIAL, run
from sketchssm.layer.recurrence import Layer, Tokens
from sketchssm.reference.quantise import Grid


class QuantisedEngine(StandardEngine):
    """The recurrence on quantised states: each state is quantised again after every token."""

    def __init__(self, layer: Layer, num_slots: int, bits: int, options: EngineOptions = DEFAULTS) -> None:
        super().__init__(layer, num_slots, options)
        self._grid = Grid.of(bits)

    def step(self, tokens: Tokens, slots: npt.NDArray[np.int64], out: Array) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        for t in range(out.shape[1]):
            out[:, t] = _one_token(super().step, tokens, t, slots, out)
            self._requantise(slots)

    def adopt(self, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        super().adopt(slots)
        self._requantise(slots)

    def _requantise(self, slots: npt.NDArray[np.int64]) -> None:
        _quantise(self._memory, self._grid, slots)


class CopyEngine(ReplayEngine):
    """Replay that reads a copy of the state between flushes: of so many bits, or projected ``(heads, K, K)``."""

    def __init__(
        self, layer: Layer, num_slots: int, window: int, copy: int | Array, options: EngineOptions = DEFAULTS
    ) -> None:
        copies = (standard_parts(layer, "float32", 0)["state"][0]._replace(name="served"),)
        parts = window_parts(layer, window, sketch=copies)
        self._open(Memory(layer, num_slots, window, parts, options), full_states(layer), options)
        self._form = Grid.of(copy, zero=False) if isinstance(copy, int) else copy.astype(np.float32)

    def step(self, tokens: Tokens, slots: npt.NDArray[np.int64], out: Array) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        for t in range(out.shape[1]):
            out[:, t] = _one_token(super().step, tokens, t, slots, out)
            live = slots[slots >= 0]
            self._renew(live[self.position[live] == 0])

    def adopt(self, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        super().adopt(slots)
        self._renew(slots)

    def flush(self, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        super().flush(slots)
        self._renew(slots)

    def reset(self, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        super().reset(slots)
        self._renew(slots)

    def _renew(self, slots: npt.NDArray[np.int64]) -> None:
        if isinstance(self._form, Grid):
            _quantise(self._memory, self._form, slots)
        else:
            live = slots[slots >= 0]
            values, keys = self.state.shape[2:]
            self._memory.arrays["sketch"][live, :, :values, :keys] = self.state[live] @ self._form


def _one_token(
    step: Callable[[Tokens, Array, Array], None], tokens: Tokens, t: int, slots: npt.NDArray[np.int64], out: Array
) -> Array:
    """Step by one token of several; return its output ``(batch, heads, V)``."""
    part = np.empty_like(out[:, t : t + 1])
    step(tokens.at(np.s_[:, t : t + 1]), slots, part)
    return part[:, 0]


def _quantise(memory: Memory, grid: Grid, slots: npt.NDArray[np.int64]) -> None:
    """Quantise the states of some slots, in place or into the served copy."""
    memory.set(top=grid.top, shift=grid.shift)
    run(quantise_kernel, memory, slots)


@Kernel
def quantise_kernel(context: int, areas: int, worker: int) -> None:
    """Quantise one worker's share of the states."""
    if worker != SERIAL:
        _share(call_record(context), worker)


@pasted
def _share(m: Record, worker: int) -> None:
    units, shape = m.batch * m.heads, (m.values, m.keys)
    top, shift = np.float32(m.top), np.float32(m.shift)
    for unit in range(units * worker // m.workers, units * (worker + 1) // m.workers):
        slot = integers(m.rows)[unit // m.heads]
        if slot >= 0:
            head = unit % m.heads * m.values * m.keys
            state = carray(floats(m.state + 4 * (slot * m.state_stride + head)), shape)
            stored = carray(floats(m.served + 4 * (slot * m.served_stride + head)), shape)
            _round_trip_one(state, stored, top, shift)


@njit
def _round_trip_one(state: Array, stored: Array, top: float, shift: float) -> None:
    """Quantise one state. The loops over one row each compile to vector instructions."""
    values, keys = state.shape
    rows, columns, line = np.zeros(values, np.float32), np.zeros(keys, np.float32), np.empty(keys, np.float32)
    size = state.view(np.int32)
    for v in range(values):
        peak = np.int32(0)
        for k in range(keys):
            # magnitudes compare like their bits, and LLVM may reorder a maximum of integers
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
        for k in range(keys):  # into a line of its own: `stored` may be `state`, which would keep this from vectors
            line[k] = _nearest(state[v, k], scale * columns[k] / (top + shift), top, shift)
        stored[v] = line


@njit
def _nearest(value: float, step: float, top: float, shift: float) -> float:
    """Round a number to the value of its nearest code, without branches, so that loops become vectors."""
    code = np.rint(value / (step if step > 0 else np.float32(1)) - shift) + shift
    code = top if code > top else code
    return (-top if code < -top else code) * step


@njit
def _bfloat16_above(x: Array) -> None:
    """Round numbers of at least 0 up to bfloat16, in place."""
    bits = x.view(np.int32)
    for i in range(x.size):
        bits[i] = (bits[i] + 0xFFFF) & ~0xFFFF
