"""How plans are made for an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field

from sketchssm.coefficients import MAPS, CoefficientMap
from sketchssm.evaluate.calibrated import Calibrated, calibrate
from sketchssm.traces import Traces

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """How plans are made: the command line's ``--window --map --pivots --ridge --weighting``."""

    window: int = 16
    map: CoefficientMap = field(default_factory=CoefficientMap)
    weighting: str = "uniform"

    def calibrate(self, traces: Traces, window: int | None = None) -> Calibrated:
        """Calibrate one layer, at another window if one is given."""
        return calibrate(traces, window or self.window, weighting=self.weighting)

    def maps(self) -> list[CoefficientMap]:
        """Every coefficient map: the one in use with its parameters, the others with their defaults."""
        return [self.map if name == self.map.name else CoefficientMap(name) for name in MAPS]
