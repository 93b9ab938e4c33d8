"""The soak in its short form: a few hundred requests on every backend of the host (see `benchmarks/soak.py`)."""

import numpy as np
import pytest
from soak.cases import CASES, server
from soak.verdicts import SoakError

from sketchssm.layer.slots import POSITION

EVENTS = {
    *("finished", "aborted", "steps", "states", "reset", "load", "adopt", "drafts", "accepted", "refused"),
    *("forked", "cached", "prefix", "moved", "preempted", "restored"),
}
"""What happens in every run."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_request_sees_its_own_tokens(case, backend):
    """No request is lost, no slot leaks into another, and positions follow the rules."""
    served = server(backend, case, 100, seed=1)
    counts = served.run()
    assert set(counts) >= EVENTS
    assert len(served.free) == 64 - (served.pad == 0)


def test_a_seed_gives_one_run():
    first, again = (server("reference", CASES[0], 60, seed=5) for _ in range(2))
    assert first.run() == again.run()
    np.testing.assert_array_equal(first.verdicts.worst, again.verdicts.worst)


def _broken(engine, name, wrong):
    method = getattr(engine, name)
    setattr(engine, name, lambda *args: wrong(engine, method, *args))


def _without_keys(engine, copy, src, dst):
    kept = engine.memory["keys"][dst]
    copy(src, dst)
    engine.memory["keys"][dst] = kept


def _one_too_many(engine, commit, accepted, slots):
    commit(np.minimum(accepted + 1, engine._cursor[slots] >> 8), slots)


def _dropped(engine, flush, slots):
    engine._cursor[slots] = np.maximum(engine._cursor[slots] & POSITION, 1) - 1
    flush(slots)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("copy", _without_keys), ("commit", _one_too_many), ("flush", _dropped)],
)
def test_faults_are_found(name, wrong):
    """The error names the seed, and the request's events."""
    served = server("reference", CASES[0], 200, seed=2)
    _broken(served.head._engine, name, wrong)
    with pytest.raises(SoakError, match=r"(?s)^seed 2, .*request \d+ in slot \d+.*its last events"):
        served.run()


def _without_sketch(engine, copy, src, dst):
    kept = engine.memory["sketch"][dst]
    copy(src, dst)
    engine.memory["sketch"][dst] = kept


def _rough_residuals(engine, adopt, slots):
    adopt(slots)
    first, end = (int(engine._memory.context[x][0] - engine._memory.context["codes"][0]) for x in ("scales", "packed"))
    engine.memory["sketch"][slots, first:end:2] ^= 1  # the lower bytes of bf16 numbers


@pytest.mark.parametrize(
    ("residual", "name", "wrong", "message"),
    [
        (False, "copy", _without_sketch, "its last events"),
        (True, "adopt", _rough_residuals, "outputs are off by more than"),
    ],
)
def test_faults_of_codes_are_found(residual, name, wrong, message):
    """Scales of residuals that are off by 2^-8 could be neighbouring codes, but are too many."""
    case = next(each for each in CASES if each.sketch_dtype == "int8" and each.residual == residual)
    served = server("cpu", case, 200, seed=2)
    _broken(served.head._engine, name, wrong)
    with pytest.raises(SoakError, match=rf"(?s)^seed 2, .*{message}"):
        served.run()
