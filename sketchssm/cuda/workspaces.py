"""Workspaces: memory through which the kernels of one call communicate, one for each stream and captured graph.

Calls on two streams may run at the same time, and so may two graphs. Nothing can be allocated during a capture, so
some workspaces are allocated in advance.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from sketchssm.cuda.constants import MAX_ROWS
from sketchssm.cuda.launch import capture_of

HEADER = 5
CHECKED_SLOTS = 4 * HEADER
"""Byte at which `Schedule` has the checked slots."""

PAIRS = CHECKED_SLOTS + 4 * MAX_ROWS + 4
"""Byte at which `Schedule` has room for pairs of slots."""

WORDS = PAIRS // 4 + 2 * MAX_ROWS
"""Words of `Schedule` in ``cuda_src/slot/schedule.cuh``, with padding for the alignment of its rows."""

READY = 64
"""Workspaces that are allocated together."""

LEAST = READY // 2
"""If fewer workspaces than this are left, more are allocated, outside of captures."""

PER_THREAD = 2
"""Handle of the default stream that each thread has for itself."""


def stream_key(stream: int) -> tuple[int, int]:
    """Key of a stream for dictionaries: the handle, and the thread if the handle is another stream in each thread."""
    return stream, threading.get_ident() if stream == PER_THREAD else 0


def spans(rows: int) -> list[tuple[int, int]]:
    """First and last row of each launch for so many rows."""
    return [(first, min(first + MAX_ROWS, rows)) for first in range(0, rows, MAX_ROWS)]


class Workspaces:
    """The workspaces of one engine, on the current device."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._used: dict[tuple[int, ...], Any] = {}
        self._ready: list[Any] = []
        self._allocate()

    def _allocate(self) -> None:
        made = self._cupy.zeros((READY, WORDS + WORDS % 2), dtype=np.int32)
        self._cupy.cuda.get_current_stream().synchronize()  # they will be used on other streams
        self._ready += list(made)

    def get(self) -> tuple[Any, bool]:
        """The workspace (`Schedule`) of the current stream, and whether it belongs to a graph in capture.

        RuntimeError if a graph is being captured and no workspace is left.
        """
        stream = int(self._cupy.cuda.get_current_stream().ptr)
        capture = capture_of(stream)
        key = *stream_key(stream), capture
        workspace = self._used.get(key)
        if not capture and len(self._ready) < LEAST:
            self._allocate()
        if workspace is None:
            if not self._ready:
                raise RuntimeError(
                    f"no workspace is left for this graph: {len(self._used)} streams and graphs of the head have one; "
                    f"make a call outside of graphs after every {LEAST} captures, which allocates more"
                )
            workspace = self._used[key] = self._ready.pop()
        return workspace, capture != 0
