"""Calls of a head that would wait forever are errors: from within a call, and in a forked process."""

import gc
import os
import signal
import threading
import weakref

import numpy as np
import pytest
from samples import LAYERS, tokens_of

import sketchssm as ss
from sketchssm.call_lock import CallLock

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
        with pytest.raises(TypeError, match=r"^q: expected an array, got .*Calling \(the head is within a call"):
            head.step(Calling(q, call), *others)
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


def test_other_threads_wait():
    lock, order = CallLock(), []

    def second():
        with lock:
            order.append("second")

    with lock:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_an_error_frees_the_lock():
    lock = CallLock()
    with pytest.raises(KeyError), lock:
        raise KeyError
    with lock:
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("inside", [False, True])
def test_forks(inside):
    """A child may use a head unless another thread was within a call."""
    lock, entered, leave = CallLock(), threading.Event(), threading.Event()

    def call():
        if inside:
            with lock:
                entered.set()
                leave.wait()
        else:
            entered.set()
            leave.wait()

    thread = threading.Thread(target=call)
    thread.start()
    entered.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            with lock:
                code = 1 if inside else 0
        except RuntimeError as error:
            code = 0 if inside and "forked" in str(error) else 2
        os._exit(code)
    _, status = os.waitpid(child, 0)
    leave.set()
    thread.join()
    assert status == 0
    with lock:
        pass
