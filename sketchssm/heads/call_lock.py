"""The lock of a head: one call at a time, and errors where a call would wait forever."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

_locks: WeakSet[CallLock] = WeakSet()


class CallLock:
    """Lets one thread at a time call a head."""

    def __init__(self) -> None:
        # `with` acquires and releases this lock in C, so that no signal handler runs in between. The lock knows its
        # owner, and no thread acquires the lock twice.
        self._lock: Any = threading.RLock()
        self._torn = False  # in a forked process: another thread of the parent process held the lock
        _locks.add(self)

    def held(self) -> AbstractContextManager[Any]:
        """Context of a call, which waits until the call of another thread has returned.

        RuntimeError if this thread is within another call of the head, or another thread of the parent process was
        when this process was forked.
        """
        if self._lock._is_owned():
            raise RuntimeError(
                "the head is within a call of this thread, and a finalizer, a signal handler or an argument of that "
                "call has called the head; make this call later"
            )
        if self._torn:
            raise RuntimeError(
                "the head was within a call of another thread when this process was forked, so its slots may be half "
                "written; make a new head"
            )
        return self._lock


def _after_fork() -> None:
    for lock in list(_locks):
        if lock._lock._is_owned():
            continue
        lock._torn = not lock._lock.acquire(blocking=False)
        if not lock._torn:
            lock._lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
