"""What programs that time heads on the device need: inputs that are there, and graphs, which the host can't slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sketchssm.head import DecodeHead
from sketchssm.recurrence import Tokens

__all__ = ["Ahead", "captured", "timed_steps", "upload"]

AHEAD, TIMES = 256 << 20, 3
"""Bytes that are cleared before work is timed, and how often: a fifth of a millisecond in all."""


class Ahead:
    """What an idle device is given before work that is to be timed, which is in the queue then when its turn comes."""

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
    import ml_dtypes

    wide = np.dtype(np.float32)
    narrow = np.dtype(ml_dtypes.bfloat16 if activation == "bfloat16" else activation)

    activations = "qkvg" if raw_gate else "qkv"

    def copied(name: str, x: Any) -> Any:
        return cupy.asarray(np.ascontiguousarray(x, dtype=narrow if name in activations else wide))

    return Tokens(*(None if x is None else copied(name, x) for name, x in tokens._asdict().items()))


def captured(work: Callable[[], None], stream: Any) -> Any:
    """Graph of what launches kernels on CuPy's current stream, without waiting or allocating."""
    with stream:
        stream.begin_capture()
        work()
        return stream.end_capture()


def timed_steps(head: DecodeHead, steps: Sequence[Tokens]) -> tuple[list[Any], float]:
    """Decode uploaded tokens as one graph; return the outputs on the device, and the seconds that it took there."""
    import cupy

    stream, start, stop = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(), cupy.cuda.Event()
    outputs = [cupy.empty(token.v.shape, token.v.dtype) for token in steps]
    ahead = Ahead()
    cupy.cuda.Device().synchronize()

    def work() -> None:
        for token, output in zip(steps, outputs, strict=True):
            head.step(*token, out=output)

    graph = captured(work, stream)
    graph.upload(stream)
    ahead.launch(stream)
    start.record(stream)
    graph.launch(stream)
    stop.record(stream)
    stop.synchronize()
    return outputs, 1e-3 * cupy.cuda.get_elapsed_time(start, stop)
