"""Updates of sums whose result the host does not wait for."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch


class Update:
    """An update by work on a device's current stream, from its creation to `end`.

    Parameters
    ----------
    device : torch.device
        Where the sums are.
    """

    def __init__(self, device: torch.device) -> None:
        self._start = perf_counter()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * (device.type == "cuda"))]
        for event in self._events[:1]:
            event.record()

    def end(self, good: Any) -> None:
        """End the update; `good` is one bool, where the sums are or on the host."""
        self._good = good
        for event in self._events[1:]:
            self._good = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._good.copy_(torch.as_tensor(good), non_blocking=True)
            event.record()
        self._host = perf_counter() - self._start

    @property
    def known(self) -> bool:
        """Whether the device has done it."""
        return all(event.query() for event in self._events[1:])

    @property
    def good(self) -> bool:
        """The bool that `end` was given, once the update is known."""
        return bool(self._good)

    @property
    def beyond_host(self) -> float:
        """Seconds that the device took longer than the host, once the update is known."""
        start, *end = self._events or [None]
        return max(0.0, 1e-3 * start.elapsed_time(*end) - self._host) if start else 0.0
