"""Parts of a measurement on a GPU: inputs in device memory, captured graphs, and work that keeps the queue full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sketchssm.arrays.interop import host_type
from sketchssm.layer.recurrence import Tokens

AHEAD, TIMES = 256 << 20, 3
"""Bytes that `Ahead` clears, and number of repetitions: a fifth of a millisecond together."""


class Ahead:
    """Work for an idle device before timed work, so that the timed work is already queued when it begins."""

    def __init__(self) -> None:
        import cupy

        self._memory = cupy.empty(AHEAD, np.uint8)

    def launch(self, stream: Any) -> None:
        """Clear memory."""
        for _ in range(TIMES):
            self._memory.data.memset_async(0, AHEAD, stream)


def upload(tokens: Tokens, activation: str = "float32", raw_gate: bool = False) -> Tokens:
    """Copy inputs to the current device: q, k, v and raw gate inputs in the activations' type, gates in float32."""
    import cupy

    wide, narrow = host_type("float32"), host_type(activation)
    activations = "qkvg" if raw_gate else "qkv"

    def copied(name: str, x: Any) -> Any:
        return cupy.asarray(np.ascontiguousarray(x, dtype=narrow if name in activations else wide))

    return Tokens(*(None if x is None else copied(name, x) for name, x in tokens._asdict().items()))


def captured(work: Callable[[], None], stream: Any) -> Any:
    """Capture a function as a graph; it launches kernels on CuPy's current stream and neither waits nor allocates."""
    with stream:
        stream.begin_capture()
        work()
        return stream.end_capture()
