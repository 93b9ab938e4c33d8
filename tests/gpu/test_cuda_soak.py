"""The soak on a CUDA device, with eager calls and with captured graphs."""

import pytest
from soak.cases import CASES, server

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("graphs", [False, True])
def test_every_request_sees_its_own_tokens(case, graphs, cupy):
    served = server("cuda", case, 200, seed=4, graphs=graphs)
    counts = served.run()
    assert {"finished", "aborted", "steps", "states", "reset", "load"} <= set(counts)
    assert len(served.free) == 64 - (served.pad == 0)
