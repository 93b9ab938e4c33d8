"""Gauges of Prometheus: what heads measure of their sketches, by layer.

vLLM's front end serves the gauges of other processes from the folder of PROMETHEUS_MULTIPROC_DIR.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from prometheus_client import Gauge

GAUGES = {
    "relative_squared_error": "Relative squared error of a layer's sketches in the requests that decode",
    "relative_squared_error_max": "The largest of a request",
    "exact_requests": "Requests that continue with exact reads in a layer, because of its tolerance",
}


def show(layer: str, relative: float, largest: float, exact: int) -> None:
    """Set the gauges of a layer; of several processes that have heads of it, the largest value is served."""
    for gauge, value in zip(_gauges(), (relative, largest, exact), strict=True):
        gauge.labels(layer).set(value)


@cache
def _gauges() -> list[Any]:
    return [Gauge(f"sketchssm_{name}", text, ["layer"], multiprocess_mode="livemax") for name, text in GAUGES.items()]
