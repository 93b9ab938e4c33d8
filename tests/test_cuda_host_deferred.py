"""CUDA kernels on the host: deferred flushes, in order and beside later kernels of a captured graph."""

import numpy as np
import pytest
from gpu.cuda_support import EXACT, STORED, SketchEngine, error, make_plan, make_tokens, tokens_to_device
from host import fixtures, kernels
from host.kernels import LAYERS, RANKS, poisoned, run_served

import sketchssm as ss
from sketchssm import cuda
from sketchssm.cuda import side
from sketchssm.layer.recurrence import FULL_STATE
from sketchssm.reference import engines as reference

pytestmark = fixtures.cold

SLOTS = 5


@pytest.fixture
def cupy(monkeypatch):
    """The stand-in for CuPy, with threads in a random order."""
    monkeypatch.setattr(cuda, "missing", lambda: "")
    return kernels.install(monkeypatch)


def engines(plan, slots=SLOTS, **types):
    """The engine on the device and its reference."""
    device = poisoned(SketchEngine(plan, slots, output_dtype="float32", deferred=True, **types))
    return device, reference.SketchEngine(plan, slots, deferred=True)


def heads_of(layer, slots, rng, count=1):
    """Deferred heads of one plan, whose kernels are loaded."""
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng, window=4)
    heads = [ss.SketchHead(plan, slots, "cuda", activation_dtype="float16", deferred=True) for _ in range(count)]
    for head in heads:
        head.warmup()
    return heads


def token_of(layer, rows, rng):
    """A token of each row on the device, and memory for the outputs."""
    tokens = tokens_to_device(make_tokens(layer, rows, 1, "float16", rng), "float16")
    token = type(tokens)(*(None if x is None else x[:, 0] for x in tokens))
    return token, np.empty_like(token.v)


def compare(plan, device, oracle, gots, wants, bound=STORED["bfloat16"]):
    """Compare outputs of all steps, and states."""
    full_state, own = plan.ranks == FULL_STATE, plan.layer.state_shape[:2]
    got, want = (np.concatenate([x.reshape(-1, *own) for x in each]) for each in (gots, wants))
    assert error(got[:, ~full_state], want[:, ~full_state]) < bound
    if full_state.any():
        assert error(got[:, full_state], want[:, full_state]) < EXACT
    assert error(device.state.get(), oracle.state) < EXACT


@pytest.mark.parametrize(
    ("name", "kind", "window", "activation"),
    [
        *(("mamba2", "lowrank", 16, "bfloat16"), ("gdn", "ridge", 16, "bfloat16"), ("kda", "lowrank", 16, "bfloat16")),
        *(
            ("gdn-96", "lowrank", 8, "float32"),
            ("mamba2-80", "ridge", 4, "bfloat16"),
            ("kda-64", "ridge", 32, "float16"),
        ),
    ],
)
def test_rows_out_of_step(name, kind, window, activation, rng, cupy):
    """Rows come and go with padding and several tokens; states are loaded, slots flushed and reset in between."""
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng, map=kind, window=window)
    device, oracle = engines(plan, activation_dtype=activation)
    got, want, folded = run_served(device, oracle, layer, 3 * window, activation, rng, cupy)
    assert folded.count(window - 1) > 1
    assert max(folded) == window - 1
    compare(plan, device, oracle, [got], [want])


def test_all_heads_read_their_full_states(rng, cupy):
    layer = LAYERS["gdn-96"]
    plan = make_plan(layer, np.full(layer.heads, FULL_STATE), rng, window=4)
    device, oracle = engines(plan)
    tokens = make_tokens(layer, 3, 9, "bfloat16", rng)
    out, want = cupy.full(tokens.v.shape, np.nan, dtype=np.float32), np.empty(tokens.v.shape)
    slots = np.array([4, -1, 0])
    device.step(tokens_to_device(tokens, "bfloat16"), cupy.asarray(slots), out)
    oracle.step(tokens, slots, want)
    assert error(out.get(), want) < EXACT
    assert error(device.state.get(), oracle.state) < EXACT


def test_rows_that_name_one_slot_are_left_out(rng, cupy):
    layer = LAYERS["gdn"]
    plan = make_plan(layer, np.resize(RANKS["gdn"], layer.heads), rng, window=4)
    device, oracle = engines(plan)
    for t in range(10):
        tokens = make_tokens(layer, 4, 1, "bfloat16", rng)
        out, want = cupy.full(tokens.v.shape, np.nan, dtype=np.float32), np.empty(tokens.v.shape)
        given = np.array([0, 1, 1, 3] if t % 2 else [0, 1, 9, 3])
        device.step(tokens_to_device(tokens, "bfloat16"), cupy.asarray(given), out)
        oracle.step(tokens, np.array([0, -1, -1, 3] if t % 2 else [0, 1, -1, 3]), want)
        assert np.array_equal(device.cursor.get(), oracle.memory["cursor"])
        assert not out[2].any()
    compare(plan, device, oracle, [out.get()], [want])


def test_more_rows_than_a_launch_takes(rng, cupy, monkeypatch):
    from sketchssm.cuda import replay

    monkeypatch.setattr(replay, "MAX_ROWS", 2)
    layer = LAYERS["kda-64"]
    plan = make_plan(layer, np.resize([5, 9], layer.heads), rng, window=4)
    device, oracle = engines(plan)
    tokens = make_tokens(layer, 5, 7, "bfloat16", rng)
    out, want = cupy.full(tokens.v.shape, np.nan, dtype=np.float32), np.empty(tokens.v.shape)
    stream = cupy.cuda.Stream()
    given, slots = tokens_to_device(tokens, "bfloat16"), cupy.arange(5)
    device.step(given, slots, out)
    oracle.step(tokens, np.arange(5), want)
    compare(plan, device, oracle, [out.get()], [want])
    stream.begin_capture()
    with ss.overlap_flushes():
        device.step(given, slots, out)
    graph = stream.end_capture()
    graph.launch(stream)
    oracle.step(tokens, np.arange(5), want)
    compare(plan, device, oracle, [out.get()], [want])


@pytest.mark.parametrize(("processors", "resident", "want"), [(3, 1, [(3, 3), (2, 1)]), (5, 2, [(5, 10), (4, 2)])])
def test_reads_leave_multiprocessors_to_flushes(processors, resident, want, rng, cupy, monkeypatch):
    """Of three or five multiprocessors, one, and as many blocks of the flush as it holds."""
    monkeypatch.setitem(cupy.cuda.Device().attributes, "MultiProcessorCount", processors)
    monkeypatch.setattr(cupy.cuda.driver, "occupancyMaxActiveBlocksPerMultiprocessor", lambda *given: resident)
    layer, slots = LAYERS["gdn"], np.arange(SLOTS)
    plan = make_plan(layer, np.resize(RANKS["gdn"], layer.heads), rng, window=4)
    tokens = make_tokens(layer, SLOTS, 1, "bfloat16", rng)
    blocks = []
    for deferred in (False, True):
        engine = SketchEngine(plan, SLOTS, output_dtype="float32", deferred=deferred)
        engine.step(tokens_to_device(tokens, "bfloat16"), cupy.asarray(slots), cupy.empty(tokens.v.shape, np.float32))
        reads, _, flushes = engine._grids[SLOTS]
        blocks.append((reads, flushes))
    assert blocks == want


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_flushes_beside_the_kernels_of_other_heads(name, rng, cupy):
    """A graph of two heads, each of which takes two steps and is loaded; flushes run as late as they may."""
    layer = LAYERS[name]
    four = heads_of(layer, SLOTS, rng, 4)
    heads, twins = four[:2], four[2:]
    tokens, outs = zip(*(token_of(layer, 4, rng) for _ in range(4)), strict=True)
    others = [np.empty_like(out) for out in outs]
    slots, loaded = cupy.asarray([3, 0, -1, 2]), cupy.asarray([1])
    start = cupy.asarray(rng.standard_normal((1, *layer.state_shape)).astype(np.float32))

    def work(own, out):
        for i in range(2):
            for j, head in enumerate(own):
                head.step(*tokens[2 * i + j], slots=slots, out=out[2 * i + j])
        for head in own:
            head.load_state(start, slots=loaded)

    stream = cupy.cuda.Stream()
    stream.begin_capture()
    with ss.overlap_flushes():
        work(heads, outs)
    graph = stream.end_capture()
    for t in range(9):
        slots[...] = rng.permutation(SLOTS)[:4] if t % 2 else np.array([3, 0, -1, 2])
        graph.launch(stream)
        work(twins, others)
        for out, other in zip(outs, others, strict=True):
            assert np.array_equal(out.view(np.uint16), other.view(np.uint16))
    for head, twin in zip(heads, twins, strict=True):
        assert np.array_equal(head.position, twin.position)
        assert np.array_equal(head.state, twin.state)


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_callers_may_overwrite_inputs_and_slots(name, rng, cupy):
    """Inputs, slots and outputs may change as soon as the read has ended."""
    layer = LAYERS[name]
    head, twin = heads_of(layer, SLOTS, rng, 2)
    tokens, out = token_of(layer, 4, rng)
    given, slots = [None if x is None else x.copy() for x in tokens], cupy.arange(4)
    outputs = []

    def overwrite(*launch, **shared):
        outputs.append(out.copy())
        for x in (*given, out):
            if x is not None:
                x.fill(np.nan)
        slots.fill(SLOTS + 1)

    stream = cupy.cuda.Stream()
    stream.begin_capture()
    with ss.overlap_flushes():
        head.step(*given, slots=slots, out=out)
        cupy.cuda.Stream.recorded.append((overwrite, 1, 1, (), 0))
    graph = stream.end_capture()
    for _ in range(9):
        for x, own in zip(given, tokens, strict=True):
            if x is not None:
                x[...] = own
        slots[...] = rows = rng.permutation(SLOTS)[:4]
        graph.launch(stream)
        want = twin.step(*tokens, slots=cupy.asarray(rows))
        assert np.array_equal(outputs[-1].view(np.uint16), want.view(np.uint16))
    assert np.array_equal(head.position, twin.position)
    assert np.array_equal(head.state, twin.state)


def test_a_capture_must_end_after_the_scope(rng, cupy):
    (head,) = heads_of(LAYERS["gdn"], 2, rng)
    (given, out), slots = token_of(LAYERS["gdn"], 2, rng), cupy.arange(2)
    stream = cupy.cuda.Stream()
    stream.begin_capture()
    with ss.overlap_flushes():
        head.step(*given, slots=slots, out=out)
        with pytest.raises(RuntimeError, match="not joined"):
            stream.end_capture()
    for read in (lambda: head.position, lambda: head.state):  # each call of the head joins
        stream.begin_capture()
        with ss.overlap_flushes():
            head.step(*given, slots=slots, out=out)
            read()
            stream.end_capture()
            head.step(*given, slots=slots, out=out)  # outside of the capture, for whose flush nothing can wait


def test_two_captures_at_a_time(rng, cupy, monkeypatch):
    """The side stream can be in one capture only. In another capture, flushes run in order."""
    (head,) = heads_of(LAYERS["gdn"], 2, rng)
    (given, out), slots = token_of(LAYERS["gdn"], 2, rng), cupy.arange(2)
    streams = cupy.cuda.Stream
    other = {head._arrays.side._stream.ptr: 1000}  # the number of the other capture
    monkeypatch.setattr(side, "capture_of", lambda stream: other.get(stream, streams.captures))
    stream = streams()
    stream.begin_capture()
    with ss.overlap_flushes():
        head.step(*given, slots=slots, out=out)
        assert len(streams.recorded) == 2  # a read and a flush
        assert not streams.beside
    stream.end_capture()


def test_calls_on_another_stream_wait_for_the_flush(cupy, monkeypatch):
    """Also after the scope, whose end joins the flush only to the stream of its step."""
    monkeypatch.setattr(side, "capture_of", lambda stream: capture)

    class Logged(cupy.cuda.Stream):
        def __init__(self, ptr):
            super().__init__()
            self.ptr, self.waits = ptr, 0

        def wait_event(self, event):
            self.waits += 1

    capture, beside, own, other = 7, side.SideStream(), Logged(1), Logged(2)
    with own, ss.overlap_flushes():
        beside(lambda: None)
    with other:
        beside.begin_call()
    with own:
        beside.begin_call()
        assert (own.waits, other.waits) == (1, 1)
        with ss.overlap_flushes():
            beside(lambda: None)
            beside.begin_call()
    assert own.waits == 2  # one for each flush
    capture = 8
    with other:
        beside.begin_call()
    assert other.waits == 1


def test_a_flush_that_fails_is_joined(rng, cupy, monkeypatch):
    """The capture ends, and the caller sees the error of the launch."""
    (head,) = heads_of(LAYERS["gdn"], 2, rng)
    (given, out), slots = token_of(LAYERS["gdn"], 2, rng), cupy.arange(2)

    def fail(*args):
        raise RuntimeError("refused")

    monkeypatch.setattr(head._engine, "_flush", [fail, *head._engine._flush[1:]])
    stream = cupy.cuda.Stream()
    stream.begin_capture()
    with pytest.raises(RuntimeError, match="refused"), ss.overlap_flushes():
        head.step(*given, slots=slots, out=out)
    stream.end_capture()
