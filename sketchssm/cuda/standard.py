"""The recurrence as it stands, and what all engines of the CUDA backend share: memory, types, kernels at hand."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sketchssm.cuda.arrays import DeviceArrays
from sketchssm.cuda.launch import launcher
from sketchssm.cuda.limits import check_layer, check_pool
from sketchssm.cuda.modules import Variant, load, warmup
from sketchssm.cuda.slots import SLOTS, SlotWriter
from sketchssm.recurrence import Layer, Tokens

if TYPE_CHECKING:
    from sketchssm.gates import GateInput

__all__ = ["StandardEngine"]

TYPES = {"bfloat16": 0, "uint16": 0, "float16": 1, "float32": 2}
"""Element types by name as the kernels number them; uint16 arrays are taken as bf16 bits."""

KINDS = {"mamba2": 0, "gdn": 1, "kda": 2}

STANDARD_WARPS = 4
"""Of a block, at most; WARPS in ``cuda_src/standard.cu``."""

MANY_WARPS, BLOCK_BYTES = 1 << 14, 4096
"""From so many warps on, a block has no more of the state: blocks begin in the order of memory, and the smaller they
are, the closer to it loads and stores come (on H200 1% to 2% faster; with fewer warps, slower by as much)."""


@cache
def _type(dtype: Any, name: str) -> int:
    code = TYPES.get(str(dtype))
    if code is None:
        raise TypeError(f"{name}: the CUDA kernels take bfloat16, float16 or float32, got {dtype}")
    return code


def _packed(gate: GateInput) -> npt.NDArray[np.float32]:
    """A gate as the kernels read it: biases, rates, and a bound (see log_decay.cuh)."""
    parts = (gate.dt_bias.reshape(-1), -np.exp(gate.A_log), [gate.lower_bound or 0.0])
    return np.concatenate(parts).astype(np.float32)


class StandardEngine:
    """The recurrence as it stands: state read and written at every token.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    num_slots : int
        Number of state slots.
    state : array, optional
        Memory to use instead of the engine's own; see `SketchHead`.
    activation_dtype : {"bfloat16", "float16", "float32"} or None, default "bfloat16"
        Type of q, k and v. None: the type that the first call needs.
    output_dtype : str, optional
        Type of outputs; the activations' by default.
    gate : GateInput, optional
        Converts raw gate inputs, which have the activations' type.
    """

    window = 1

    def __init__(
        self,
        layer: Layer,
        num_slots: int,
        *,
        state: Any = None,
        activation_dtype: str | None = "bfloat16",
        output_dtype: str | None = None,
        gate: GateInput | None = None,
    ) -> None:
        import cupy

        check_layer(layer)
        self.layer = layer
        self.num_slots = num_slots
        self.value_rows = 4 if layer.erases else 8  # measured on H200
        self.arrays = DeviceArrays(activation_dtype, output_dtype, gate is not None)
        self._raw_gate = 0 if gate is None else 1 if gate.lower_bound is None else 2  # RAW_GATE in log_decay.cuh
        self._gate = np.uint64(0) if gate is None else cupy.asarray(_packed(gate))
        shape = (num_slots, *layer.state_shape)
        self.state = cupy.zeros(shape, dtype=np.float32) if state is None else check_pool(state, shape)
        self._slot_stride = np.int64(self.state.strides[0] // 4)
        self.position = cupy.zeros(num_slots, dtype=np.int32)
        self._launches: dict[str, tuple[Any, int, int]] = {}
        self._ready = False
        self._write = SlotWriter()
        self.arrays.device.synchronize()  # the first call may come on another stream

    @property
    def _types(self) -> tuple[int, int]:
        """Types of activations and outputs; "bfloat16" as long as no call has settled them."""
        return TYPES[self.arrays.activation or "bfloat16"], TYPES[self.arrays.output or "bfloat16"]

    def fit(self) -> None:
        """Refuse what the device is too small for."""

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
            "RAW_GATE": self._raw_gate,
        }

    def warmup(self, activation_dtype: str | None = None) -> None:
        """Compile all kernels now, in parallel."""
        self.arrays.warmup(activation_dtype or self.arrays.activation or "bfloat16", self.num_slots)
        warmup([*self.variants(), SLOTS])
        self._prepare()

    def _prepare(self) -> None:
        """Get ready to launch, once the activations' type is settled."""
        self._kernel(0, late=True)
        self._ready = True

    def _kernel(self, index: int, late: bool = False) -> tuple[Any, int, int]:
        """A kernel with its dynamic shared memory and number of blocks, where these are fixed."""
        if "standard_step" not in self._launches:
            module = load(self.variants()[index], late=late)
            self._launches["standard_step"] = launcher(module.get_function("standard_step")), 0, 0
        return self._launches["standard_step"]

    def step(self, tokens: Tokens, slots: Any, out: Any) -> None:
        """See `sketchssm.backends.Engine`."""
        self._check(tokens, out)
        if not self._ready:
            self._prepare()
        batch, length = out.shape[:2]
        if not batch or not length:
            return
        kernel, _, _ = self._kernel(0)
        state, counts = (self.state, self._slot_stride, self._gate), (np.int32(batch), np.int32(length))
        args = (*state, *self._pointers(tokens), out, slots, *counts)
        kernel(*self._standard_grid(batch), args)

    def _standard_grid(self, batch: int) -> tuple[int, int]:
        """Blocks that have a warp for every few value rows, and a block's threads."""
        layer, rows = self.layer, self.value_rows
        tasks = batch * layer.heads * (layer.value_dim // rows)
        fit = BLOCK_BYTES // (4 * layer.key_dim * rows) if tasks >= MANY_WARPS else STANDARD_WARPS
        warps = max(1, min(fit, STANDARD_WARPS))
        return -(-tasks // warps), 32 * warps

    def _check(self, tokens: Tokens, out: Any) -> None:
        for name in self.arrays.activations:
            array = getattr(tokens, name)
            if _type(array.dtype, name) != self._types[0]:
                raise TypeError(f"{name}: the engine was made for {self.arrays.activation}, got {array.dtype}")
        if _type(out.dtype, "out") != self._types[1]:
            raise TypeError(f"out: got {out.dtype}, which the engine was not made for")

    def _pointers(self, tokens: Tokens) -> tuple[Any, ...]:
        return (*tokens[:4], np.uint64(0) if tokens.beta is None else tokens.beta)

    def load_state(self, state: Any, slots: Any) -> None:
        """See `sketchssm.backends.Engine`."""
        self._write(self.state, state, slots, self.position)

    def flush(self, slots: Any) -> None:
        """See `sketchssm.backends.Engine`."""

    def reset(self, slots: Any) -> None:
        """See `sketchssm.backends.Engine`."""
        self._write(self.state, None, slots, self.position)
