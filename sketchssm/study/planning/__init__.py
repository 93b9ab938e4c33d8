"""Plans made by measurement: map, format, window and ranks of all layers of a model, for one target.

`candidates` lists the settings to try, `autoplan` makes plans of each at several mean ranks, measures their errors and
costs, and chooses. `plans_within` makes plans of a calibration for a time. `StepTimes` measures the time of a step on
this machine.
"""

from sketchssm.study.planning.candidate import Candidate, candidates
from sketchssm.study.planning.search import PlanPoint, PlanSearch, UnmetTargetError, autoplan
from sketchssm.study.planning.times import StepTimes
from sketchssm.study.planning.within import plans_within

__all__ = [
    "Candidate",
    "PlanPoint",
    "PlanSearch",
    "StepTimes",
    "UnmetTargetError",
    "autoplan",
    "candidates",
    "plans_within",
]
