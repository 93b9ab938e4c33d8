"""Standard decode: one pass over the state per token."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from sketchssm.cpu.jit import Kernel, njit, pasted
from sketchssm.cpu.layout import KDA, MAMBA2, Array, Memory, Record, areas_record, blank, call_record
from sketchssm.cpu.simd import LANES, Pointer, copy, exp, floats, fma, integers, load, splat, store, total
from sketchssm.cpu.workers import SERIAL, run, worker_count
from sketchssm.host_arrays import HostArrays
from sketchssm.recurrence import PAD_SLOT, Layer, Tokens

__all__ = ["StandardEngine"]


class StandardEngine:
    """The recurrence in float32: every token reads and writes every state.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    num_slots : int
        Number of state slots.
    """

    arrays = HostArrays(np.float32)
    window = 1

    def __init__(self, layer: Layer, num_slots: int) -> None:
        self._own(Memory(layer, num_slots))
        self._memory.scratch(worker_count())

    def _own(self, memory: Memory) -> None:
        self._memory = memory
        self.state, self.position = memory.state, memory.position

    def warmup(self, activation_dtype: str | None = None) -> None:
        """See `sketchssm.backends.Engine`: calls everything once, on a row of padding."""
        layer, row = self._memory.layer, np.array([PAD_SLOT])
        shapes = layer.token_shapes()
        token = Tokens(*(np.zeros((1, 1, *shapes[x]), np.float32) if x in shapes else None for x in Tokens._fields))
        self.step(token, row, np.empty_like(token.v))
        self.load_state(np.zeros((1, *layer.state_shape), np.float32), row)
        self.flush(row)
        self.reset(row)

    def step(self, tokens: Tokens, slots: npt.NDArray[np.int64], out: Array) -> None:
        """See `sketchssm.backends.Engine`."""
        run(standard_kernel, self._memory, slots, tokens, out)

    def load_state(self, state: Array, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.backends.Engine`."""
        live = slots >= 0
        self._memory.clear_state(slots[live])
        self.state[slots[live]] = state[live]

    def flush(self, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.backends.Engine`."""

    def reset(self, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.backends.Engine`."""
        self._memory.clear_state(slots[slots >= 0])


@Kernel
def standard_kernel(context: int, areas: int, worker: int) -> None:
    """Run one worker's share of a step: a contiguous range of rows and heads, with all of their tokens."""
    if worker != SERIAL:
        _share(call_record(context), areas_record(areas), worker)


@pasted
def _share(m: Record, at: Record, worker: int) -> None:
    buf = floats(m.scratch + 4 * worker * at.size)
    units = m.batch * m.heads
    for unit in range(units * worker // m.workers, units * (worker + 1) // m.workers):
        row, head = unit // m.heads, unit % m.heads
        slot = integers(m.rows)[row]
        if slot < 0:
            for t in range(m.length):
                blank(m, (row * m.length + t) * m.heads + head, 1)
            continue
        first = (slot * m.heads + head) * m.values * m.keys
        for t in range(m.length):
            place = row * m.length + t
            _take(m, at, buf, place, head)
            if m.kind == MAMBA2:
                _write(m, at, buf, place * m.heads + head, first)
            else:
                _erase_write(m, at, buf, place * m.heads + head, first)


@njit
def _take(m: Record, at: Record, buf: Pointer, place: int, head: int) -> None:
    """Copy the query, the key and the decay of one token, padded, into scratch memory."""
    source = (place * m.key_heads + head // m.group) * m.key_dim
    gates = place * m.heads + head
    copy(buf, at.inputs, floats(m.in_q), source, m.key_dim)
    copy(buf, at.inputs + m.keys, floats(m.in_k), source, m.key_dim)
    if m.kind == KDA:
        copy(buf, at.decay, floats(m.in_g), gates * m.key_dim, m.key_dim)
        for c in range(m.key_dim, m.keys):
            buf[at.decay + c] = np.float32(0.0)
        for c in range(0, m.keys, LANES):
            store(buf, at.decay + c, exp(load(buf, at.decay + c)))
    else:
        decay = splat(np.float32(math.exp(floats(m.in_g)[gates])))
        for c in range(0, m.keys, LANES):
            store(buf, at.decay + c, decay)


@njit
def _write(m: Record, at: Record, buf: Pointer, place: int, first: int) -> None:
    """Decay, write and read row by row, for mamba2."""
    state = floats(m.state)
    for v in range(m.value_dim):
        row = first + v * m.keys
        value = splat(floats(m.in_v)[place * m.value_dim + v])
        read = splat(np.float32(0.0))
        for c in range(0, m.keys, LANES):
            decayed = load(buf, at.decay + c) * load(state, row + c)
            new = fma(value, load(buf, at.inputs + m.keys + c), decayed)
            store(state, row + c, new)
            read = fma(new, load(buf, at.inputs + c), read)
        floats(m.out)[place * m.value_dim + v] = total(read)


@njit
def _erase_write(m: Record, at: Record, buf: Pointer, place: int, first: int) -> None:
    """Decay, erase, write and read row by row, for gdn and kda. A row stays in the first cache meanwhile."""
    beta = floats(m.in_beta)[place]
    state = floats(m.state)
    for v in range(m.value_dim):
        row = first + v * m.keys
        predicted = splat(np.float32(0.0))
        for c in range(0, m.keys, LANES):
            decayed = load(buf, at.decay + c) * load(state, row + c)
            predicted = fma(decayed, load(buf, at.inputs + m.keys + c), predicted)
        value = splat(beta * (floats(m.in_v)[place * m.value_dim + v] - total(predicted)))
        read = splat(np.float32(0.0))
        for c in range(0, m.keys, LANES):
            decayed = load(buf, at.decay + c) * load(state, row + c)
            new = fma(value, load(buf, at.inputs + m.keys + c), decayed)
            store(state, row + c, new)
            read = fma(new, load(buf, at.inputs + c), read)
        floats(m.out)[place * m.value_dim + v] = total(read)
