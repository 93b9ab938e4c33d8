"""Decode with windows on the device: replay and sketches. A step only launches kernels on its stream."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from sketchssm.arrays.options import DEFAULTS, HOST_OPTIONS, EngineOptions
from sketchssm.cuda.constants import DRAFT, FOLD, LOAD, MAPS, STEP, TYPES
from sketchssm.cuda.direct import DirectStep
from sketchssm.cuda.engine import DeviceEngine
from sketchssm.cuda.flushes import Encodes, Flushes
from sketchssm.cuda.kernel_parameters import KERNELS, LENGTHS
from sketchssm.cuda.layout import PackedPlan, pack_full_state, pack_plan
from sketchssm.cuda.limits import check_layer, check_plan, check_shared, check_window
from sketchssm.cuda.memory import slot_parts
from sketchssm.cuda.modules import Variant, load, warmup
from sketchssm.cuda.occupancy import blocks_per_multiprocessor, read_pace
from sketchssm.cuda.pointer import Pointer, Slots, StepInputs
from sketchssm.cuda.reads import DraftReads, Reads, draft_variant
from sketchssm.cuda.slots import COMMIT, COPY, SLOTS, part_of
from sketchssm.cuda.workspaces import CHECKED_SLOTS, spans
from sketchssm.layer.recurrence import Layer
from sketchssm.layer.slots import MAX_DRAFTS, SlotPart
from sketchssm.plans.plan import SketchPlan


class WindowEngine(DeviceEngine):
    """The kernels of ``read.cu``, ``flush.cu`` and ``read_draft.cu`` on a layer's slots; see `ExactEngine`.

    `packed` tells which heads have a sketch, and the map of the sketches.
    """

    supports: ClassVar = HOST_OPTIONS | {"activation_dtype", "output_dtype", "phase"}

    def __init__(self, layer: Layer, num_slots: int, window: int, packed: PackedPlan, options: EngineOptions) -> None:
        import cupy
        import ml_dtypes

        check_window(window)
        super().__init__(layer, num_slots, options, window, packed)
        self.drafts, self.commit = min(MAX_DRAFTS, window - 1), self.slots.commit
        self._packed, self._sketched = packed, packed.full_state < layer.heads
        rows = packed.projection
        if packed.dtype != "float32":
            rows = rows.astype(ml_dtypes.bfloat16).view(np.uint16)
        self._projection = cupy.asarray(rows if rows.size else np.zeros(1, rows.dtype))
        self._basis = cupy.asarray(packed.basis if packed.basis.size else np.zeros(4, np.uint16))
        self._heads, self._order = cupy.asarray(packed.heads), cupy.asarray(packed.order)
        self._kernels: tuple[Reads, Flushes, Encodes | None] | None = None
        self._draft_reads: DraftReads | None = None
        self._grids: dict[int, list[tuple[int, int]]] = {}  # of a step, by rows
        self._unsketched = False  # whether states were loaded before the flush kernel could be
        self.arrays.device.synchronize()  # the first call may come on another stream

    def variants(self) -> list[Variant]:
        """Every kernel of a step: read, flush, and encode if the flush does not sketch (ENCODES)."""
        import cupy

        packed, layer = self._packed, self.layer
        constants = self._constants() | {
            "W": self.window,
            "FULL_STATE_HEADS": packed.full_state,
            "SKETCHED_HEADS": layer.heads - packed.full_state,
            "RANK_MAX": int(max(packed.heads[:, 0].max(), 1)),
            **packed.constants,
        }
        raw_keys = constants["ACT"] == TYPES["bfloat16"] and not layer.channel_decays  # RAW_KEYS in flush/config.cuh
        blocks = blocks_per_multiprocessor(layer, raw_keys, constants["MAP"] == MAPS["dense"])
        pace = read_pace(cupy.cuda.Device().attributes)
        monitor = {"MONITOR": self._options.monitor} if self._options.monitor else {}
        if self._options.tolerance is not None:
            monitor["TOLERANCE"] = 1  # the number is an argument, as each layer may have its own
        read, flush = constants | monitor | {"PACE": pace}, constants | monitor | {"BLOCKS": blocks}
        encode = []
        if packed.adapts:
            flush["MAP"] = MAPS["subspace"]
            if not raw_keys:
                flush.pop("RESIDUAL", None)
                encode = [Variant("encode", constants)]
        return [Variant("read", read), Variant("flush", flush), *encode]

    def fit(self) -> None:
        """Refuse a device that is too small."""
        check_shared(*self.variants()[:2])

    def warmup(self, activation_dtype: str | None = None, drafts: bool = False) -> None:
        """See `sketchssm.heads.engine.Engine`; kernels are compiled in parallel."""
        self.arrays.warmup(activation_dtype or self.arrays.activation_dtype or "bfloat16", self.num_slots)
        steps = self.variants()
        warmup([*steps, SLOTS, COPY, *((draft_variant(steps[0]), COMMIT) if drafts else ())])
        if self._kernels is None:
            self._prepare()
        self.slots.load_copy()
        if drafts:
            self._load_drafts()

    def _prepare(self, late: bool = True) -> tuple[Reads, Flushes, Encodes | None]:
        """Load the kernels of a step, now that the activations' type is known; `late` warns if a step has to wait."""
        self.fit()  # a type that the first call has settled may take more room
        slots, packed = self.slots, self._packed
        modules = [load(variant, late=late) for variant in self.variants()]
        slots.settle(str(self.arrays.activation_dtype))
        memory = self._memory()
        errors: tuple[Any, ...] = ()
        if self._options.monitor:
            errors = *part_of(self.memory["errors"]), np.float32(self._options.tolerance or 0)
        fixed = *memory, self._heads, self._order, *errors
        reads = Reads(modules[0], fixed, slots, packed.full_state, self._sketched)
        fixed = *memory, self._basis, self._heads, *errors
        flushes = Flushes(modules[1], fixed, slots, self.layer.heads, packed.ridge)
        encodes = self._encodes(modules[2]) if len(modules) > 2 else None
        no_draft = dict.fromkeys(("draft_tokens", *LENGTHS.names), "zero")
        launches = [
            (reads.launch, KERNELS["read_step"].given(scan_from="zero")),
            (flushes.launches[STEP], KERNELS["flush_step"].given(scan_from="zero", ticks="one", **no_draft)),
        ]
        if encodes is not None:
            launches.append((encodes.launch, KERNELS["encode_states"].names))
        self._direct = DirectStep(self.arrays, self.layer, launches, self.num_slots)
        self._kernels = reads, flushes, encodes
        if self._unsketched:
            self._unsketched = False
            self.arrays.device.synchronize()  # states may have been loaded on any stream
            self._rebuild(LOAD, self.arrays.all_slots(self.num_slots, self.num_slots))
            self.arrays.device.synchronize()  # the next call may be on any stream too
        return self._kernels

    def _encodes(self, module: Any) -> Encodes:
        slots, arguments = self.slots, list[Any]()
        for array in (slots.state, self.memory["sketch"], slots.cursor):
            arguments += part_of(array)
        fixed = (*arguments, self._basis, self._heads, self._order)
        return Encodes(module, fixed, self.layer.heads - self._packed.full_state)

    def _memory(self) -> list[Any]:
        """First arguments of all kernels of windows: the slots' memory, the gate, and the projection."""
        slots, arguments = self.slots, list[Any]()
        for array in (slots.state, *slots.ring):
            arguments += part_of(array)
        arguments += part_of(self.memory["sketch"]) if self._packed.slot_elements else (np.uint64(0), np.int32(0))
        return [*arguments, *part_of(slots.cursor), self._gate, self._projection]

    def _load_drafts(self) -> DraftReads:
        """The kernel of draft reads; the first call loads the kernels of drafts and commits."""
        if self._draft_reads is None:
            fixed = *self._memory(), self._heads, self._order
            self._draft_reads = DraftReads(draft_variant(self.variants()[0]), fixed, self.slots, self._sketched)
            self.slots.load_commit()
        return self._draft_reads

    def step(self, tokens: StepInputs, slots: Slots, out: Pointer) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        reads, flushes, encodes = self._kernels or self._prepare()
        batch, length = out.shape[:2]
        workspace, captured = self.slots.workspace()
        scratch = workspace.data.ptr
        for t in range(length):
            if t == 1:
                slots = slots.again()
            ticks = 1  # the clock moves on once for all parts of a batch
            for first, end in spans(batch):
                rows = end - first
                part = slots if rows == batch else slots.rows(first, end)
                address = out.address + first * out.row + t * out.step
                inputs = *tokens.token(first, t), address, *tokens.row_strides, out.row, *part.arguments, rows
                grids = self._grids.get(rows)
                if grids is None:
                    grids = self._grids[rows] = [part.grid(rows) for part in (reads, flushes, encodes) if part]
                try:
                    reads.launch(*grids[0], *inputs, scratch)
                    flushes.launches[STEP](*grids[1], *inputs, ticks, 0, 0, 0, scratch)
                    if encodes is not None:
                        encodes.launch(*grids[2], rows, scratch)
                except BaseException:  # the next flush must not take the rows that this read has listed
                    workspace.fill(0)
                    raise
                if not captured:
                    self._direct.learn(rows, grids, scratch)
                ticks = 0

    def draft(self, tokens: StepInputs, lengths: Slots | None, slots: Slots, out: Pointer) -> None:
        """See `sketchssm.heads.engine.ExactEngine`."""
        reads, flushes, encodes = self._kernels or self._prepare()
        draft_reads = self._load_drafts()
        batch, length = out.shape[:2]
        scratch = self.slots.workspace()[0].data.ptr
        for first, end in spans(batch) if length else ():
            part, rows = slots.rows(first, end), end - first
            inputs = *tokens.token(first), out.address + first * out.row, *tokens.row_strides, out.row
            own = (0, 0) if lengths is None else lengths.rows(first, end).number
            draft = int(end == batch), length, *own  # the clock moves on after the last flush has looked at it
            checked = scratch + CHECKED_SLOTS, 0, 0, 0, rows, *draft  # slots as the flush leaves them
            flushes.launches[DRAFT](*flushes.grid(rows), *inputs, *part.arguments, rows, *draft, scratch)
            if encodes is not None:
                encodes.launch(*encodes.grid(rows), rows, scratch)
            draft_reads(*reads.grid(rows), *inputs, *tokens.steps, *checked)

    def load_state(self, state: Pointer, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        self.slots.load(state, slots.again() if self.slots.ring else slots)
        self.adopt(slots)

    def adopt(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.ExactEngine`."""
        self.slots.clear_errors(slots)
        if self.slots.ring:
            self._rebuild(LOAD, slots)
        else:  # the flush kernel must know the ring's type: the first step sketches, when it is settled
            self._unsketched = True

    def flush(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        if self.slots.ring:  # without a ring nothing is buffered
            self._rebuild(FOLD, slots)

    def _rebuild(self, mode: int, slots: Slots) -> None:
        """Fold the rings of slots, or sketch their states, without tokens."""
        _, flushes, encodes = self._kernels or self._prepare(late=False)
        scratch = self.slots.workspace()[0].data.ptr
        for first, end in spans(slots.shape[0]):
            rows = end - first
            flushes.rebuild(mode, slots.rows(first, end), rows, scratch)
            if encodes is not None:
                encodes.launch(*encodes.grid(rows), rows, scratch)


class ReplayEngine(WindowEngine):
    """Replay: every head reads its full state; arguments as of `WindowEngine`."""

    def __init__(self, layer: Layer, num_slots: int, window: int, options: EngineOptions = DEFAULTS) -> None:
        super().__init__(layer, num_slots, window, pack_full_state(layer), options)

    @staticmethod
    def parts_of(layer: Layer, window: int, options: EngineOptions) -> tuple[SlotPart, ...]:
        """Parts of a slot; see `sketchssm.heads.engine.ExactEngine`."""
        check_layer(layer)
        check_window(window)
        return slot_parts(layer, options, window)


class SketchEngine(WindowEngine):
    """Exact states, written once in a window and read through their sketches in between."""

    supports = WindowEngine.supports | {"monitor", "tolerance"}

    def __init__(
        self,
        plan: SketchPlan,
        num_slots: int,
        sketch_dtype: str = "bfloat16",
        options: EngineOptions = DEFAULTS,
    ) -> None:
        check_plan(plan)
        packed = pack_plan(plan, sketch_dtype, options.state_dtype)
        super().__init__(plan.layer, num_slots, plan.window, packed, options)

    @staticmethod
    def parts_of(plan: SketchPlan, sketch_dtype: str, options: EngineOptions) -> tuple[SlotPart, ...]:
        """Parts of a slot; see `sketchssm.heads.engine.ExactEngine`."""
        check_plan(plan)
        return slot_parts(plan.layer, options, plan.window, pack_plan(plan, sketch_dtype, options.state_dtype))
