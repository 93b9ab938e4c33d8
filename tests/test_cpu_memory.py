"""The memory of the CPU engines."""

from __future__ import annotations

import copy
import pickle

import pytest

from sketchssm.cpu.replay import ReplayEngine
from sketchssm.layer.recurrence import Layer


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_memory_refuses_to_be_copied(duplicate) -> None:
    """A copy of the record of addresses would lead to the memory of the original."""
    engine = ReplayEngine(Layer("gdn", 2, 16, 16), 1, window=4)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        duplicate(engine._memory)
