"""Compare decode systems on traces: the sketch and its ablations, and quantised, pruned and read-only states.

`Study` holds one layer, `select` picks systems by name, `measure` decodes the test sequences with one system, and
`evaluate` measures all systems on several layers and keeps finished results.
"""

from sketchssm.study.evaluate.evaluation import Evaluation, LayerResults, evaluate
from sketchssm.study.evaluate.measure import Measurement, measure
from sketchssm.study.evaluate.registry import Entry, entries, select
from sketchssm.study.evaluate.study import Study

__all__ = ["Entry", "Evaluation", "LayerResults", "Measurement", "Study", "entries", "evaluate", "measure", "select"]
