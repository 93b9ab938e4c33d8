"""The CPU kernels' vectors."""

from __future__ import annotations

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

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


HALVES = """
import numpy as np
from sketchssm.cpu.jit import njit
from sketchssm.cpu.simd import LANES, floats, halves, load, store

@njit
def widen(source, target, size):
    for i in range(0, size, LANES):
        store(floats(target), i, load(halves(source), i))

@njit
def narrow(source, target, size):
    for i in range(0, size, LANES):
        store(halves(target), i, load(floats(source), i))

np.seterr(all="ignore")
every = np.arange(65536, dtype=np.uint16).view(np.float16)
got = np.zeros(every.size, np.float32)
widen(every.ctypes.data, got.ctypes.data, got.size)
np.testing.assert_array_equal(got, every.astype(np.float32))
ties = np.ldexp(got[:0x7C00].astype(np.float64) + got[1:0x7C01], -1).astype(np.float32)
ties[-1] = 65520
beside = np.nextafter(ties, 0), np.nextafter(ties, np.float32(1e9))
values = np.concatenate([ties, *beside, [np.nan, np.inf, 1e38, 1e-40]])
values = np.resize(np.concatenate([values, -values]), 16 * 12000).astype(np.float32)
rounded = np.zeros(values.size, np.float16)
narrow(values.ctypes.data, rounded.ctypes.data, values.size)
np.testing.assert_array_equal(rounded, values.astype(np.float16))
np.testing.assert_array_equal(np.signbit(rounded), np.signbit(values))
"""


@pytest.mark.parametrize("cpu", [{}, {"NUMBA_CPU_NAME": "sandybridge", "NUMBA_CPU_FEATURES": ""}])
def test_float16_with_and_without_the_cpu_s_conversion(cpu: dict[str, str]) -> None:
    """All numbers, those halfway between two and those beside; without the conversion, LLVM would end the process."""
    done = subprocess.run(
        [sys.executable, "-c", HALVES], env=os.environ | cpu, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
