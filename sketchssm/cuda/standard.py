"""Standard decode on the device: every token reads and writes its state."""

from __future__ import annotations

from typing import ClassVar

from sketchssm.arrays.options import DEFAULTS, HOST_OPTIONS, EngineOptions
from sketchssm.cuda.constants import STANDARD_WARPS
from sketchssm.cuda.direct import DirectStep
from sketchssm.cuda.engine import DeviceEngine
from sketchssm.cuda.kernel_parameters import KERNELS, TOKEN_STEPS
from sketchssm.cuda.launch import Launcher
from sketchssm.cuda.limits import check_layer
from sketchssm.cuda.memory import slot_parts
from sketchssm.cuda.modules import Variant, load, warmup
from sketchssm.cuda.pointer import Pointer, Slots, StepInputs
from sketchssm.cuda.slots import COMMIT, COPY, SLOTS, part_of
from sketchssm.layer.recurrence import Layer
from sketchssm.layer.slots import SlotPart

MANY_WARPS, BLOCK_BYTES = 1 << 14, 4096
"""With at least so many warps, a block has at most so many bytes of state: blocks start in the order of memory, and
smaller blocks keep loads and stores closer to that order (on H200 1% to 2% faster; slower by as much with fewer
warps)."""


def standard_draft_variant(step: Variant, drafts: int) -> Variant:
    """The kernels of drafts and commits of a standard step."""
    return Variant("standard_draft", dict(step.constants) | {"DRAFTS": drafts})


class StandardEngine(DeviceEngine):
    """The kernels of ``standard.cu`` and ``standard_draft.cu`` on a layer's slots; see `ExactEngine`."""

    supports: ClassVar = HOST_OPTIONS | {"activation_dtype", "output_dtype", "drafts"}

    def __init__(self, layer: Layer, num_slots: int, options: EngineOptions = DEFAULTS) -> None:
        super().__init__(layer, num_slots, options)
        self.drafts = options.drafts
        # rows of a warp, measured on H200; eight rows of 16 bits have as many bytes in flight as four of float32
        self._value_rows = 4 if layer.erases and options.state_dtype == "float32" else 8
        self.load_state, self.adopt = self.slots.load, self.slots.begin
        self._step: Launcher | None = None
        self._drafts: tuple[Launcher, ...] = ()  # of drafts and of commits

    @staticmethod
    def parts_of(layer: Layer, options: EngineOptions) -> tuple[SlotPart, ...]:
        """Parts of a slot; see `sketchssm.heads.engine.ExactEngine`."""
        check_layer(layer)
        return slot_parts(layer, options)

    def fit(self) -> None:
        """Nothing: every device is large enough."""

    def variants(self) -> list[Variant]:
        """Every kernel of a step."""
        return [Variant("standard", self._constants() | {"ROWS": self._value_rows})]

    def warmup(self, activation_dtype: str | None = None, drafts: bool = False) -> None:
        """See `sketchssm.heads.engine.Engine`; kernels are compiled in parallel."""
        self.arrays.warmup(activation_dtype or self.arrays.activation_dtype or "bfloat16", self.num_slots)
        steps = self.variants()
        warmup([*steps, SLOTS, COPY, *((standard_draft_variant(steps[0], self.drafts), COMMIT) if drafts else ())])
        self._prepare(late=False)
        self.slots.load_copy()
        if drafts:
            self._load_drafts()

    def _prepare(self, late: bool = True) -> Launcher:
        """Load the kernel of a step, now that the activations' type is known; `late` warns if a step has to wait."""
        self.slots.settle(str(self.arrays.activation_dtype))
        kernel = load(self.variants()[0], late=late).get_function("standard_step")
        fixed = *part_of(self.state), self._gate
        parameters = KERNELS["standard_step"]
        self._step = step = Launcher(kernel, fixed, parameters.letters, self.slots.limits)
        values = parameters.given(**dict.fromkeys(TOKEN_STEPS.names, "zero"), scan_from="zero", tokens="one")
        self._direct = DirectStep(self.arrays, self.layer, [(step, values)], self.num_slots)
        return step

    def _load_drafts(self) -> tuple[Launcher, ...]:
        """The kernels of drafts and commits; the first call loads them."""
        if not self._drafts:
            slots, fixed = self.slots, [*part_of(self.state), self._gate]
            module = load(standard_draft_variant(self.variants()[0], self.drafts), late=True)
            for array in (*slots.ring, slots.cursor):
                fixed += part_of(array)
            self._drafts = tuple(
                Launcher(module.get_function(name), tuple(fixed), KERNELS[name].letters, slots.limits)
                for name in ("standard_draft", "standard_commit")
            )
            slots.load_commit()
        return self._drafts

    def step(self, tokens: StepInputs, slots: Slots, out: Pointer) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        step = self._step or self._prepare()
        batch, length = out.shape[:2]
        if batch and length:
            grid = self._grid(batch)
            inputs = *tokens.addresses, out.address, *tokens.row_strides, out.row, *tokens.steps
            step(*grid, *inputs, *slots.arguments, batch, length)
            self.flush(slots)
            if not self.drafts:  # a direct step would not drop drafts
                self._direct.learn(batch, [grid], 0)

    def draft(self, tokens: StepInputs, lengths: Slots | None, slots: Slots, out: Pointer) -> None:
        """See `sketchssm.heads.engine.ExactEngine`."""
        if self._step is None:
            self._prepare()
        decode, _ = self._load_drafts()
        batch, length = out.shape[:2]
        if batch and length:
            inputs = *tokens.addresses, out.address, *tokens.row_strides, out.row, *tokens.steps
            counts = (0, 0) if lengths is None else lengths.number
            decode(*self._grid(batch), *inputs, *slots.arguments, batch, length, *counts)

    def commit(self, accepted: Slots, slots: Slots) -> None:
        """See `sketchssm.heads.engine.ExactEngine`."""
        batch = slots.shape[0]
        if self._drafts and batch:
            self._drafts[1](*self._grid(batch), *slots.arguments, batch, *accepted.number)  # cursors keep their drafts
            self.flush(slots)

    def flush(self, slots: Slots) -> None:
        """See `sketchssm.heads.engine.Engine`: drop drafts, if there can be any."""
        if self._drafts:
            self.slots.commit(None, slots.again())

    def _grid(self, batch: int) -> tuple[int, int]:
        """Blocks that have a warp for every few value rows, and a block's threads."""
        layer, rows = self.layer, self._value_rows
        tasks = batch * layer.heads * (layer.value_dim // rows)
        fit = BLOCK_BYTES // (self.state.itemsize * layer.key_dim * rows) if tasks >= MANY_WARPS else STANDARD_WARPS
        warps = max(1, min(fit, STANDARD_WARPS))
        return -(-tasks // warps), 32 * warps
