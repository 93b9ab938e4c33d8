"""The lock of a head: one call at a time, and errors where a call would wait forever."""

from __future__ import annotations

import os
import threading
from weakref import WeakSet

__all__ = ["CallLock"]

FREE, TORN = 0, -1
"""Owners of a lock: no thread; a thread that this process, a fork, does not have."""

_locks: WeakSet[CallLock] = WeakSet()


class CallLock:
    """Context of a call of a head; waits until the call of another thread has returned.

    Raises
    ------
    RuntimeError
        If this thread is within another call of the head, or another thread of the parent process was when this
        process was forked.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = FREE
        _locks.add(self)

    def __enter__(self) -> None:
        thread, owner = threading.get_ident(), self._owner
        if owner == thread:
            raise RuntimeError(
                "the head is within a call of this thread, and a finalizer, a signal handler or an argument of that "
                "call has called the head; make this call later"
            )
        if owner == TORN:
            raise RuntimeError(
                "the head was within a call of another thread when this process was forked, so its slots may be half "
                "written; make a new head"
            )
        self._lock.acquire()
        self._owner = thread

    def __exit__(self, *error: object) -> None:
        self._owner = FREE
        self._lock.release()


def _after_fork() -> None:
    for lock in list(_locks):
        if lock._lock.locked() and lock._owner != threading.get_ident():
            lock._owner = TORN


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
