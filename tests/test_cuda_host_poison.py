"""NaN and infinity in a request's inputs: other slots never see them, and a new request of the slot does not either.
The backend `cuda` runs its kernels on the host.
"""

from itertools import cycle

import numpy as np
import pytest
from decode_systems import head_of
from gpu.cuda_support import make_plan
from host import heads, standin
from samples import tokens_of

from sketchssm.layer.recurrence import FULL_STATE, Layer

WINDOW, SLOTS, BAD = 4, 4, 3
ROWS = [0, BAD, 2]
SHAPES = {kind: (kind, 2, 64, 80, 1 if kind != "kda" else 2) for kind in ("mamba2", "gdn", "kda")}
CASES = [(backend, kind) for backend in ("reference", "cpu") for kind in SHAPES] + [("cuda", "gdn")]

pytestmark = pytest.mark.filterwarnings("ignore:loading kernel:RuntimeWarning")  # of copies


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def case(request, monkeypatch):
    """Backend, layer, and how the backend's arrays are made of NumPy's. Arrays on a device are not checked."""
    backend, kind = request.param
    layer = Layer(*SHAPES[kind])
    if backend != "cuda":
        yield backend, layer, np.array
        return
    installed = heads.install(monkeypatch)
    next(installed)
    yield backend, layer, standin.asarray
    next(installed, None)


def make(system, backend, layer):
    plan = make_plan(layer, [7, FULL_STATE], np.random.default_rng(1), window=WINDOW)
    head = head_of(system, plan, SLOTS, backend)
    head.warmup(*(["float32"] if backend == "cuda" else []))
    return head


def bad_tokens(tokens, name, value):
    """The same tokens, with `value` in one number of every head of the bad row's token 1."""
    spoilt = tokens._replace(**{name: getattr(tokens, name).copy()})
    x = getattr(spoilt, name)[ROWS.index(BAD), 1]
    x[..., :1] = value
    return spoilt


def run(head, tokens, to_array, steps, rows=slice(None)):
    slots = to_array(np.array(ROWS)[rows])
    with np.errstate(invalid="ignore"):  # in the reference
        got = [
            head.step(
                *(None if x is None else to_array(np.ascontiguousarray(x[rows, t])) for x in tokens), slots=slots
            )
            for t in steps
        ]
    return np.stack([np.asarray(o) for o in got], 1)


def begin(head, cure, state, to_array, source):
    """Begin a new request in the bad slot."""
    slots = to_array(np.array([BAD]))
    if cure == "reset":
        head.reset(slots)
    elif cure == "load_state":
        head.load_state(to_array(state), slots)
    elif cure == "adopt":
        memory = head._engine.memory["state"]
        memory[BAD] = to_array(state[0]) if head.backend == "cuda" else state[0]
        head.adopt(slots)
    elif cure == "copy":
        head.load_state(to_array(state), to_array(np.array([1])))
        head.copy(to_array(np.array([1])), slots)
    else:
        head.restore(source, [BAD])


@pytest.mark.parametrize("cure", ["reset", "load_state", "adopt", "copy", "restore"])
@pytest.mark.parametrize("system", ["sketch", "replay", "standard"])
def test_a_bad_request(case, system, cure, rng):
    """The number is in the ring, or already in the state and in the sketch, when the request ends."""
    backend, layer, to_array = case
    names = ["k", "v"] + ([n for n in ("g", "beta") if n in layer.token_shapes()] if backend == "cuda" else [])
    state = rng.standard_normal((1, *layer.state_shape)).astype(np.float32)
    tokens, after = tokens_of(rng, layer, 3, 7), tokens_of(rng, layer, 3, 2 * WINDOW + 1)
    others, bad = [0, 2], slice(1, 2)
    fresh = make(system, backend, layer)
    fresh.load_state(to_array(state), to_array(np.array([1])))
    source = fresh.snapshot([1])
    begin(fresh, cure, state, to_array, source)
    want = run(fresh, after, to_array, range(2 * WINDOW + 1), bad)
    kinds = (np.nan, 2), (-np.inf, WINDOW), (np.inf, 7), (np.nan, WINDOW)  # a gate of -inf would be right
    for name, (value, steps) in zip(cycle(names), kinds):
        head, twin = (make(system, backend, layer) for _ in range(2))
        spoilt = run(head, bad_tokens(tokens, name, value), to_array, range(steps))
        clean = run(twin, tokens, to_array, range(steps))
        assert not np.isfinite(spoilt[bad]).all()
        np.testing.assert_array_equal(spoilt[others], clean[others])
        for each in (head, twin):
            begin(each, cure, state, to_array, source)
        got, expected = (run(each, after, to_array, range(2 * WINDOW + 1)) for each in (head, twin))
        np.testing.assert_array_equal(got[others], expected[others])
        np.testing.assert_array_equal(got[bad], want)
        for each in (head, twin, fresh):
            each.flush()
        np.testing.assert_array_equal(np.asarray(head.state)[ROWS], np.asarray(twin.state)[ROWS])
        np.testing.assert_array_equal(np.asarray(head.state)[BAD], np.asarray(fresh.state)[BAD])


@pytest.mark.parametrize("system", ["sketch", "replay", "standard"])
def test_a_bad_query(case, system, rng):
    """Queries are not stored: only the outputs of their own token are spoilt."""
    backend, layer, to_array = case
    tokens = tokens_of(rng, layer, 3, WINDOW + 2)
    head, twin = (make(system, backend, layer) for _ in range(2))
    got = run(head, bad_tokens(tokens, "q", np.nan), to_array, range(WINDOW + 2))
    want = run(twin, tokens, to_array, range(WINDOW + 2))
    assert np.isnan(got[1, 1]).any()
    got[1, 1] = want[1, 1]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.asarray(head.state), np.asarray(twin.state))
