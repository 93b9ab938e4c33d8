"""Calls of a head that would wait forever are errors: from within a call, and in a forked process."""

import contextlib
import gc
import os
import signal
import threading
import weakref

import numpy as np
import pytest
from samples import LAYERS, refused, tokens_of

import sketchssm as ss
from sketchssm.heads.call_lock import CallLock

MESSAGE = r"^the head is within a call of this thread"


class Calling:
    """An array that calls a head while the head reads the array."""

    def __init__(self, array, call):
        self.array, self.call, self.shape = array, call, array.shape

    def __array__(self, dtype=None, copy=None):
        self.call()
        return self.array


def test_an_argument_that_calls_the_head(backend, layer, rng):
    """The error comes before anything is written, and the head goes on."""
    head = ss.ReplayHead(layer, 2, backend, window=4)
    q, *others = tokens_of(rng, layer, 2, 1)
    for call in (lambda: head.position, head.reset, lambda: head.step(q, *others), lambda: head.state):
        refused(r"q: expected an array, got .*Calling \(the head is within a", head.step, Calling(q, call), *others)
    np.testing.assert_array_equal(head.position, 0)
    head.step(q, *others)
    np.testing.assert_array_equal(head.position, 1)


def test_a_finalizer_that_calls_the_head(monkeypatch):
    """The garbage collector may run it within a call."""
    head, seen = ss.StandardHead(LAYERS["gdn"], 2, "reference"), []

    class Request:
        def __init__(self):
            self.itself = self
            weakref.finalize(self, release)

    def release():
        with pytest.raises(RuntimeError, match=MESSAGE):
            head.reset([1])
        seen.append(True)

    flush = head._engine.flush
    monkeypatch.setattr(head._engine, "flush", lambda slots: (gc.collect(), flush(slots)))
    Request()
    head.flush()
    assert seen
    head.reset([1])


class Interrupt(BaseException):
    """Raised by a signal handler, like KeyboardInterrupt."""


@pytest.fixture
def signals():
    """A function that starts signals at random times, a few microseconds apart, with a handler."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        pytest.skip("needs signals")
    before = signal.getsignal(signal.SIGALRM)
    rng = np.random.default_rng(0)

    def start(handler):
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(1e-6, 3e-5)))

    yield start
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_an_interrupt_frees_the_lock(signals):
    """Wherever it comes."""
    lock = CallLock()

    def interrupt(*given):
        raise Interrupt

    for _ in range(2000):
        with pytest.raises(Interrupt):
            signals(interrupt)
            while True:
                with lock.held():
                    pass
        with lock.held():
            pass


def test_a_signal_handler_that_calls_the_head(signals):
    """Either the call is refused, or it is made; it never waits for the call that it interrupts."""
    lock, seen = CallLock(), []

    def handle(*given):
        try:
            with lock.held():
                seen.append("made")
        except RuntimeError as error:
            assert "within a call of this thread" in str(error)
            seen.append("refused")

    for n in range(2000):
        signals(handle)
        while len(seen) == n:
            with lock.held():
                for _ in range(20):
                    pass
    assert set(seen) == {"made", "refused"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("holder", ["nobody", "another thread", "the forking thread"])
def test_forks(holder):
    """A child may use a head unless another thread was within a call; the forking thread's own call goes on."""
    lock, entered, leave = CallLock(), threading.Event(), threading.Event()

    def call():
        with lock.held() if holder == "another thread" else contextlib.nullcontext():
            entered.set()
            leave.wait()

    def tried():
        try:
            with lock.held():
                return "entered"
        except RuntimeError as error:
            return "torn" if "forked" in str(error) else "within"

    thread = threading.Thread(target=call)
    thread.start()
    entered.wait()
    with lock.held() if holder == "the forking thread" else contextlib.nullcontext():
        child = os.fork()
        first = tried() if child == 0 else ""
    if child == 0:
        expected = {
            "nobody": ("entered", "entered"),
            "another thread": ("torn", "torn"),
            "the forking thread": ("within", "entered"),
        }
        signal.alarm(20)
        os._exit(0 if (first, tried()) == expected[holder] else 1)
    _, status = os.waitpid(child, 0)
    leave.set()
    thread.join()
    assert status == 0
    assert tried() == "entered"
