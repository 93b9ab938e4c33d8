"""The options of a plan, as given on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sketchssm.evaluate import Calibrated, MapSetting, calibrate
from sketchssm.plan import DEFAULT_MAP
from sketchssm.traces import Traces

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """How plans are made; see `options.map_settings`."""

    window: int = 16
    map_name: str | None = None
    pivots: int = 4
    ridge: float | None = None
    weighting: str = "uniform"

    @property
    def map(self) -> str:
        """The coefficient map: `SketchPlan`'s default unless one was named."""
        return self.map_name or DEFAULT_MAP

    def calibrate(self, traces: Traces) -> Calibrated:
        """Calibrate one layer."""
        return calibrate(traces, self.window, weighting=self.weighting)

    def setting(self) -> MapSetting:
        """The map with its parameters."""
        return MapSetting(self.map, self.pivots, self.ridge)

    def plan_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `SketchPlan` beside basis and ranks."""
        return {"window": self.window, "map": self.map, "pivots": self.pivots, "ridge": self.ridge}
