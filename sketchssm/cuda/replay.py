"""Replay on the device, and the kernels of windows. A step only launches kernels on its stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sketchssm.cuda.commits import Committer
from sketchssm.cuda.copies import Copier
from sketchssm.cuda.direct import DirectStep
from sketchssm.cuda.drafts import DraftReader, draft_variant
from sketchssm.cuda.launch import Launcher
from sketchssm.cuda.layout import MAPS, PackedPlan, pack_full_state
from sketchssm.cuda.limits import check_shared, check_window, shared_limit
from sketchssm.cuda.memory import allocate, cursor_part, sketch_part, slot_parts
from sketchssm.cuda.modules import Variant, size_of
from sketchssm.cuda.occupancy import blocks_per_multiprocessor, read_pace
from sketchssm.cuda.pointer import Pointer, Slots, StepInputs
from sketchssm.cuda.slots import SlotWriter, part_of
from sketchssm.cuda.standard import SLOT_INPUTS, SLOT_VALUES, TOKEN_INPUTS, TOKEN_VALUES, StandardEngine
from sketchssm.cuda.workspaces import MAX_ROWS, SLOTS
from sketchssm.layer.recurrence import Layer
from sketchssm.layer.slots import DUE, SlotPart

if TYPE_CHECKING:
    from sketchssm.arrays.gates import GateInput

__all__ = ["ReplayEngine"]

LEAST_READ_WARPS = 4
"""Smallest number of warps of a read kernel's block. At least two are needed: a warp without tiles computes the
products of keys for the other warps and writes tokens into the ring."""

NO_TOKENS = (0,) * len(TOKEN_INPUTS)

STEP, FOLD, LOAD, DRAFT = 0, 1, 2, 3
"""Modes of the flush kernel: a step's due rows; fold only; sketch only; rows that must fold before a draft."""


class ReplayEngine(StandardEngine):
    """Replay: the window kernels in which every head reads its full state.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    num_slots : int
        Number of state slots.
    window : int
        Tokens of a window (W), from one flush to the next.
    packed : PackedPlan, optional
        Sketches and their map. Default: no head has a sketch.
    phase : int, optional
        Where the clock begins; None for no clock.
    **memory
        See `StandardEngine`.
    """

    def __init__(
        self,
        layer: Layer,
        num_slots: int,
        window: int,
        *,
        packed: PackedPlan | None = None,
        phase: int | None = None,
        **memory: Any,
    ) -> None:
        import cupy
        import ml_dtypes

        super().__init__(layer, num_slots, **memory)
        check_window(window)
        self.window = window
        stroke = 0
        if phase is not None:  # cursor word of a row that takes part in every call
            stroke = DUE if phase == window - 1 else 0
            self._clock = cupy.full(1, phase | stroke, dtype=np.int32)
        self._packed = packed = pack_full_state(layer) if packed is None else packed
        if packed.full_state < layer.heads:
            self.memory |= allocate((sketch_part(packed),), num_slots, self._given)
            self.sketch = self.memory["sketch"]
        else:  # no part of a slot's memory
            self.sketch = cupy.zeros((num_slots, packed.slot_elements), dtype=np.uint16)
        self.memory |= allocate((cursor_part(),), num_slots, self._given)
        self.cursor = self.memory["cursor"]
        self.cursor[...] = stroke
        self._set_sketch = SlotWriter(self.sketch, self.cursor, self._slot_limits, self._clock)
        rows = packed.projection
        if packed.dtype != "float32":
            rows = rows.astype(ml_dtypes.bfloat16).view(np.uint16)
        self._projection = cupy.asarray(rows if rows.size else np.zeros(1, rows.dtype))
        self._basis = cupy.asarray(packed.basis if packed.basis.size else np.zeros(4, np.uint16))
        self._heads, self._order = cupy.asarray(packed.heads), cupy.asarray(packed.order)
        self._unsketched = False  # whether states were loaded before the flush kernel could be
        self._grids: dict[int, tuple[int, int, int]] = {}
        self._draft_read: DraftReader | None = None
        self._commit: Committer | None = None
        if self.arrays.activation_dtype is not None:
            self._make_ring(window)
        elif given := {"keys", "values", "gates", "betas"} & self._given.keys():
            raise ValueError(f"activation_dtype: expected a type with memory for {min(given)!r}, got None")
        else:
            self._take_memory(last=True)
        self.arrays.device.synchronize()  # the first call may come on another stream

    @property
    def parts(self) -> tuple[SlotPart, ...]:
        """See `sketchssm.heads.engine.ExactEngine`."""
        raw_gate = bool(self._raw_gate)
        return slot_parts(self.layer, self.window, self._packed, self.state_dtype, self._settled, raw_gate)

    @staticmethod
    def parts_of(  # type: ignore[override]
        layer: Layer,
        window: int,
        *,
        state_dtype: str = "float32",
        gate: GateInput | None = None,
        activation_dtype: str | None = None,
    ) -> tuple[SlotPart, ...]:
        """Parts of a slot; see `sketchssm.heads.engine.ExactEngine`."""
        activation = activation_dtype or "bfloat16"
        return slot_parts(layer, window, pack_full_state(layer), state_dtype, activation, gate is not None)

    def variants(self) -> list[Variant]:
        """Every kernel that the engine may launch: read and flush."""
        import cupy

        packed, layer = self._packed, self.layer
        constants = self._constants() | {
            "W": self.window,
            "FULL_STATE_HEADS": packed.full_state,
            "SKETCHED_HEADS": layer.heads - packed.full_state,
            "RANK_MAX": int(max(packed.heads[:, 0].max(), 1)),
            **packed.constants,
        }
        prior = constants.pop("PRIOR")
        raw_keys = self._types[0] == 0 and layer.kind != "kda"  # RAW_KEYS in flush/stages.cuh
        blocks = blocks_per_multiprocessor(layer, raw_keys, constants["MAP"] == MAPS["dense"])
        pace = read_pace(cupy.cuda.Device().attributes)
        flush = constants | {"PRIOR": prior, "MIN_BLOCKS": blocks}
        return [Variant("read", constants | {"PACE": pace}), Variant("flush", flush)]

    def fit(self) -> None:
        """Refuse a device that is too small."""
        check_shared(*self.variants())

    def _load(self, modules: list[Any]) -> None:
        """Take the kernels from the modules of `variants`, and sketch the states that were loaded before."""
        import cupy

        if not self.ring:
            self._make_ring(self.window)
        read, flush = modules
        processors = int(cupy.cuda.Device().attributes["MultiProcessorCount"])
        memory: list[Any] = []
        for array in (self.state, *self.ring, self.sketch, self.cursor):
            memory += part_of(array)
        memory += [self._gate, self._projection]
        inputs = TOKEN_INPUTS + SLOT_INPUTS

        kernel = read.get_function("read_step")
        shared = 0
        self._read_limits: tuple[int, ...] = ()
        if self._packed.full_state < self.layer.heads:  # a block divides all shared memory among its warps
            shared = kernel.max_dynamic_shared_size_bytes = shared_limit()
            names = ("read_row_tiles", "read_max_tiles", "read_max_warps")
            self._read_limits = (processors, *(size_of(read, name) for name in names))
        self._read_memory = (*memory, self._heads, self._order)
        last = (*self._slot_limits, np.int32(shared))
        self._read = Launcher(kernel, self._read_memory, inputs + "Q", last, shared=shared)  # the workspace

        kernel = flush.get_function("flush_step")
        shared = kernel.max_dynamic_shared_size_bytes = size_of(flush, "flush_shared_bytes")
        self._flush_threads = size_of(flush, "flush_threads")
        resident = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
            kernel.kernel.ptr, self._flush_threads, shared
        )
        self.flush_blocks = processors * resident  # of one launch, at most
        clock = np.uint64(0) if self._clock is None else self._clock
        self._flush = [
            Launcher(
                kernel,
                (*memory, self._basis, self._heads),
                inputs + "iiQiQ",  # whether the clock moves on; tokens of a draft, and lengths of its rows; workspace
                (*self._slot_limits, clock, np.int32(mode), np.float32(self._packed.ridge)),
                shared=shared,
            )
            for mode in (STEP, FOLD, LOAD, DRAFT)
        ]
        values = (*TOKEN_VALUES, *SLOT_VALUES)
        nothing = "zero", "zero", "zero"  # no draft
        launches = [
            (self._read, (*values, "workspace")),
            (self._flush[STEP], (*values, "one", *nothing, "workspace")),
        ]
        self._direct = DirectStep(self.arrays, self.layer, launches, self.num_slots)
        if self._unsketched:
            self._unsketched = False
            self.arrays.device.synchronize()  # states may have been loaded on any stream
            self._rebuild(self.arrays.all_slots(self.num_slots, self.num_slots), LOAD)
            self.arrays.device.synchronize()  # the next call may be on any stream too

    def step(self, tokens: StepInputs, slots: Slots, out: Pointer) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        self._prepare()
        batch, length = out.shape[:2]
        spans: list[tuple[int, int]] = [(0, batch)] if batch else []
        if batch > MAX_ROWS:
            spans = [(first, min(first + MAX_ROWS, batch)) for first in range(0, batch, MAX_ROWS)]
        workspace, captured = self._workspaces.get()
        for t in range(length):
            if t == 1:
                slots = slots.again()
            ticks = 1  # the clock moves on once for all parts of a batch
            for first, end in spans:
                part = slots if end - first == batch else slots.rows(first, end)
                self._window_step(
                    (
                        *tokens.token(first, t),
                        out.address + first * out.row + t * out.step,
                        *tokens.row_strides,
                        out.row,
                        *part.arguments,
                        end - first,
                    ),
                    end - first,
                    ticks,
                    workspace,
                    captured,
                )
                ticks = 0

    def _window_step(self, inputs: tuple[int, ...], batch: int, ticks: int, workspace: Any, captured: bool) -> None:
        """Decode one token of up to `MAX_ROWS` rows: reads, then flushes of the rows that are due."""
        if batch not in self._grids:
            self._grids[batch] = *self._read_grid(batch), self._flush_grid(batch)
        blocks, threads, flush_blocks = self._grids[batch]
        try:
            address = workspace.data.ptr
            self._read(blocks, threads, *inputs, address)
            self._flush[STEP](flush_blocks, self._flush_threads, *inputs, ticks, 0, 0, 0, address)
        except BaseException:  # the next flush must not take the rows that this read has listed
            workspace.fill(0)
            raise
        if not captured:
            grids = [(blocks, threads), (flush_blocks, self._flush_threads)]
            self._direct.learn(batch, grids, address)

    def draft(self, tokens: StepInputs, lengths: Slots | None, slots: Slots, out: Pointer) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        self._prepare()
        read = self._load_drafts()
        batch, length = out.shape[:2]
        workspace, _ = self._workspaces.get()
        address = workspace.data.ptr
        for first in range(0, batch if length else 0, MAX_ROWS):
            rows = first, min(first + MAX_ROWS, batch)
            part, count = slots.rows(*rows), rows[1] - first
            inputs = *tokens.token(first), out.address + first * out.row, *tokens.row_strides, out.row
            own = (0, 0) if lengths is None else lengths.rows(*rows).number
            draft = int(rows[1] == batch), length, *own  # the clock moves on after the last flush has looked at it
            given = *part.arguments, count, *draft
            checked = address + SLOTS, 0, 0, 0, count, *draft  # slots as the flush leaves them
            blocks, threads = self._read_grid(count)
            self._flush[DRAFT](self._flush_grid(count), self._flush_threads, *inputs, *given, address)
            read(blocks, threads, *inputs, *tokens.steps, *checked)

    def commit(self, accepted: Slots, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        self._load_commit()(accepted, slots)

    def _draft_variant(self) -> Variant:
        return draft_variant(self.variants()[0])

    def _load_drafts(self) -> Any:
        if self._draft_read is None:
            variant, sketched = self._draft_variant(), self._packed.full_state < self.layer.heads
            self._draft_read = DraftReader(variant, self._read_memory, self._slot_limits, self._clock, sketched)
        self._load_commit()
        return self._draft_read

    def _load_commit(self) -> Committer:
        if self._commit is None:
            self._commit = Committer(self.cursor, self._clock, self.window, self._slot_limits)
        return self._commit

    def _read_grid(self, batch: int) -> tuple[int, int]:
        """Blocks of a read, and a block's threads."""
        if not self._read_limits:  # all heads read full states
            return batch * self._packed.full_state, 128
        processors, row_tiles, max_tiles, max_warps = self._read_limits
        tiles = batch * row_tiles
        blocks = max(min(tiles, processors), -(-tiles // max_tiles))
        return blocks, 32 * min(max(-(-tiles // blocks), LEAST_READ_WARPS), max_warps)

    def _flush_grid(self, batch: int) -> int:
        """Blocks of a flush."""
        return min(self.flush_blocks, batch * self.layer.heads)

    def _rebuild(self, slots: Slots, mode: int) -> None:
        """Launch flushes without tokens, to fold rings or to sketch states."""
        workspace = self._workspaces.get()[0].data.ptr
        for first in range(0, slots.shape[0], MAX_ROWS):
            part = slots.rows(first, first + MAX_ROWS)
            batch = part.shape[0]
            blocks = self._flush_grid(batch)
            self._flush[mode](blocks, self._flush_threads, *NO_TOKENS, *part.arguments, batch, 0, 0, 0, 0, workspace)

    def load_state(self, state: Pointer, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        super().load_state(state, slots.again() if self.ring else slots)
        if not self.ring:  # the flush kernel must know the ring's type: the first step sketches, when it is settled
            self._unsketched = True
            return
        self._prepare(late=False)
        self._rebuild(slots, LOAD)

    def flush(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        if self.ring:  # without a ring nothing is buffered
            self._prepare(late=False)
            self._rebuild(slots, FOLD)

    def reset(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        super().reset(slots)
        self._set_sketch(None, slots.again())

    def adopt(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.ExactEngine`."""
        if not self.ring:  # as in `load_state`
            self._unsketched = True
            return
        self._prepare(late=False)
        self._rebuild(slots, LOAD)

    def _begin_memory(self) -> None:
        """Do nothing: the constructor allocates windows and sketches later."""

    def _copies(self) -> Copier:
        if not self.ring:
            self._make_ring(self.window)
        return super()._copies()
