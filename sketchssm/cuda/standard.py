"""Standard decode on the device, and the parts that all engines of the CUDA backend share: memory, types, gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sketchssm.backends import UnsupportedError
from sketchssm.cuda.arrays import DeviceArrays
from sketchssm.cuda.direct import DirectStep
from sketchssm.cuda.frameworks import host_type
from sketchssm.cuda.launch import Launcher
from sketchssm.cuda.limits import check_layer, check_pool
from sketchssm.cuda.modules import Variant, load, warmup
from sketchssm.cuda.pointer import Pointer, Slots, StepInputs
from sketchssm.cuda.slots import SLOTS, SlotWriter, part_of
from sketchssm.cuda.standard_drafts import StandardDrafts, standard_draft_variant
from sketchssm.recurrence import Layer
from sketchssm.slots import POSITION

if TYPE_CHECKING:
    from sketchssm.gates import GateInput

__all__ = ["StandardEngine"]

TYPES = {"bfloat16": 0, "float16": 1, "float32": 2}
"""Element types by name, as the kernels number them."""

KINDS = {"mamba2": 0, "gdn": 1, "kda": 2}

STANDARD_WARPS = 4
"""Largest number of warps of a block; WARPS in ``cuda_src/standard.cu``."""

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

SLOT_INPUTS, SLOT_VALUES = "Qii", ("slots", "wide", "rows")
"""Address and flags of a call's slots, and its rows."""


def _packed(gate: GateInput) -> npt.NDArray[np.float32]:
    """A gate as the kernels read it: biases, rates, and a bound (see log_decay.cuh)."""
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
        Memory to use instead of the engine's own, of "state"; see `SketchHead`.
    activation_dtype : {"bfloat16", "float16", "float32"} or None, default "bfloat16"
        Type of q, k and v. None: the narrowest that holds those of the first call.
    output_dtype : str, optional
        Type of outputs; the activations' by default.
    gate : GateInput, optional
        Converts raw gate inputs, which have the activations' type.
    state_dtype : {"float32", "bfloat16", "float16"}, default "float32"
        Type of states in memory: what is rounded whenever a state is written.
    drafts : int, default 0
        Most tokens of a draft.
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
    ) -> None:
        import cupy

        check_layer(layer)
        self._most_drafts = drafts
        self._drafts: StandardDrafts | None = None
        self.ring: tuple[Any, ...] = ()
        self.layer = layer
        self.state_dtype = state_dtype
        self.num_slots = num_slots
        self.value_rows = 4 if layer.erases else 8  # measured on H200
        self.arrays = DeviceArrays(layer, activation_dtype, output_dtype, gate is not None, state_dtype)
        self._raw_gate = 0 if gate is None else 1 if gate.lower_bound is None else 2  # RAW_GATE in log_decay.cuh
        self._gate = np.uint64(0) if gate is None else cupy.asarray(_packed(gate))
        shape = (num_slots, *layer.state_shape)
        given = dict(memory or {})
        state = given.pop("state", None)
        if given:
            raise UnsupportedError(f"memory: backend 'cuda' takes no memory for {next(iter(given))!r}")
        kind = host_type(state_dtype)
        self.state = cupy.zeros(shape, dtype=kind) if state is None else check_pool(state, shape, kind)
        self._slot_limits = np.int32(-1), np.int32(num_slots)  # the slot that means padding, and all slots
        self.cursor = cupy.zeros(num_slots, dtype=np.int32)
        self._set_state = SlotWriter(self.state, self.cursor, self._slot_limits)
        self._ready = False  # to launch: kernels loaded, and all memory allocated
        self.arrays.device.synchronize()  # the first call may come on another stream

    @property
    def memory(self) -> dict[str, Any]:
        """See `sketchssm.backends.ExactEngine`."""
        return {"state": self.state, "cursor": self.cursor}

    @property
    def position(self) -> Any:
        """See `sketchssm.backends.Engine`."""
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

    def warmup(self, activation_dtype: str | None = None) -> None:
        """Compile all kernels now, in parallel."""
        self.arrays.warmup(activation_dtype or self.arrays.activation_dtype or "bfloat16", self.num_slots)
        warmup([*self.variants(), SLOTS])
        self._prepare()

    def _prepare(self, late: bool = True) -> None:
        """Get ready to launch, once the activations' type is settled; `late` warns of kernels that are not loaded."""
        if self._ready:
            return
        self.fit()  # a type that the first call has settled may take more room
        modules = []
        for variant in self.variants():
            modules.append(load(variant, late=late))
        self._load(modules)
        self._ready = True

    def _make_ring(self, places: int) -> None:
        """Allocate raw inputs of so many tokens, in the activations' type."""
        import cupy

        layer, slots = self.layer, self.num_slots
        activation = {0: np.uint16, 1: np.float16, 2: np.float32}[self._types[0]]
        gates = activation if self._raw_gate else np.float32
        self.ring = (
            cupy.zeros((slots, layer.key_heads, places, layer.key_dim), dtype=activation),
            cupy.zeros((slots, layer.heads, places, layer.value_dim), dtype=activation),
            cupy.zeros((slots, layer.heads, places, layer.gate_channels), dtype=gates),
            cupy.zeros((slots, layer.heads, places) if layer.erases else (1,), dtype=np.float32),
        )

    def _load(self, modules: list[Any]) -> None:
        """Take the kernels from the modules of `variants`."""
        kernel = modules[0].get_function("standard_step")
        fixed = *part_of(self.state), self._gate
        self._step = Launcher(kernel, fixed, STEPS_INPUTS + SLOT_INPUTS + "i", self._slot_limits)
        values = *TOKEN_VALUES, *("zero",) * 5, *SLOT_VALUES, "one"  # one token
        self._direct = DirectStep(self.arrays, self.layer, [(self._step, values)], self.num_slots, clean=lambda: None)

    def step(self, tokens: StepInputs, slots: Slots, out: Pointer) -> None:
        """See `sketchssm.backends.Engine`."""
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
                *slots.number,
                batch,
                length,
            )
            if self._drafts is not None:
                self._drafts.drop(slots)
            if not self._most_drafts:  # a direct step would not drop drafts
                self._direct.learn(batch, [grid])

    def draft(self, tokens: StepInputs, lengths: Slots | None, slots: Slots, out: Pointer) -> None:
        """See `sketchssm.backends.ExactEngine`."""
        self._prepare()
        batch, length = out.shape[:2]
        if self._drafts is None:
            variant = standard_draft_variant(self.variants()[0], self._most_drafts)
            self._make_ring(self._most_drafts)
            memory = self.state, self._gate, self.ring, self.cursor
            self._drafts = StandardDrafts(variant, *memory, self._slot_limits, STEPS_INPUTS)
        if batch and length:
            inputs = *tokens.addresses, out.address, *tokens.row_strides, out.row, *tokens.steps
            counts = (0, 0) if lengths is None else lengths.number
            self._drafts.draft(self._standard_grid(batch), *inputs, *slots.number, batch, length, *counts)

    def commit(self, accepted: Slots, slots: Slots) -> None:
        """See `sketchssm.backends.ExactEngine`."""
        if self._drafts is not None and slots.shape[0]:  # else nothing was drafted
            self._drafts.commit(self._standard_grid(slots.shape[0]), accepted, slots)

    def _standard_grid(self, batch: int) -> tuple[int, int]:
        """Blocks that have a warp for every few value rows, and a block's threads."""
        layer, rows = self.layer, self.value_rows
        tasks = batch * layer.heads * (layer.value_dim // rows)
        fit = BLOCK_BYTES // (self.state.itemsize * layer.key_dim * rows) if tasks >= MANY_WARPS else STANDARD_WARPS
        warps = max(1, min(fit, STANDARD_WARPS))
        return -(-tasks // warps), 32 * warps

    def load_state(self, state: Pointer, slots: Slots) -> None:
        """See `sketchssm.backends.Engine`."""
        self._set_state(state, slots)

    def flush(self, slots: Slots) -> None:
        """See `sketchssm.backends.Engine`."""
        if self._drafts is not None:
            self._drafts.drop(slots)

    def reset(self, slots: Slots) -> None:
        """See `sketchssm.backends.Engine`."""
        self._set_state(None, slots)
