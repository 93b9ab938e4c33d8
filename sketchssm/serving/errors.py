"""What heads measure of their sketches while an engine serves, as lines of its log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

import numpy as np

from sketchssm.heads.sketch import SketchHead

EVERY = 60.0
"""Seconds from one line to the next."""


class ErrorLog:
    """Tells the errors of some layers' heads once a minute.

    `tell` takes a line. `show` takes a layer's name, its relative squared error, the largest of a request, and the
    number of requests with exact reads.
    """

    def __init__(self, tell: Callable[[str], None], show: Callable[[str, float, float, int], None]) -> None:
        self._tell, self._show, self._last = tell, show, monotonic()

    @property
    def due(self) -> bool:
        """Whether a line is due; at most once."""
        now = monotonic()
        if now - self._last < EVERY:
            return False
        self._last = now
        return True

    def write(self, heads: Mapping[str, SketchHead], slots: Any) -> None:
        """Tell the errors in the slots of requests; waits for the device. Without a sample nothing is told."""
        parts, samples = [], 0
        for name, head in heads.items():
            found = head.errors(slots)
            measured = found.samples > 0
            if not measured.any():
                continue
            samples = max(samples, int(found.samples.sum()))
            each = found.error[measured].sum(1) / np.maximum(found.energy[measured].sum(1), 1e-30)
            relative, largest, changed = float(found.relative), float(each.max()), int(found.exact.sum())
            self._show(name, relative, largest, changed)
            exact = "" if head.tolerance is None else f", {changed} exact"
            parts.append(f"{name} {relative:.1e} ({largest:.1e}{exact})")
        if parts:
            requests = "1 request" if len(slots) == 1 else f"{len(slots)} requests"
            self._tell(
                f"sketchssm: relative squared errors of sketches in {requests}, {samples} samples a layer; of all "
                f"(the largest of a request): {', '.join(parts)}"
            )
