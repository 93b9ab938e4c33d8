"""Standard decode on the device, and the parts that all engines of the CUDA backend share: memory, types, gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sketchssm.cuda.arrays import DeviceArrays
from sketchssm.cuda.commits import COMMIT
from sketchssm.cuda.copies import COPY, Copier
from sketchssm.cuda.direct import DirectStep
from sketchssm.cuda.launch import Launcher
from sketchssm.cuda.limits import check_layer
from sketchssm.cuda.memory import allocate, check_places, cursor_part, ring_parts, state_part
from sketchssm.cuda.modules import Variant, load, warmup
from sketchssm.cuda.pointer import Pointer, Slots, StepInputs
from sketchssm.cuda.slots import SLOTS, SlotWriter, part_of
from sketchssm.cuda.standard_drafts import StandardDrafts, standard_draft_variant
from sketchssm.cuda.workspaces import Workspaces
from sketchssm.layer.recurrence import PAD_SLOT, Layer
from sketchssm.layer.slots import POSITION, SlotPart

if TYPE_CHECKING:
    from sketchssm.arrays.gates import GateInput

__all__ = ["StandardEngine"]

TYPES = {"bfloat16": 0, "float16": 1, "float32": 2}
"""Element types, and their numbers in the kernels."""

KINDS = {"mamba2": 0, "gdn": 1, "kda": 2}

STANDARD_WARPS = 4
"""Largest number of warps of a block; WARPS in ``cuda_src/standard/rows.cuh``."""

MANY_WARPS, BLOCK_BYTES = 1 << 14, 4096
"""With at least so many warps, a block has at most so many bytes of state: blocks start in the order of memory, and
smaller blocks keep loads and stores closer to that order (on H200 1% to 2% faster; slower by as much with fewer
warps)."""

TOKEN_INPUTS = "Q" * 6 + "i" * 6
"""Arguments of a step's kernels: addresses and row strides of q, k, v, g, beta and outputs."""

TOKEN_VALUES = tuple(f"{name}{what}" for what in ("", "_stride") for name in ("q", "k", "v", "g", "beta", "out"))
"""The same by name."""

STEPS_INPUTS = TOKEN_INPUTS + "i" * 5
"""The same with bytes from token to token of the inputs, for kernels that take several."""

SLOT_INPUTS, SLOT_VALUES = "Qiiii", ("slots", "slot_flags", "zero", "scan", "rows")
"""Address, flags and scan of a call's slots, and its rows."""


def _packed(gate: GateInput) -> npt.NDArray[np.float32]:
    """A gate as the kernels read it: biases, rates, and a bound (see lib/log_decay.cuh)."""
    parts = (gate.dt_bias.reshape(-1), -np.exp(gate.A_log), [gate.lower_bound or 0.0])
    return np.concatenate(parts).astype(np.float32)


class StandardEngine:
    """Standard decode: every token reads and writes its state.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    num_slots : int
        Number of state slots.
    memory : mapping of str to array, optional
        Memory to use instead of the engine's own, by the names of `parts`; see `SketchHead`.
    activation_dtype : {"bfloat16", "float16", "float32"} or None, default "bfloat16"
        Type of q, k and v. None: the narrowest that holds those of the first call.
    output_dtype : str, optional
        Type of outputs; the activations' by default.
    gate : GateInput, optional
        Converts raw gate inputs, which have the activations' type.
    state_dtype : {"float32", "bfloat16", "float16"}, default "float32"
        Type of states in memory; a state is rounded whenever it is written.
    drafts : int, default 0
        Most tokens of a draft.
    pad_slot : int, default -1
        Slot number that means padding.
    """

    window = 1

    def __init__(
        self,
        layer: Layer,
        num_slots: int,
        *,
        memory: Mapping[str, Any] | None = None,
        activation_dtype: str | None = "bfloat16",
        output_dtype: str | None = None,
        gate: GateInput | None = None,
        state_dtype: str = "float32",
        drafts: int = 0,
        pad_slot: int = PAD_SLOT,
    ) -> None:
        import cupy

        check_layer(layer)
        self._most_drafts = drafts
        self._drafts: StandardDrafts | None = None
        self.ring: tuple[Any, ...] = ()
        self.layer = layer
        self.state_dtype = state_dtype
        self.num_slots = num_slots
        # rows of a warp, measured on H200; eight rows of 16 bits have as many bytes in flight as four of float32
        self.value_rows = 4 if layer.erases and state_dtype == "float32" else 8
        self.arrays = DeviceArrays(layer, activation_dtype, output_dtype, gate is not None, state_dtype, pad_slot)
        self._raw_gate = 0 if gate is None else 1 if gate.lower_bound is None else 2  # RAW_GATE in lib/log_decay.cuh
        self._gate = np.uint64(0) if gate is None else cupy.asarray(_packed(gate))
        self._given = dict(memory or {})  # the caller's memory that no part has taken yet
        self.memory = allocate((state_part(layer, state_dtype),), num_slots, self._given)
        self.state = self.memory["state"]
        self.cursor = cupy.zeros(num_slots, dtype=np.int32)
        self._left_out = cupy.zeros(1, dtype=np.int32)
        # the slot that means padding, all slots, and how many rows were left out
        self._slot_limits = np.int32(pad_slot), np.int32(num_slots), self._left_out
        self._workspaces = Workspaces()
        self._copier: Copier | None = None
        self._clock: Any = None
        self._begin_memory()
        self._ready = False  # to launch: kernels loaded, and all memory allocated
        self.arrays.device.synchronize()  # the first call may come on another stream

    def _begin_memory(self) -> None:
        """Allocate all memory except the states."""
        if self._most_drafts:
            self.memory |= allocate((cursor_part(),), self.num_slots, self._given)
            self.cursor = self.memory["cursor"]
            self.cursor[...] = 0
        if self._most_drafts and self.arrays.activation_dtype is not None:
            self._make_ring(self._most_drafts)
        else:
            self._take_memory(last=not self._most_drafts)

    def _make_ring(self, places: int) -> None:
        """Allocate raw inputs of so many tokens, in the activations' type."""
        import cupy

        parts = ring_parts(self.layer, places, self._settled, bool(self._raw_gate))
        ring = allocate(parts, self.num_slots, self._given)
        nothing = cupy.zeros((1,), dtype=np.float32)  # of a layer without betas
        self.ring = tuple(ring.get(name, nothing) for name in ("keys", "values", "gates", "betas"))
        self.memory = {part.name: (self.memory | ring)[part.name] for part in self.parts}
        self._take_memory(last=True)
        self.arrays.device.synchronize()  # the next call may come on another stream

    def _take_memory(self, last: bool) -> None:
        """Use the memory of the parts so far; `last` if there are no others."""
        if last and self._given:
            names = ", ".join(self.memory)
            raise ValueError(f"memory: expected only {names}, got {next(iter(self._given))!r}")
        check_places(self.memory)
        self._set_state = SlotWriter(self.state, self.cursor, self._slot_limits, self._clock)
        self.arrays.own = [_extent(array) for array in self.memory.values()]

    @property
    def _settled(self) -> str:
        """The activations' type."""
        activation = self.arrays.activation_dtype
        if activation is None:
            raise ValueError("activation_dtype: expected a type, or warmup() before the ring's memory is described")
        return activation

    @staticmethod
    def parts_of(
        layer: Layer,
        *,
        state_dtype: str = "float32",
        drafts: int = 0,
        gate: GateInput | None = None,
        activation_dtype: str | None = None,
    ) -> tuple[SlotPart, ...]:
        """Parts of a slot; see `sketchssm.heads.engine.ExactEngine`."""
        return _parts(layer, state_dtype, drafts, activation_dtype or "bfloat16", gate is not None)

    @property
    def parts(self) -> tuple[SlotPart, ...]:
        """See `sketchssm.heads.engine.ExactEngine`."""
        activation = self._settled if self._most_drafts else ""
        return _parts(self.layer, self.state_dtype, self._most_drafts, activation, bool(self._raw_gate))

    @property
    def position(self) -> Any:
        """See `sketchssm.heads.engine.Engine`."""
        return self.cursor & POSITION

    @property
    def _types(self) -> tuple[int, int]:
        """Types of activations and outputs; "bfloat16" as long as no call has settled them."""
        return TYPES[self.arrays.activation_dtype or "bfloat16"], TYPES[self.arrays.output_dtype or "bfloat16"]

    def fit(self) -> None:
        """Refuse a device that is too small."""

    def variants(self) -> list[Variant]:
        """Every kernel that the engine may launch."""
        return [Variant("standard", self._constants() | {"ROWS": self.value_rows})]

    def _constants(self) -> dict[str, int]:
        layer = self.layer
        return {
            "KIND": KINDS[layer.kind],
            "HEADS": layer.heads,
            "KEY_HEADS": layer.key_heads,
            "K": layer.key_dim,
            "V": layer.value_dim,
            "ACT": self._types[0],
            "OUT": self._types[1],
            "STATE": TYPES[self.state_dtype],
            "RAW_GATE": self._raw_gate,
        }

    def warmup(self, activation_dtype: str | None = None, drafts: bool = False) -> None:
        """See `sketchssm.heads.engine.Engine`; kernels are compiled in parallel."""
        self.arrays.warmup(activation_dtype or self.arrays.activation_dtype or "bfloat16", self.num_slots)
        warmup([*self.variants(), SLOTS, COPY, *((self._draft_variant(), COMMIT) if drafts else ())])
        self._prepare()
        self._copies()
        if drafts:
            self._load_drafts()

    def _draft_variant(self) -> Variant:
        return standard_draft_variant(self.variants()[0], self._most_drafts)

    def _load_drafts(self) -> Any:
        """Return the kernel of drafts; the first call loads the kernels of drafts and commits."""
        if self._drafts is None:
            memory = self.state, self._gate, self.ring, self.cursor
            self._drafts = StandardDrafts(self._draft_variant(), *memory, self._slot_limits, STEPS_INPUTS)
        return self._drafts

    def _prepare(self, late: bool = True) -> None:
        """Prepare launches, when the activations' type is known; `late` warns of kernels that are not loaded."""
        if self._ready:
            return
        self.fit()  # a type that the first call has settled may take more room
        modules = []
        for variant in self.variants():
            modules.append(load(variant, late=late))
        self._load(modules)
        self._ready = True

    def _load(self, modules: list[Any]) -> None:
        """Take the kernels from the modules of `variants`."""
        if self._most_drafts and not self.ring:
            self._make_ring(self._most_drafts)
        kernel = modules[0].get_function("standard_step")
        fixed = *part_of(self.state), self._gate
        self._step = Launcher(kernel, fixed, STEPS_INPUTS + SLOT_INPUTS + "i", self._slot_limits)
        values = *TOKEN_VALUES, *("zero",) * 5, *SLOT_VALUES, "one"  # one token
        self._direct = DirectStep(self.arrays, self.layer, [(self._step, values)], self.num_slots)

    def step(self, tokens: StepInputs, slots: Slots, out: Pointer) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        self._prepare()
        batch, length = out.shape[:2]
        if batch and length:
            grid = self._standard_grid(batch)
            self._step(
                *grid,
                *tokens.addresses,
                out.address,
                *tokens.row_strides,
                out.row,
                *tokens.steps,
                *slots.arguments,
                batch,
                length,
            )
            if self._drafts is not None:
                self._drafts.drop(slots)
            if not self._most_drafts:  # a direct step would not drop drafts
                self._direct.learn(batch, [grid], 0)

    def draft(self, tokens: StepInputs, lengths: Slots | None, slots: Slots, out: Pointer) -> None:
        """See `sketchssm.heads.engine.ExactEngine`."""
        self._prepare()
        drafts = self._load_drafts()
        batch, length = out.shape[:2]
        if batch and length:
            inputs = *tokens.addresses, out.address, *tokens.row_strides, out.row, *tokens.steps
            counts = (0, 0) if lengths is None else lengths.number
            drafts.draft(self._standard_grid(batch), *inputs, *slots.arguments, batch, length, *counts)

    def commit(self, accepted: Slots, slots: Slots) -> None:
        """See `sketchssm.heads.engine.ExactEngine`."""
        if self._drafts is not None and slots.shape[0]:  # None: nothing was drafted
            self._drafts.commit(self._standard_grid(slots.shape[0]), accepted, slots)

    def _standard_grid(self, batch: int) -> tuple[int, int]:
        """Blocks that have a warp for every few value rows, and a block's threads."""
        layer, rows = self.layer, self.value_rows
        tasks = batch * layer.heads * (layer.value_dim // rows)
        fit = BLOCK_BYTES // (self.state.itemsize * layer.key_dim * rows) if tasks >= MANY_WARPS else STANDARD_WARPS
        warps = max(1, min(fit, STANDARD_WARPS))
        return -(-tasks // warps), 32 * warps

    def load_state(self, state: Pointer, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        self._set_state(state, slots)

    def flush(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        if self._drafts is not None:
            self._drafts.drop(slots)

    def reset(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        self._set_state(None, slots)

    def adopt(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.ExactEngine`."""
        self._set_state.begin(slots)

    def copy(self, src: Slots, dst: Slots) -> None:
        """See `sketchssm.heads.engine.ExactEngine`."""
        self._copies().copy(src, dst, self._workspaces.get()[0].data.ptr)

    def rejoin(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.ExactEngine`."""
        self._copies().rejoin(slots)

    def left_out(self) -> int:
        """See `sketchssm.heads.engine.ExactEngine`."""
        self.arrays.device.synchronize()
        count = int(self._left_out.get()[0])
        if count:
            self._left_out -= count
            self.arrays.device.synchronize()  # rows may be counted on any stream
        return count

    def _copies(self) -> Copier:
        """Kernels that copy slots, once all memory is allocated."""
        if self._most_drafts and not self.ring:
            self._make_ring(self._most_drafts)
        if self._copier is None:
            self._copier = Copier(self.memory | {"cursor": self.cursor}, self._clock, self._slot_limits)
        return self._copier


def _parts(layer: Layer, state_dtype: str, drafts: int, activation_dtype: str, raw_gate: bool) -> tuple[SlotPart, ...]:
    """All parts of a slot."""
    ring = (*ring_parts(layer, drafts, activation_dtype, raw_gate), cursor_part()) if drafts else ()
    return state_part(layer, state_dtype), *ring


def _extent(array: Any) -> tuple[int, int]:
    """Where an array starts and ends; its elements lie in between."""
    start, strides = int(array.data.ptr), zip(array.shape, array.strides, strict=True)
    return start, start + sum((size - 1) * stride for size, stride in strides) + array.itemsize
