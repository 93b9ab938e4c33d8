"""The CPU kernels' vectors."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from sketchssm.cpu.jit import njit
from sketchssm.cpu.llvm import LANES
from sketchssm.cpu.simd import bfloats, floats, int8s, load, store


@njit
def _narrow(source: int, target: int) -> None:
    store(bfloats(target), 0, load(floats(source), 0))


@njit
def _round_trip(source: int, codes: int, target: int, size: int) -> None:
    """Store numbers as codes, and load what was stored."""
    for i in range(0, size, LANES):
        store(int8s(codes), i, load(floats(source), i))
        store(floats(target), i, load(int8s(codes), i))


def test_codes_are_rounded_to_nearest_even_and_widened_exactly() -> None:
    """Every code, every number halfway between two, and the float32 numbers beside it."""
    grid = np.arange(128, dtype=np.float32)
    ties = (grid[1:] + grid[:-1]) / 2
    values = np.concatenate([grid, ties, np.nextafter(ties, 0), np.nextafter(ties, np.float32(np.inf))])
    values = np.concatenate([values, -values])
    values = np.resize(values, -(-values.size // LANES) * LANES)
    codes, got = np.zeros(values.size, np.uint8), np.zeros_like(values)
    _round_trip(values.ctypes.data, codes.ctypes.data, got.ctypes.data, got.size)
    np.testing.assert_array_equal(got, np.rint(values))


def test_bfloat16_is_rounded_to_nearest_even_and_nan_stays_nan() -> None:
    rng = np.random.default_rng(0)
    ties = np.array([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001], dtype=np.uint32)
    nan = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], dtype=np.uint32)
    special = np.array([np.inf, -np.inf, 0.0, -0.0], dtype=np.float32)
    ordinary = rng.standard_normal(4, dtype=np.float32)
    values = np.concatenate([ties.view(np.float32), nan.view(np.float32), special, ordinary])
    result = np.zeros(LANES, dtype=np.uint16)
    _narrow(values.ctypes.data, result.ctypes.data)
    have = result.view(ml_dtypes.bfloat16).astype(np.float32)
    with np.errstate(invalid="ignore"):  # one of the NaNs is a signalling one
        want = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(have, want)
