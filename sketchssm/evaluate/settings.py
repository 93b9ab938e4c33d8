"""How plans are made for an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sketchssm.evaluate.calibrated import Calibrated, calibrate
from sketchssm.evaluate.energy import MapSetting
from sketchssm.plan import DEFAULT_MAP
from sketchssm.traces import Traces

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """How plans are made: the command line's ``--window --map --pivots --ridge --weighting``."""

    window: int = 16
    map_name: str | None = None
    pivots: int = 4
    ridge: float | None = None
    weighting: str = "uniform"

    @property
    def map(self) -> str:
        """The coefficient map: `SketchPlan`'s default unless one was named."""
        return self.map_name or DEFAULT_MAP

    def calibrate(self, traces: Traces, window: int | None = None) -> Calibrated:
        """Calibrate one layer, at another window if one is given."""
        return calibrate(traces, window or self.window, weighting=self.weighting)

    def setting(self, map: str | None = None) -> MapSetting:
        """A map with its parameters: the one in use, or another with its own ridge."""
        if map in (None, self.map):
            return MapSetting(self.map, self.pivots, self.ridge)
        return MapSetting(map, self.pivots)

    def plan_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `SketchPlan` beside basis and ranks."""
        return {"window": self.window, "map": self.map, "pivots": self.pivots, "ridge": self.ridge}
