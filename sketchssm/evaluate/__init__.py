"""Compare decode systems on traces: the sketch and its ablations, and quantised, pruned and read-only states.

`Study` holds one layer, `select` picks systems by name, `measure` decodes the test sequences with one system, and
`evaluate` measures all systems on several layers and keeps finished results.
"""

from sketchssm.evaluate.calibrated import Calibrated, Settings, calibrate
from sketchssm.evaluate.evaluation import Evaluation, LayerResults, evaluate
from sketchssm.evaluate.measure import Measurement, measure
from sketchssm.evaluate.registry import Entry, entries, select
from sketchssm.evaluate.study import Study
from sketchssm.evaluate.systems import System, exact_systems, sketch_system

__all__ = [
    "Calibrated",
    "Entry",
    "Evaluation",
    "LayerResults",
    "Measurement",
    "Settings",
    "Study",
    "System",
    "calibrate",
    "entries",
    "evaluate",
    "exact_systems",
    "measure",
    "select",
    "sketch_system",
]
