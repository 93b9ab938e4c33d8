"""The decode systems in float64, one row and one token at a time. Tests compare every faster engine with these."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from sketchssm.arrays.host_arrays import HostArrays, slot_memory
from sketchssm.arrays.options import DEFAULTS, HOST_OPTIONS, EngineOptions
from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.recurrence import FULL_STATE, Layer, Tokens
from sketchssm.layer.slots import (
    DRAFTED_SHIFT,
    DUE,
    EXACT,
    LEAST_SAMPLES,
    MAX_DRAFTS,
    POSITION,
    PartsOf,
    SlotPart,
    drafted,
)
from sketchssm.plans.plan import SketchPlan
from sketchssm.reference.recurrence import Array, per_head, step
from sketchssm.reference.residual import residual_read
from sketchssm.reference.window import Ring, fold, read_window

Slots = npt.NDArray[np.int64]


class StandardEngine:
    """Standard decode: the state is read and written at every token.

    A 16-bit state is rounded whenever it is stored; memory stays float64.
    """

    supports: ClassVar = HOST_OPTIONS | {"drafts"}
    parts_of: ClassVar[PartsOf] = staticmethod(lambda layer, options: _parts(layer, options.drafts))
    window = 1

    def __init__(self, layer: Layer, num_slots: int, options: EngineOptions = DEFAULTS) -> None:
        self.drafts = options.drafts
        self._open(layer, num_slots, options.drafts, options)

    def _open(self, layer: Layer, num_slots: int, ring: int, options: EngineOptions) -> None:
        """Set the memory up, with rings of `ring` tokens."""
        self.layer = layer
        self.parts = _parts(layer, ring, options.monitor)
        self.memory = slot_memory(self.parts, num_slots, options.memory)
        self.arrays = HostArrays(np.float64, options, self.memory.values())
        self.state = self.memory["state"]
        self._cursor = self.memory.get("cursor", np.zeros(num_slots, np.int32))
        self._clock: int | None = None  # the virtual row's cursor word
        self._state_dtype = options.state_dtype

    @property
    def position(self) -> npt.NDArray[np.int32]:
        """See `sketchssm.heads.engine.Engine`."""
        return self._cursor & POSITION

    def warmup(self, activation_dtype: str | None = None, drafts: bool = False) -> None:
        """See `sketchssm.heads.engine.Engine`: there is nothing to compile."""

    def step(self, tokens: Tokens, slots: Slots, out: Array) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        live = slots >= 0
        out[~live] = 0.0
        for t in range(out.shape[1] if slots.size else 0):
            for row in np.flatnonzero(live):
                out[row, t] = self._token(slots[row], tokens.at((row, t)))
            self._tick(slots[live])

    def _token(self, slot: int, token: Tokens) -> Array:
        self._cursor[slot] = 0
        state, output = step(self.state[slot].swapaxes(-1, -2), *per_head(self.layer, token))
        self.state[slot] = self._rounded(state.swapaxes(-1, -2))
        return output

    def _tick(self, slots: Slots) -> None:
        """Advance the clock by a plain token; at its stroke, mark these slots due."""
        if self._clock is None:
            return
        last = self.window - 1
        flushes = self._clock & DUE or self._clock & POSITION == last
        position = 0 if flushes else (self._clock & POSITION) + 1
        self._clock = position | (DUE if position == last else 0)
        self._cursor[slots] |= self._clock & DUE

    def draft(self, tokens: Tokens, lengths: Slots, slots: Slots, out: Array) -> None:
        """See `sketchssm.heads.engine.ExactEngine`."""
        out[...] = 0.0
        for row in np.flatnonzero(slots >= 0):
            slot, length = slots[row], int(lengths[row])
            state = self.state[slot]
            for t in range(length):
                token = tokens.at((row, t))
                self._buffer(slot, t, token)
                new, out[row, t] = step(state.swapaxes(-1, -2), *per_head(self.layer, token))
                state = self._rounded(new.swapaxes(-1, -2))
            self._cursor[slot] = length << DRAFTED_SHIFT

    def commit(self, accepted: Slots, slots: Slots) -> None:
        """See `sketchssm.heads.engine.ExactEngine`."""
        for row in np.flatnonzero(slots >= 0):
            slot = slots[row]
            for t in range(accepted[row]):
                k, v, g, beta = (x if x is None else x[:, t] for x in self._ring(slot, t + 1))
                assert k is not None and v is not None and g is not None
                state, _ = step(self.state[slot].swapaxes(-1, -2), k, k, v, g, beta)  # its output is not used
                self.state[slot] = self._rounded(state.swapaxes(-1, -2))
            self._cursor[slot] = 0

    def load_state(self, state: Array, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        live = slots >= 0
        self.state[slots[live]] = self._rounded(state[live])  # the index copies: `state` may be this memory
        self.adopt(slots)

    def adopt(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.ExactEngine`."""
        for slot in slots[slots >= 0]:
            self._begin(slot, self._stroke)

    def flush(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        self._cursor[slots[slots >= 0]] = 0

    def reset(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        self.state[slots[slots >= 0]] = 0.0
        self.adopt(slots)

    def copy(self, src: Slots, dst: Slots) -> None:
        """See `sketchssm.heads.engine.ExactEngine`."""
        live = (src >= 0) & (dst >= 0)
        src, dst = src[live], dst[live]
        for array in self.memory.values():
            array[dst] = array[src]
        self._cursor[dst] &= POSITION | DUE | EXACT

    def rejoin(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.ExactEngine`."""
        live = slots[slots >= 0]
        self._cursor[live] = (self._cursor[live] & (POSITION | EXACT)) | self._stroke

    def left_out(self) -> int:
        """See `sketchssm.heads.engine.ExactEngine`: `HostArrays` has refused such slots."""
        return 0

    @property
    def _stroke(self) -> int:
        """The DUE bit of a new window: that of the clock."""
        return 0 if self._clock is None else self._clock & DUE

    def _begin(self, slot: int, word: int) -> None:
        """Begin a window on the slot's state."""
        self._cursor[slot] = word

    def _rounded(self, state: Array) -> Array:
        """A state as its type holds it, in float64."""
        if self._state_dtype == "float32":
            return state
        if self._state_dtype == "bfloat16":
            import ml_dtypes

            return state.astype(ml_dtypes.bfloat16).astype(np.float64)
        with np.errstate(over="ignore"):  # becomes infinite
            return state.astype(np.float16).astype(np.float64)

    def _buffer(self, slot: int, place: int, token: Tokens) -> None:
        """Put a token into the slot's ring."""
        self.memory["keys"][slot, :, place] = token.k
        self.memory["values"][slot, :, place] = token.v
        self.memory["gates"][slot, :, place] = token.g.reshape(self.layer.heads, -1)
        if self.layer.erases:
            self.memory["betas"][slot, :, place] = token.beta

    def _ring(self, slot: int, stop: int) -> Ring:
        """Tokens of the slot's ring up to `stop`, with a key per value head."""
        k, v, g = (self.memory[name][slot, :, :stop] for name in ("keys", "values", "gates"))
        beta = self.memory["betas"][slot, :, :stop] if self.layer.erases else None
        return Ring(self.layer.expand_keys(k, axis=0), v, g, beta)


class ReplayEngine(StandardEngine):
    """Replay: a ring keeps the raw inputs, and its last token folds them into the state.

    A 16-bit state is rounded after its flush's outputs are read.
    """

    supports = HOST_OPTIONS | {"phase"}
    parts_of: ClassVar[PartsOf] = staticmethod(lambda layer, window, options: _parts(layer, window))

    def __init__(self, layer: Layer, num_slots: int, window: int, options: EngineOptions = DEFAULTS) -> None:
        self.window = window
        self.drafts = min(MAX_DRAFTS, window - 1)
        self._open(layer, num_slots, window, options)
        if options.phase is not None:
            self._clock = options.phase | (DUE if options.phase == window - 1 else 0)
            self._cursor[:] = self._stroke

    def _token(self, slot: int, token: Tokens) -> Array:
        word = int(self._cursor[slot])
        position = word & POSITION
        self._buffer(slot, position, token)
        if self._flushes(word):
            state = self._fold(slot, position + 1)
            self._begin(slot, word & EXACT)
            return np.einsum("hvk,hk->hv", state, self.layer.expand_keys(token.q))
        self._cursor[slot] = position + 1
        return self._output(slot, position + 1, token.q)

    def _flushes(self, word: int) -> bool:
        """Whether a plain token flushes a slot."""
        return bool(word & (DUE | EXACT)) or word & POSITION == self.window - 1

    def _output(self, slot: int, count: int, query: Array) -> Array:
        """Output ``(heads, V)`` of the last of so many buffered tokens."""
        ring = self._ring(slot, count)
        reads = read_window(self.layer.expand_keys(query)[:, None, :], ring)
        buffer = np.einsum("hs,hsv->hv", reads.weights[:, 0, :], ring.v)
        return self._read(slot, reads.queries[:, 0, :]) + buffer

    def _read(self, slot: int, queries: Array) -> Array:
        """State-read outputs ``(heads, V)`` of effective queries ``(heads, K)``."""
        return np.einsum("hvk,hk->hv", self.state[slot], queries)

    def _fold(self, slot: int, count: int) -> Array:
        """Fold so many buffered tokens into the slot's state; return the state before its rounding."""
        state = fold(self.state[slot].swapaxes(-1, -2), self._ring(slot, count)).swapaxes(-1, -2)
        self.state[slot] = self._rounded(state)
        return state

    def draft(self, tokens: Tokens, lengths: Slots, slots: Slots, out: Array) -> None:
        """See `sketchssm.heads.engine.ExactEngine`."""
        out[...] = 0.0
        stroke = 0  # if the clock has no room for the draft, all slots of the call fold with the clock
        if self._clock is not None and self._folds_before(self._clock, out.shape[1]):
            stroke = DUE
        for row in np.flatnonzero(slots >= 0):
            slot, length = slots[row], int(lengths[row])
            position, exact = self.position[slot], self._cursor[slot] & EXACT
            if self._folds_before(int(self._cursor[slot]) | stroke, length):
                if position:
                    self._fold(slot, position)
                    self._begin(slot, exact)
                position = 0
            for t in range(length):
                token = tokens.at((row, t))
                self._buffer(slot, position + t, token)
                out[row, t] = self._output(slot, position + t + 1, token.q)
            self._cursor[slot] = position | exact | length << DRAFTED_SHIFT
        if self._clock is not None and slots.size:
            self._clock = (0 if stroke else self._clock & POSITION) | out.shape[1] << DRAFTED_SHIFT

    def _folds_before(self, word: int, length: int) -> bool:
        """Whether a slot has to flush before a draft."""
        return bool(word & (DUE | EXACT)) or (word & POSITION) + length > self.window - 1

    def commit(self, accepted: Slots, slots: Slots) -> None:
        """See `sketchssm.heads.engine.ExactEngine`."""
        live = slots >= 0
        index = slots[live]
        words = self._cursor[index]
        self._cursor[index] = (words & (POSITION | DUE | EXACT)) + np.minimum(accepted[live], drafted(words))
        if self._clock is not None and slots.size:
            length = drafted(self._clock)
            self._clock = (self._clock & (POSITION | DUE)) + length
            if (self._clock & POSITION) + length > self.window - 1:
                self._clock |= DUE
                self._cursor[index] |= DUE

    def flush(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        for slot in slots[slots >= 0]:
            word = self._cursor[slot] & EXACT | self._stroke
            if self.position[slot]:
                self._fold(slot, self.position[slot])
                self._begin(slot, word)
            else:
                self._cursor[slot] = word


class SketchEngine(ReplayEngine):
    """The paper's algorithm 1: replay, with state reads through a sketch between flushes.

    Formats with codes are rounded as on every backend; "float32" and "bfloat16" stay float64, and so do full reads. A
    slot's memory has no sketches: every read computes them from the state. With a monitor, a flush token is read
    through the sketch too; its exact output tells the error. A slot whose error is above the tolerance flushes at
    every token.
    """

    supports = ReplayEngine.supports | {"monitor", "tolerance"}
    parts_of: ClassVar[PartsOf] = staticmethod(
        lambda plan, sketch_dtype, options: _parts(plan.layer, plan.window, options.monitor)
    )

    def __init__(
        self, plan: SketchPlan, num_slots: int, sketch_dtype: str = "float32", options: EngineOptions = DEFAULTS
    ) -> None:
        super().__init__(plan.layer, num_slots, plan.window, options)
        self.plan = plan
        self._form, self._monitor = SketchFormat.of(sketch_dtype), options.monitor
        self._tolerance = options.tolerance

    def adopt(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.ExactEngine`."""
        super().adopt(slots)
        if self._monitor:
            self.memory["errors"][slots[slots >= 0]] = 0.0

    def _token(self, slot: int, token: Tokens) -> Array:
        word = int(self._cursor[slot])
        position = word & POSITION
        if not self._monitor or word & EXACT or not self._flushes(word):
            return super()._token(slot, token)
        error, energy, flushes = self.memory["errors"][slot, :, 0].T
        flushes += 1
        if (flushes[0] - 1) % self._monitor:
            return super()._token(slot, token)
        self._buffer(slot, position, token)
        answer = self._output(slot, position + 1, token.q)
        output = super()._token(slot, token)
        error += np.square(output - answer).sum(-1)
        energy += np.square(output).sum(-1)
        enough = flushes[0] > (LEAST_SAMPLES - 1) * self._monitor
        if self._tolerance and enough and not error.sum() <= self._tolerance * energy.sum():  # NaN is above
            self._cursor[slot] |= EXACT
        return output

    def _read(self, slot: int, queries: Array) -> Array:
        outputs = super()._read(slot, queries)
        for head, rank in enumerate(self.plan.ranks):
            if rank != FULL_STATE:
                omega = self.plan.omega[head, :, :rank].astype(np.float64)
                state, bits = self.state[slot, head].T, int(self.plan.residual_bits[head])
                matrix = residual_read(self._form, self.plan.map, state, omega, bits=bits)
                outputs[head] = matrix @ queries[head]
        return outputs


def _parts(layer: Layer, ring: int, monitor: int = 0) -> tuple[SlotPart, ...]:
    """Parts of a slot with a ring of so many tokens, and the sums of a monitor."""
    shapes: dict[str, tuple[int, ...]] = {"state": layer.state_shape}
    if ring:
        shapes["keys"] = layer.key_heads, ring, layer.key_dim
        shapes["values"] = layer.heads, ring, layer.value_dim
        shapes["gates"] = layer.heads, ring, layer.gate_channels
        if layer.erases:
            shapes["betas"] = layer.heads, ring
    if monitor:
        shapes["errors"] = layer.heads, 1, 3
    parts = [SlotPart(name, shape, "float64", 8) for name, shape in shapes.items()]
    return (*parts, SlotPart("cursor", (), "int32", 4)) if ring else tuple(parts)
