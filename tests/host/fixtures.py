"""Shared by the tests of the CUDA backend: fixtures named ``cupy`` or ``host``, and the filter for cold kernels."""

import numpy as np
import pytest

from host import heads

ORDER = 0x5EED
"""Seed of the order of threads."""


@pytest.fixture(params=["host", pytest.param("device", marks=pytest.mark.gpu)])
def of_kernels(request, monkeypatch):
    """CuPy, with NaN in fresh memory, or its stand-in: a test runs the same kernels on a device and on the host."""
    if request.param == "host":
        yield from heads.install(monkeypatch, ORDER)
        return
    cupy = pytest.importorskip("cupy")
    cupy.get_default_memory_pool().free_all_blocks()
    blocks = [cupy.full(1 << 20, np.nan, dtype=np.float32) for _ in range(8)]
    del blocks
    yield cupy


@pytest.fixture
def of_host(monkeypatch):
    """The stand-in alone."""
    yield from heads.install(monkeypatch, ORDER)


of_heads = pytest.fixture(autouse=True)(heads.install)

cold = pytest.mark.filterwarnings("ignore:loading kernel:RuntimeWarning")
"""For engines without a `warmup`: they compile at their first step."""
