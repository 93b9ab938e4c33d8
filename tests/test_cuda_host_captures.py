"""Heads on the CUDA backend without a GPU: what a capture refuses, and the order of streams of two frameworks."""

import contextlib
import re
import threading
from threading import get_ident

import numpy as np
import pytest
from host import driver, fixtures, standin
from host.heads import BFLOAT16, LAYER, OnDevice, narrow, sketch, tokens_of
from samples import refused

import sketchssm as ss
from sketchssm.cuda import frameworks
from sketchssm.cuda.call_layout import ArrayLayout
from sketchssm.cuda.workspaces import PER_THREAD, stream_key
from sketchssm.layer.recurrence import Tokens

cupy = fixtures.of_heads
SLOTS = [3, 1, 0]


@pytest.fixture
def step(rng):
    """A head, its arguments on the device, and a function that calls a step of them."""
    head = sketch()
    tokens = narrow(Tokens(*(x[:, 0].copy() for x in tokens_of(rng))), standin.asarray)
    out, slots = standin.empty(tokens.v.shape, BFLOAT16), standin.asarray(np.array(SLOTS))

    def call(**others):
        return head.step(**(tokens._asdict() | {"slots": slots, "out": out} | others))

    call.head, call.tokens = head, tokens
    return call


@contextlib.contextmanager
def capture():
    """A capture; afterwards the list has the graph's launch."""
    stream, made = standin.Stream(), []
    stream.begin_capture()
    try:
        yield made
    finally:
        graph = stream.end_capture()
        made.append(lambda: graph.launch(stream))


def strided(x):
    """The same values with heads that are not next to each other."""
    return standin.asarray(np.repeat(x, 2, axis=1))[:, ::2]


HOSTED = "expected an array on the device while a graph is captured, got one on the host"
TOKENS = "expected contiguous, aligned tokens of type bfloat16"
OUT = f"out: {TOKENS} that share no memory with an input while a graph is captured, got "


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": SLOTS}, f"slots: {HOSTED}"),
        ({"g": np.asarray}, f"g: {HOSTED}"),
        ({"v": strided}, f"v: {TOKENS} while a graph is captured, got dtype bfloat16 and strides ("),
        (
            {"slots": standin.asarray(np.array(SLOTS, np.int16))},
            "slots: expected contiguous int64 or int32 numbers while",
        ),
        ({"out": None}, f"{OUT}None"),
        ({"out": strided}, f"{OUT}dtype bfloat16 and strides ("),
        ({"out": np.asarray}, f"{OUT}one on the host"),
    ],
)
def test_a_step_needs_lasting_memory(step, change, message):
    """A graph would use memory that is freed after the call, so the call is refused before anything is captured."""
    of = step.tokens._asdict() | {"out": step.tokens.v}
    change = {name: made(of[name]) if callable(made) else made for name, made in change.items()}
    step(**change)
    with capture() as made:
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            step(**change)
        step()
    np.testing.assert_array_equal(step.head.position, [1, 1, 0, 1])
    made[0]()
    np.testing.assert_array_equal(step.head.position, [2, 2, 0, 2])


def test_other_calls_need_lasting_memory(step, rng):
    head, slots = step.head, standin.asarray(np.array(SLOTS))
    drafts = {"draft": True, "out": standin.empty((3, 1, *step.tokens.v.shape[1:]), BFLOAT16)}
    several = {name: x[:, None] for name, x in step.tokens._asdict().items()}
    states = rng.standard_normal((3, *LAYER.state_shape), np.float32)
    calls = {
        "lengths": lambda: step(**several, **drafts, lengths=[1, 0, 1]),
        "accepted": lambda: head.commit([1, 0, 1], slots=slots),
        "state": lambda: head.load_state(states, slots=slots),
        "slots": lambda: head.reset(SLOTS),
        "src": lambda: head.copy([0, 1], slots[:2]),
        "dst": lambda: head.copy(slots[:2], [0, 1]),
    }
    with capture():
        for name, call in calls.items():
            refused(f"{name}: expected an array on the device while a graph is captured", call)


def test_states_in_the_head_s_memory(step):
    """They would be copied before the kernel overwrites them."""
    expected = "^state: expected states apart from the head's memory while a graph is captured"
    with capture(), pytest.raises(ValueError, match=expected):
        step.head.load_state(step.head.state[:3], slots=standin.asarray(np.array(SLOTS)))


class OfTorch(standin.Stream):
    """PyTorch's current stream."""

    ptr = 7


@pytest.fixture
def waits(torch, monkeypatch):
    """Pairs of streams: the first waits for the second. Tensors are on the device, and PyTorch's stream is 7."""
    driver.install(monkeypatch, torch, None)
    seen, inner = [], OfTorch()
    monkeypatch.setattr(frameworks.TorchArrays, "stream", lambda self: (self.__dict__.update(_device="cpu"), inner)[1])
    monkeypatch.setattr(frameworks.TorchArrays, "stream_address", lambda self: inner.ptr)
    monkeypatch.setattr(
        standin.Stream, "wait_event", lambda self, event: seen.append((self.ptr, event.stream)), raising=True
    )
    return seen


def on_torch(torch, tokens):
    return Tokens(
        *(
            torch.from_numpy(np.asarray(x).astype(np.float32)).to(torch.bfloat16 if i < 3 else torch.float32)
            for i, x in enumerate(tokens)
        )
    )


def test_cupy_s_slots_among_tensors(step, waits, torch):
    """PyTorch's stream waits for CuPy's current stream, on which the slots may still be written."""
    step(**on_torch(torch, step.tokens)._asdict(), out=None)
    assert waits == [(OfTorch.ptr, 0)]
    twin = ss.SketchHead(step.head.plan, 4, "reference")
    twin.step(*(np.asarray(x).astype(float) for x in step.tokens), slots=SLOTS)
    np.testing.assert_array_equal(step.head._engine.slots.cursor, twin.position)


def test_positions_after_tensors(step, waits, torch):
    """The copy is made on PyTorch's stream, and CuPy's current stream waits for the copy; likewise for states."""
    step(**on_torch(torch, step.tokens)._asdict(), slots=torch.tensor(SLOTS), out=None)
    assert not waits
    np.testing.assert_array_equal(step.head.position, [1, 1, 0, 1])
    assert waits == [(0, OfTorch.ptr)]
    assert not step.head.state.any()
    assert waits == [(0, OfTorch.ptr)] * 2
    step()
    np.testing.assert_array_equal(step.head.position, [2, 2, 0, 2])
    assert len(waits) == 2  # the last call was CuPy's own
    step(**on_torch(torch, step.tokens)._asdict(), slots=torch.tensor(SLOTS), out=None)
    with capture():
        assert step.head.state.shape[0] == 4
    assert len(waits) == 2  # a stream outside of the capture must not wait for the capture


def test_other_arrays_among_tensors(step, waits, torch):
    """DLPack itself orders the streams."""
    step(**on_torch(torch, step.tokens)._asdict(), slots=OnDevice(np.array(SLOTS)), out=None)
    assert not waits
    np.testing.assert_array_equal(step.head._engine.slots.cursor, [1, 1, 0, 1])


def test_pytorch_keeps_the_memory_of_its_graphs(step, waits, torch):
    """So a captured step of tensors may make copies and outputs."""
    given = on_torch(torch, step.tokens)
    given, slots = given._replace(v=torch.repeat_interleave(given.v, 2, 1)[:, ::2]), torch.tensor(SLOTS)
    with capture() as made:
        output = step(**given._asdict(), slots=slots, out=None)
    made[0]()
    assert output.shape == given.v.shape
    np.testing.assert_array_equal(step.head._engine.slots.cursor, [1, 1, 0, 1])


def test_another_framework_s_arrays_in_a_capture(step, waits, torch):
    with capture(), pytest.raises(ValueError, match=r"^slots: expected an array of the framework of the call while"):
        step(**on_torch(torch, step.tokens)._asdict(), out=None)


def test_long_rows():
    """A single row may have any length, as no stride of rows is needed; longer strides are refused by name."""
    tokens = 2**31 // (2 * 64 * 2)  # of two heads and 64 channels in bf16: one byte more than the largest stride
    assert ArrayLayout("v", "bfloat16", 1, tokens, (2, 64), True).contiguous == (0, 256, 2**31)
    assert ArrayLayout("v", "bfloat16", 2, tokens - 1, (2, 64), True).contiguous[0] == 2**31 - 256
    refused("v: expected at most 2147483647 bytes a row, got", ArrayLayout, "v", "bfloat16", 2, tokens, (2, 64), True)


def test_keys_of_streams():
    """Handle 2 is another stream in each thread."""
    keys = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: keys.append((stream_key(PER_THREAD), stream_key(7), get_ident())))
        thread.start()
        thread.join()
    keys.append((stream_key(PER_THREAD), stream_key(7), get_ident()))
    assert {plain for _, plain, _ in keys} == {(7, 0)}
    assert all(own == (PER_THREAD, thread) for own, _, thread in keys)
