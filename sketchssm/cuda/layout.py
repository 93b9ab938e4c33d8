"""Places of a plan's heads in packed device memory, and its bases in the kernels' operand order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.cuda.constants import ALIGN, MAPS, TYPES
from sketchssm.layer.coefficients import RIDGE_FLOOR
from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.recurrence import FULL_STATE, Layer
from sketchssm.plans.plan import SketchPlan

ELEMENTS = {"bfloat16": "bfloat16", "float32": "float32", "int8": "uint8"}
"""Type of a slot's sketches in memory, by format."""

RESIDUAL_ALIGN = 16
"""Bytes: a residual begins at a multiple."""


@dataclass(frozen=True)
class PackedPlan:
    """A plan as the kernels read it; see ``cuda_src/slot/sketch_layout.cuh``."""

    heads: npt.NDArray[np.int32]
    """``(heads, 4)``: rank (0: full state), offset in a slot's sketches and shadows, offset of the projection (with
    the map `subspace` the residual's bits), offset of the basis fragments."""
    order: npt.NDArray[np.int32]  # full-state heads, then sketched ones
    full_state: int  # number of full-state heads
    slot_elements: int  # of one slot's shadows and sketches
    dtype: str  # of these elements; bytes for codes
    projection: npt.NDArray[np.float32]
    """Rows ``Omega^T (G, K)`` of all sketched heads, one after the other; none with the map `subspace`."""
    basis: npt.NDArray[np.uint16]  # bases as matrix operands, in bf16 slices
    ridge: float
    constants: dict[str, int]  # of the map's kernels
    adapts: bool = False  # whether the map is `subspace`, so that ``encode.cu`` sketches


def basis_fragments(omega: npt.NDArray[Any], slices: int) -> npt.NDArray[np.uint16]:
    """A basis ``(K, G)`` in the order in which the flush multiplies with it, as a sum of 1 or 2 bf16 slices.

    Returns bf16 bits ``(tiles of 8 columns, K / 16, slices, 32 lanes, 4)``: lane ``4 r + c`` holds channels ``4c`` to
    ``4c + 3`` of 16 of the tile's column r.
    """
    import ml_dtypes

    key_dim, rank = omega.shape
    tiles = -(-rank // 8)
    padded = np.zeros((tiles * 8, key_dim), dtype=np.float32)
    padded[:rank] = omega.T
    parts = []
    for _ in range(slices):
        parts.append(padded.astype(ml_dtypes.bfloat16))
        padded = padded - parts[-1].astype(np.float32)
    bits = np.stack([part.view(np.uint16) for part in parts])
    grid = bits.reshape(slices, tiles, 8, key_dim // 16, 4, 4).transpose(1, 3, 0, 2, 4, 5)
    return np.ascontiguousarray(grid.reshape(tiles, key_dim // 16, slices, 32, 4))


def _residual_bytes(bits: int, key_dim: int, value_dim: int) -> int:
    """Bytes of a residual: a lane's words of each block of 16 rows, whole for each plane, and scales in bf16."""
    words = sum(-(-key_dim // 8 * width // 8) for width in {1: (1,), 2: (2,), 3: (2, 1)}[bits])
    return value_dim // 16 * 32 * 4 * words + 2 * (key_dim + value_dim)


def pack_plan(plan: SketchPlan, sketch_dtype: str, state_dtype: str) -> PackedPlan:
    """Lay a plan out for the kernels, with sketches and states in these formats."""
    layer, form = plan.layer, SketchFormat.of(sketch_dtype)
    full_state = np.flatnonzero(plan.ranks == FULL_STATE)
    shadows = form.shadows(state_dtype) and full_state.size > 0
    if full_state.size == layer.heads:
        return pack_full_state(layer, shadows)
    dtype = ELEMENTS[form.name]
    item, slices = np.dtype("uint16" if dtype == "bfloat16" else dtype).itemsize, 2 if dtype == "float32" else 1
    adapts = plan.map.name == "subspace"
    heads = np.zeros((layer.heads, 4), dtype=np.int32)
    shadow = 2 * layer.key_dim * layer.value_dim // item if shadows else 0
    heads[full_state, 1] = shadow * np.arange(full_state.size)
    projections: list[npt.NDArray[Any]] = [np.zeros(0, dtype=np.float32)]
    bases: list[npt.NDArray[Any]] = [np.zeros(0, dtype=np.uint16)]
    offset, rows, fragments = shadow * full_state.size, 0, 0
    for head, rank in enumerate(map(int, plan.ranks)):
        if rank == FULL_STATE:
            continue
        bits = int(plan.residual_bits[head])
        size = int(form.bytes(plan.map, rank, layer.key_dim, layer.value_dim))
        if bits:
            size += -size % RESIDUAL_ALIGN + _residual_bytes(bits, layer.key_dim, layer.value_dim)
        heads[head] = rank, offset, bits if adapts else rows, fragments
        offset += -(-size // ALIGN) * (ALIGN // item)
        if not adapts:
            projections.append(np.ascontiguousarray(plan.omega[head, :, :rank].T).reshape(-1))
            rows += projections[-1].size
        bases.append(basis_fragments(plan.omega[head, :, :rank], slices).reshape(-1))
        fragments += bases[-1].size // 4
    return PackedPlan(
        heads,
        np.concatenate([full_state, np.flatnonzero(plan.ranks != FULL_STATE)]).astype(np.int32),
        full_state.size,
        max(offset, ALIGN // item),
        dtype,
        np.concatenate(projections),
        np.concatenate(bases),
        plan.map.effective_ridge,
        {
            "MAP": MAPS[plan.map.storage],
            "PIVOTS": plan.map.pivots or 1,
            "SKETCH": TYPES[form.name],
        }
        | ({"RESIDUAL": sum({1 << int(bits) for bits in plan.residual_bits})} if plan.residual_bits.any() else {})
        | ({"SHADOW": 1} if shadows else {}),
        adapts,
    )


def pack_full_state(layer: Layer, shadows: bool = False) -> PackedPlan:
    """Lay out a layer whose heads all read full states or their shadows: replay, or a plan without sketches."""
    heads, order = np.zeros((layer.heads, 4), dtype=np.int32), np.arange(layer.heads, dtype=np.int32)
    constants = {"MAP": MAPS["none"], "PIVOTS": 1, "SKETCH": 0} | ({"SHADOW": 1} if shadows else {})
    size = layer.key_dim * layer.value_dim if shadows else 0
    heads[:, 1] = size * order
    nothing = np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.uint16)
    return PackedPlan(heads, order, layer.heads, size * layer.heads, "bfloat16", *nothing, RIDGE_FLOOR, constants)
