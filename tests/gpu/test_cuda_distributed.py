"""Two processes through NCCL, each with its own GPU: the tensor-parallel example."""

import pytest
from processes import check_tensor_parallel_example

pytestmark = pytest.mark.gpu

DEVICES = "0,1"


@pytest.fixture(autouse=True)
def two_devices(cupy, torch):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two CUDA devices")


def test_tensor_parallel_example(tmp_path):
    check_tensor_parallel_example(tmp_path, DEVICES)
