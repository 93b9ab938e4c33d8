"""The soak on the CUDA kernels, compiled by g++ and run on the host."""

import pytest
from gpu.cuda_support import thorough
from host import fixtures
from soak.cases import CASES, server

cupy = fixtures.of_heads


NUMBERS = 0, 2, 4, 6, 9, 10, 13, *thorough((8,), (11,), (12,), (14,))


@pytest.mark.parametrize("number", NUMBERS, ids=lambda i: str(CASES[i]))
def test_every_request_sees_its_own_tokens(number):
    """Some cases replay captured graphs; on a device all cases run both ways."""
    case, graphs = CASES[number], number % 4 in (0, 3)
    served = server("cuda", case, 24, mean_length=8.0, seed=3, slots=16, graphs=graphs)
    assert {"finished", "steps", "drafts"} <= set(served.run())
    assert len(served.free) == 16 - (served.pad == 0)
