"""The CPU kernels' vectors."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from sketchssm.cpu.jit import njit
from sketchssm.cpu.simd import LANES, bfloats, floats, load, store


@njit
def _narrow(source: int, target: int) -> None:
    store(bfloats(target), 0, load(floats(source), 0))


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
