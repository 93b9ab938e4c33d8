"""Shared by the tests of the CUDA kernels on the host: fixtures named ``cupy``, and the filter for cold kernels.

The import skips a file of tests on machines that can't compile the kernels.
"""

import pytest

from host import compiler, heads, kernels

if missing := compiler.missing():
    pytest.skip(missing, allow_module_level=True)

of_heads = pytest.fixture(autouse=True)(heads.install)
of_kernels = pytest.fixture(kernels.install)

cold = pytest.mark.filterwarnings("ignore:loading kernel:RuntimeWarning")
"""For engines without a `warmup`: they compile at their first step."""
