"""Judge plans on traces: retained energy, decode systems side by side, allocation methods at one budget."""

from sketchssm.evaluate.allocations import AllocationResult, compare_allocations
from sketchssm.evaluate.calibrated import Calibrated, allocate, calibrate
from sketchssm.evaluate.energy import HeadEnergy, MapEnergy, plan_energy, retained_energy
from sketchssm.evaluate.systems import System, SystemResult, compare, exact_systems, sketch_system
from sketchssm.evaluate.windows import Windows, collect_windows

__all__ = [
    "AllocationResult",
    "Calibrated",
    "HeadEnergy",
    "MapEnergy",
    "System",
    "SystemResult",
    "Windows",
    "allocate",
    "calibrate",
    "collect_windows",
    "compare",
    "compare_allocations",
    "exact_systems",
    "plan_energy",
    "retained_energy",
    "sketch_system",
]
