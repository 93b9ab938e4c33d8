"""Buffered replay and sketches on the device. Arrays are CuPy arrays; a step only launches kernels on its stream."""

from __future__ import annotations

from typing import Any

import numpy as np

from sketchssm.coefficients import RIDGE_FLOOR
from sketchssm.cuda.launch import launcher
from sketchssm.cuda.layout import PackedPlan, pack_plan
from sketchssm.cuda.limits import check_plan, check_shared, check_window, shared_limit
from sketchssm.cuda.modules import Variant, load, size_of
from sketchssm.cuda.standard import StandardEngine
from sketchssm.plan import SketchPlan
from sketchssm.recurrence import Layer, Tokens

__all__ = ["ReplayEngine", "SketchEngine", "StandardEngine"]

MAX_ROWS = 512
SCHEDULE_WORDS = 6 + 2 * MAX_ROWS
"""Of `Schedule` in ``cuda_src/schedule.cuh``, with what aligns its rows."""
LEAST_READ_WARPS = 4
"""Warps of a block of the read kernel, however little it has to read. It needs two: those without items work out
products of keys that others wait for, and put tokens into the ring."""

KERNELS = ("read_step", "flush_step")

STEP, FOLD, LOAD = 0, 1, 2

FLUSH_BLOCKS = {
    ("mamba2", 64): 4,
    ("mamba2", 80): 3,
    ("mamba2", 96): 2,
    ("gdn", 64): 3,
    ("gdn", 80): 2,
    ("gdn", 96): 2,
    ("gdn", 128): 2,
}
"""Blocks of the flush that registers leave room for on a multiprocessor, by kind and value_dim; else one. Measured on
H200: what spills costs more than what waits."""

MOST_DENSE_BLOCKS = 3
"""The same for dense maps, where a warp more leaves less."""


class SketchEngine(StandardEngine):
    """Exact states, written once a window and read through their sketches in between.

    Parameters
    ----------
    plan : SketchPlan
        Bases, ranks and settings of the layer.
    num_slots : int
        Number of state slots.
    sketch_dtype : {"bfloat16", "float32"}, default "bfloat16"
        Type of sketches and maps.
    **memory
        See `StandardEngine`.
    """

    def __init__(self, plan: SketchPlan, num_slots: int, sketch_dtype: str = "bfloat16", **memory: Any) -> None:
        super().__init__(plan.layer, num_slots, **memory)
        self.plan = plan
        slices = 1 if sketch_dtype == "bfloat16" else 2
        self._setup(plan.window, pack_plan(plan, slices), plan.map.effective_ridge, sketch_dtype)

    def _setup(self, window: int, packed: PackedPlan, ridge: float, sketch_dtype: str) -> None:
        import cupy
        import ml_dtypes

        slots = self.num_slots
        check_window(window)
        plan: SketchPlan | None = getattr(self, "plan", None)
        if plan is not None:
            check_plan(plan)
        self.window = window
        self.ring: tuple[Any, ...] = ()
        self._unsketched = False
        bf16 = sketch_dtype == "bfloat16"
        self.sketch = cupy.zeros((slots, packed.slot_elements), dtype=np.uint16 if bf16 else np.float32)
        rows = packed.projection.astype(ml_dtypes.bfloat16).view(np.uint16) if bf16 else packed.projection
        self._projection = cupy.asarray(rows if rows.size else np.zeros(1, rows.dtype))
        self._basis = cupy.asarray(packed.basis if packed.basis.size else np.zeros(4, np.uint16))
        self._heads, self._order = cupy.asarray(packed.heads), cupy.asarray(packed.order)
        self._dense = packed.dense
        self._ridge = np.float32(ridge)
        self._schedule = cupy.zeros(SCHEDULE_WORDS, dtype=np.int32)  # from the read kernel to the flush kernel
        self._sketch_type = 0 if bf16 else 2
        self._rank_max = int(max(packed.heads[:, 0].max(), 1))
        if self.arrays.activation is not None:
            self._make_ring()
        self.arrays.device.synchronize()  # the first call may come on another stream

    def _make_ring(self) -> None:
        """Make room for a window's raw inputs, in the activations' type."""
        import cupy

        layer, slots, window = self.layer, self.num_slots, self.window
        activation = {0: np.uint16, 1: np.float16, 2: np.float32}[self._types[0]]
        gates = activation if self._raw_gate else np.float32
        self.ring = (
            cupy.zeros((slots, layer.key_heads, window, layer.key_dim), dtype=activation),
            cupy.zeros((slots, layer.heads, window, layer.value_dim), dtype=activation),
            cupy.zeros((slots, layer.heads, window, layer.gate_channels), dtype=gates),
            cupy.zeros((slots, layer.heads, window) if layer.erases else (1,), dtype=np.float32),
        )

    def variants(self) -> list[Variant]:
        """Every kernel that the engine may launch."""
        plan: SketchPlan | None = getattr(self, "plan", None)
        storage = {"factors": 0, "dense": 1, "shared": 2}["shared" if plan is None else plan.map.storage]
        constants = self._constants() | {
            "W": self.window,
            "DENSE_HEADS": self._dense,
            "SKETCHED_HEADS": self.layer.heads - self._dense,
            "RANK_MAX": self._rank_max,
            "PIVOTS": plan.map.pivots or 1 if plan is not None else 1,
            "MAP": storage,
            "SKETCH": self._sketch_type,
        }
        blocks = FLUSH_BLOCKS.get((self.layer.kind, self.layer.value_dim), 1) if self._raw_keys else 1
        flush = constants | {
            "PRIOR": int(plan is not None and plan.map.name == "prior"),
            "MIN_BLOCKS": min(blocks, MOST_DENSE_BLOCKS) if storage == 1 else blocks,
        }
        return [Variant("read", constants), Variant("flush", flush)]

    def _kernel(self, index: int, late: bool = False) -> tuple[Any, int, int]:
        """A kernel with its dynamic shared memory and the blocks that fill the device, where work is shared out."""
        import cupy

        name = KERNELS[index]
        if name not in self._launches:
            module = load(self.variants()[index], late=late)
            kernel, shared, blocks = module.get_function(name), 0, 0
            if name == "flush_step":
                shared = kernel.max_dynamic_shared_size_bytes = size_of(module, "flush_shared_bytes")
                self._flush_threads = size_of(module, "flush_threads")
                blocks = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
                    kernel.kernel.ptr, self._flush_threads, shared
                )
            elif self._dense < self.layer.heads:  # one block shares all there is out to its warps
                shared = kernel.max_dynamic_shared_size_bytes = shared_limit()
                names = ("read_row_tiles", "read_max_tiles", "read_max_warps")
                self._read_limits = tuple(size_of(module, name) for name in names)
                blocks = 1
            blocks *= int(cupy.cuda.Device().attributes["MultiProcessorCount"])
            self._launches[name] = launcher(kernel), shared, blocks
        return self._launches[name]

    @property
    def _raw_keys(self) -> bool:
        """Whether the flush multiplies with keys as they come (RAW in stage.cuh)."""
        return self._types[0] == 0 and self.layer.kind != "kda"

    def fit(self) -> None:
        """Refuse what the device is too small for."""
        check_shared(*self.variants())

    def _prepare(self) -> None:
        """Get ready to launch, once the activations' type is settled: a ring, and sketches of what was loaded."""
        if not self.ring:
            self.fit()  # a wider type takes more room
            self._make_ring()
        for index in range(len(KERNELS)):
            self._kernel(index, late=True)
        if self._unsketched:
            self._unsketched = False
            self._rebuild(self.arrays.rows(self.num_slots, self.num_slots), LOAD)
        self._ready = True

    def step(self, tokens: Tokens, slots: Any, out: Any) -> None:
        """See `sketchssm.backends.Engine`."""
        self._check(tokens, out)
        if not self._ready:
            self._prepare()
        if not out.shape[0] or not out.shape[1]:
            return
        if out.shape[0] <= MAX_ROWS:
            for t in range(out.shape[1]):
                self._token(tokens, slots, out, t)
            return
        for first in range(0, out.shape[0], MAX_ROWS):
            rows = slice(first, first + MAX_ROWS)
            part = Tokens(*(x if x is None else x[rows] for x in tokens))
            for t in range(out.shape[1]):
                self._token(part, slots[rows], out[rows], t)

    def _memory(self) -> tuple[Any, ...]:
        """Where the slots are, and the gate, for both kernels."""
        own = (self.state, self._slot_stride, self.position, *self.ring, self._gate)
        return (*own, self.sketch, np.int64(self.sketch.shape[1]))

    def _token(self, tokens: Tokens, slots: Any, out: Any, t: int) -> None:
        batch, length = out.shape[:2]
        kernel, shared, most = self._kernel(0)
        state = self._memory()
        inputs = (*self._pointers(tokens), out, slots, np.int32(batch), np.int32(length), np.int32(t))
        blocks, warps = batch * self._dense, 4
        if most:
            parts, most_items, most_warps = self._read_limits
            items = batch * parts
            blocks = max(min(items, most), -(-items // most_items))
            warps = min(max(-(-items // blocks), LEAST_READ_WARPS), most_warps)
        limits = np.int32(self.num_slots), np.int32(shared)
        args = (*state, self._projection, self._heads, self._order, *inputs, self._schedule, *limits)
        try:
            kernel(blocks, 32 * warps, args, shared)
            self._flush(state, inputs, STEP)
        except BaseException:  # the next flush must not take what this read leaves for its own
            self._schedule.fill(0)
            raise

    def _flush(self, state: tuple[Any, ...], inputs: tuple[Any, ...], mode: int) -> None:
        kernel, shared, blocks = self._kernel(1)
        plan = (self._projection, self._basis, self._heads)
        args = (*state, *plan, *inputs, self._schedule, np.int32(mode), self._ridge)
        blocks = min(blocks, int(inputs[-3]) * self.layer.heads)
        kernel(blocks, self._flush_threads, args, shared)

    def _rebuild(self, slots: Any, mode: int) -> None:
        state = self._memory()
        null = np.uint64(0)
        for first in range(0, slots.shape[0], MAX_ROWS):
            part = slots[first : first + MAX_ROWS]
            counts = np.int32(part.shape[0]), np.int32(1), np.int32(0)
            self._flush(state, (null, null, null, null, null, null, part, *counts), mode)

    def load_state(self, state: Any, slots: Any) -> None:
        """See `sketchssm.backends.Engine`."""
        super().load_state(state, slots)
        if not self.ring:  # whose type the flush kernel must know: sketch when the first step has settled it
            self._unsketched = True
        else:
            self._rebuild(slots, LOAD)

    def flush(self, slots: Any) -> None:
        """See `sketchssm.backends.Engine`."""
        if self.ring:  # nothing is buffered before there is one
            self._rebuild(slots, FOLD)

    def reset(self, slots: Any) -> None:
        """See `sketchssm.backends.Engine`."""
        super().reset(slots)
        self._write(self.sketch, None, slots, self.position)


class ReplayEngine(SketchEngine):
    """Buffered replay: the same kernels with every head dense.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    num_slots : int
        Number of state slots.
    window : int
        Tokens from one flush to the next (W).
    **memory
        See `StandardEngine`.
    """

    def __init__(self, layer: Layer, num_slots: int, window: int, **memory: Any) -> None:
        StandardEngine.__init__(self, layer, num_slots, **memory)
        heads = np.zeros((layer.heads, 4), dtype=np.int32)
        order = np.arange(layer.heads, dtype=np.int32)
        nothing = np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.uint16)
        self._setup(window, PackedPlan(heads, order, layer.heads, 8, *nothing), RIDGE_FLOOR, "bfloat16")
