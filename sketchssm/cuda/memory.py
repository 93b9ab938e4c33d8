"""Parts of a slot's memory on the device, and memory for them: the engine's own or the caller's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np

from sketchssm.arrays.interop import host_type
from sketchssm.arrays.options import EngineOptions
from sketchssm.cuda.constants import ACCESS, MOST_STRIDE
from sketchssm.cuda.layout import PackedPlan
from sketchssm.layer.recurrence import Layer
from sketchssm.layer.slots import SlotPart, check_memory, check_separate

RING = ("keys", "values", "gates", "betas")
"""Parts of the ring."""


def ring_parts(layer: Layer, tokens: int, activation_dtype: str, raw_gate: bool) -> tuple[SlotPart, ...]:
    """Raw inputs of so many buffered tokens; raw gates have the activations' type."""
    shapes = {
        "keys": (layer.key_heads, tokens, layer.key_dim),
        "values": (layer.heads, tokens, layer.value_dim),
        "gates": (layer.heads, tokens, layer.gate_channels),
        "betas": (layer.heads, tokens),
    }
    if not layer.erases:
        del shapes["betas"]
    activations = ("keys", "values", "gates") if raw_gate else ("keys", "values")
    return tuple(
        SlotPart(name, shape, activation_dtype if name in activations else "float32", ACCESS)
        for name, shape in shapes.items()
    )


def slot_parts(
    layer: Layer, options: EngineOptions, window: int = 1, packed: PackedPlan | None = None
) -> tuple[SlotPart, ...]:
    """All parts of a slot: the state; if it has a ring also the ring, sketches and errors if any, and the cursor.

    A window of 1 has a ring for drafts, if any. Activations are "bfloat16" if the options name no type.
    """
    state = SlotPart("state", layer.state_shape, options.state_dtype, ACCESS)
    tokens = window if window > 1 else options.drafts
    if not tokens:
        return (state,)
    ring = ring_parts(layer, tokens, options.activation_dtype or "bfloat16", options.gate is not None)
    sketch: tuple[SlotPart, ...] = ()
    if packed is not None and packed.slot_elements:
        sketch = (SlotPart("sketch", (packed.slot_elements,), packed.dtype, ACCESS),)
    if options.monitor:  # `ErrorSums` in cuda_src/slot/errors.cuh
        sketch += (SlotPart("errors", (layer.heads, -(-layer.value_dim // 16), 4), "float32", ACCESS),)
    return state, *ring, *sketch, SlotPart("cursor", (), "int32", 4)


def allocate(parts: Iterable[SlotPart], num_slots: int, given: dict[str, Any]) -> dict[str, Any]:
    """Memory of some parts for all slots, by name: the caller's arrays, taken from `given`, or else zeros.

    TypeError if memory is not on a device, can't be written, or has another type; ValueError if shape, strides,
    alignment or device do not fit.
    """
    import cupy

    memory = {}
    for part in parts:
        kind = host_type(part.dtype)
        if kind.name == "bfloat16" and part.name != "state":
            kind = np.dtype(np.uint16)  # its bits: not every CuPy has bfloat16
        array = given.pop(part.name, None)
        if array is None:
            memory[part.name] = cupy.zeros((num_slots, *part.shape), dtype=kind)
        else:
            memory[part.name] = _pool(f"memory[{part.name!r}]", array, part, num_slots).view(kind)
    return memory


def check_places(memory: Mapping[str, Any]) -> None:
    """Refuse parts that share memory, and slots that are too far apart for the kernels."""
    check_separate(
        {
            name: (int(array.data.ptr), array.strides[0], array.itemsize * prod(array.shape[1:]))
            for name, array in memory.items()
        },
        len(next(iter(memory.values()))),
    )
    for name, array in memory.items():
        if array.strides[0] > MOST_STRIDE:
            raise ValueError(
                f"memory[{name!r}]: expected at most {MOST_STRIDE} bytes from slot to slot, got {array.strides[0]}"
            )


def _pool(name: str, pool: Any, part: SlotPart, num_slots: int) -> Any:
    """View the caller's memory as a CuPy array."""
    import cupy

    if not isinstance(pool, cupy.ndarray):
        where = getattr(pool, "__dlpack_device__", None)
        if where is None or type(pool).__module__.startswith("jax") or where()[0] == 1:
            raise TypeError(f"{name}: expected a writable array on the CUDA device, got {type(pool).__name__}")
        pool = cupy.from_dlpack(pool.detach() if hasattr(pool, "detach") else pool)
    check_memory(name, pool, int(pool.data.ptr), part, num_slots)
    if pool.device.id != cupy.cuda.Device().id:
        raise ValueError(f"{name}: expected memory of CUDA device {cupy.cuda.Device().id}, got {pool.device.id}")
    return pool
