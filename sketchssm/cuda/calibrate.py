"""Launches of ``calibrate.cu``: sums of calibration, in arrays of CuPy or PyTorch on one device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from sketchssm.arrays import interop
from sketchssm.cuda.frameworks import CupyArrays, TorchArrays
from sketchssm.cuda.limits import shared_limit
from sketchssm.cuda.modules import Variant, load
from sketchssm.layer.residual import GAINS, STEPS

CALIBRATE = Variant("calibrate", {})

THREADS, QUERIES, MOST_BITS = 256, 16, 3
"""Of ``calibrate.cu``."""


def joint_sums(arrays: Sequence[Any], slope: Any, ranks: tuple[int, ...], bits: tuple[int, ...], out: Any) -> bool:
    """Write the sums of joint scores of states, for all ranks and bits, into `out (..., ranks, bits, 3)` of float64.

    They are squares of the reads' errors, of the states' errors, and of errors times slopes. `arrays` are of float32:
    states ``(..., V, K)``, images ``(..., G, V)`` and rows ``(..., G, K)`` of their sketches with the widest rank, and
    queries ``(..., W, K)``; `slope` is ``(..., W, V)``, ``(..., W, 1)`` or None. False if a block has no room for a
    state.
    """
    *lead, values, channels = arrays[0].shape
    tokens, columns = arrays[3].shape[-2], arrays[1].shape[-2]
    if (shared := _shared_bytes(values, channels, tokens)) > shared_limit():
        return False
    numbers = values, channels, columns, tokens, 0 if slope is None else slope.shape[-1], len(ranks), len(bits)

    def launch(cupy: Any, given: list[Any]) -> None:
        kernel = load(CALIBRATE).get_function("joint_sums")
        kernel.max_dynamic_shared_size_bytes = shared
        states, image, rows, queries, *slopes, result = given
        levels = [(2 ** (b - 1), STEPS[b], GAINS[b], STEPS[b] * GAINS[b]) for b in bits]
        settings = cupy.asarray(np.array(ranks, np.int32)), cupy.asarray(np.array(levels, np.float32))
        own = states, image, rows, queries, *(slopes or [states]), *settings, result
        kernel((math.prod(lead),), (THREADS,), (*own, *map(np.int32, numbers)), shared_mem=shared)

    _on_stream(launch, [*arrays, *([] if slope is None else [slope]), out])
    return True


def orthogonalise(gram: Any, least: float, out: Any) -> bool:
    """Write `sketchssm.calibrate.prefixes.orthogonaliser` of matrices of float64 into `out`; False without room."""
    *lead, size, _ = gram.shape
    if (shared := 16 * size * size) > shared_limit():
        return False

    def launch(cupy: Any, given: list[Any]) -> None:
        kernel = load(CALIBRATE).get_function("orthogonalise")
        kernel.max_dynamic_shared_size_bytes = shared
        kernel((math.prod(lead),), (THREADS,), (*given, np.int32(size), np.float64(least)), shared_mem=shared)

    _on_stream(launch, [gram, out])
    return True


def _on_stream(launch: Any, arrays: list[Any]) -> None:
    """Call a function with CuPy and contiguous views or copies, on the current stream of the arrays' framework.

    The last array is for results. PyTorch's memory is its own again for the work that follows on the stream.
    """
    import cupy

    torch = interop.framework(arrays[0]) == "torch"
    device = arrays[0].device.index or 0 if torch else arrays[0].device.id
    with cupy.cuda.Device(device), (TorchArrays(device).stream() if torch else None) or nullcontext():
        imported = CupyArrays(device).imported if torch else lambda x: x
        launch(cupy, [cupy.ascontiguousarray(imported(x)) for x in arrays])


def _shared_bytes(values: int, channels: int, tokens: int) -> int:
    """Bytes of ``Room`` in ``calibrate.cu``; more than any device has if the threads do not reach all values."""
    half = (values + 1) // 2
    if half > THREADS:
        return 2**31
    groups, chunks = min(THREADS // half, channels), max(1, THREADS // channels)
    part = max(groups * QUERIES * 2 * half, MOST_BITS * chunks * channels)
    queries, left = -(-tokens // QUERIES) * channels * QUERIES, channels * (2 * half + 1)
    scales = 4 * 2 * half + 2 * MOST_BITS * (channels + 2 * half)
    return 4 * (queries + scales + 2 * 3 * THREADS // 32 + left + part)
