"""Standard decode: one pass over the state per token."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from sketchssm.arrays.host_arrays import HostArrays
from sketchssm.arrays.options import DEFAULTS, HOST_OPTIONS, EngineOptions
from sketchssm.cpu.jit import Kernel, njit, pasted
from sketchssm.cpu.layout import COMMIT, DRAFT, FLOAT32, STEP, Memory, Record, areas_record, blank, call_record
from sketchssm.cpu.llvm import LANES
from sketchssm.cpu.parts import Array, slot_parts, standard_parts
from sketchssm.cpu.simd import Pointer, copy, exp, floats, fma, integers, load, splat, store, total
from sketchssm.cpu.states import narrow, widen
from sketchssm.cpu.workers import SERIAL, run, worker_count
from sketchssm.layer.recurrence import PAD_SLOT, Layer, Tokens
from sketchssm.layer.slots import DRAFTED_SHIFT, DUE, EXACT, POSITION, PartsOf

Slots = npt.NDArray[np.int64]


class StandardEngine:
    """The recurrence in float32: every token reads and writes every state."""

    supports: ClassVar = HOST_OPTIONS | {"drafts"}
    parts_of: ClassVar[PartsOf] = staticmethod(
        lambda layer, options: slot_parts(standard_parts(layer, options.state_dtype, options.drafts))
    )
    window = 1

    def __init__(self, layer: Layer, num_slots: int, options: EngineOptions = DEFAULTS) -> None:
        parts = standard_parts(layer, options.state_dtype, options.drafts)
        self._own(Memory(layer, num_slots, 0, parts, options), options.drafts, options)
        self._memory.scratch(worker_count(), drafts=options.drafts)

    def _own(self, memory: Memory, drafts: int, options: EngineOptions) -> None:
        self._memory, self.drafts = memory, drafts
        self.state, self.parts, self.memory = memory.state, memory.parts, memory.arrays
        self.arrays = HostArrays(np.float32, options, self.memory.values())

    @property
    def position(self) -> npt.NDArray[np.int32]:
        """See `sketchssm.heads.engine.Engine`."""
        return self._memory.cursor & POSITION

    def warmup(self, activation_dtype: str | None = None, drafts: bool = False) -> None:
        """See `heads.engine.Engine`: calls every kernel once, on a row of padding; drafts use those of steps."""
        layer, row = self._memory.layer, np.array([PAD_SLOT])
        shapes = layer.token_shapes()
        token = Tokens(*(np.zeros((1, 1, *shapes[x]), np.float32) if x in shapes else None for x in Tokens._fields))
        clock = self._memory.clock.copy()
        self.step(token, row, np.empty_like(token.v))
        self._memory.clock[...] = clock  # as if there had been no step
        self.load_state(np.zeros((1, *layer.state_shape), np.float32), row)
        self.flush(row)
        self.reset(row)

    def step(self, tokens: Tokens, slots: Slots, out: Array) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        if self.drafts:
            self.flush(slots)
        self._memory.set(task=STEP)
        run(standard_kernel, self._memory, slots, tokens, out)

    def load_state(self, state: Array, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        live = slots >= 0
        with np.errstate(over="ignore"):  # a number beyond the range of float16 becomes infinite
            self.state[slots[live]] = state[live]  # the index copies: `state` may be this memory
        self.adopt(slots)

    def flush(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        self._memory.cursor[slots[slots >= 0]] = 0

    def reset(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        live = slots[slots >= 0]
        self.memory["state"][live] = 0
        self._memory.begin(live)

    def adopt(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        self._memory.begin(slots[slots >= 0])

    def draft(self, tokens: Tokens, lengths: Slots, slots: Slots, out: Array) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        live = slots >= 0
        index = slots[live]
        for name, x in (("keys", tokens.k), ("values", tokens.v), ("gates", tokens.g), ("betas", tokens.beta)):
            if x is not None:
                self.memory[name][index, : x.shape[1]] = x[live]
        self._memory.cursor[index] = lengths[live] << DRAFTED_SHIFT
        self._memory.set(task=DRAFT, counts=lengths.ctypes.data)
        run(standard_kernel, self._memory, slots, tokens, out)

    def commit(self, accepted: Slots, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        live = slots >= 0
        index, counts = slots[live], accepted[live]
        ring = {name: self.memory[name][index] for name in ("keys", "values", "gates", "betas") if name in self.memory}
        tokens = Tokens(ring["keys"], ring["keys"], ring["values"], ring["gates"], ring.get("betas"))
        self._memory.set(task=COMMIT, counts=counts.ctypes.data)
        run(standard_kernel, self._memory, index, tokens, np.empty_like(tokens.v))
        self._memory.cursor[index] = 0

    def copy(self, src: Slots, dst: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        live = (src >= 0) & (dst >= 0)
        src, dst = src[live], dst[live]
        for array in self.memory.values():
            array[dst] = array[src]
        self._memory.cursor[dst] &= POSITION | DUE | EXACT

    def rejoin(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        live, cursor = slots[slots >= 0], self._memory.cursor
        cursor[live] = (cursor[live] & (POSITION | EXACT)) | self._memory.stroke

    def left_out(self) -> int:
        """See `sketchssm.heads.engine.Engine`: `HostArrays` has refused wrong slots."""
        return 0


@Kernel
def standard_kernel(context: int, areas: int, worker: int) -> None:
    """Run one worker's share of a task: a contiguous range of rows and heads, with all of their tokens."""
    if worker != SERIAL:
        _share(call_record(context), areas_record(areas), worker)


@pasted
def _share(m: Record, at: Record, worker: int) -> None:
    buf = floats(m.scratch + 4 * worker * at.size)
    units, size = m.batch * m.heads, m.values * m.keys
    for unit in range(units * worker // m.workers, units * (worker + 1) // m.workers):
        row, head = unit // m.heads, unit % m.heads
        slot = integers(m.rows)[row]
        count = (m.length if m.task == STEP else integers(m.counts)[row]) if slot >= 0 else 0
        stored = slot * m.state_stride + head * size
        state, first = floats(m.state), stored
        if count and (m.state_type != FLOAT32 or m.task == DRAFT):
            _copy_state(m, buf, at.state, stored, size)
            state, first = buf, at.state
        for t in range(count):
            place = row * m.length + t
            _take(m, at, buf, place, head)
            _update(m, at, buf, place * m.heads + head, state, first)
            if m.state_type != FLOAT32:
                # drafts are rounded as well, but not stored
                if m.task == DRAFT:
                    narrow(m, buf, at.state, m.scratch + 4 * (worker * at.size + at.narrow), 0, size)
                else:
                    narrow(m, buf, at.state, m.state, stored, size)
        for t in range(count, m.length):
            blank(m, (row * m.length + t) * m.heads + head, 1)


@njit
def _copy_state(m: Record, buf: Pointer, target: int, stored: int, size: int) -> None:
    """Copy one head's state to scratch memory as float32."""
    if m.state_type != FLOAT32:
        widen(m, m.state, stored, buf, target, size)
    else:
        copy(buf, target, floats(m.state), stored, size)


@njit
def _take(m: Record, at: Record, buf: Pointer, place: int, head: int) -> None:
    """Copy the query, the key and the decay of one token, padded, into scratch memory."""
    source = (place * m.key_heads + head // m.group) * m.key_dim
    gates = place * m.heads + head
    copy(buf, at.inputs, floats(m.in_q), source, m.key_dim)
    copy(buf, at.inputs + m.keys, floats(m.in_k), source, m.key_dim)
    if m.channel_decays:
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
def _update(m: Record, at: Record, buf: Pointer, place: int, state: Pointer, first: int) -> None:
    """Decay, erase, write and read row by row. A row stays in the first cache meanwhile."""
    for v in range(m.value_dim):
        row, value = first + v * m.keys, floats(m.in_v)[place * m.value_dim + v]
        if m.erases:
            predicted = splat(np.float32(0.0))
            for c in range(0, m.keys, LANES):
                decayed = load(buf, at.decay + c) * load(state, row + c)
                predicted = fma(decayed, load(buf, at.inputs + m.keys + c), predicted)
            value = floats(m.in_beta)[place] * (value - total(predicted))
        write, read = splat(value), splat(np.float32(0.0))
        for c in range(0, m.keys, LANES):
            decayed = load(buf, at.decay + c) * load(state, row + c)
            new = fma(write, load(buf, at.inputs + m.keys + c), decayed)
            store(state, row + c, new)
            read = fma(new, load(buf, at.inputs + c), read)
        floats(m.out)[place * m.value_dim + v] = total(read)
