"""Launches of ``calibrate.cu``: sums of calibration, in arrays of CuPy or PyTorch on one device.

The functions return None if a block has no room for a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from sketchssm.arrays import interop
from sketchssm.arrays.space import Space
from sketchssm.cuda.frameworks import CupyArrays, TorchArrays
from sketchssm.cuda.limits import shared_limit
from sketchssm.cuda.modules import Variant, load
from sketchssm.layer.residual import GAINS, STEPS

CALIBRATE = Variant("calibrate", {})

THREADS, QUERIES = 256, 16
"""Of ``calibrate.cu``."""


def joint_sums(
    space: Space, states: Any, image: Any, rows: Any, x: Any, slope: Any, ranks: Sequence[int], bits: Sequence[int]
) -> Any:
    """Return `sketchssm.calibrate.joint_scores.JointScores._measured` of arrays of float32."""
    *lead, values, channels = states.shape
    if values > THREADS:
        return None
    tokens, slopes = x.shape[-2], 0 if slope is None else slope.shape[-1]
    padded = -(-tokens // QUERIES) * QUERIES
    shared = 4 * (channels * (padded + 2 + (values | 1)) + 2 * values + QUERIES * THREADS)
    levels = [(2 ** (b - 1), STEPS[b], GAINS[b], STEPS[b] * GAINS[b]) for b in bits]
    sizes = values, channels, image.shape[-2], tokens, slopes, len(ranks), len(bits)
    shape = *lead, len(ranks), len(bits), THREADS // 32, 3
    numbers = np.array(ranks, np.int32), np.array(levels, np.float32), *map(np.int32, sizes)
    found = _launched(
        space, "joint_sums", [states, image, rows, x, x if slope is None else slope], shape, numbers, shared
    )
    return None if found is None else found.sum(-2)


def orthogonaliser(space: Space, gram: Any, least: float) -> Any:
    """Return `sketchssm.calibrate.prefixes.orthogonaliser` of matrices of float64."""
    size = gram.shape[-1]
    return _launched(space, "orthogonalise", [gram], gram.shape, (np.int32(size), np.float64(least)), 16 * size * size)


def _launched(
    space: Space, name: str, arrays: list[Any], shape: Sequence[int], numbers: Sequence[Any], shared: int
) -> Any:
    """Result of float64 of a kernel with a block for each matrix, on the current stream of the arrays' framework.

    The kernel takes contiguous views or copies of `arrays`, the result, and `numbers` of the host.
    """
    import cupy

    torch = interop.framework(arrays[0]) == "torch"
    device = arrays[0].device.index or 0 if torch else arrays[0].device.id
    with cupy.cuda.Device(device), (TorchArrays(device).stream() if torch else None) or nullcontext():
        if shared > shared_limit():
            return None
        out = space.empty(tuple(shape), "float64")
        imported = CupyArrays(device).imported if torch else lambda x: x
        given = [cupy.ascontiguousarray(imported(x)) for x in (*arrays, out)]
        given += [cupy.asarray(x) if isinstance(x, np.ndarray) else x for x in numbers]
        kernel = load(CALIBRATE).get_function(name)
        kernel.max_dynamic_shared_size_bytes = shared
        kernel((math.prod(arrays[0].shape[:-2]),), (THREADS,), tuple(given), shared_mem=shared)
    return out
