"""Two processes through torch.distributed, on the host: merged moments, and the tensor-parallel example."""

import pytest
from processes import check_moments, check_tensor_parallel_example


@pytest.mark.slow
def test_moments(torch, rng, tmp_path):
    check_moments("gloo", rng, tmp_path)


@pytest.mark.slow
def test_tensor_parallel_example(torch, tmp_path):
    check_tensor_parallel_example(tmp_path)
