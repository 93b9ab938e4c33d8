"""Two processes through torch.distributed, on the host: the tensor-parallel example."""

import pytest
from processes import check_tensor_parallel_example


@pytest.mark.slow
def test_tensor_parallel_example(torch, tmp_path):
    check_tensor_parallel_example(tmp_path)
