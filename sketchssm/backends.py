"""Which engine runs which system on which backend, and what every engine can do.

An engine owns the memory of one layer's slots and does the arithmetic; a head (`sketchssm.head.DecodeHead`) checks
and converts what a caller hands in. Engines are imported on first use, so that importing the library stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sketchssm.recurrence import Tokens

__all__ = ["BACKENDS", "Engine", "load_engine"]

BACKENDS = ("reference", "cpu")

ENGINES = {
    ("reference", "standard"): "sketchssm.reference.engines:StandardEngine",
    ("reference", "replay"): "sketchssm.reference.engines:ReplayEngine",
    ("reference", "sketch"): "sketchssm.reference.engines:SketchEngine",
    ("reference", "quantised"): "sketchssm.reference.baselines:QuantisedEngine",
    ("reference", "copy"): "sketchssm.reference.baselines:CopyEngine",
    ("reference", "reduced"): "sketchssm.baselines.reduced:reference_engine",
    ("cpu", "standard"): "sketchssm.cpu.standard:StandardEngine",
    ("cpu", "replay"): "sketchssm.cpu.replay:ReplayEngine",
    ("cpu", "sketch"): "sketchssm.cpu.sketch:SketchEngine",
    ("cpu", "quantised"): "sketchssm.cpu.quantised:QuantisedEngine",
    ("cpu", "copy"): "sketchssm.cpu.quantised:CopyEngine",
    ("cpu", "reduced"): "sketchssm.baselines.reduced:cpu_engine",
}


class Engine(Protocol):
    """What a head needs of a backend.

    All arrays are the backend's own, C-contiguous, of `dtype` (integers aside), and already checked: slots are
    unique, in range, or -1 for padding rows.
    """

    dtype: np.dtype[Any]
    """Type of states, inputs and outputs: float64 for `reference`, float32 for `cpu`."""

    @property
    def state(self) -> npt.NDArray[Any]:
        """``(slots, heads, V, K)``: states as of each slot's last flush, exact unless the system itself is not."""

    @property
    def position(self) -> npt.NDArray[np.int32]:
        """``(slots,)``: tokens buffered since each slot's last flush."""

    def step(self, tokens: Tokens, slots: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
        """Run ``(batch, tokens, ...)`` inputs, token by token, and write ``out (batch, tokens, heads, V)``."""

    def load_state(self, state: npt.NDArray[Any], slots: npt.NDArray[np.int64]) -> None:
        """Set states ``(batch, heads, V, K)`` at the start of a window."""

    def flush(self, slots: npt.NDArray[np.int64]) -> None:
        """Fold what the slots have buffered into their states and start a new window."""

    def reset(self, slots: npt.NDArray[np.int64]) -> None:
        """Make the slots as new, whatever they held: zero state, empty ring."""


def load_engine(system: str, backend: str, *args: Any, **settings: Any) -> tuple[str, Engine]:
    """Build the engine of a system on a backend.

    Parameters
    ----------
    system : str
        "standard", "replay", "sketch", "quantised", "copy" or "reduced".
    backend : {"auto", "reference", "cpu"}
        Where to run; "auto" takes the fastest that this machine has.
    *args, **settings
        Passed to the engine.

    Returns
    -------
    name : str
        The backend in use.
    engine : Engine
        The engine.

    Raises
    ------
    ValueError
        If the backend is unknown or does not have the system.
    """
    name = "cpu" if backend == "auto" else backend
    if (name, system) not in ENGINES:
        have = ["auto", *(b for b in BACKENDS if (b, system) in ENGINES)]
        raise ValueError(f"backend: expected one of {', '.join(have)} for {system}, got {backend!r}")
    module, attribute = ENGINES[name, system].split(":")
    return name, getattr(import_module(module), attribute)(*args, **settings)
